"""Bounds from draws keep their error rate, and images stop when nothing can change."""

import itertools

import pytest
import torch
from scipy.stats import beta

from mixednuts_dist.certification.certificates import smoothed_margin
from mixednuts_dist.certification.confidence import Looks, lower_bound, most_false, require_enough_draws, upper_bound
from mixednuts_dist.certification.smoothing import SmoothingPlan
from mixednuts_dist.errors import InvalidInputError

CLASSIFIERS = 500


def _hits(votes_BK: torch.Tensor, looks: Looks, seed: int) -> torch.Tensor:
    """Counts of random draws at each look, (looks, B, K): the first two classes, and the rest as a third."""
    generator = torch.Generator().manual_seed(seed)
    new = []
    for n_new in (after - before for before, after in itertools.pairwise((0, *looks.at))):
        n = torch.full((len(votes_BK),), float(n_new), dtype=torch.float64)
        first = torch.binomial(n, votes_BK[:, 0], generator=generator)
        second = torch.binomial(n - first, votes_BK[:, 1] / (1 - votes_BK[:, 0]), generator=generator)
        new.append(torch.stack([first, second, n - first - second], dim=1))
    return torch.stack(new).cumsum(dim=0)


def _questions(needed: float, distance: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([needed], dtype=torch.float64), torch.tensor([distance], dtype=torch.float64)


def _stopped(counts: torch.Tensor, looks: Looks, questions: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The counts at the look at which each image is decided, (B, K)."""
    at = counts[-1]
    for counts_BK in counts.flip(0):  # the first look at which it is decided is seen last
        decided = looks.decided(counts_BK, torch.zeros(len(counts_BK), dtype=torch.int64), questions)
        at = torch.where(decided[:, None], counts_BK, at)
    return at


def test_the_lower_bound_is_clopper_and_pearsons() -> None:
    for hits, n in ((0, 10), (7, 10), (10, 10), (950, 1000)):
        expected = beta.ppf(0.01, hits, n - hits + 1) if hits else 0.0
        assert float(lower_bound(torch.tensor([hits]), n, 0.01)) == pytest.approx(expected)
    assert float(upper_bound(torch.tensor([3]), 10, 0.01)) == pytest.approx(beta.ppf(0.99, 4, 7))


@pytest.mark.parametrize("confidence", [0.9, 0.99])
@pytest.mark.parametrize("votes", [(0.62, 0.3), (0.8, 0.15), (0.9, 0.02), (0.55, 0.4)])
def test_bounds_cover_both_votes_at_any_early_stop(confidence: float, votes: tuple[float, float]) -> None:
    """20,000 repetitions stop where their questions are decided; the questions lie right above the true margin.

    A repetition is wrong if p_A or p_B is. The allowed number is six standard deviations above the expected one.
    """
    votes_BK = torch.tensor([votes], dtype=torch.float64).expand(20_000, -1)
    looks = Looks.of(2000, confidence, first=50)
    true = float(smoothed_margin(votes_BK[:1, 0], votes_BK[:1, 1], 0.3)) + 1e-4
    counts = _stopped(_hits(votes_BK, looks, seed=0), looks, _questions(true, 0.3))
    p_top, p_second = looks.vote_bounds(counts, torch.zeros(len(counts), dtype=torch.int64))
    assert len(counts.sum(dim=1).unique()) > 2  # repetitions do stop at different looks
    allowed = len(counts) * (1 - confidence) + 6 * (len(counts) * (1 - confidence) * confidence) ** 0.5
    assert int(((p_top > votes[0]) | (p_second < votes[1])).sum()) <= allowed
    assert int((smoothed_margin(p_top, p_second, 0.3) > true).sum()) <= allowed


def test_early_stops_change_no_decision_beyond_confidence() -> None:
    """All draws certify whatever an early stop certifies, except for the errors that the confidence allows."""
    votes = torch.linspace(0.5, 0.99, CLASSIFIERS, dtype=torch.float64)
    looks = Looks.of(1600, 0.99)
    counts = _hits(torch.stack([votes, 0.8 * (1 - votes)], dim=1), looks, seed=2)
    stopped, first = _stopped(counts, looks, _questions(0.5, 0.5)), torch.zeros(CLASSIFIERS, dtype=torch.int64)
    early = smoothed_margin(*looks.vote_bounds(stopped, first), 0.5) > 0.5
    full = smoothed_margin(*Looks.of(1600, 0.99, first=1600).vote_bounds(counts[-1], first), 0.5) > 0.5
    assert int((stopped.sum(dim=1) < 1600).sum()) > CLASSIFIERS / 2
    assert int((early & ~full).sum()) <= 5
    assert int((full & ~early).sum()) <= 5


def test_an_image_out_of_reach_stops() -> None:
    far = _questions(0.9999, 0.0)  # not even 1,000 hits of 1,000 lead there
    assert Looks.of(1000, 0.999).decided(torch.tensor([[100, 0, 0]]), torch.tensor([0]), far).tolist() == [True]


def test_a_rare_runner_up_gets_a_bound_of_its_own() -> None:
    looks = Looks.of(1000, 0.999, first=1000)
    p_top, p_second = looks.vote_bounds(torch.tensor([[700, 150, 150]]), torch.tensor([0]))
    assert float(p_second) < 0.21
    assert float(1 - p_top) > 0.3


def test_a_count_over_images_loses_the_quantile_of_false_bounds() -> None:
    assert most_false(899, 0.999) == 5
    assert most_false(1, 0.9) == 0
    generator = torch.Generator().manual_seed(0)
    false = torch.binomial(torch.full((10_000,), 899.0), torch.tensor(0.001), generator=generator)
    assert float((false > most_false(899, 0.999)).double().mean()) <= 0.002


def test_all_looks_together_have_the_asked_confidence() -> None:
    for n in (50, 100, 101, 450, 10_000):
        looks = Looks.of(n, 0.999)
        assert sum(looks.errors) == pytest.approx(0.001)
        assert looks.at[-1] == n
        assert list(looks.at) == sorted(set(looks.at))


def test_a_bound_is_refused_between_looks() -> None:
    with pytest.raises(InvalidInputError, match="not one of the looks"):
        Looks.of(1000, 0.999).errors_at(torch.tensor([150]))


def test_too_few_draws_are_refused_with_a_number_that_would_do() -> None:
    plan = SmoothingPlan(0.25, 20, 0.999, 100, (1.0,), (0.5,))
    with pytest.raises(InvalidInputError, match="n of at least") as refused:
        require_enough_draws(20, 0.999, plan.least_vote)
    enough = int(str(refused.value).rsplit(" ", 1)[1])
    require_enough_draws(enough, 0.999, plan.least_vote)
    with pytest.raises(InvalidInputError, match=f"n of at least {enough}"):
        require_enough_draws(enough - 1, 0.999, plan.least_vote)
