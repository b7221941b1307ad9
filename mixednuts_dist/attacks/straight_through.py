"""The straight-through estimator for code that cuts the gradient (BPDA with the identity, Athalye et al. 2018).

Rounded pixels, quantization, JPEG and hard thresholds have a gradient of zero or none, so an attack that follows it is
blind. One forward and backward pass shows where the gradient stops: between the last input or output of a module that
it does not reach and the next one that it reaches. The values there stay, and the backward pass becomes the identity.

The search finds modules and code in a `forward`, if the tensors before and after the cut have the same shape, flattened
or not. It does not find gradients that are small but not zero, thresholds that cut some entries of a tensor, a cut with
a path around it, or functions that are not torch modules.

Shapes: B images of C x H x W.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InvalidInputError
from ..mixing.classifier import MixedClassifier

_MOST_CUTS = 8  # one after the other
_N_TRIED = 4  # images of random pixels

Tap = tuple[str, bool]  # a module's name, and whether its output is meant instead of its first input


def straight_through(model: nn.Module) -> nn.Module:
    """Give everything in the model that cuts the gradient an identity backward pass; the logits do not change.

    The cuts are searched in the first pass that takes a gradient, on a few images of random pixels. The result for a
    mixed classifier is a mixed classifier whose two base classifiers let the gradient through.

    Args:
        model: a torch module, images (B, C, H, W) to logits (B, K).

    Raises:
        InvalidInputError: if the model is not a torch module.

    Example:
        >>> class Rounded(nn.Module):
        ...     def forward(self, x):
        ...         return (8 * x).round() / 8
        >>> model = straight_through(nn.Sequential(Rounded(), nn.Flatten(), nn.Linear(4, 3)))
        >>> x = torch.rand(2, 1, 2, 2, requires_grad=True)
        >>> model(x)[:, 0].sum().backward()
        >>> bool(x.grad.any()), [str(cut) for cut in model.cuts]
        (True, ['0'])
    """
    if not isinstance(model, nn.Module):
        raise InvalidInputError(f"the model is a {type(model).__name__}. Wrap the function in a torch.nn.Module.")
    if isinstance(model, MixedClassifier):
        return MixedClassifier.from_mixture(StraightThrough(model.std), StraightThrough(model.rob), model.mixture)
    return StraightThrough(model)


@dataclass(frozen=True)
class Cut:
    """A place where the gradient stops, which lies between two inputs or outputs of modules."""

    after: Tap
    before: Tap

    def __str__(self) -> str:
        (first, is_output), (last, _) = self.after, self.before
        if first == last:
            return first
        start = f"the {'output' if is_output else 'input'} of {first}" if first else "the images"
        return f"between {start} and the input of {last}"


class StraightThrough(nn.Module):
    """A network whose cuts have an identity backward pass."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.cuts: tuple[Cut, ...] | None = None  # None until the first pass that takes a gradient
        self.training = network.training  # `train` would change the mode of the network's modules

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the network's logits, (B, K)."""
        if not (torch.is_grad_enabled() and x_BCHW.requires_grad):
            return self.network(x_BCHW)  # type: ignore[no-any-return]
        # The hooks come and go with each pass. As a decorator, `disable` would import the compiler in every process.
        return torch.compiler.disable(self._pass)(x_BCHW)  # type: ignore[no-untyped-call, no-any-return]

    def _pass(self, x_BCHW: Tensor) -> Tensor:
        if self.cuts is None:
            self.cuts = _find_cuts(self.network, x_BCHW)
        with _identity_backward(self.network, self.cuts):
            logits_BK: Tensor = self.network(x_BCHW)
        return logits_BK


