"""Square (Andriushchenko et al. 2020): random search with squares, through the classifier's logits alone.

The first point is a random one on the boundary of the ball. Each further query changes a random square window of the
best point so far, and the search keeps the change if it lowers the loss. Windows shrink by the published schedule. The
norm determines how a window changes. The published code draws one window for the whole batch; here, every image has its
own windows.

Shapes: S slots or B images of C x H x W, K classes.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..config.register import ATTACKS
from ..mixing.margins import at, others
from ..norms.ball import TINY, Ball, per_image
from ..norms.l1 import project_on_l1
from ..norms.random import below, hashed
from .attack import Counts, Doubles, Images, Run, Setting, SlotState, StartBatch, Stepper, StepResult, copy_rows

P_INIT = 0.8  # share of the image that the first windows cover, AutoAttack's setting
_HALVED_AFTER = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)  # queries; budgets do not rescale them

# The random numbers of a query, in order: corners of two windows (Linf uses one), a coin, and a sign per channel.
ROW, COLUMN, ROW_2, COLUMN_2, COIN, SIGNS = range(6)
_START = -(1 << 40)  # the first counter of the start's draws; negative, because queries use the counters from 0


@dataclass
class SquareState(SlotState):
    """Square's state of each slot."""

    windows: "Windows"
    x_best: Images
    loss: Doubles  # at the best point
    key: Counts


@dataclass(frozen=True)
class SquareSteps(Stepper[SquareState]):
    """The queries of one search, `n_iter` after the first point."""

    loss_of: Literal["logits", "probabilities"] = "logits"  # the search lowers the margin of these
    gradient_every: ClassVar[int] = 0
    repeats_in_float32: ClassVar[bool] = True

    def init(self, like_SCHW: Tensor) -> SquareState:
        return SquareState.of(like_SCHW, windows=WINDOWS[self.threat.norm](like_SCHW, self.ball))

    def start(self, state: SquareState, slots: Tensor, batch: StartBatch) -> None:
        state.x_best[slots] = state.windows.first_point(batch.x, batch.keys)
        state.key[slots], state.loss[slots] = batch.keys, torch.inf

    def ask(self, state: SquareState) -> Tensor:
        return state.windows.changed(state, draws_of_query(state.key, state.n_passes, state.x.shape[1]))

    def tell(self, state: SquareState, x: Tensor, result: StepResult) -> Tensor:
        """Keep the point if it lowers the loss (the published "or misclassified" adds no case)."""
        loss = -result.log1m_margin
        if self.loss_of == "logits":  # z_y - max_{j != y} z_j, the published loss
            logits = result.logits.double()
            loss = at(logits, state.labels) - others(logits, state.labels).amax(dim=1)
        better = loss < state.loss
        copy_rows(state.x_best, x, better)
        state.loss = torch.where(better, loss, state.loss)
        return state.n_passes > self.n_iter


def draws_of_query(keys_S: Tensor, query_S: Tensor, n_channels: int) -> Tensor:
    """Return (S, 5 + C) int64, uniform over all 64 bits; the columns are `ROW` ... `SIGNS`."""
    return hashed(keys_S, query_S * (SIGNS + n_channels), SIGNS + n_channels)


