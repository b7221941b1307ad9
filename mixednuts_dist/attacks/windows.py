"""The points that Square tries: its start and its windows, one class per norm.

Shapes: B images and S slots of C x H x W.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..norms.ball import TINY, Ball, per_image
from ..norms.random import below, hashed
from .stepper import Counts, Doubles, Images, SlotState

P_INIT = 0.8  # share of the image that the first windows cover, AutoAttack's setting
# From which query on the share is P_INIT divided by what; AutoAttack does not rescale it to the budget.
_SHRINKING = ((10, 2), (50, 4), (200, 8), (500, 16), (1000, 32), (2000, 64), (4000, 128), (6000, 256), (8000, 512))

# The draws of a query, in order: the corners of two windows (Linf uses one), a coin, and a sign for each channel.
ROW, COLUMN, ROW_2, COLUMN_2, COIN, SIGNS = range(6)
_START = -(1 << 40)  # the first counter of the start's draws: below 0, where no query has any


@dataclass
class SquareState(SlotState):
    """Square's state of each slot."""

    windows: "Windows"
    anchors: Tensor  # what the norm needs of the clean image
    x_best: Images
    loss: Doubles  # at the best point
    query: Counts  # the next one; 0 is the start
    key: Counts


class Windows:
    """Base class of a norm's windows."""

    def __init__(self, like_BCHW: Tensor, ball: Ball, n_queries: int) -> None:
        height, width = like_BCHW.shape[2:]
        self.ball = ball
        self.sizes = [self.size(query, height, width) for query in range(1, n_queries + 1)]
        self.size_Q = torch.tensor([0, *self.sizes], device=like_BCHW.device)  # by query; the start changes nothing
        self.rows_H1 = torch.arange(height, device=like_BCHW.device)[:, None]
        self.columns_1W = torch.arange(width, device=like_BCHW.device)[None]

    @staticmethod
    def size(query: int, height: int, width: int) -> int:
        """The side of the window of a query, counted from 1: it covers a share p of the image, which shrinks."""
        share = P_INIT / max((divisor for after, divisor in _SHRINKING if query - 1 > after), default=1)
        return min(max(round(math.sqrt(share * height * width)), 1), height, width)

    def first_point(self, x_BCHW: Tensor, keys_B: Tensor) -> Tensor:
        """The start, (B, C, H, W)."""
        raise NotImplementedError

    def change(self, state: SquareState) -> Tensor:
        """Change the window of each slot's next query in its best point, (S, C, H, W); return the start unchanged."""
        query = state.query.clamp(max=len(self.size_Q) - 1)  # a free slot may be past its last query
        return self.changed(state, query, draws_of_query(state.key, query, state.x_best.shape[1]))

    def changed(self, state: SquareState, query: Tensor, draws: Tensor) -> Tensor:
        """Return `change` for the given queries, (S,), and their random numbers, (S, 5 + C)."""
        raise NotImplementedError

    def _corner(self, draws: Tensor, row: int, column: int, size: Tensor) -> tuple[Tensor, Tensor]:
        """(top, left), (S,) each, of a window that lies in the image."""
        return below(draws[:, row], len(self.rows_H1) - size), below(draws[:, column], self.columns_1W.shape[1] - size)

    def _mask(self, top: Tensor, left: Tensor, size: Tensor) -> Tensor:
        """(S, 1, H, W) bool: the square of `size` whose corner is at (top, left)."""
        rows, columns = self.rows_H1 - top.view(-1, 1, 1, 1), self.columns_1W - left.view(-1, 1, 1, 1)
        size = size.view(-1, 1, 1, 1)
        return ((rows >= 0) & (rows < size)) & ((columns >= 0) & (columns < size))


