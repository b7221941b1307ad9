"""Simulated GPUs for a machine without one: tensors on `cuda:0` or `cuda:1` that the CPU computes.

A tensor is on a GPU if its storage is registered there; views share the storage, and results are on the device of their
inputs. Two torch modes: one overrides device queries and moves tensors; the other sees every operation and raises
where CUDA would.

The simulation shows operations that mix devices, waits of the host for the GPU by line of the package, and memory that
ends at chosen passes. It cannot show kernels, speed, CUDA graphs, races or the size of memory.

    with SimulatedCard() as card:
        net.to("cuda"); attack(...)
    card.waits  # Counter of "file:line what"
    card.copies  # Counter of copies from unpinned memory and of host indices
"""

import collections
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CARD, HOST = torch.device("cuda", 0), torch.device("cpu")
aten = torch.ops.aten

_INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
_WAITING = {
    aten._local_scalar_dense.default: "item", aten.nonzero.default: "nonzero", aten.equal.default: "equal",
    aten.masked_select.default: "masked_select", aten._unique2.default: "unique", aten.unique_dim.default: "unique",
}  # fmt: skip
_GETTERS: dict[Any, Callable[[torch.device], Any]] = {
    torch.Tensor.device.__get__: lambda device: device,  # type: ignore[attr-defined]
    torch.Tensor.is_cuda.__get__: lambda device: device != HOST,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: lambda device: device == HOST,  # type: ignore[attr-defined]
}
_REFUSED_ON_CARD = {"numpy": "can't convert cuda:0 device type tensor to numpy", "pin_memory": "cannot pin cuda:0"}


