"""Square (Andriushchenko et al. 2020): random search with squares, through the classifier's answers alone.

The first point is a random one on the ball's border. Each further query changes a random square window of the best
point so far and keeps the change where it lowers the loss; the windows shrink by the published schedule. How a window
changes depends on the norm (`windows.py`).

The random numbers of an image are a hash of (seed, sample id, query, draw), so its search does not depend on the batch.
The published code draws one window for the whole batch; here every image has its own windows.

Shapes: S slots, images of C x H x W, K classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..config.register import ATTACKS
from .attack import Attack, with_float32_repeats
from .budget import AttackBudget
from .losses import at, others
from .stepper import Run, StartBatch, Stepper, StepResult, copy_rows
from .windows import WINDOWS, SquareState


@dataclass(frozen=True)
class SquareSteps(Stepper[SquareState]):
    """The queries of one search."""

    n_queries: int = 5000
    loss_of: Literal["logits", "probabilities"] = "logits"  # whose margin the search lowers
    gradient_every: ClassVar[int] = 0

    def init(self, like_SCHW: Tensor) -> SquareState:
        windows = WINDOWS[self.threat.norm](like_SCHW, self.ball, self.n_queries)
        anchors = self.ball.anchors(torch.zeros_like(like_SCHW))
        return SquareState.of(like_SCHW, windows=windows, anchors=anchors)

    def start(self, state: SquareState, slots: Tensor, batch: StartBatch) -> None:
        keys = batch.keys(self.seed)
        state.anchors[slots] = self.ball.anchors(batch.x)
        state.key[slots], state.query[slots] = keys, 0
        state.loss[slots] = torch.inf
        state.x_best[slots] = state.windows.first_point(batch.x, keys)

    def ask(self, state: SquareState) -> Tensor:
        return state.windows.change(state)

    def tell(self, state: SquareState, x: Tensor, result: StepResult) -> Tensor:
        """Keep what lowers the loss (the published "or misclassified" follows, because it is negative then)."""
        loss = self._loss(result)
        better = loss < state.loss
        copy_rows(state.x_best, x, better)
        state.loss = torch.where(better, loss, state.loss)
        state.query += 1
        return state.query > self.n_queries

    def _loss(self, result: StepResult) -> Tensor:
        return logit_margin(result.logits, result.labels) if self.loss_of == "logits" else -result.log1m_margin


@ATTACKS(
    "square", describes="random search with squares, no gradients", options=("n_queries",),
    norms=("Linf", "L2", "L1"), order=4, gradients=False,
)  # fmt: skip
class Square(Attack):
    """Square with AutoAttack's settings: one restart, the margin of the logits as its loss."""

    name = "square"
    takes_gradient = False
    loss_of: ClassVar[Literal["logits", "probabilities"]] = "logits"

    @staticmethod
    def passes(budget: AttackBudget, n_classes: int) -> tuple[int, int]:  # noqa: ARG004
        return budget.n_queries + 1, 0

    def runs(self) -> Sequence[Run]:
        """Return one search; in bfloat16 small changes of the loss, which it follows, are lost in rounding."""
        setting = self.setting
        stepper = SquareSteps(setting.threat, setting.seed, setting.budget.n_queries, self.loss_of)
        return with_float32_repeats([Run(self.name, self.name, stepper)], setting)


def logit_margin(logits_SK: Tensor, labels_S: Tensor) -> Tensor:
    """z_y - max_{j != y} z_j, (S,) float64: the published loss."""
    return at(logits_SK, labels_S).double() - others(logits_SK, labels_S).amax(dim=1).double()


@ATTACKS(
    "square-margin", describes="Square on log(1 - margin), as MMAA does on a black box", options=("n_queries",),
    norms=("Linf", "L2", "L1"), order=7, gradients=False,
)  # fmt: skip
class SquareMargin(Square):
    """The black-box MMAA (paper, appendix D): a window is kept where it lowers the signed margin itself."""

    name = "square-margin"
    loss_of = "probabilities"