class StripesAndSquares(Windows):
    """Linf: every pixel is on one of the two sides of its interval.

    The start is vertical stripes of x +- eps, with a sign for each channel and column. As published, a window adds or
    subtracts 2 eps and cuts at the interval, which puts its pixels of each channel on one side.
    """

    def first_point(self, x_BCHW: Tensor, keys_B: Tensor) -> Tensor:
        n, n_channels, _, width = x_BCHW.shape
        draws = hashed(keys_B, _START, n_channels * width).view(n, n_channels, 1, width)
        return (x_BCHW + torch.where(draws >= 0, self.ball.eps, -self.ball.eps)).clamp(0.0, 1.0)

    def changed(self, state: SquareState, query: Tensor, draws: Tensor) -> Tensor:
        size, high = self.size_Q[query], draws[:, SIGNS:, None, None] >= 0
        window = self._mask(*self._corner(draws, ROW, COLUMN, size), size)
        return torch.where(window, torch.where(high, state.anchors[:, 1], state.anchors[:, 0]), state.x_best)


class Bumps(Windows):
    """L2: the perturbation is a sum of bumps, and the windows move its mass.

    The start is a tiling of bumps scaled to the sphere. A bump falls from its center with a power, `falls`, of the
    distance.
    """

    falls = 2

    @staticmethod
    def mass(delta: Tensor) -> Tensor:
        """Return the mass of each pixel."""
        return delta.square()

    @staticmethod
    def root(total_mass: Tensor) -> Tensor:
        """The length that a mass has."""
        return total_mass.sqrt()

    def __init__(self, like_BCHW: Tensor, ball: Ball, n_queries: int) -> None:
        super().__init__(like_BCHW, ball, n_queries)
        kinds = sorted(set(self.sizes))
        self.kind_Q = torch.tensor([0, *map(kinds.index, self.sizes)], device=like_BCHW.device)
        self.bumps_NMM = torch.zeros(len(kinds), kinds[-1], kinds[-1], device=like_BCHW.device)
        for bump_MM, size in zip(self.bumps_NMM, kinds, strict=True):
            bump_MM[:size, :size] = self.bump(size)

    @staticmethod
    def size(query: int, height: int, width: int) -> int:
        """Bumps are odd and no smaller than 3, where the image is not smaller."""
        return min(max(Windows.size(query, height, width), 3) | 1, height, width)

    def first_point(self, x_BCHW: Tensor, keys_B: Tensor) -> Tensor:
        return self._on_sphere(x_BCHW, self._tiling(x_BCHW, keys_B))

    def changed(self, state: SquareState, query: Tensor, draws: Tensor) -> Tensor:
        size, signs = self.size_Q[query], draws[:, SIGNS:, None, None] >= 0
        top, left = self._corner(draws, ROW, COLUMN, size)
        window, source = self._mask(top, left, size), self._mask(*self._corner(draws, ROW_2, COLUMN_2, size), size)
        bump_S1HW = self._bumps(top, left, query, draws[:, COIN] >= 0)
        x = state.anchors[:, 0]
        delta = self._moved(state.x_best - x, window, source, bump_S1HW * window, signs)
        return torch.where((query > 0).view(-1, 1, 1, 1), self._on_sphere(x, delta), state.x_best)

    def _on_sphere(self, x: Tensor, delta: Tensor) -> Tensor:
        return (x + delta / (per_image(self.ball.length(delta), delta) + TINY) * self.ball.eps).clamp(0.0, 1.0)

    def _bumps(self, top: Tensor, left: Tensor, query: Tensor, turned: Tensor) -> Tensor:
        """(S, 1, H, W): each query's bump with its corner at (top, left), or turned; outside of the window anything."""
        rows, columns = self.rows_H1 - top.view(-1, 1, 1), self.columns_1W - left.view(-1, 1, 1)
        turned = turned.view(-1, 1, 1)
        last = self.bumps_NMM.shape[1] - 1
        first = torch.where(turned, columns, rows).clamp(0, last)
        second = torch.where(turned, rows, columns).clamp(0, last)
        return self.bumps_NMM[self.kind_Q[query].view(-1, 1, 1), first, second][:, None]

    def _moved(self, delta: Tensor, window: Tensor, source: Tensor, bump: Tensor, signs: Tensor) -> Tensor:
        """The query: mass moves from the window `source` to `window`, where it takes the shape of a bump.

        In each channel the window becomes the sum of a bump of random sign and of its old content, scaled to length 1
        each; it gets the mass of both windows together, plus its share of what the radius leaves unspent.
        """
        mass = self.mass(delta)
        inside = delta * window
        raised = bump * torch.where(signs, 1.0, -1.0) + inside / (TINY + self.root((mass * window).sum((2, 3), True)))
        raised = raised / (TINY + self.root(self.mass(raised).sum((2, 3), True)))
        both = (mass * (window | source)).sum((2, 3), True)
        unspent = (self._all_mass() - mass.sum((1, 2, 3), True)).clamp(min=0) / delta.shape[1]
        return torch.where(window, raised * self._length(unspent + both, delta.shape[1]), delta.masked_fill(source, 0))

    def _all_mass(self) -> float:
        return self.ball.eps**2

    def _length(self, mass: Tensor, n_channels: int) -> Tensor:  # noqa: ARG002
        """How long a window's bump is that gets a mass."""
        return self.root(mass)

    def _tiling(self, x_BCHW: Tensor, keys_B: Tensor) -> Tensor:
        """Bumps side by side, (B, C, H, W), each turned or not, with a sign for each channel.

        Tiles have a fifth of the shorter side, and as many as fit are centered, as published for square images.
        """
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
        return delta

    @classmethod
    def bump(cls, size: int) -> Tensor:
        """Two pyramids of opposite sign, one above the other, of norm 1 together; (size, size)."""
        upper = size // 2
        both = torch.cat([cls._pyramid(upper, size), -cls._pyramid(size - upper, size)])
        return both / cls.root(cls.mass(both).sum())

    @classmethod
    def _pyramid(cls, height: int, width: int) -> Tensor:
        """Sum of rectangles around the center, the k-th at distance k or less with weight 1 / (k + 1)^falls, norm 1."""
        steps = max(height, width) // 2 + 1
        weights = 1.0 / torch.arange(1, steps + 1, dtype=torch.float32).pow(cls.falls)
        height_at = weights.flip(0).cumsum(0).flip(0)  # by distance: the rectangles that reach so far
        rows, columns = (torch.arange(height) - height // 2).abs(), (torch.arange(width) - width // 2).abs()
        pyramid = height_at[torch.maximum(rows[:, None], columns[None])]
        return pyramid / cls.root(cls.mass(pyramid).sum()) if height else pyramid


class BumpsInL1(Bumps):
    """L1: the same with sums of absolute values, bumps that fall faster, and points projected on ball and box."""

    falls = 4

    def __init__(self, like_BCHW: Tensor, ball: Ball, n_queries: int) -> None:
        super().__init__(like_BCHW, ball, n_queries)
        self._inner = type(ball)(ball.eps * (1 - 1e-6))  # as published

    @staticmethod
    def mass(delta: Tensor) -> Tensor:
        return delta.abs()

    @staticmethod
    def root(total_mass: Tensor) -> Tensor:
        return total_mass

    def _on_sphere(self, x: Tensor, delta: Tensor) -> Tensor:
        return self._inner.project(x + delta, x)

    def _all_mass(self) -> float:
        return self.ball.eps

    def _length(self, mass: Tensor, n_channels: int) -> Tensor:
        """As published each channel gets what is all channels' share; the projection takes back what is too much."""
        return mass * n_channels


WINDOWS: dict[str, type[Windows]] = {"Linf": StripesAndSquares, "L2": Bumps, "L1": BumpsInL1}  # by norm


def draws_of_query(keys_S: Tensor, query_S: Tensor, n_channels: int) -> Tensor:
    """(S, 5 + C) int64, uniform over all 64 bits; the columns are `ROW` ... `SIGNS`."""
    n_draws = SIGNS + n_channels
    return hashed(keys_S, query_S * n_draws, n_draws)
