"""Certified radii of the smoothed mixed classifier, in closed form.

The mixed classifier is `F(x) = (1 - a) s(x) + a q(x)`, where a is alpha, s(x) are the probabilities of the standard
classifier (one-hot at T = 0), and q(x) are those of the robust one. Let y be a class and `tau = (1 - a) / a < 1`.

**Proposition 1 (the lead of the standard classifier).** Let `s_k - s_y <= gamma` for every class k != y at every point
of a ball, with gamma in [-1, 1]. If `min_k (q_y - q_k) > gamma tau` at every point of the ball, F predicts y there.

*Proof.* `(F_y - F_k) / a = q_y - q_k - tau (s_k - s_y) >= q_y - q_k - gamma tau > 0`. Two cases matter. gamma = 1 holds
for every standard classifier. With T = 0 the condition is then also necessary if the standard classifier is unknown,
because it may predict k. gamma = -1 holds if T = 0 and the standard classifier is itself certified to predict y in the
ball. The robust classifier may then even prefer another class by less than tau.

**Proposition 2 (the smoothed margin).** Let `q_k(x) = P(v(x + sigma z) = k)`, z standard normal, for a measurable
classifier v. If `p_A <= q_y(x)` and `p_B >= q_k(x)` for all k != y, the margin `q_y - max_k q_k` at L2 distance r from
x is at least `Phi(Phi^-1(p_A) - r / sigma) - Phi(Phi^-1(p_B) + r / sigma)`. Some classifier attains this bound if
`p_A + p_B <= 1`.

*Proof.* `Phi^-1(q_k)` is 1/sigma-Lipschitz in L2 (Salman et al. 2019, lemma 2), and Phi increases. The half-spaces
`z_1 <= sigma Phi^-1(p_A)` of y and `z_1 >= -sigma Phi^-1(p_B)` of k, with a third class in between, attain the bound.

**Corollary (the radius).** F predicts y up to the distance r at which the bound of proposition 2 falls to `gamma tau`.
With `p_B = 1 - p_A` that distance is

    r = sigma [Phi^-1(p_A) - Phi^-1((1 + gamma tau) / 2)],

which for gamma = 1 is `sigma [Phi^-1(p_A) - Phi^-1(1 / (2 a))]`, Cohen's radius minus a constant. A smaller p_B gives a
larger r, because the bound decreases with p_B. The half-spaces of proposition 2 and a standard classifier that predicts
k (gamma = 1) or y (gamma = -1) attain r.

**Proposition 3 (the larger of two radii).** Let the standard classifier be certified to predict y up to distance R, let
r be the radius at gamma = 1, and let r' be the radius at gamma = -1. F predicts y up to `max(r, min(R, r'))`.

*Proof.* F predicts y up to r by proposition 1 with gamma = 1, and up to min(R, r') with gamma = -1. Both radii must
come from the same bounds p_A and p_B, so that both are valid whenever these two bounds hold. If the radii came from
separate bounds, each with confidence 1 - delta, the larger radius would have only the confidence 1 - 2 delta.

p_A and p_B are confidence bounds from draws (`confidence.py`). They do not depend on alpha, so the same two bounds give
every radius for every alpha and beta. In these statements, v is the predicted class of the robust classifier itself.
The transformation M, which may change the class under noise, is not applied.

**Origin.** Proposition 1 with gamma = 1 is the margin lemma of mixed classifiers (Bai et al., arXiv 2311.15165).
Proposition 2 is the bound of Cohen et al. (1902.02918), Salman et al. (1906.04584) and, for thresholds on margins,
Kumar et al. 2020. The radius is a corollary of the two. With T = 0 the mixed classifier is a compositional
architecture, as in Certify or Predict (Mueller et al. 2021) and ACES (Horvath et al. 2022, 2204.00487), whose gate is
the robust margin.

**Limits.** The proofs are for exact real arithmetic. Floating point can break smoothing in constructed cases (Voracek
and Hein 2023).

Shapes: B images.
"""

import torch
from torch import Tensor

from ..errors import InvalidInputError

_WIDEST = 80.0  # standard deviations: Phi^-1 of any float64 in (0, 1) is within 39, so every radius is within this
_HALVINGS = 70  # from 160 standard deviations to below 1e-16 of one


