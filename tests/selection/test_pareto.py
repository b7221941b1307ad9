"""The front of (clean, kept) against a plain loop, and the choices that targets ask for."""

from dataclasses import replace

import pytest

from mixednuts_dist.errors import InvalidInputError
from mixednuts_dist.mixing.transforms import LogitTransform
from mixednuts_dist.selection.criteria import ExactCriterion, PaperCriterion
from mixednuts_dist.selection.grid import kept_images
from mixednuts_dist.selection.inputs import CachedLogits
from mixednuts_dist.selection.selection import beta_of_robust, most_kept_at_clean, pareto_front, search_grid
from tests.helpers.brute_force import GRID, every_outcome, outcome, rows, smallest_margins, with_points


def criterion(cached: CachedLogits, clamp: str = "gelu") -> ExactCriterion:
    return ExactCriterion.from_rows(cached, clamp=clamp, ln_k=None)


@pytest.mark.parametrize("n_points", [0, 90])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_front_is_that_of_every_candidate_at_every_cutoff(seed: int, n_points: int) -> None:
    cached = rows(seed=seed)
    points = with_points(cached, n_points) if n_points else None
    cached = replace(cached, points=points)
    reached = set()
    for at in GRID:
        transform = LogitTransform(*at)
        margins = smallest_margins(cached, points, transform)
        reached |= {(clean, kept) for clean, kept, _ in every_outcome(cached, margins, transform) if kept}
    expected = {
        (clean, kept)
        for clean, kept in reached
        if not any(c >= clean and k >= kept and (c, k) != (clean, kept) for c, k in reached)
    }
    front = pareto_front([(criterion(cached), GRID)])
    assert {(choice.objective_count, choice.kept_predicted) for choice in front} == expected
    for choice in front:
        margins = smallest_margins(cached, points, choice.transform())
        found = outcome(cached, margins, choice.transform(), choice.log_one_minus_cutoff)
        assert found == (choice.objective_count, choice.kept_predicted)


def test_the_front_of_several_clamps_holds_the_choice_of_every_beta() -> None:
    cached = rows()
    searched = [(criterion(cached, clamp), replace(GRID, clamp=clamp)) for clamp in ("gelu", "linear")]
    front = pareto_front(searched)
    n_robust = front[0].n_robust
    for beta in GRID.betas:
        counts = [choice.objective_count for made in searched if (choice := search_grid(*made).choice(beta))]
        allowed = [c.objective_count for c in front if c.kept_predicted >= kept_images(beta, n_robust)]
        assert max(allowed) == max(counts)


def test_targets_are_told_as_people_mean_them() -> None:
    cached = rows()
    front = pareto_front([(criterion(cached), GRID)])
    n_robust, total = front[0].n_robust, len(cached.labels_B)
    wanted = (n_robust - 7) / total
    beta = beta_of_robust(wanted, n_robust=n_robust, total=total)
    assert kept_images(beta, n_robust) == n_robust - 7
    middle = front[len(front) // 2]
    found = most_kept_at_clean(front, (middle.objective_count - 0.5) / total, total=total)
    assert found == middle
    with pytest.raises(InvalidInputError, match=r"robust=0\.99 cannot be had: rob is robust on \d+ of 150 images"):
        beta_of_robust(0.99, n_robust=n_robust, total=total)
    with pytest.raises(InvalidInputError, match=r"clean=1\.0 cannot be had: the best candidate gets \d+ of 150"):
        most_kept_at_clean(front, 1.0, total=total)


def test_a_criterion_without_cutoffs_to_choose_has_no_front() -> None:
    paper = PaperCriterion.from_rows(rows(), clamp="gelu", ln_k=None)
    with pytest.raises(InvalidInputError, match="criterion 'paper' fixes the cutoff by beta"):
        pareto_front([(paper, GRID)])
