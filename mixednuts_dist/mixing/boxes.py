"""The smallest margin of softmax(M(logits)) while the logits stay within known bounds.

With it, bounds on rob's logits over a ball become a certificate of the mixture: it keeps class y in the whole ball,
whatever std answers, if the margin of M(rob) stays above the cutoff (`certificates.py`, step 1).

Bounded are the *centred* logits `u_k = h_k - mean(h)`, and the leads `h_y - h_k` of the label. Every map of this
package depends on differences of logits alone (softmax and LayerNorm do not change when a constant is added to all
logits), and these vary less over a ball than the logits themselves. The mapped logits' leads are bounded twice, from
the box and from the leads, and the better bound counts: on 100 CIFAR-10 images and a certifiably trained network at
2/255, the box alone certifies 27 images behind M and LayerNorm at alpha = .9, both together 55.

Shapes: B images, K classes; float64.
"""

import functools
from dataclasses import dataclass

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

_ROUNDING = 1e-9  # of normalised logits, which are a few units large
_CELLS = 32  # of the interval of the label's logit; more certify no further image of those measured
Box = tuple[Tensor, Tensor]  # lower and upper bounds, both (B, K)


@dataclass(frozen=True)
class LogitBox:
    """Bounds of some images' logits h: of `h_k - mean(h)`, and from below of the label's lead `h_y - h_k`."""

    lower_BK: Tensor
    upper_BK: Tensor
    leads_BK: Tensor

    def __post_init__(self) -> None:
        shapes = {tuple(values.shape) for values in (self.lower_BK, self.upper_BK, self.leads_BK)}
        if len(shapes) > 1 or self.lower_BK.dim() != 2 or not bool((self.lower_BK <= self.upper_BK).all()):
            raise InvalidInputError(
                f"bounds of logits have one shape (images, classes), and lower <= upper; got {shapes}"
                + (", and lower > upper" if len(shapes) == 1 else "")
            )

    @classmethod
    def of_logits(cls, lower_BK: Tensor, upper_BK: Tensor, labels_B: Tensor) -> "LogitBox":
        """From bounds of the logits themselves: `h_k - mean = (1 - 1/K) h_k - (sum of the others) / K`."""
        share, label_B1 = 1 / lower_BK.shape[1], labels_B[:, None]
        others_high_BK = upper_BK.sum(dim=1, keepdim=True) - upper_BK
        others_low_BK = lower_BK.sum(dim=1, keepdim=True) - lower_BK
        return cls(
            (1 - share) * lower_BK - share * others_high_BK,
            (1 - share) * upper_BK - share * others_low_BK,
            (lower_BK.gather(1, label_B1) - upper_BK).scatter(1, label_B1, 0.0),
        )

    def double(self) -> "LogitBox":
        return LogitBox(self.lower_BK.double(), self.upper_BK.double(), self.leads_BK.double())


def certified_over_box(box: LogitBox, labels_B: Tensor, mixture: Mixture) -> Tensor:
    """Which images the mixture gets right wherever rob's logits are within the bounds, whatever std answers, (B,).

    >>> box = LogitBox.of_logits(torch.tensor([[2.9, -0.1]]), torch.tensor([[3.1, 0.1]]), torch.tensor([0]))
    >>> certified_over_box(box, torch.tensor([0]), Mixture(IdentityTransform(), 0.6, 0.4)).tolist()
    [True]
    """
    cutoff_of(mixture.alpha)  # refuses what cannot be certified
    return least_margin(box, labels_B, mixture.transform) > mixture.one_minus_alpha / mixture.alpha


def least_margin(box: LogitBox, labels_B: Tensor, transform: LogitMap) -> Tensor:
    """A lower bound of `q_y - max_{k != y} q_k`, q = softmax(M(logits)), where it is positive, (B,).

    With leads `d_k = m_y - m_k` of the mapped logits, `q_y - q_k = (1 - e^{-d_k}) / sum_j e^{-d_j}` rises with each d_j
    where it is positive. So it is smallest where all leads are at their lower bounds. Where the result is not positive
    nothing is certified.
    """
    leads_BK = map_leads(transform, box.double(), labels_B)
    return -torch.expm1(log_one_minus_signed_margin((-leads_BK).scatter(1, labels_B[:, None], 0.0), labels_B))


