"""The straight-through estimator for modules that cut the gradient (BPDA with the identity, Athalye et al. 2018).

Rounded pixels, quantization, JPEG and hard thresholds have a gradient of zero or none, so an attack that follows it is
blind. One forward and backward pass shows where the gradient stops: at a module whose output has a gradient and whose
input has none. If that module has children, the cut lies between the last child without a gradient and the first child
with one. The values stay, and the backward pass becomes the identity.

The search finds modules, and code in a `forward` before, between or after children, if the input and the output have
the same shape, flattened or not. It does not find gradients that are small but not zero, thresholds that cut some
entries of a tensor, cuts inside a residual branch, or functions that are not torch modules.

Shapes: B images of C x H x W, K classes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..errors import InvalidInputError
from ..mixing.classifier import MixedClassifier

_MOST_CUTS = 8  # one after the other
_N_TRIED = 4  # images of random pixels


def straight_through(model: nn.Module) -> nn.Module:
    """Give every module of the model that cuts the gradient an identity backward pass; the logits do not change.

    The cuts are searched in the first pass that takes a gradient, on a few images of random pixels. The result of a
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
    """A place where the gradient stops: within `module`, after the child `after` and before the child `before`."""

    module: str  # its name in the model; empty for the model itself
    before: str = ""  # a child of the module; empty for the module's output
    after: str = ""  # a child of the module; empty for the module's input

    def __str__(self) -> str:
        where = self.module or "the classifier"
        return where + f" after {self.after}" * bool(self.after) + f" before {self.before}" * bool(self.before)


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
            self.cuts = tuple(find_cuts(self.network, x_BCHW))
        with identity_backward(self.network, self.cuts):
            logits_BK: Tensor = self.network(x_BCHW)
        return logits_BK


def find_cuts(model: nn.Module, like_BCHW: Tensor) -> list[Cut]:
    """Return the places where the gradient to the images stops; random pixels of the given shape show them."""
    pixels = torch.rand(_N_TRIED, *like_BCHW.shape[1:], generator=torch.Generator().manual_seed(0)).to(like_BCHW)
    cuts: list[Cut] = []
    while len(cuts) < _MOST_CUTS:
        with identity_backward(model, cuts):
            new = [cut for cut in _cuts_of_one_pass(model, pixels) if cut not in cuts]
        if not new:
            break
        cuts += new
    return cuts


@contextmanager
def identity_backward(model: nn.Module, cuts: Sequence[Cut]) -> Iterator[None]:
    """Let the gradient through the cuts while the block runs; the values stay."""
    handles: list[RemovableHandle] = []
    given: dict[Cut, Tensor] = {}

    def hook(cut: Cut, child: str, act: Callable[[Cut, Tensor], Tensor | None], at_input: bool) -> None:
        module = model.get_submodule(child or cut.module)
        if at_input:

            def before(_: nn.Module, args: Any) -> Any:
                changed = act(cut, args[0])
                return None if changed is None else (changed, *args[1:])

            handles.append(module.register_forward_pre_hook(before))
        else:
            handles.append(module.register_forward_hook(lambda _, __, out: act(cut, out)))

    def keep(cut: Cut, values: Tensor) -> None:
        given[cut] = values

    def let_through(cut: Cut, values: Tensor) -> Tensor | None:
        if cut not in given:  # the module has another caller
            return None
        source = given.pop(cut)
        return values.detach() + (source - source.detach()).reshape(values.shape) if source.requires_grad else None

    for cut in cuts:
        hook(cut, cut.after, keep, at_input=not cut.after)
        hook(cut, cut.before, let_through, at_input=bool(cut.before))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class _Trace:
    """A module's first input and its output in one pass, which hold their gradients after the backward pass."""

    given: Tensor
    out: Tensor | None = None

    @property
    def cuts(self) -> bool:
        """Whether the output has a gradient although the input has none, or the output cannot have one."""
        if self.out is None or not self.given.requires_grad:
            return False
        return not self.out.requires_grad or (_has_gradient(self.out) and not _has_gradient(self.given))


def _cuts_of_one_pass(model: nn.Module, x_BCHW: Tensor) -> list[Cut]:
    traces: dict[str, _Trace] = {}
    handles: list[RemovableHandle] = []

    def traced(values: Any) -> Tensor | None:
        """A copy whose gradient is that of one module alone; None for classes and other integers."""
        if not isinstance(values, Tensor) or not values.is_floating_point():
            return None
        copied = values.clone()
        if copied.requires_grad:
            copied.retain_grad()
        return copied

    def enter(name: str, args: Any) -> Any:
        if not args or (given := traced(args[0])) is None:
            return None
        traces.setdefault(name, _Trace(given))
        return (given, *args[1:])

    def leave(name: str, out: Any) -> Any:
        trace = traces.get(name)
        if trace is None or trace.out is not None:
            return None
        trace.out = traced(out)
        return trace.out

    for name, module in model.named_modules():
        handles += [
            module.register_forward_pre_hook(lambda _, args, name=name: enter(name, args)),
            module.register_forward_hook(lambda _, __, out, name=name: leave(name, out)),
        ]
    try:
        with torch.enable_grad():
            logits_BK = model(x_BCHW.detach().clone().requires_grad_())
            if logits_BK.requires_grad:  # linear weights do not saturate, as a cross-entropy does
                (logits_BK * torch.linspace(1, 2, logits_BK.shape[1]).to(logits_BK)).sum().backward()
    finally:
        for handle in handles:
            handle.remove()
    cutting = [name for name, trace in traces.items() if trace.cuts]
    innermost = [name for name in cutting if not any(_is_within(other, name) for other in cutting)]
    return [cut for name in innermost if (cut := _cut_at(name, traces)) is not None]


def _cut_at(name: str, traces: dict[str, _Trace]) -> Cut | None:
    """Return the cut between two children of a module, its input and its output; None if their shapes differ."""
    trace = traces[name]
    within = {child: inner for child, inner in traces.items() if _is_within(child, name)}
    blind = {
        child: inner.out
        for child, inner in within.items()
        if inner.out is not None and inner.out.requires_grad and not _has_gradient(inner.out)
    }
    last = [child for child in blind if not any(_is_within(child, other) for other in blind)]
    sources = [*((child, blind[child]) for child in reversed(last)), ("", trace.given)]
    given = {child: inner.given for child, inner in within.items()}
    seeing = [each for each in given.items() if not each[1].requires_grad or _has_gradient(each[1])]
    for before, target in [*seeing, ("", trace.out)]:
        for after, source in sources:
            if target is not None and target.shape in (source.shape, source.flatten(1).shape):
                return Cut(name, before, after)
    return None


def _is_within(name: str, outer: str) -> bool:
    return name != outer and (not outer or name.startswith(f"{outer}."))


def _has_gradient(values: Tensor) -> bool:
    """Whether the gradient is not zero on at least half of the images."""
    if values.grad is None:
        return False
    return bool(2 * values.grad.flatten(1).any(dim=1).sum() >= len(values)) if values.dim() > 1 else True