def _find_cuts(model: nn.Module, like_BCHW: Tensor) -> tuple[Cut, ...]:
    """Return the places where the gradient to the images stops; random pixels of the given shape show them."""
    pixels = torch.rand(_N_TRIED, *like_BCHW.shape[1:], generator=torch.Generator().manual_seed(0)).to(like_BCHW)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    cuts: list[Cut] = []
    try:
        for weight in trained:  # so that a tensor has a gradient only if it depends on the images
            weight.requires_grad_(False)
        while len(cuts) < _MOST_CUTS and (cut := _last_cut(model, pixels, cuts)) is not None:
            cuts.append(cut)
    finally:
        for weight in trained:
            weight.requires_grad_(True)
    return tuple(cuts)


def _last_cut(model: nn.Module, x_BCHW: Tensor, cuts: Sequence[Cut]) -> Cut | None:
    """Return the cut nearest to the logits, besides `cuts`; None if the images have a gradient or no cut fits."""
    taps: dict[Tap, Tensor] = {}  # in the order of the pass; copies, whose gradient is that of one module alone

    def keep(tap: Tap, values: Tensor) -> Tensor | None:
        if tap in taps or not values.is_floating_point():
            return None
        taps[tap] = values.clone()
        if values.requires_grad:
            taps[tap].retain_grad()
        return taps[tap]

    names = [name for name, _ in model.named_modules()]
    with torch.enable_grad(), _identity_backward(model, cuts), _tapped(model, names, keep):
        logits_BK = model(x_BCHW.detach().clone().requires_grad_())
        if logits_BK.requires_grad:  # linear weights do not saturate, as a cross-entropy does
            (logits_BK * torch.linspace(1, 2, logits_BK.shape[1]).to(logits_BK)).sum().backward()
    order = list(taps)
    reached = [i for i, tap in enumerate(order) if _has_gradient(taps[tap])]
    blind = [i for i, tap in enumerate(order) if taps[tap].requires_grad and i not in reached]
    target = reached[0] if reached else 1 + max(blind, default=-1)
    if target == 0 or target == len(order):
        return None
    shape = taps[order[target]].shape
    fits = [i for i in blind if i < target and shape in (taps[order[i]].shape, taps[order[i]].flatten(1).shape)]
    cut = Cut(order[fits[-1]], order[target]) if fits else None
    return None if cut in cuts else cut


@contextmanager
def _identity_backward(model: nn.Module, cuts: Sequence[Cut]) -> Iterator[None]:
    """Let the gradient through the cuts while the block runs; the values stay."""
    sources: dict[Tap, Tensor] = {}

    def let_through(tap: Tap, values: Tensor) -> Tensor | None:
        changed = None
        for cut in cuts:
            source = sources.pop(cut.after, None) if cut.before == tap else None  # None: another caller of the module
            if source is not None and source.requires_grad:
                values = changed = values.detach() + (source - source.detach()).reshape(values.shape)
        if any(cut.after == tap for cut in cuts):
            sources[tap] = values
        return changed

    with _tapped(model, {name for cut in cuts for name, _ in (cut.after, cut.before)}, let_through):
        yield


@contextmanager
def _tapped(model: nn.Module, names: Iterable[str], act: Callable[[Tap, Tensor], Tensor | None]) -> Iterator[None]:
    """While the block runs, `act` sees the first input and the output of the modules and may return a replacement."""

    def enter(name: str, args: Any) -> Any:
        changed = act((name, False), args[0]) if args and isinstance(args[0], Tensor) else None
        return None if changed is None else (changed, *args[1:])

    def leave(name: str, out: Any) -> Any:
        return act((name, True), out) if isinstance(out, Tensor) else None

    handles = []
    for name in names:
        module = model.get_submodule(name)
        handles.append(module.register_forward_pre_hook(lambda _, args, name=name: enter(name, args)))
        handles.append(module.register_forward_hook(lambda _, __, out, name=name: leave(name, out)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _has_gradient(values: Tensor) -> bool:
    """Return whether the gradient is not zero on at least half of the images."""
    if values.grad is None:
        return False
    return bool(2 * values.grad.flatten(1).any(dim=1).sum() >= len(values)) if values.dim() > 1 else True