@functools.singledispatch
def map_leads(transform: LogitMap, box: LogitBox, labels_B: Tensor) -> Tensor:  # noqa: ARG001
    """Lower bounds of the label's lead after `transform`, (B, K); a new map registers its own.

    Raises:
        InvalidInputError: for a map without registered bounds.
    """
    raise InvalidInputError(
        f"{type(transform).__name__} has no bounds over a box of logits: register them with "
        f"`map_leads.register({type(transform).__name__})`, or certify by smoothing"
    )


@map_leads.register
def _(transform: IdentityTransform, box: LogitBox, labels_B: Tensor) -> Tensor:  # noqa: ARG001
    return box.leads_BK


@map_leads.register
def _(transform: TemperatureTransform, box: LogitBox, labels_B: Tensor) -> Tensor:  # noqa: ARG001
    return box.leads_BK / transform.temperature


@map_leads.register
def _(transform: LayerNormTransform, box: LogitBox, labels_B: Tensor) -> Tensor:
    return normalised_leads(box, labels_B, transform.ln_k)


@map_leads.register
def _(transform: LogitTransform, box: LogitBox, labels_B: Tensor) -> Tensor:
    """The label's normalised logit lies in one of a few cells, and another class's is below it by the least lead.

    In a cell [a, b] the mapped lead is at least the map's least value over [a, b] less its largest over what the other
    class may then have, up to `b - lead`. A cell that leaves it nothing does not occur.
    """
    low_BK, high_BK = (
        ends_BK + transform.bias for ends_BK in normalised_box((box.lower_BK, box.upper_BK), transform.ln_k)
    )
    leads_BK, label_B1 = normalised_leads(box, labels_B, transform.ln_k), labels_B[:, None]
    low_B1, high_B1 = low_BK.gather(1, label_B1), high_BK.gather(1, label_B1)
    found_BK = torch.full_like(leads_BK, torch.inf)
    for cell in range(_CELLS):
        a_B1, b_B1 = (low_B1 + (high_B1 - low_B1) * end / _CELLS for end in (cell, cell + 1))
        other_high_BK = torch.minimum(high_BK, b_B1 - leads_BK)
        occurs_BK = other_high_BK >= low_BK - _ROUNDING
        other_high_BK = torch.maximum(other_high_BK, low_BK)
        (least_B1, _), (_, most_BK) = (mapped_box(ends, transform) for ends in ((a_B1, b_B1), (low_BK, other_high_BK)))
        found_BK = torch.where(occurs_BK, torch.minimum(found_BK, least_B1 - most_BK), found_BK)
    return found_BK


def mapped_box(box: Box, transform: LogitTransform) -> Box:
    """Clamp, power and scale of intervals of shifted normalised logits; the power keeps signs and rises."""
    low, high = (transform.scale * signed_power(end, transform.power) for end in clamped_box(box, transform.clamp))
    return low, high


def normalised_leads(box: LogitBox, labels_B: Tensor, ln_k: int | None = None) -> Tensor:
    """Lower bounds of the label's lead after LayerNorm: `(h_y - h_k) / deviation`, or from the box, (B, K)."""
    ends = normalised_box((box.lower_BK, box.upper_BK), ln_k)
    from_box_BK = ends[0].gather(1, labels_B[:, None]) - ends[1]
    least_B1, most_B1 = (
        (squares_BK.sum(dim=1, keepdim=True) / (squares_BK.shape[1] - 1) + LN_EPS).sqrt()
        for squares_BK in _squares((box.lower_BK, box.upper_BK))
    )
    from_leads_BK = torch.where(box.leads_BK > 0, box.leads_BK / most_B1, box.leads_BK / least_B1)
    return torch.maximum(from_box_BK, from_leads_BK)


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
    least_BK, most_BK = _squares(box)
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


def _squares(box: Box) -> Box:
    """The range of the squares of intervals."""
    lower_BK, upper_BK = box
    crosses_BK = (lower_BK < 0) & (upper_BK > 0)
    ends = lower_BK.square(), upper_BK.square()
    return torch.where(crosses_BK, 0.0, torch.minimum(*ends)), torch.maximum(*ends)
