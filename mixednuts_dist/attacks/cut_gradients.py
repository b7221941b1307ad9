"""Gradients that are cut: which module stops them, and a backward pass in its place (BPDA, Athalye et al. 2018).

Rounded pixels, quantisation, JPEG and hard thresholds have a gradient of zero or none, and an attack that follows it is
blind. One forward and backward pass shows where it stops: at a module whose output has a gradient and whose input has
none. Where that module's output has the shape of its input, or the code of its forward changes the input before a child
of the same shape sees it, the values stay and the backward pass becomes the identity.

What can be found: modules, and code between a module's input and its first child's. What cannot: code after a child;
gradients that are small and not zero; thresholds that cut some entries of a tensor (MeanSparse); a function that is no
torch module. A module of other shapes is named, with both shapes, and not replaced.

Shapes: B images of C x H x W, K classes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

_MOST_CUTS = 8  # that are looked for one behind the other


@dataclass(frozen=True)
class Cut:
    """Where a gradient stops: within `module`, or in its forward before `child` where that is named."""

    module: str  # its name in the classifier; empty for the classifier itself
    child: str = ""
    obstacle: str = ""  # why no backward pass can be put in its place

    def __str__(self) -> str:
        """For tables."""
        where = self.module or "the classifier"
        return f"{where} before {self.child}" if self.child else where

    @property
    def replaced(self) -> bool:
        return not self.obstacle


@dataclass
class _Trace:
    """A module's first input and its output in one pass, with their gradients after it."""

    given: Tensor
    out: Tensor | None = None

    def cuts(self) -> bool:
        """Whether the output of some image has a gradient where its input has none, or the output cannot have one."""
        if self.out is None or not self.given.requires_grad:
            return False
        if not self.out.requires_grad:
            return True
        return _is_there(self.out) and not _is_there(self.given)


def found_cuts(model: Any, x_BCHW: Tensor) -> list[Cut]:
    """Where the gradient to the images stops, nothing for what is no module; one gradient where nothing does."""
    cuts: list[Cut] = []
    while isinstance(model, nn.Module) and len(cuts) < _MOST_CUTS:
        with identity_backward(model, cuts):
            new = [cut for cut in _cuts_of_one_pass(model, x_BCHW) if cut not in cuts]
        cuts += new
        if not any(cut.replaced for cut in new):
            break
    return cuts


@contextmanager
def identity_backward(model: nn.Module, cuts: Sequence[Cut]) -> Iterator[None]:
    """Within it the cuts that can be replaced let the gradient through; values and passes without gradients stay."""
    handles: list[RemovableHandle] = []
    given: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, Any], None]:
        def hook(_: nn.Module, args: Any) -> None:
            given[name] = args[0]

        return hook

    def after(name: str) -> Callable[[nn.Module, Any, Any], Any]:
        return lambda _, __, out: _passed_through(given.pop(name), out)

    def before_child(name: str) -> Callable[[nn.Module, Any], Any]:
        return lambda _, args: (_passed_through(given.pop(name), args[0]), *args[1:]) if name in given else None

    for cut in cuts:
        if cut.replaced:
            module = model.get_submodule(cut.module)
            handles.append(module.register_forward_pre_hook(keep(cut.module)))
            if cut.child:
                child = model.get_submodule(cut.child)
                handles.append(child.register_forward_pre_hook(before_child(cut.module)))
            else:
                handles.append(module.register_forward_hook(after(cut.module)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Uncut(nn.Module):
    """A classifier with the identity as the backward pass of its cuts; its values are the same bits."""

    def __init__(self, network: nn.Module, cuts: Sequence[Cut]) -> None:
        super().__init__()
        self.network, self._cuts = network, tuple(cuts)
        self.eval()

    @torch.compiler.disable  # the hooks come and go with each pass
    def forward(self, x_BCHW: Tensor) -> Tensor:
        with identity_backward(self.network, self._cuts):
            logits_BK: Tensor = self.network(x_BCHW)
        return logits_BK


def _passed_through(given: Tensor, value: Tensor) -> Tensor:
    """The value, with the gradient of what was given."""
    return value.detach() + (given - given.detach()) if torch.is_grad_enabled() and given.requires_grad else value


def _cuts_of_one_pass(model: nn.Module, x_BCHW: Tensor) -> list[Cut]:
    traces: dict[str, _Trace] = {}
    handles: list[RemovableHandle] = []

    def enter(name: str) -> Callable[[nn.Module, Any], Any]:
        def hook(_: nn.Module, args: Any) -> Any:
            if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
                return None
            given = args[0].clone()  # so that its gradient is this module's alone
            if given.requires_grad:
                given.retain_grad()
            traces.setdefault(name, _Trace(given))
            return (given, *args[1:])

        return hook

    def leave(name: str) -> Callable[[nn.Module, Any, Any], Any]:
        def hook(_: nn.Module, __: Any, out: Any) -> Any:
            trace = traces.get(name)
            if trace is None or trace.out is not None or not isinstance(out, Tensor):
                return None
            trace.out = out.clone()
            if trace.out.requires_grad:
                trace.out.retain_grad()
            return trace.out

        return hook

    for name, module in model.named_modules():
        handles += [module.register_forward_pre_hook(enter(name)), module.register_forward_hook(leave(name))]
    try:
        x = x_BCHW.detach().clone().requires_grad_()
        with torch.enable_grad():
            logits_BK = getattr(model, "surrogate_logits", model)(x)  # of a mixture what its gradients are taken of
            weights_K = torch.linspace(1, 2, logits_BK.shape[1]).to(logits_BK)  # linear: it does not saturate
            if logits_BK.requires_grad:
                (logits_BK * weights_K).sum().backward()
    finally:
        for handle in handles:
            handle.remove()
    cutting = [name for name, trace in traces.items() if trace.cuts()]
    innermost = [name for name in cutting if not any(_is_within(other, name) for other in cutting)]
    return [_cut_at(name, traces) for name in innermost]


def _cut_at(name: str, traces: dict[str, _Trace]) -> Cut:
    """Behind the first child whose input has the shape of the module's, or else around the module."""
    trace = traces[name]
    for child, inner in traces.items():
        if _is_within(child, name) and inner.given.shape == trace.given.shape:
            return Cut(name, child)
    given, out = (" x ".join(map(str, each.shape[1:])) for each in (trace.given, trace.out) if each is not None)
    return Cut(name, obstacle="" if given == out else f"its input is {given} and its output {out}")


def _is_within(name: str, outer: str) -> bool:
    return name != outer and (not outer or name.startswith(f"{outer}."))


def _is_there(values: Tensor) -> bool:
    """Whether the gradient is not zero on at least half of the images."""
    if values.grad is None:
        return False
    return bool(2 * values.grad.flatten(1).any(dim=1).sum() >= len(values)) if values.dim() > 1 else True
