"""The best margin threshold found by trying every threshold, and random cached logits to try it on."""

import itertools
from dataclasses import replace

import torch
from torch import Tensor

from mixednuts_dist.mixing.margins import log_one_minus_signed_margin
from mixednuts_dist.mixing.mixture import Mixture, mixed_clean_correct
from mixednuts_dist.mixing.transforms import LogitTransform
from mixednuts_dist.selection.criteria import ExactCriterion
from mixednuts_dist.selection.grid import Grid
from mixednuts_dist.selection.inputs import AttackedPoints, CachedLogits
from mixednuts_dist.selection.selection import Selection, search_grid

GRID = Grid((0.05, 0.4, 2.0), (0.8, 1.5, 3.0), (-1.6, -0.7, 0.2), betas=(1.0, 0.97, 0.9, 0.7, 0.3, 0.0))


def rows(n: int = 150, n_classes: int = 10, *, seed: int = 0) -> CachedLogits:
    """`rob` is right on most images, `std` on most others and wrong on some of the first."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(n_classes, (n,), generator=generator)
    clean = torch.randn(n, n_classes, generator=generator)
    clean[torch.arange(n), labels] += 1 + 3 * torch.rand(n, generator=generator)
    attacked = clean + 0.5 * torch.randn(n, n_classes, generator=generator)
    attacked[torch.arange(n), labels] -= 0.4
    wrong = torch.rand(n, generator=generator) < 0.25
    std_pred = torch.where(wrong, torch.randint(n_classes, (n,), generator=generator), labels)
    return CachedLogits(clean, attacked, labels, std_pred)


def with_points(cached: CachedLogits, n_points: int, *, seed: int = 1) -> AttackedPoints:
    """Several points of some images, with margins for any class of `std`; `rob` is wrong on a few of them."""
    generator = torch.Generator().manual_seed(seed)
    image = torch.randint(len(cached.labels_B) // 2, (n_points,), generator=generator)
    logits = cached.rob_attacked_BK[image] + 0.4 * torch.randn(
        n_points, cached.rob_attacked_BK.shape[1], generator=generator
    )
    logits[torch.arange(n_points), cached.labels_B[image]] -= 0.3
    return AttackedPoints(logits, image, cached.labels_B[image])


def exact(cached: CachedLogits, points: AttackedPoints | None = None, clamp: str = "gelu") -> Selection:
    criterion = ExactCriterion.from_rows(replace(cached, points=points), clamp=clamp, ln_k=None)
    return search_grid(criterion, replace(GRID, clamp=clamp))


def smallest_margins(cached: CachedLogits, points: AttackedPoints | None, transform: LogitTransform) -> Tensor:
    """log(1 - signed margin) of each image that `rob` keeps, the largest over its points."""
    values = log_one_minus_signed_margin(transform(cached.rob_attacked_BK.double()), cached.labels_B)
    if points is not None:
        found = log_one_minus_signed_margin(
            transform(points.rob_logits_PK.double()), cached.labels_B[points.image_P]
        ).tolist()
        for image, value in zip(points.image_P.tolist(), found, strict=True):
            values[image] = max(float(values[image]), value)
    return values[cached.rob_attacked_BK.argmax(dim=1) == cached.labels_B]


def outcome(cached: CachedLogits, margins: Tensor, transform: LogitTransform, log_cutoff: float) -> tuple[int, int]:
    """(clean images right, images kept) at a margin threshold."""
    cutoff = -float(torch.expm1(torch.tensor(log_cutoff, dtype=torch.float64)))
    mixture = Mixture(transform, 1 / (1 + cutoff), cutoff / (1 + cutoff))
    clean = mixed_clean_correct(cached.rob_clean_BK, cached.labels_B, cached.std_pred_B, mixture)
    return int(clean.sum()), int((margins <= log_cutoff + 1e-12 * abs(log_cutoff)).sum())


def every_outcome(cached: CachedLogits, margins: Tensor, transform: LogitTransform) -> list[tuple[int, int, float]]:
    """Evaluate every distinct margin threshold: each margin, and just above each clean image's margin."""
    mapped = transform(cached.rob_clean_BK.double())
    top, probs = mapped.argmax(dim=1), mapped.softmax(dim=1)
    index = torch.arange(len(top))
    gaps = torch.log1p(-(probs[index, top] - probs[index, cached.std_pred_B]))
    breaks = sorted({*margins[margins <= 0].tolist(), *gaps.tolist(), 0.0})
    tried = [*margins[margins <= 0].tolist(), *((a + b) / 2 for a, b in itertools.pairwise(breaks))]
    return [(*outcome(cached, margins, transform, value), value) for value in tried]
