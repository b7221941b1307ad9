"""Gradients that are cut: which module stops them, and a backward pass in its place (BPDA, Athalye et al. 2018).

Rounded pixels, quantisation, JPEG and hard thresholds have a gradient of zero or none, and an attack that follows it is
blind. One forward and backward pass shows where it stops: at a module whose output has a gradient and whose input has
none. If it has children, the cut lies between the last one without a gradient and the first one with one. Where what
goes in there has the shape of what comes out, flattened or not, the values stay and the backward pass is the identity.
A module between other shapes gets a smoothed difference: its outputs at points around the given one.

What can be found: modules, and code of a forward before, between and behind children. What cannot: gradients that are
small and not zero; thresholds that cut some entries of a tensor (MeanSparse); a cut with a way around it (a residual
connection); a function that is no torch module. Code of a forward between other shapes is named, with them, and not
replaced: it cannot be called alone.

Shapes: B images of C x H x W, K classes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .hashing import hashed, keys_of

_MOST_CUTS = 8  # that are looked for one behind the other
_PAIRS = 16  # of points around the given one; 8 dropped less on CIFAR-10 behind a downscaling quantiser
_STEP = 0.3  # of the given values' standard deviation; with .1 thresholds of the digits hid more
_LEAST_STEP = 1e-3  # for values that are all the same


@dataclass(frozen=True)
class Cut:
    """Where a gradient stops: within `module`, or in its forward `after` and before the children that are named."""

    module: str  # its name in the classifier; empty for the classifier itself
    child: str = ""  # before it; before the module's output where none is named
    after: str = ""  # after this child; after the module's input where none is named
    obstacle: str = ""  # why no backward pass can be put in its place

    def __str__(self) -> str:
        """For tables."""
        where = self.module or "the classifier"
        return where + f" after {self.after}" * bool(self.after) + f" before {self.child}" * bool(self.child)

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

    @property
    def is_before(self) -> bool:
        """Whether its output could have a gradient, and has none."""
        return self.out is not None and self.out.requires_grad and not _is_there(self.out)

    @property
    def is_behind(self) -> bool:
        """Whether its input has a gradient, or cannot have one."""
        return not self.given.requires_grad or _is_there(self.given)


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
    given: dict[Cut, Tensor] = {}

    def keep(cut: Cut) -> None:
        def given_to(_: nn.Module, args: Any) -> None:
            given[cut] = args[0]

        def left_by(_: nn.Module, __: Any, out: Tensor) -> None:
            given[cut] = out

        module = model.get_submodule(cut.after or cut.module)
        handles.append(
            module.register_forward_hook(left_by) if cut.after else module.register_forward_pre_hook(given_to)
        )

    def pass_on(cut: Cut) -> None:
        def given_to(_: nn.Module, args: Any) -> Any:
            return (_passed_through(given.pop(cut), args[0]), *args[1:]) if cut in given else None

        def left_by(module: nn.Module, args: Any, kwargs: Any, out: Tensor) -> Any:
            if cut not in given:
                return None
            return _passed_through(given.pop(cut), out, lambda z: module.forward(z, *args[1:], **kwargs))

        module = model.get_submodule(cut.child or cut.module)
        handles.append(
            module.register_forward_pre_hook(given_to)
            if cut.child
            else module.register_forward_hook(left_by, with_kwargs=True)
        )

    for cut in cuts:
        if cut.replaced:
            keep(cut)
            pass_on(cut)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Uncut(nn.Module):
    """A classifier with another backward pass of its cuts; its values are the same bits."""

    def __init__(self, network: nn.Module, cuts: Sequence[Cut]) -> None:
        super().__init__()
        self.network, self._cuts = network, tuple(cuts)
        self.eval()

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Logits (B, K). Never compiled, since the hooks come and go with each pass."""
        # As a decorator of the class it would import the compiler, 2 s, in every process.
        logits_BK: Tensor = torch.compiler.disable(self._uncompiled)(x_BCHW)  # type: ignore[no-untyped-call]
        return logits_BK

    def _uncompiled(self, x_BCHW: Tensor) -> Tensor:
        with identity_backward(self.network, self._cuts):
            logits_BK: Tensor = self.network(x_BCHW)
        return logits_BK


def _passed_through(given: Tensor, value: Tensor, function: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """The value, with the gradient of what was given; of another shape, with that of a smoothed `function`."""
    if not (torch.is_grad_enabled() and given.requires_grad):
        return value
    if function is not None and value.shape not in (given.shape, given.flatten(1).shape):
        smoothed: Tensor = _SmoothedDifference.apply(given, value.detach(), function)
        return smoothed
    return value.detach() + (given - given.detach()).reshape(value.shape)


class _SmoothedDifference(torch.autograd.Function):
    """A value, with the gradient of the mean over random signs u of (g(z + s u) - g(z - s u)) u / (2 s) (Spall 1992).

    Of images the differences are taken place by place, without those far away, whose signs are noise to a pixel: what
    cuts keeps things about where they are. The signs depend on z alone.
    """

    @staticmethod
    def forward(ctx: Any, given: Tensor, value: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(given)
        ctx.function = function
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (given,) = ctx.saved_tensors
        an_image = (len(given), *[1] * (given.dim() - 1))
        step = (_STEP * given.flatten(1).std(dim=1)).clamp_min(_LEAST_STEP).view(an_image)
        keys_B, n_values = keys_of(given, 0), given[0].numel()
        slope = torch.zeros_like(given)
        for pair in range(_PAIRS):
            signs = (2 * (hashed(keys_B, pair * n_values, n_values) & 1) - 1).to(given).view_as(given)
            change = grad * (ctx.function(given + step * signs) - ctx.function(given - step * signs))
            if change.dim() == given.dim() == 4:
                change = F.interpolate(change.sum(dim=1, keepdim=True), size=given.shape[2:])
            else:
                change = change.flatten(1).sum(dim=1).view(an_image)
            slope += change * signs / (2 * _PAIRS * step)
        return slope, None, None


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
            if trace is None or trace.out is not None or not isinstance(out, Tensor) or not out.is_floating_point():
                return None  # classes and other integers: the module around them is the one that cuts
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
    """From the last child before it, or the module's input, to the first one behind it, or the module's output."""
    trace = traces[name]
    within = {child: inner for child, inner in traces.items() if _is_within(child, name)}
    before = {child: inner.out for child, inner in within.items() if inner.is_before}
    last = [child for child in before if not any(_is_within(child, other) for other in before)]
    sources = [*((child, before[child]) for child in reversed(last)), ("", trace.given)]
    reached = [*((child, inner.given) for child, inner in within.items() if inner.is_behind), ("", trace.out)]
    for child, there in reached:
        for after, source in sources:
            if source is not None and there is not None and there.shape in (source.shape, source.flatten(1).shape):
                return Cut(name, child, after)
    if name and len(reached) == 1:  # no child of it has a gradient that would be lost
        return Cut(name)
    given, out = (" x ".join(map(str, each.shape[1:])) for each in (trace.given, trace.out) if each is not None)
    return Cut(name, obstacle=f"its input is {given} and its output {out}, by code that is no module")


def _is_within(name: str, outer: str) -> bool:
    return name != outer and (not outer or name.startswith(f"{outer}."))


def _is_there(values: Tensor) -> bool:
    """Whether the gradient is not zero on at least half of the images."""
    if values.grad is None:
        return False
    return bool(2 * values.grad.flatten(1).any(dim=1).sum() >= len(values)) if values.dim() > 1 else True
