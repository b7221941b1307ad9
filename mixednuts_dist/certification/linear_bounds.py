"""Bounds of a ReLU network's logits over a box of images: interval propagation, then CROWN where it matters.

**Intervals** (Gowal et al. 2018). A box is a centre c and a radius r. An affine map W takes it to centre `W c + b` and
radius `|W| r`; ReLU is applied to both ends. One pass, and loose: each layer forgets how its inputs vary together.

**CROWN** (Zhang et al. 2018). Where the input z of a ReLU lies in [l, u] with l < 0 < u, the ReLU lies between
`a z` (a = 1 if u > -l, else 0) and `u (z - l) / (u - l)`. A lower bound of any `w . f(x)` follows by going backward:
where the coefficient of a ReLU's output is positive, its lower line takes its place, where negative, its upper line.
What arrives at the image is linear, `A x + const`, and smallest over the box at a corner: `A c - |A| r + const`.
Going backward through affine layers is what automatic differentiation does, so only the ReLUs need code: their
backward here multiplies by the slopes of the lines and notes what they add to the constant.

The bounds l, u of each ReLU come from intervals; those that straddle 0 are tightened by CROWN, layer after layer.

Networks are followed while they run, whatever modules they are made of: affine operations and ReLU are known; anything
else that depends on the image is refused by name. All in float64: the bounds are of the network in exact arithmetic,
widened by `SLACK` for the rounding of float32 logits.

Shapes: B images of C x H x W, R rows (one coefficient vector of one image), K classes.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import InvalidInputError
from ..mixing.boxes import LogitBox

SLACK = 1e-5  # relative to the largest logit: float32 logits of three networks were within 7e-7 of float64's
_ROWS = 256  # a pass

_RELU = {torch.relu, torch.relu_, F.relu, F.relu_, Tensor.relu, Tensor.relu_}
_ADD = {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__}
_SUB = {torch.sub, Tensor.sub, Tensor.__sub__, Tensor.__isub__}
_MUL = {torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__}
_DIV = {torch.div, Tensor.div, Tensor.__truediv__}
# Linear with weights that are never negative, each image for itself: a centre and a radius pass them alike.
_SPREADS = {
    torch.flatten, Tensor.flatten, Tensor.view, Tensor.reshape, torch.reshape, Tensor.contiguous, Tensor.permute,
    Tensor.squeeze, Tensor.unsqueeze, Tensor.__getitem__, Tensor.mean, torch.mean, Tensor.sum, torch.sum, torch.cat,
    F.pad, F.avg_pool2d, F.adaptive_avg_pool2d, F.dropout, Tensor.to, Tensor.double,
}  # fmt: skip
_WEIGHTED = {F.conv2d, torch.conv2d, F.linear}
# Look at a tensor without computing; that its values are finite holds in the whole box, whose bounds are.
_SEES = {"size", "dim", "__get__", "numel", "is_floating_point", "__len__", "isfinite"}


@dataclass(frozen=True)
class LogitBounds:
    """What is known of a network's logits h over each image's box of pixels."""

    box: LogitBox
    n_forward: int  # passes of one row
    n_backward: int


def logit_bounds(
    model: nn.Module, x_BCHW: Tensor, labels_B: Tensor, eps: float, *, tighten: bool = True
) -> LogitBounds:
    """Bounds of the logits over all images within Linf distance `eps` and in [0, 1], float64.

    Args:
        tighten: bound the ReLUs that straddle 0 by CROWN; without it from intervals alone, many times faster.

    Raises:
        InvalidInputError: for a network with an operation beyond affine ones and ReLU, with its name.

    >>> network = nn.Sequential(nn.Flatten(), nn.Linear(2, 2, bias=False)).requires_grad_(False)
    >>> _ = network[1].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    >>> box = logit_bounds(network, torch.full((1, 1, 1, 2), 0.5), torch.tensor([0]), 0.1).box
    >>> box.lower_BK.round(decimals=3), box.upper_BK.round(decimals=3)
    (tensor([[ 0.2000, -0.3000]], dtype=torch.float64), tensor([[ 0.3000, -0.2000]], dtype=torch.float64))
    """
    bounds = _Bounder(model, x_BCHW, eps)
    if tighten:
        for layer in range(1, len(bounds.ranges)):
            bounds.tighten(layer)
    return bounds.of_logits(labels_B)


@dataclass
class _Range:
    """The inputs of one ReLU of all images."""

    low: Tensor
    high: Tensor


class _Bounder:
    """The bounds of one network's ReLUs over the boxes of some images, tightened step by step."""

    def __init__(self, model: nn.Module, x_BCHW: Tensor, eps: float) -> None:
        self.model = _in_float64(model)
        low, high = (x_BCHW.double() - eps).clamp(0, 1), (x_BCHW.double() + eps).clamp(0, 1)
        self.centre, self.radius = (low + high) / 2, (high - low) / 2
        self.ranges: list[_Range] = []
        self.n_forward = self.n_backward = 0
        self.logits = self._intervals()  # centre and radius

    def _intervals(self) -> Tensor:
        """One pass of centres and radii, stacked along the batch; ranges known from before stay where tighter."""
        following = _Intervals(self.ranges)
        with following, torch.enable_grad():
            logits: Tensor = self.model(torch.cat([self.centre, self.radius]).requires_grad_())
        self.ranges = following.ranges
        self.n_forward += 2 * len(self.centre)
        return logits.detach()

    def tighten(self, layer: int) -> None:
        """CROWN on each input of the layer's ReLU whose sign is not known."""
        known = self.ranges[layer]
        open_ = ((known.low < 0) & (known.high > 0)).flatten(1).nonzero()
        for part in _split(open_, _ROWS // 2):
            images, places = part.T
            ends = self._lower(images.repeat(2), layer, _Pick(places))
            below, above = ends.chunk(2)
            low, high = known.low.flatten(1), known.high.flatten(1)
            low[images, places] = torch.maximum(low[images, places], below)
            high[images, places] = torch.minimum(high[images, places], -above)
        if len(open_):
            self._intervals()  # later layers profit at once

    def of_logits(self, labels_B: Tensor) -> LogitBounds:
        """CROWN on each centred logit from below and above, and on the label's lead over each class."""
        n_images, n_classes = len(self.centre), self.logits.shape[1]
        unit = torch.eye(n_classes, dtype=torch.float64, device=self.centre.device)
        centring, leads_BKK = unit - 1 / n_classes, unit[labels_B][:, None] - unit
        asked_BRK = torch.cat([torch.cat([centring, -centring]).expand(n_images, -1, -1), leads_BKK], dim=1)
        images = torch.arange(n_images, device=self.centre.device).repeat_interleave(asked_BRK.shape[1])
        parts = zip(_split(images, _ROWS), _split(asked_BRK.flatten(0, 1), _ROWS), strict=True)
        rows = torch.cat([self._lower(part, None, _Weigh(weights)) for part, weights in parts])
        below, above, leads = rows.view(n_images, 3, n_classes).unbind(dim=1)
        slack = SLACK * self.logits.abs().amax(dim=1)[:n_images, None]
        box = LogitBox(below - slack, torch.maximum(-above, below) + slack, leads - slack)
        return LogitBounds(box, self.n_forward, self.n_backward)

    def _lower(self, images_R: Tensor, layer: int | None, scalar: Callable[[Tensor], Tensor]) -> Tensor:
        """The lower bound of one number a row: of `scalar` of a ReLU's input, or of the logits where layer is None."""
        following = _Lines([_Range(known.low[images_R], known.high[images_R]) for known in self.ranges], layer)
        x = self.centre[images_R].requires_grad_()
        with torch.enable_grad():
            try:
                with following:
                    reached = self.model(x)
            except _ReachedError as stop:
                reached = stop.reached
            value_R = scalar(reached)
            (slopes,) = torch.autograd.grad(value_R.sum(), x)
        self.n_forward += len(images_R)
        self.n_backward += len(images_R)
        moved_R = (slopes.abs() * self.radius[images_R]).flatten(1).sum(dim=1)
        lower_R: Tensor = value_R.detach() + sum(following.constants, torch.zeros_like(moved_R)) - moved_R
        return lower_R


@dataclass
class _Pick:
    """Inputs of a ReLU by their places: rows for each from below, then, with a minus, for each from above."""

    places: Tensor

    def __call__(self, values: Tensor) -> Tensor:
        below, above = (half.flatten(1).gather(1, self.places[:, None]).squeeze(1) for half in values.chunk(2))
        return torch.cat([below, -above])


@dataclass
class _Weigh:
    """A weighted sum of each row's logits."""

    weights: Tensor

    def __call__(self, logits: Tensor) -> Tensor:
        return (logits * self.weights).sum(dim=1)


class _ReachedError(Exception):
    """Ends a network's pass at the layer that is asked for."""

    def __init__(self, reached: Tensor) -> None:
        super().__init__()
        self.reached = reached


class _Following(TorchFunctionMode):
    """Watches a network run and refuses what neither bound knows; what depends on the image has a gradient."""

    def __torch_function__(  # noqa: PLR0911
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        moving = [value for value in _tensors([*args, *kwargs.values()]) if value.requires_grad]
        if not moving or getattr(func, "__name__", "") in _SEES:
            return func(*args, **kwargs)
        if func is Tensor.detach:
            return args[0]  # still depends on the image: what follows from it is bounded or refused
        if func in _RELU:
            return self.relu(args[0])
        if func in _ADD | _SUB and len(args) == 2 and not kwargs:
            return self.combine(func, *args)
        fixed = len(moving) == 1 and len(args) == 2 and not kwargs
        if (func in _MUL and fixed) or (func in _DIV and fixed and args[0] is moving[0]):
            return self.scale(func, *args)
        if func in _SPREADS and not kwargs.get("training"):
            return func(*args, **kwargs)
        if func in _WEIGHTED and len(moving) == 1:
            return self.weigh(func, args, kwargs)
        if func is F.batch_norm and not kwargs.get("training", len(args) > 5 and args[5]):
            return self.normalise(args, kwargs)
        raise InvalidInputError(
            f"the network computes {getattr(func, '__name__', func)!r}, which bounds do not follow: they know affine "
            "operations and ReLU. Certify by smoothing instead (certify: {sigma: 0.25}), which asks nothing of it"
        )

    def relu(self, z: Tensor) -> Tensor:
        raise NotImplementedError

    def combine(self, func: Any, a: Any, b: Any) -> Tensor:
        combined: Tensor = _out_of_place(func)(a, b)
        return combined

    def scale(self, func: Any, a: Any, b: Any) -> Tensor:
        scaled: Tensor = func(a, b)
        return scaled

    def weigh(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        weighed: Tensor = func(*args, **kwargs)
        return weighed

    def normalise(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        normalised: Tensor = F.batch_norm(*args, **kwargs)
        return normalised


class _Intervals(_Following):
    """Centres in the first half of the batch, radii in the second."""

    def __init__(self, known: Sequence[_Range]) -> None:
        super().__init__()
        self.known, self.ranges = known, list[_Range]()

    def relu(self, z: Tensor) -> Tensor:
        centre, radius = z.chunk(2)
        low, high = centre - radius, centre + radius
        if self.known:
            before = self.known[len(self.ranges)]
            low, high = torch.maximum(low, before.low), torch.minimum(high, before.high)
        self.ranges.append(_Range(low.detach().clone(), high.detach().clone()))
        low, high = low.clamp_min(0), high.clamp_min(0)
        return torch.cat([low + high, high - low]) / 2

    def combine(self, func: Any, a: Any, b: Any) -> Tensor:
        operate = _out_of_place(func)
        if not (_moves(a) and _moves(b)):
            moving, fixed = (a, b) if _moves(a) else (b, a)
            centre, radius = moving.chunk(2)
            return torch.cat([operate(centre, fixed) if moving is a else operate(fixed, centre), radius])
        (centre_a, radius_a), (centre_b, radius_b) = a.chunk(2), b.chunk(2)
        return torch.cat([operate(centre_a, centre_b), radius_a + radius_b])

    def scale(self, func: Any, a: Any, b: Any) -> Tensor:
        moving, fixed = (a, b) if _moves(a) else (b, a)
        centre, radius = moving.chunk(2)
        return torch.cat([func(centre, fixed), func(radius, abs(fixed))])

    def weigh(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        moving, weight, *others = args
        bias = others[0] if others else kwargs.get("bias")
        rest, named = others[1:], {key: value for key, value in kwargs.items() if key != "bias"}
        centre, radius = moving.chunk(2)
        return torch.cat([func(centre, weight, bias, *rest, **named), func(radius, weight.abs(), None, *rest, **named)])

    def normalise(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        (centre, radius), others = args[0].chunk(2), args[1:]
        named = dict(zip(("running_mean", "running_var", "weight", "bias"), others, strict=False)) | kwargs
        spread = {**named, "running_mean": torch.zeros_like(named["running_mean"]), "bias": None}
        if named.get("weight") is not None:
            spread["weight"] = named["weight"].abs()
        passed = others[4:]  # training, momentum, eps by position
        keys = ("training", "momentum", "eps")[: len(passed)]
        plain = dict(zip(keys, passed, strict=True))
        return torch.cat([F.batch_norm(centre, **{**named, **plain}), F.batch_norm(radius, **{**spread, **plain})])


class _Lines(_Following):
    """Each ReLU forward as it is, and backward as the line that bounds it from below for each row."""

    def __init__(self, ranges: Sequence[_Range], stop_at: int | None) -> None:
        super().__init__()
        self.ranges, self.stop_at, self.constants, self._at = ranges, stop_at, list[Tensor](), 0

    def relu(self, z: Tensor) -> Tensor:
        if self._at == self.stop_at:
            raise _ReachedError(z)
        known, self._at = self.ranges[self._at], self._at + 1
        line: Tensor = _ReluLine.apply(z, known.low, known.high, self.constants)
        return line


class _ReluLine(torch.autograd.Function):
    """ReLU whose gradient takes the slopes of its bounding lines; the constants they add go into a list, a row each."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, low: Tensor, high: Tensor, constants: list[Tensor]) -> Tensor:
        ctx.save_for_backward(z, low, high)
        ctx.constants = constants
        return z.clamp_min(0)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,) = grad_outputs
        z, low, high = ctx.saved_tensors
        open_ = (low < 0) & (high > 0)
        upper = torch.where(open_, high / (high - low).clamp_min(1e-300), (low >= 0).to(z))
        lower = torch.where(open_, (high > -low).to(z), upper)
        slope = torch.where(grad >= 0, lower, upper)
        lift = torch.where(open_ & (grad < 0), -low * upper, 0.0)  # the upper line at z = 0
        # The line replaces the ReLU's forward value in the constant: A relu(z) becomes A (slope z + lift).
        ctx.constants.append((grad * (slope * z + lift - z.clamp_min(0))).flatten(1).sum(dim=1))
        return grad * slope, None, None, None


def _split(values: Tensor, n: int) -> list[Tensor]:
    return [values[at : at + n] for at in range(0, len(values), n)]


def _out_of_place(func: Any) -> Any:
    return torch.add if func in _ADD else torch.sub


def _moves(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _in_float64(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).double().eval().requires_grad_(False)
