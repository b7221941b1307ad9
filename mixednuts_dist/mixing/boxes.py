"""The smallest margin of softmax(M(logits)) while the logits stay in a box.

With it, bounds on rob's logits over a ball become a certificate of the mixture: it keeps class y in the whole ball,
whatever std answers, if the margin of M(rob) stays above the cutoff (`certificates.py`, step 1).

A box says that each *centred* logit, `h_k - mean(h)`, lies between two numbers. Centred ones are bounded because every
map of this package depends on them alone (softmax and LayerNorm do not change when a constant is added to all logits),
and because differences of logits vary less over a ball than the logits themselves.

Shapes: B images, K classes; float64.
"""

import functools

import torch
from torch import Tensor

from ..errors import InvalidInputError
from .certificates import cutoff_of
from .clamps import clamp_logits, clamp_shape
from .margins import log_one_minus_signed_margin
from .mixture import Mixture
from .transforms import (
    LN_EPS,
    IdentityTransform,
    LayerNormTransform,
    LogitMap,
    LogitTransform,
    TemperatureTransform,
    resolve_ln_k,
    signed_power,
)

Box = tuple[Tensor, Tensor]  # lower and upper bounds, both (B, K)


def certified_over_box(lower_BK: Tensor, upper_BK: Tensor, labels_B: Tensor, mixture: Mixture) -> Tensor:
    """Which images the mixture gets right wherever rob's centred logits are in the box, whatever std answers, (B,).

    >>> box = torch.tensor([[1.9, -1.1, -1.1]]), torch.tensor([[2.1, -0.9, -0.9]])
    >>> certified_over_box(*box, torch.tensor([0]), Mixture(IdentityTransform(), 0.6, 0.4)).tolist()
    [True]
    """
    cutoff_of(mixture.alpha)  # refuses what cannot be certified
    return least_margin(lower_BK, upper_BK, labels_B, mixture.transform) > mixture.one_minus_alpha / mixture.alpha


def least_margin(lower_BK: Tensor, upper_BK: Tensor, labels_B: Tensor, transform: LogitMap) -> Tensor:
    """A lower bound of `q_y - max_{k != y} q_k`, q = softmax(M(logits)), over the box, (B,); exact to its sign.

    `q_y - q_k = (e^{m_y} - e^{m_k}) / sum_j e^{m_j}` falls with every mapped logit other than m_y where it is positive,
    and rises with m_y: so its least value over a box is at y's lower and all others' upper bounds. Where the result is
    not positive, the margin at that corner is below 0 or is 0, and nothing is certified.
    """
    _require_box(lower_BK, upper_BK)
    low_BK, high_BK = map_box(transform, (lower_BK.double(), upper_BK.double()))
    corner_BK = high_BK.scatter(1, labels_B[:, None], low_BK.gather(1, labels_B[:, None]))
    return -torch.expm1(log_one_minus_signed_margin(corner_BK, labels_B))


def centred_box(lower_BK: Tensor, upper_BK: Tensor) -> Box:
    """The box of `h - mean(h)` from one of h: `h_k - mean = (1 - 1/K) h_k - (sum of the others) / K`."""
    share = 1 / lower_BK.shape[1]
    others_high_BK = upper_BK.sum(dim=1, keepdim=True) - upper_BK
    others_low_BK = lower_BK.sum(dim=1, keepdim=True) - lower_BK
    return (1 - share) * lower_BK - share * others_high_BK, (1 - share) * upper_BK - share * others_low_BK


@functools.singledispatch
def map_box(transform: LogitMap, box: Box) -> Box:  # noqa: ARG001
    """Bounds of `transform`'s values over a box of centred logits; a new map registers its own.

    Raises:
        InvalidInputError: for a map whose bounds nobody has registered.
    """
    raise InvalidInputError(
        f"{type(transform).__name__} has no bounds over a box of logits: register them with "
        f"`map_box.register({type(transform).__name__})`, or certify by smoothing"
    )


