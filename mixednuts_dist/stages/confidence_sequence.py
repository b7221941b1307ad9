"""When enough images are evaluated: a confidence sequence for a mean, valid at every look.

Values X_1, X_2, ... in [0, 1] are drawn without replacement, in random order, from N fixed ones with mean m. For each
candidate mean the bets of Waudby-Smith & Ramdas (Estimating means of bounded random variables by betting, JRSS B 86,
2024, sections 4.4 and 5) multiply a capital,

    K+_t(m) = prod_i (1 + a_i (X_i - m_i)),   K-_t(m) = prod_i (1 - b_i (X_i - m_i)),
    m_i = (N m - X_1 - ... - X_{i-1}) / (N - i + 1),

where m_i is what the mean of the values that are left would be, and the bets a_i, b_i depend on earlier values only.
At the true mean each factor has expectation 1 given the past, so (K+ + K-) / 2 is a nonnegative martingale that starts
at 1. By Ville's inequality the probability that it ever reaches 1 / alpha is at most alpha, and max(K+, K-) / 2 is no
larger. The confidence set holds the means at which max(K+, K-) / 2 has stayed below 1 / alpha. It is valid after every
value at once, so looking at it often does not weaken it. K+ falls and K- rises with m, so the set is an interval.

Shapes: G candidate means.
"""

import math

import numpy as np

_CELLS = 4000  # grid over [0, 1]; the interval is rounded outwards by at most 0.025 percentage points
_SHARE = 0.5  # c in the paper: share of the largest bet that cannot lose everything


class ConfidenceSequence:
    """Bounds of the mean of `n_values` values in [0, 1], from those that have been seen so far.

    Args:
        n_values: how many there are in all.
        alpha: upper bound of the probability that the mean ever lies outside the bounds.

    Example:
        >>> bounds = ConfidenceSequence(4, alpha=0.05)
        >>> for value in (1.0, 1.0, 0.5):
        ...     bounds.add(value)
        >>> bounds.interval  # the unseen value may be anything from 0 to 1
        (0.625, 0.875)
    """

    def __init__(self, n_values: int, alpha: float = 0.05) -> None:
        self.n_values, self.n_seen, self._alpha = n_values, 0, alpha
        self._sum = 0.0
        self._squares = 0.25  # sum of (X_i - its predicted mean)^2, from 1/4 as the paper has it
        self._means_G = np.linspace(0, 1, _CELLS + 1)
        self._log_up_G = np.zeros_like(self._means_G)
        self._log_down_G = np.zeros_like(self._means_G)
        self._low, self._high = 0.0, 1.0

    @property
    def interval(self) -> tuple[float, float]:
        """The bounds, the tightest so far; they meet once all values are seen."""
        possible = self._sum / self.n_values, (self._sum + self.n_values - self.n_seen) / self.n_values
        return max(self._low, possible[0]), min(self._high, possible[1])

    def add(self, value: float) -> None:
        """Add the next value, in the order in which the values were drawn."""
        t = self.n_seen + 1
        variance = self._squares / t
        bet = math.sqrt(2 * math.log(2 / self._alpha) / (variance * t * math.log(1 + t)))
        left_G = (self.n_values * self._means_G - self._sum) / (self.n_values - self.n_seen)
        inside_G = np.clip(left_G, 1e-12, 1 - 1e-12)  # other means cannot be reached any more: `interval` excludes them
        up_G = np.minimum(_SHARE / inside_G, bet)
        down_G = np.minimum(_SHARE / (1 - inside_G), bet)
        self._log_up_G += np.log1p(up_G * (value - inside_G))
        self._log_down_G += np.log1p(-down_G * (value - inside_G))
        self._sum, self.n_seen = self._sum + value, t
        self._squares += (value - (0.5 + self._sum) / (1 + t)) ** 2
        log_capital_G = np.maximum(self._log_up_G, self._log_down_G) - math.log(2)
        alive = np.flatnonzero(log_capital_G < -math.log(self._alpha))
        if len(alive):
            low, high = self._means_G[[alive[0], alive[-1]]].tolist()
            self._low, self._high = max(self._low, low - 1 / _CELLS), min(self._high, high + 1 / _CELLS)
