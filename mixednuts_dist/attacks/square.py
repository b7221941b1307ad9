"""Square (Andriushchenko et al. 2020): random search with squares, through the classifier's answers alone.

The first point is a random one on the ball's border. Each further query changes a random square window of the best
point so far and keeps the change where it lowers the loss; the windows shrink by the published schedule. How a window
changes depends on the norm (`windows.py`).

The random numbers of an image are a hash of (seed, sample id, query, draw): nothing else decides its search, neither
the batch nor its other images, and no generator has to be kept or advanced. Unlike the published code, which draws one
window for the whole batch, every image has windows of its own.

Shapes: S slots, images of C x H x W, K classes.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..config.register import ATTACKS
from .attack import Arrivals, Attack, Phase, Seen, Setting, again_in_float32, copy_rows, sent
from .budget import AttackBudget
from .hashing import image_key
from .windows import WINDOWS, SquareState, Windows


@ATTACKS(
    "square", describes="random search with squares, no gradients", options=("n_queries",),
    norms=("Linf", "L2", "L1"), order=4,
)  # fmt: skip
class Square(Attack):
    """Square with AutoAttack's settings: one restart, the margin of the logits as its loss."""

    name = "square"
    takes_gradient = False
    loss: ClassVar[Literal["logits", "probabilities"]] = "logits"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._windows: Windows | None = None

    @staticmethod
    def passes(budget: AttackBudget, n_classes: int) -> tuple[int, int]:  # noqa: ARG004
        """The start and the queries, all forward."""
        return budget.n_queries + 1, 0

    def phases(self) -> Sequence[Phase]:
        """One search; in bfloat16 small changes of the loss, which it follows, are lost in rounding."""
        return again_in_float32([Phase(self.name, self.name, self)], self.setting)

    def state(self, like_SCHW: Tensor) -> SquareState:
        """The arrays of as many slots as there are rows."""
        windows = WINDOWS[self.setting.threat.norm]
        self._windows = windows(like_SCHW, self.setting.ball, self.setting.budget.n_queries)
        return SquareState(like_SCHW, self.setting.ball)

    def begin(self, state: SquareState, slots: Tensor, arrivals: Arrivals) -> None:
        """At the random start."""
        ids = arrivals.sample_ids
        keys = sent([image_key(self.setting.seed, self.name, sample_id) for sample_id in ids], slots)
        assert self._windows is not None  # `state` makes them
        state.anchors[slots] = self.setting.ball.anchors(arrivals.x)
        state.key[slots], state.query[slots] = keys, 0
        state.loss[slots] = torch.inf
        state.x_best[slots] = self._windows.first_point(arrivals.x, keys)

    def propose(self, state: SquareState) -> Tensor:
        """(S, C, H, W): the start, or the best point with a window changed."""
        assert self._windows is not None  # `state` makes them
        return self._windows.change(state)

    def absorb(self, state: SquareState, x_new: Tensor, seen: Seen) -> Tensor:
        """Keep what lowers the loss (the published "or misclassified" follows, because it is negative then)."""
        loss = self._losses(seen)
        better = loss < state.loss
        copy_rows(state.x_best, x_new, better)
        state.loss = torch.where(better, loss, state.loss)
        state.query += 1
        return state.query > self.setting.budget.n_queries

    def _losses(self, seen: Seen) -> Tensor:
        return -seen.log_gap if self.loss == "probabilities" else logit_margin(seen.logits, seen.labels)


def logit_margin(logits_SK: Tensor, labels_S: Tensor) -> Tensor:
    """z_y - max_{j != y} z_j, (S,) float64: the published loss."""
    others_SK = logits_SK.scatter(1, labels_S[:, None], -torch.inf)
    return logits_SK.gather(1, labels_S[:, None]).squeeze(1).double() - others_SK.amax(dim=1).double()


@ATTACKS(
    "square-margin", describes="Square on log(1 - margin), as MMAA does on a black box", options=("n_queries",),
    norms=("Linf", "L2", "L1"), order=7,
)  # fmt: skip
class SquareMargin(Square):
    """The black-box MMAA (paper, appendix D): a window is kept where it lowers the signed margin itself."""

    name = "square-margin"
    loss = "probabilities"
