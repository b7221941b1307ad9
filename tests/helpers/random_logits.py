"""Random stored logits of a run, and a search on them by the criterion `exact`."""

from dataclasses import replace

import torch

from mixednuts_dist.selection.criteria import ExactCriterion
from mixednuts_dist.selection.grid import Grid
from mixednuts_dist.selection.inputs import AttackedPoints, CachedLogits
from mixednuts_dist.selection.selection import Selection, search_grid

GRID = Grid((0.05, 0.4, 2.0), (0.8, 1.5, 3.0), (-1.6, -0.7, 0.2), betas=(1.0, 0.97, 0.9, 0.7, 0.3, 0.0))


def random_rows(n: int = 150, n_classes: int = 10, *, seed: int = 0) -> CachedLogits:
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


def with_points(cached: CachedLogits, n_points: int) -> AttackedPoints:
    """Several points of some images, with margins for any class of `std`; `rob` is wrong on a few of them."""
    generator = torch.Generator().manual_seed(1)
    image = torch.randint(len(cached.labels_B) // 2, (n_points,), generator=generator)
    logits = cached.rob_attacked_BK[image]
    logits = logits + 0.4 * torch.randn(logits.shape, generator=generator)
    logits[torch.arange(n_points), cached.labels_B[image]] -= 0.3
    return AttackedPoints(logits, image, cached.labels_B[image])


def exact(cached: CachedLogits, points: AttackedPoints | None = None, clamp: str = "gelu") -> Selection:
    criterion = ExactCriterion.from_rows(replace(cached, points=points), clamp=clamp, ln_k=None)
    return search_grid(criterion, replace(GRID, clamp=clamp))