class SimulatedCard(contextlib.ExitStack):
    """While it is entered, `cuda:0`, which is the current one, and `cuda:1` are devices of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: collections.Counter[str] = collections.Counter()
        self.copies: collections.Counter[str] = collections.Counter()
        self._there: dict[int, tuple[StorageWeakRef, torch.device]] = {}
        self._pinned: dict[int, StorageWeakRef] = {}
        self.ignoring = False

    def __enter__(self) -> "SimulatedCard":
        super().__enter__()

        class Event:
            def record(self, stream: torch.device = CARD) -> None: ...

            def synchronize(self) -> None: ...  # the step is over: no wait

        for name, value in {
            "is_available": lambda: True, "device_count": lambda: 2, "current_device": lambda: 0, "Event": Event,
            "current_stream": lambda device=CARD: torch.device(device),
            "get_device_name": lambda *_: "a simulated card", "get_device_capability": lambda *_: (9, 0),
            "synchronize": lambda *_: self.waited("synchronize"), "empty_cache": lambda: None,
            "get_rng_state": lambda *_: torch.zeros(0), "set_rng_state": lambda *_: None,
            "set_per_process_memory_fraction": lambda _: None,
            "is_bf16_supported": lambda *_, **__: True, "mem_get_info": lambda *_: (140 << 30, 141 << 30),
        }.items():  # fmt: skip
            self.enter_context(mock.patch.object(torch.cuda, name, value))
        real = torch.autocast

        def autocast(device_type: str, *args: Any, **options: Any) -> Any:
            return real("cpu" if device_type == "cuda" else device_type, *args, **options)

        self.enter_context(mock.patch.object(torch, "autocast", autocast))
        self.enter_context(_Calls(self))
        self.enter_context(_Operations(self))
        return self

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._there

    def where(self, tensor: Tensor) -> torch.device:
        there = self._there.get(tensor.untyped_storage()._cdata)
        return HOST if there is None else there[1]

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._pinned

    def put(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Register the device of a new tensor. The weak reference keeps the storage's address from being given away."""
        storage = tensor.untyped_storage()
        if device != HOST:
            self._there[storage._cdata] = StorageWeakRef(storage), device
        else:
            self._there.pop(storage._cdata, None)
        if len(self._there) > 4096:
            self._there = {address: each for address, each in self._there.items() if not each[0].expired()}
        return tensor

    def pin(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._pinned[storage._cdata] = StorageWeakRef(storage)
        return tensor

    def waited(self, what: str) -> None:
        self.waits[f"{_line()} {what}"] += 1

    def move(self, tensor: Tensor, device: torch.device, dtype: torch.dtype | None, non_blocking: bool) -> Tensor:
        """A copy on another device."""
        if device == HOST and not non_blocking:
            self.waited("copy to the host")
        elif not self.holds(tensor):
            self.came(tensor, non_blocking)
        with self.unseen():
            copied = tensor.clone() if dtype is None else tensor.clone().to(dtype)
        return self.put(copied, device)

    def came(self, tensor: Tensor, non_blocking: bool) -> None:
        """Note a copy from the host to a GPU."""
        if tensor.dim() and not self.is_pinned(tensor):
            self.copies[f"{_line()} pageable"] += 1
        if tensor.dim() and not non_blocking:
            self.waited("blocking copy")

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        before, self.ignoring = self.ignoring, True
        try:
            yield
        finally:
            self.ignoring = before


class _Calls(TorchFunctionMode):
    """Where a tensor is, moves, and tensors that are made on a device."""

    def __init__(self, card: SimulatedCard) -> None:
        super().__init__()
        self.card = card

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs, card, name = dict(kwargs or {}), self.card, getattr(func, "__name__", "")
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if name == "__get__" and func in _GETTERS:
            return _GETTERS[func](card.where(args[0]))
        if first is not None and name in ("to", "cuda", "cpu"):
            return self._moved(first, args[1:], kwargs, name)
        if first is not None and card.holds(first):
            if name in _REFUSED_ON_CARD:
                raise TypeError(_REFUSED_ON_CARD[name])
            if name == "tolist":
                card.waited("tolist")
        elif first is not None and name == "pin_memory":
            return card.pin(first.clone())
        if name == "one_hot" and card.holds(args[0]):  # its zeros are made where torch believes the classes to be
            with card.unseen():
                return card.put(func(*args, **kwargs), card.where(args[0]))
        pinned = kwargs.pop("pin_memory", False)
        device = kwargs.get("device")
        if device is None:
            made = func(*args, **kwargs)
            return card.pin(made) if pinned else made
        kwargs["device"] = HOST
        with card.unseen():
            made = func(*args, **kwargs)
        return card.put(made, _device(device))

    def _moved(self, tensor: Tensor, given: Sequence[Any], kwargs: dict[str, Any], name: str) -> Tensor:
        card, copy = self.card, kwargs.pop("copy", False)
        if name != "to":
            given = given or (CARD if name == "cuda" else HOST,)
        elif given and isinstance(given[0], Tensor):
            given = (card.where(given[0]), given[0].dtype, *given[1:])
        device, dtype, non_blocking, layout = torch._C._nn._parse_to(*given, **kwargs)
        if device is not None and _device(device) != card.where(tensor):
            tensor = card.move(tensor, _device(device), dtype, non_blocking)
        options = {} if layout is None else {"memory_format": layout}
        return torch.Tensor.to(tensor, tensor.dtype if dtype is None else dtype, copy=copy, **options)


class _Operations(TorchDispatchMode):
    """Every operation, of backward passes too."""

    def __init__(self, card: SimulatedCard) -> None:
        super().__init__()
        self.card = card

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        card, kwargs = self.card, kwargs or {}
        if card.ignoring:
            return func(*args, **kwargs)
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        devices = {card.where(each) for each in tensors if card.holds(each)}
        if not devices:
            return func(*args, **kwargs)
        if func is aten.copy_.default:
            self._copied(args, kwargs)
            return func(*args, **kwargs)
        if func in _INDEXING:
            self._indexed(func, args)
        elif func is aten.scatter.src and not args[0].any():
            # The backward pass of `sort` in torch 2.6: its zeros have the gradient's device, and
            # no tensor argument shows it.
            pass
        elif len(devices) > 1 or not all(card.holds(each) or not each.dim() for each in tensors):
            shapes = [(tuple(each.shape), str(card.where(each))) for each in tensors]
            raise RuntimeError(f"Expected all tensors to be on the same device, {func} was given {shapes}")
        if func in _WAITING:
            card.waited(_WAITING[func])
        made = func(*args, **kwargs)
        for each in tree_leaves(made):
            if isinstance(each, Tensor):
                card.put(each, next(iter(devices)))
        return made

    def _copied(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        to, of = args[:2]
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        card = self.card
        if card.holds(of) and not card.holds(to) and not (non_blocking and card.is_pinned(to)):
            card.waited("copy to the host")
        elif card.holds(to) and not card.holds(of):
            card.came(of, bool(non_blocking))

    def _indexed(self, func: Any, args: Sequence[Any]) -> None:
        card, (array, indices) = self.card, args[:2]
        given = [each for each in indices if each is not None]
        values = [] if func is aten.index.Tensor else [args[2]]
        if elsewhere := {card.where(each) for each in given} - {HOST, card.where(array)}:
            raise RuntimeError(f"{func}: indices of {elsewhere} for an array on {card.where(array)}")
        if any(each.dim() and card.where(each) != card.where(array) for each in values):
            raise RuntimeError(f"{func}: values on {card.where(args[2])} for an array on {card.where(array)}")
        fills = bool(values) and values[0].numel() == 1
        for index in given:
            if index.dtype == torch.bool and not fills:
                card.waited("boolean mask")
            if not card.holds(index):
                card.copies[f"{_line()} index from the host"] += 1


def _device(given: "str | torch.device") -> torch.device:
    """With its number; 0 where it has none, as of the current device."""
    device = torch.device(given)
    return device if device.type != "cuda" or device.index is not None else CARD


def _line() -> str:
    """The innermost line of the package on the stack."""
    frame = sys._getframe(1)
    while frame is not None and "/mixednuts_dist/" not in frame.f_code.co_filename:
        frame = frame.f_back  # type: ignore[assignment]
    return (
        "elsewhere" if frame is None else f"{frame.f_code.co_filename.rsplit('/mixednuts_dist/')[-1]}:{frame.f_lineno}"
    )