def certified_radius(
    p_top_B: Tensor, *, sigma: float, alpha: float, p_second_B: Tensor | None = None, std_lead: float = 1.0
) -> Tensor:
    """Return the L2 radius up to which the class cannot change (the corollary above), (B,) float64.

    A negative radius means that the class is not certified even at the image itself.

    Args:
        p_top_B: lower bounds of the vote for the class (its probability under noise), in [0, 1].
        sigma: standard deviation of the noise, in units of the pixel range [0, 1].
        alpha: the weight of the robust classifier, above 1/2.
        p_second_B: upper bounds of the vote for every other class; by default `1 - p_top`.
        std_lead: gamma of proposition 1, in [-1, 1].

    Raises:
        InvalidInputError: if sigma or alpha is out of range, or if votes are outside [0, 1].

    >>> votes = torch.tensor([0.99, 0.6])
    >>> certified_radius(votes, sigma=0.25, alpha=1.0)  # Cohen's
    tensor([0.5816, 0.0633], dtype=torch.float64)
    >>> certified_radius(votes, sigma=0.25, alpha=0.8)
    tensor([ 0.5019, -0.0163], dtype=torch.float64)
    >>> certified_radius(votes, sigma=0.25, alpha=0.8, std_lead=-1.0)
    tensor([0.6612, 0.1430], dtype=torch.float64)
    """
    p_top_B, needed = _votes("p_top_B", p_top_B), needed_margin(alpha, std_lead)
    _require_sigma(sigma)
    half = torch.tensor(0.5 + 0.5 * needed, dtype=torch.float64)
    closed_B: Tensor = sigma * (torch.special.ndtri(p_top_B) - torch.special.ndtri(half))
    if p_second_B is None:
        return closed_B
    p_second_B = torch.minimum(_votes("p_second_B", p_second_B), 1 - p_top_B)
    low_B, high_B = torch.full_like(p_top_B, -_WIDEST), torch.full_like(p_top_B, _WIDEST)
    for _ in range(_HALVINGS):  # bisection, because the margin decreases with the distance
        middle_B = (low_B + high_B) / 2
        held_B = smoothed_margin(p_top_B, p_second_B, middle_B) > needed
        low_B, high_B = torch.where(held_B, middle_B, low_B), torch.where(held_B, high_B, middle_B)
    return torch.maximum(closed_B, low_B * sigma)  # in exact arithmetic the second is never smaller


def radius_with_std(p_top_B: Tensor, p_second_B: Tensor, std_radius_B: Tensor, *, sigma: float, alpha: float) -> Tensor:
    """Return the radius of proposition 3, (B,) float64; errors as in `certified_radius`.

    Args:
        std_radius_B: the L2 radius up to which the standard classifier is certified to predict the class, 0 for none.
    """
    any_std_B, own_std_B = (
        certified_radius(p_top_B, sigma=sigma, alpha=alpha, p_second_B=p_second_B, std_lead=lead)
        for lead in (1.0, -1.0)
    )
    with_std_B = torch.minimum(own_std_B, std_radius_B.to(own_std_B))
    return torch.where(std_radius_B.to(own_std_B) > 0, torch.maximum(any_std_B, with_std_B), any_std_B)


def smoothed_margin(p_top_B: Tensor, p_second_B: Tensor, distance_B: Tensor | float) -> Tensor:
    """Return the lower bound of the smoothed margin at `distance_B` standard deviations (proposition 2), float64.

    >>> smoothed_margin(torch.tensor([0.9]), torch.tensor([0.1]), 0.0)
    tensor([0.8000], dtype=torch.float64)
    """
    top_B = torch.special.ndtri(p_top_B.double()) - distance_B
    second_B = torch.special.ndtri(p_second_B.double()) + distance_B
    margin_B: Tensor = torch.special.ndtr(top_B) - torch.special.ndtr(second_B)
    return margin_B


def vote_needed(radius: float, *, sigma: float, alpha: float) -> float:
    """Return the vote above which a class is certified at `radius`: `Phi(r / sigma + Phi^-1(1 / (2 alpha)))`.

    >>> round(vote_needed(0.25, sigma=0.25, alpha=1.0), 4)  # Phi(1)
    0.8413
    """
    _require_sigma(sigma)
    half = torch.tensor(0.5 + 0.5 * needed_margin(alpha), dtype=torch.float64)
    return float(torch.special.ndtr(radius / sigma + torch.special.ndtri(half)))


def needed_margin(alpha: float, std_lead: float = 1.0) -> float:
    """Return `gamma tau` of proposition 1, the robust margin that has to be exceeded.

    Raises:
        InvalidInputError: if alpha is not in (0.5, 1].
    """
    if not 0.5 < alpha <= 1:
        raise InvalidInputError(
            f"alpha={alpha} cannot be certified: up to 1/2 the standard classifier alone decides. "
            "Give an alpha in (0.5, 1]"
        )
    return std_lead * (1 - alpha) / alpha


def _votes(name: str, votes_B: Tensor) -> Tensor:
    if not bool(((votes_B >= 0) & (votes_B <= 1)).all()):
        raise InvalidInputError(f"{name} spans {votes_B.min():g} to {votes_B.max():g}; votes are shares in [0, 1]")
    return votes_B.double()


def _require_sigma(sigma: float) -> None:
    if not 0 < sigma < float("inf"):
        raise InvalidInputError(
            f"sigma={sigma} must be positive. Give the standard deviation of the noise, for example 0.25 for images in "
            "[0, 1]"
        )