class Windows:
    """Base class: the first point and the changed windows in one norm."""

    def __init__(self, like_BCHW: Tensor, ball: Ball) -> None:
        height, width = like_BCHW.shape[2:]
        self.ball, here = ball, like_BCHW.device
        self.after = torch.tensor(_HALVED_AFTER, device=here)
        self.sizes = torch.tensor([self.size(n, height, width) for n in range(len(_HALVED_AFTER) + 1)], device=here)
        self.rows_H1 = torch.arange(height, device=here)[:, None]
        self.columns_1W = torch.arange(width, device=here)[None]

    @staticmethod
    def size(n_halved: int, height: int, width: int) -> int:
        """Return the side of a window after its share of the image was halved this often."""
        return min(max(round(math.sqrt(P_INIT / 2**n_halved * height * width)), 1), height, width)

    def n_halved(self, state: SquareState) -> Tensor:
        """Return how often the windows were halved before the next queries, (S,)."""
        return (state.n_passes[:, None] - 1 > self.after).sum(dim=1)

    def first_point(self, x_BCHW: Tensor, keys_B: Tensor) -> Tensor:
        """Return the start, (B, C, H, W)."""
        raise NotImplementedError

    def changed(self, state: SquareState, draws: Tensor) -> Tensor:
        """Return the best points with the windows of their next queries changed by the draws, (S, 5 + C)."""
        raise NotImplementedError

    def _window(self, draws: Tensor, row: int, column: int, size: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mask, (S, 1, H, W), of a square, and the position of each row and column relative to it."""
        size, draws = size.view(-1, 1, 1, 1), draws[..., None, None, None]
        rows = self.rows_H1 - below(draws[:, row], self.rows_H1.numel() - size)
        columns = self.columns_1W - below(draws[:, column], self.columns_1W.numel() - size)
        return ((rows >= 0) & (rows < size)) & ((columns >= 0) & (columns < size)), rows, columns


class StripesAndSquares(Windows):
    """Linf: every pixel is at one of the two ends of its interval.

    The start has vertical stripes x +- eps, with a sign for each channel and column. In a window, all pixels of a
    channel move to the same end.
    """

    def first_point(self, x_BCHW: Tensor, keys_B: Tensor) -> Tensor:
        n, n_channels, _, width = x_BCHW.shape
        return self._on_side(x_BCHW, hashed(keys_B, _START, n_channels * width).view(n, n_channels, 1, width))

    def changed(self, state: SquareState, draws: Tensor) -> Tensor:
        size = self.sizes[self.n_halved(state)] * (state.n_passes > 0)  # query 0 is the start
        window, _, _ = self._window(draws, ROW, COLUMN, size)
        return torch.where(window, self._on_side(state.x, draws[:, SIGNS:, None, None]), state.x_best)

    def _on_side(self, x: Tensor, draws: Tensor) -> Tensor:
        return (x + torch.where(draws >= 0, self.ball.eps, -self.ball.eps)).clamp_(0.0, 1.0)


class Bumps(Windows):
    """L2: the perturbation is a sum of bumps, and each query moves mass (the sum of squares) between two windows.

    The start is a tiling of bumps scaled to the sphere.
    """

    power: ClassVar[int] = 2  # the mass of a pixel is this power of its change
    falls: ClassVar[int] = 2  # a bump falls with this power of the distance to its center

    @classmethod
    def mass(cls, delta: Tensor) -> Tensor:
        """Return the mass of each pixel."""
        return delta.abs().pow(cls.power)

    @classmethod
    def root(cls, total_mass: Tensor) -> Tensor:
        """Return the norm of a perturbation with this mass."""
        return total_mass.pow(1 / cls.power)

    def __init__(self, like_BCHW: Tensor, ball: Ball) -> None:
        super().__init__(like_BCHW, ball)
        sizes = self.sizes.tolist()
        self.bumps_NMM = torch.zeros(len(sizes), sizes[0], sizes[0], device=like_BCHW.device)
        for bump_MM, size in zip(self.bumps_NMM, sizes, strict=True):
            bump_MM[:size, :size] = self.bump(size)

    @staticmethod
    def size(n_halved: int, height: int, width: int) -> int:
        """Return an odd side of at least 3, but at most the side of the image."""
        return min(max(Windows.size(n_halved, height, width), 3) | 1, height, width)

    def first_point(self, x_BCHW: Tensor, keys_B: Tensor) -> Tensor:
        """Return as many bumps side by side as fit, each transposed or not, with a sign for each channel."""
        n, n_channels, height, width = x_BCHW.shape
        size = max(1, min(height, width) // 5)
        n_rows, n_columns = height // size, width // size
        top, left = (height - n_rows * size) // 2, (width - n_columns * size) // 2
        draws = hashed(keys_B, _START, n_rows * n_columns * (1 + n_channels))
        draws = draws.view(n, n_rows, n_columns, 1 + n_channels)
        tile = self.bump(size).to(x_BCHW)
        turned = torch.where((draws[..., :1] >= 0)[..., None], tile.T, tile)  # (B, rows, columns, size, size)
        signs = torch.where(draws[..., 1:] >= 0, 1.0, -1.0).to(x_BCHW)
        tiles = torch.einsum("brcij,brck->bkricj", turned, signs)
        delta = torch.zeros_like(x_BCHW)
        inside = delta[:, :, top : top + n_rows * size, left : left + n_columns * size]
        inside.copy_(tiles.reshape(inside.shape))
        return self._on_sphere(x_BCHW, delta)

    def changed(self, state: SquareState, draws: Tensor) -> Tensor:
        """Move mass from a source window to a target window, where it takes the shape of a bump.

        In each channel, the target becomes the sum of a bump with a random sign and of its old content, each scaled to
        length 1. Its new mass is that of both windows plus the channel's share of the mass that the radius leaves.
        """
        n_halved, delta = self.n_halved(state), state.x_best - state.x
        size = self.sizes[n_halved]
        window, rows, columns = self._window(draws, ROW, COLUMN, size)
        source, _, _ = self._window(draws, ROW_2, COLUMN_2, size)
        turned, last = draws[:, COIN].view(-1, 1, 1, 1) >= 0, self.bumps_NMM.shape[1] - 1
        first, second = (torch.where(turned, *sides).clamp(0, last) for sides in ((columns, rows), (rows, columns)))
        bump = self.bumps_NMM[n_halved.view(-1, 1, 1, 1), first, second] * window
        signs = torch.where(draws[:, SIGNS:, None, None] >= 0, 1.0, -1.0)
        mass = self.mass(delta)
        raised = bump * signs + delta * window / (TINY + self.root((mass * window).sum((2, 3), True)))
        raised = raised / (TINY + self.root(self.mass(raised).sum((2, 3), True)))
        both = (mass * (window | source)).sum((2, 3), True)
        unspent = (self.ball.eps**self.power - mass.sum((1, 2, 3), True)).clamp(min=0) / delta.shape[1]
        # In L1, each channel gets the mass of all channels, as published; the projection corrects the sum.
        raised *= self.root(unspent + both) * (delta.shape[1] if self.power == 1 else 1)
        moved = self._on_sphere(state.x, torch.where(window, raised, delta.masked_fill(source, 0)))
        return torch.where(per_image(state.n_passes > 0, moved), moved, state.x_best)

    def _on_sphere(self, x: Tensor, delta: Tensor) -> Tensor:
        return (x + delta / (per_image(self.ball.length(delta), delta) + TINY) * self.ball.eps).clamp(0.0, 1.0)

    @classmethod
    def bump(cls, size: int) -> Tensor:
        """Return two pyramids of opposite sign, one above the other, with norm 1 together; (size, size)."""
        upper = size // 2
        both = torch.cat([cls._pyramid(upper, size), -cls._pyramid(size - upper, size)])
        return both / cls.root(cls.mass(both).sum())

    @classmethod
    def _pyramid(cls, height: int, width: int) -> Tensor:
        """Return a sum of rectangles, of norm 1; the k-th reaches distance k and has the weight 1 / (k + 1)^falls."""
        steps = max(height, width) // 2 + 1
        weights = 1.0 / torch.arange(1, steps + 1, dtype=torch.float32).pow(cls.falls)
        height_at = weights.flip(0).cumsum(0).flip(0)  # by distance: the sum of the rectangles that contain it
        rows, columns = (torch.arange(height) - height // 2).abs(), (torch.arange(width) - width // 2).abs()
        pyramid = height_at[torch.maximum(rows[:, None], columns[None])]
        return pyramid / cls.root(cls.mass(pyramid).sum()) if height else pyramid


class BumpsInL1(Bumps):
    """L1: the same, but mass is a sum of absolute values, bumps fall faster, and points are projected exactly."""

    power = 1
    falls = 4

    def _on_sphere(self, x: Tensor, delta: Tensor) -> Tensor:
        return project_on_l1(x + delta, x, self.ball.eps * (1 - 1e-6))  # as published


WINDOWS: dict[str, type[Windows]] = {"Linf": StripesAndSquares, "L2": Bumps, "L1": BumpsInL1}  # by norm


@ATTACKS("square", options=("n_queries",), norms=("Linf", "L2", "L1"), order=4, gradients=False)
def square(setting: Setting) -> list[Run]:
    """Random search with squares, without gradients."""
    return [Run("square", SquareSteps(setting.threat, setting.budget.n_queries))]


@ATTACKS("square-margin", options=("n_queries",), norms=("Linf", "L2", "L1"), order=7, gradients=False)
def square_margin(setting: Setting) -> list[Run]:
    """Square on the signed margin itself, the black-box MMAA (paper, appendix D)."""
    return [Run("square-margin", SquareSteps(setting.threat, setting.budget.n_queries, "probabilities"))]
