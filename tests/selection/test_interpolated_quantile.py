"""The criterion `paper-interpolated` against the percentile that the paper's reference code computes."""

import math

import numpy as np
import pytest
import torch

from mixednuts_dist.mixing.margins import top2_margin
from mixednuts_dist.mixing.transforms import LogitTransform
from mixednuts_dist.selection.criteria import InterpolatedPaperCriterion
from mixednuts_dist.selection.grid import Grid
from mixednuts_dist.selection.selection import score_candidates


@pytest.mark.parametrize("beta", [0.0, 0.9, 0.985, 1.0])
def test_interpolated_criterion_uses_numpys_percentile(beta: float) -> None:
    generator = torch.Generator().manual_seed(3)
    attacked_BK = torch.randn(37, 6, generator=generator, dtype=torch.float64)
    wrong_BK = torch.randn(20, 6, generator=generator, dtype=torch.float64)
    criterion = InterpolatedPaperCriterion.of(attacked_BK, wrong_BK, clamp="gelu", ln_k=None)
    grid = Grid((0.7, 2.0), (1.0, 2.5), (-1.0, 0.0), (beta,))
    scores = score_candidates(criterion, grid)
    found = zip(grid, scores.log_thresholds.flatten().tolist(), scores.counts.flatten().tolist(), strict=True)
    for at, log_threshold, count in found:
        margins, wrong = (
            top2_margin(LogitTransform(*at)(x_BK).softmax(dim=1)).numpy() for x_BK in (attacked_BK, wrong_BK)
        )
        threshold = np.percentile(margins, 100 * (1 - beta))
        assert -math.expm1(log_threshold) == pytest.approx(threshold, rel=1e-9, abs=1e-12)
        assert abs(wrong - threshold).min() > 1e-9
        assert count == int((wrong >= threshold).sum())
