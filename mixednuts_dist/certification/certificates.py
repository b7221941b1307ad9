"""What no attack can take from the mixture: certified radii in closed form.

The mixture is `F(x) = (1 - a) onehot(std(x)) + a q(x)` with `q = softmax(M(rob))`, a = alpha. Let y be a class and
`tau = (1 - a) / a`, the cutoff.

1. **Any std.** `F_y - F_k = (1 - a) (s_y - s_k) + a (q_y - q_k)`, where s is std's answer. Over everything that std may
   answer, `s_y - s_k` is smallest where std votes for k: it is -1. So F predicts y everywhere in a ball, whatever std
   answers there, if and only if `min_k (q_y - q_k) > tau` everywhere in it. Since `q_y - q_k <= 1` this needs a > 1/2.
   A temperature T > 0 gives the same condition: the supremum of `s_k - s_y` is 1. Where `s_k - s_y <= gamma` is known
   in the ball (`std_lead`), tau becomes `gamma tau`.
2. **Smoothing.** Let `qbar(x) = E v(x + sigma z)`, z standard normal, for votes v in [0, 1]: the hard votes
   `onehot(argmax rob)` or the soft ones `softmax(M(rob))`; in both, M is *inside* the expectation. For any measurable v
   in [0, 1], `Phi^-1(qbar_k)` is 1/sigma-Lipschitz in L2 (Salman et al. 2019, lemma 2). With `p_A <= qbar_y(x)` and
   `p_B >= max_{k != y} qbar_k(x)`, the margin at distance r from x is at least
   `Phi(Phi^-1(p_A) - r / sigma) - Phi(Phi^-1(p_B) + r / sigma)`.
3. **The radius.** With `p_B = 1 - p_A` this is `2 Phi(Phi^-1(p_A) - r / sigma) - 1`, and it exceeds tau while

       r < sigma [Phi^-1(p_A) - Phi^-1((1 + tau) / 2)] = sigma [Phi^-1(p_A) - Phi^-1(1 / (2 a))],

   Cohen's radius (arXiv 1902.02918) less a constant that depends on a alone. It is tight: rob that votes for y in the
   half-space `z_1 <= sigma Phi^-1(p_A)` and for k beyond it, and a std that always votes for k, attain it. With an own
   bound p_B on the runner-up, the r at which the expression of step 2 equals tau is found by bisection; it is never
   smaller, because the expression falls with p_B and `p_B <= 1 - p_A`.
4. **The published radius** (adaptive smoothing, arXiv 2301.12554; what MixedNUTS refers to) smooths F itself with std's
   vote as part of the probability, `sigma / 2 [Phi^-1(a p_A) - Phi^-1(a p_B + 1 - a)]`. It is never larger than step 3
   and stays below `sigma Phi^-1(a)` however sure rob is.
5. **Confidence.** p_A is a lower confidence bound from draws. It does not depend on a, so one bound holds for every
   alpha, beta and radius at once.

Shapes: B images.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import InvalidInputError

_WIDEST = 80.0  # standard deviations: Phi^-1 of any float64 in (0, 1) is within 39, so every radius is within this
_HALVINGS = 70  # from 160 standard deviations to below 1e-16 of one


def certified_radius(
    p_top_B: Tensor, *, sigma: float, alpha: float, p_second_B: Tensor | None = None, std_lead: float = 1.0
) -> Tensor:
    """The L2 radius within which the smoothed mixture keeps its class whatever std answers (steps 2 and 3), (B,).

    Negative where the class is not certified even at the image itself; float64, in units of the pixel range [0, 1].

    Args:
        p_top_B: lower bounds of the class's smoothed vote, in [0, 1].
        sigma: standard deviation of the noise, in units of the pixel range.
        alpha: the weight of rob, above 1/2.
        p_second_B: upper bounds of every other class's vote; `1 - p_top` where not given.
        std_lead: the most by which std may prefer another class within the ball, in [0, 1].

    Raises:
        InvalidInputError: for sigma or alpha out of range, or votes outside [0, 1].

    >>> votes = torch.tensor([0.99, 0.6])
    >>> certified_radius(votes, sigma=0.25, alpha=1.0)  # Cohen's
    tensor([0.5816, 0.0633], dtype=torch.float64)
    >>> certified_radius(votes, sigma=0.25, alpha=0.8)
    tensor([ 0.5019, -0.0163], dtype=torch.float64)
    """
    p_top_B, half = _votes("p_top_B", p_top_B), 0.5 + 0.5 * cutoff_of(alpha, std_lead)
    _require_sigma(sigma)
    certain = float(torch.special.ndtri(torch.tensor(half, dtype=torch.float64)))
    closed_B: Tensor = sigma * (torch.special.ndtri(p_top_B) - certain)
    if p_second_B is None:
        return closed_B
    p_second_B = torch.minimum(_votes("p_second_B", p_second_B), 1 - p_top_B)
    solved_B = _last_radius(lambda r_B: smoothed_margin(p_top_B, p_second_B, r_B) > 2 * half - 1, p_top_B) * sigma
    return torch.maximum(closed_B, solved_B)  # in exact arithmetic the second is never smaller


def smoothed_margin(p_top_B: Tensor, p_second_B: Tensor, distance_B: Tensor | float) -> Tensor:
    """The smallest margin that smoothed votes may have `distance_B` standard deviations away (step 2), (B,), float64.

    >>> smoothed_margin(torch.tensor([0.9]), torch.tensor([0.1]), 0.0)
    tensor([0.8000], dtype=torch.float64)
    """
    top_B = torch.special.ndtri(p_top_B.double()) - distance_B
    second_B = torch.special.ndtri(p_second_B.double()) + distance_B
    margin_B: Tensor = torch.special.ndtr(top_B) - torch.special.ndtr(second_B)
    return margin_B


def published_radius(p_top_B: Tensor, p_second_B: Tensor, *, sigma: float, alpha: float) -> Tensor:
    """The radius of adaptive smoothing (arXiv 2301.12554), for comparison (step 4), (B,), float64.

    >>> published_radius(torch.tensor([1.0]), torch.tensor([0.0]), sigma=0.25, alpha=0.8)  # it saturates
    tensor([0.2104], dtype=torch.float64)
    """
    _require_sigma(sigma)
    mixed_top_B, mixed_second_B = alpha * p_top_B.double(), alpha * p_second_B.double() + (1 - alpha)
    radius_B: Tensor = 0.5 * sigma * (torch.special.ndtri(mixed_top_B) - torch.special.ndtri(mixed_second_B))
    return radius_B


def vote_needed(radius: float, *, sigma: float, alpha: float, std_lead: float = 1.0) -> float:
    """The smoothed vote above which the mixture is certified at `radius`: `Phi(r / sigma + Phi^-1(1 / (2 alpha)))`.

    >>> round(vote_needed(0.25, sigma=0.25, alpha=1.0), 4)  # Phi(1)
    0.8413
    """
    _require_sigma(sigma)
    half = torch.tensor(0.5 + 0.5 * cutoff_of(alpha, std_lead), dtype=torch.float64)
    return float(torch.special.ndtr(radius / sigma + torch.special.ndtri(half)))


def cutoff_of(alpha: float, std_lead: float = 1.0) -> float:
    """tau, the margin of rob that outweighs std: `std_lead (1 - alpha) / alpha`.

    Raises:
        InvalidInputError: for an alpha at which std alone can decide, or a `std_lead` outside [0, 1].
    """
    if not 0 <= std_lead <= 1:
        raise InvalidInputError(f"std_lead={std_lead} must be in [0, 1]: it is a difference of two probabilities")
    if not 0.5 < alpha <= 1:
        raise InvalidInputError(
            f"alpha={alpha} cannot be certified: up to 1/2 std alone decides the class, and nothing is known of std. "
            "Give an alpha in (0.5, 1]"
        )
    return std_lead * (1 - alpha) / alpha


def _last_radius(holds: Callable[[Tensor], Tensor], like_B: Tensor) -> Tensor:
    """The largest distance, in standard deviations, at which a condition holds that only ever stops to hold."""
    low_B, high_B = torch.full_like(like_B, -_WIDEST), torch.full_like(like_B, _WIDEST)
    for _ in range(_HALVINGS):
        middle_B = (low_B + high_B) / 2
        held_B = holds(middle_B)
        low_B, high_B = torch.where(held_B, middle_B, low_B), torch.where(held_B, high_B, middle_B)
    return low_B


def _votes(name: str, votes_B: Tensor) -> Tensor:
    if not bool(((votes_B >= 0) & (votes_B <= 1)).all()):
        raise InvalidInputError(f"{name} spans {votes_B.min():g} to {votes_B.max():g}; votes are shares in [0, 1]")
    return votes_B.double()


def _require_sigma(sigma: float) -> None:
    if not 0 < sigma < float("inf"):
        raise InvalidInputError(
            f"sigma={sigma} must be positive: without noise nothing is smoothed and no radius is certified; "
            "0.25 is usual for images in [0, 1]"
        )