@map_box.register
def _(transform: IdentityTransform, box: Box) -> Box:  # noqa: ARG001
    return box


@map_box.register
def _(transform: TemperatureTransform, box: Box) -> Box:
    return box[0] / transform.temperature, box[1] / transform.temperature


@map_box.register
def _(transform: LayerNormTransform, box: Box) -> Box:
    return normalised_box(box, transform.ln_k)


@map_box.register
def _(transform: LogitTransform, box: Box) -> Box:
    low_BK, high_BK = normalised_box(box, transform.ln_k)
    clamped = clamped_box((low_BK + transform.bias, high_BK + transform.bias), transform.clamp)
    low_BK, high_BK = (transform.scale * signed_power(bound_BK, transform.power) for bound_BK in clamped)
    return low_BK, high_BK


def normalised_box(box: Box, ln_k: int | None = None) -> Box:
    """Bounds of LayerNorm over a box of centred logits u: `u_k / sqrt((u_k^2 + S) / (K - 1) + 1e-8)`.

    S is the sum of the other squares. The quotient rises with u_k for every S, and in S it falls where u_k > 0 and
    rises where u_k < 0. So each bound takes u_k at its end and S at the end of its own range that is worse.

    Raises:
        InvalidInputError: where LayerNorm's statistics leave classes out: which ones may change within the box.
    """
    lower_BK, upper_BK = box
    n_classes = lower_BK.shape[1]
    if resolve_ln_k(ln_k, n_classes) < n_classes:
        raise InvalidInputError(
            f"bounds need LayerNorm over all K={n_classes} classes, here it is over the top "
            f"{resolve_ln_k(ln_k, n_classes)}: certify by smoothing instead (certify: {{sigma: 0.25}})"
        )
    most_BK = torch.maximum(lower_BK.square(), upper_BK.square())
    crosses_BK = (lower_BK < 0) & (upper_BK > 0)
    least_BK = torch.where(crosses_BK, 0.0, torch.minimum(lower_BK.square(), upper_BK.square()))
    others_most_BK = (most_BK.sum(dim=1, keepdim=True) - most_BK).clamp_min(0)
    others_least_BK = (least_BK.sum(dim=1, keepdim=True) - least_BK).clamp_min(0)

    def quotient(u_BK: Tensor, others_BK: Tensor) -> Tensor:
        return u_BK / ((u_BK.square() + others_BK) / (n_classes - 1) + LN_EPS).sqrt()

    low_BK = quotient(lower_BK, torch.where(lower_BK > 0, others_most_BK, others_least_BK))
    high_BK = quotient(upper_BK, torch.where(upper_BK > 0, others_least_BK, others_most_BK))
    return low_BK, high_BK


def clamped_box(box: Box, clamp: str) -> Box:
    """The range of a clamp over intervals: it rises, or it falls to one point and rises from there (`clamps.py`)."""
    lower_BK, upper_BK = box
    at_lower_BK, at_upper_BK, shape = clamp_logits(lower_BK, clamp), clamp_logits(upper_BK, clamp), clamp_shape(clamp)
    low_BK = torch.minimum(at_lower_BK, at_upper_BK)
    if shape.turns_at is not None:
        turns_BK = (lower_BK < shape.turns_at) & (upper_BK > shape.turns_at)
        low_BK = torch.where(turns_BK, shape.lowest, low_BK)
    return low_BK, torch.maximum(at_lower_BK, at_upper_BK)


def _require_box(lower_BK: Tensor, upper_BK: Tensor) -> None:
    if lower_BK.shape != upper_BK.shape or lower_BK.dim() != 2 or not bool((lower_BK <= upper_BK).all()):
        raise InvalidInputError(
            f"a box of logits has lower <= upper, both (images, classes); got {tuple(lower_BK.shape)} and "
            f"{tuple(upper_BK.shape)}" + (", with lower > upper" if lower_BK.shape == upper_BK.shape else "")
        )
