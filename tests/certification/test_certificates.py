"""The closed forms of the certificates hold against brute force and direct constructions."""

import math

import pytest
import torch
from torch import Tensor

from benchmarks.certify import published_radius
from mixednuts_dist.certification.certificates import certified_radius, radius_with_std, vote_needed
from mixednuts_dist.errors import InvalidInputError

SIGMA = 0.25


def test_the_published_radius_is_never_larger_on_random_votes() -> None:
    for alpha in torch.linspace(0.501, 1, 100).tolist():
        p_top, share = torch.rand(2, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        p_top = 0.5 + 0.5 * p_top
        p_second = share * (1 - p_top)
        ours = certified_radius(p_top, sigma=SIGMA, alpha=alpha, p_second_B=p_second)
        theirs = published_radius(p_top, p_second, sigma=SIGMA, alpha=alpha)
        counts = theirs > 0  # below 0 it certifies nothing
        assert bool((ours[counts] >= theirs[counts] - 1e-12).all())


@pytest.mark.parametrize("alpha", [0.6, 0.8, 0.95])
@pytest.mark.parametrize("lead", [1.0, -1.0])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_facing_half_spaces_attain_the_radius(alpha: float, lead: float, share: float) -> None:
    """`rob` votes for y below one bound and for k above another; `std` votes for k (lead 1) or y (lead -1).

    `share` is that of k among the votes for other classes. At 1, the closed form is the radius.
    """
    p_top = torch.tensor([0.7]).double()
    p_second = share * (1 - p_top)
    radius = certified_radius(p_top, sigma=SIGMA, alpha=alpha, p_second_B=p_second, std_lead=lead)
    closed = certified_radius(p_top, sigma=SIGMA, alpha=alpha, std_lead=lead)
    assert bool(radius > closed + 1e-3) if share < 1 else float(radius) == pytest.approx(float(closed))
    last_of_y, first_of_k = SIGMA * torch.special.ndtri(p_top), -SIGMA * torch.special.ndtri(p_second)

    def mixture_keeps_y(distance: Tensor) -> bool:
        vote_y = torch.special.ndtr((last_of_y - distance) / SIGMA)  # P(distance + sigma z <= last_of_y)
        vote_k = torch.special.ndtr((distance - first_of_k) / SIGMA)
        std_y, std_k = (0, 1) if lead > 0 else (1, 0)
        return float((1 - alpha) * std_y + alpha * vote_y) > float((1 - alpha) * std_k + alpha * vote_k)

    assert mixture_keeps_y(radius - 1e-6)
    assert not mixture_keeps_y(radius + 1e-6)


def test_a_certified_std_enlarges_the_radius_up_to_its_own() -> None:
    p_top, p_second = torch.tensor([0.6, 0.6, 0.6, 0.99]).double(), torch.tensor([0.4, 0.4, 0.4, 0.01]).double()
    std_radius = torch.tensor([0.0, 0.1, 9.0, 0.01])
    found = radius_with_std(p_top, p_second, std_radius, sigma=SIGMA, alpha=0.8)
    torch.testing.assert_close(found[:3], torch.tensor([-0.0163, 0.1, 0.1430]).double(), atol=1e-4, rtol=0)
    assert float(found[3]) == pytest.approx(float(certified_radius(p_top, sigma=SIGMA, alpha=0.8)[3]))


def test_the_needed_vote_inverts_the_radius() -> None:
    for alpha in (0.6, 0.9, 1.0):
        vote = torch.tensor([vote_needed(0.3, sigma=SIGMA, alpha=alpha)], dtype=torch.float64)
        assert float(certified_radius(vote, sigma=SIGMA, alpha=alpha)) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("vote", "arguments", "said"),
    [
        (0.9, {"sigma": 0.0, "alpha": 0.9}, "sigma=0.0 must be positive"),
        (0.9, {"sigma": math.inf, "alpha": 0.9}, "must be positive"),
        (0.9, {"sigma": 0.25, "alpha": 0.5}, "standard classifier alone decides"),
        (0.9, {"sigma": 0.25, "alpha": 1.5}, "alpha=1.5"),
        (1.2, {"sigma": 0.25, "alpha": 0.9}, "shares in"),
    ],
)
def test_what_cannot_be_certified_is_refused(vote: float, arguments: dict[str, float], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        certified_radius(torch.tensor([vote]), **arguments)
