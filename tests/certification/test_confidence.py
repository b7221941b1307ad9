"""Bounds from draws are wrong no more often than they say, and images stop where nothing can change."""

import pytest
import torch
from scipy.stats import beta

from mixednuts_dist.certification.confidence import (
    Looks,
    lower_bound,
    require_enough_draws,
    upper_bound,
)
from mixednuts_dist.certification.smoothing import SmoothingPlan
from mixednuts_dist.errors import InvalidInputError

CLASSIFIERS = 500


def _draws(votes: torch.Tensor, n: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(len(votes), n, generator=generator, dtype=torch.float64) < votes[:, None]).double()


def test_the_lower_bound_is_clopper_and_pearsons() -> None:
    for hits, n in ((0, 10), (7, 10), (10, 10), (950, 1000)):
        expected = beta.ppf(0.01, hits, n - hits + 1) if hits else 0.0
        assert float(lower_bound(torch.tensor([hits]), n, 0.01)) == pytest.approx(expected)
    assert float(upper_bound(torch.tensor([3]), 10, 0.01)) == pytest.approx(beta.ppf(0.99, 4, 7))


@pytest.mark.parametrize("confidence", [0.9, 0.99])
def test_wrong_certificates_are_rarer_than_the_confidence_allows(confidence: float) -> None:
    """500 made-up classifiers with known votes, each stopped at the look at which its questions are decided.

    The allowed number is the binomial's .9999 quantile of 500 at 1 - confidence.
    """
    votes = torch.linspace(0.3, 0.995, CLASSIFIERS, dtype=torch.float64)
    looks, thresholds = Looks.of(2000, confidence, first=50), torch.tensor([0.6, 0.8, 0.95], dtype=torch.float64)
    draws, wrong = _draws(votes, 2000, seed=0), 0
    stopped_at = torch.zeros(CLASSIFIERS, dtype=torch.int64)
    for look in looks.at:
        open_ = stopped_at == 0
        decided = looks.decided(draws[:, :look].sum(dim=1), look, thresholds)
        stopped_at[open_ & decided] = look
    assert len(stopped_at.unique()) > 3  # images do stop at different looks
    hits = torch.tensor([float(row[:n].sum()) for row, n in zip(draws, stopped_at.tolist(), strict=True)])
    bounds = looks.lower_bounds(hits, stopped_at)
    wrong = int((bounds > votes).sum())
    allowed = {0.9: 77, 0.99: 15}[confidence]
    assert wrong <= allowed


def test_stopping_early_changes_no_decision_beyond_its_confidence() -> None:
    """What an early stop certifies, all draws certify too, but for the errors that the confidence allows."""
    votes = torch.linspace(0.5, 0.999, CLASSIFIERS, dtype=torch.float64)
    looks, last = Looks.of(1600, 0.99), Looks.one(1600, 0.99)
    thresholds, draws = torch.tensor([0.9], dtype=torch.float64), _draws(votes, 1600, seed=2)
    for look in looks.at[:-1]:
        hits = draws[:, :look].sum(dim=1)
        decided = looks.decided(hits, look, thresholds)
        early = looks.lower_bounds(hits, torch.full((CLASSIFIERS,), look)) > 0.9
        full = last.lower_bounds(draws.sum(dim=1), torch.full((CLASSIFIERS,), 1600)) > 0.9
        assert int(decided.sum()) > 0
        assert int((early & ~full)[decided].sum()) <= 5
        assert int((full & ~early)[decided].sum()) <= 5


def test_an_image_out_of_reach_stops() -> None:
    looks = Looks.of(1000, 0.999)
    thresholds = torch.tensor([0.9999], dtype=torch.float64)  # not even 1,000 hits of 1,000 lead there
    assert looks.decided(torch.tensor([100]), 100, thresholds).tolist() == [True]


def test_all_looks_together_have_the_asked_confidence() -> None:
    for n in (50, 100, 101, 450, 10_000):
        looks = Looks.of(n, 0.999)
        assert sum(looks.errors) == pytest.approx(0.001)
        assert looks.at[-1] == n
        assert list(looks.at) == sorted(set(looks.at))


def test_a_bound_is_refused_between_looks() -> None:
    with pytest.raises(InvalidInputError, match="are no look"):
        Looks.of(1000, 0.999).error_at(150)


def test_too_few_draws_are_refused_with_a_number_that_would_do() -> None:
    plan = SmoothingPlan(0.25, 20, 0.999, 100, (1.0,), (0.5,))
    with pytest.raises(InvalidInputError, match="n of at least 331"):
        require_enough_draws(20, 0.999, plan.thresholds)
    require_enough_draws(331, 0.999, plan.thresholds)
    with pytest.raises(InvalidInputError, match="n of at least 331"):
        require_enough_draws(330, 0.999, plan.thresholds)


@pytest.mark.parametrize(("n", "confidence"), [(0, 0.999), (100, 1.0), (100, 0.0)])
def test_no_draws_and_no_doubt_are_refused(n: int, confidence: float) -> None:
    with pytest.raises(InvalidInputError):
        Looks.of(n, confidence)
