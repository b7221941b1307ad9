"""Square (Andriushchenko et al. 2020): random search with squares, through the classifier's answers alone.

The first point is random stripes (Linf) or a tiling of bumps (L2) on the ball's border. Each further query changes a
random square window of the best point so far and keeps the change where it lowers the loss; the windows shrink by the
published schedule.

The random numbers of an image are a hash of (seed, sample id, query, draw): nothing else decides its search, neither
its batch nor who shares it, and no generator has to be kept or advanced. Unlike the published code, which draws one
window for the whole batch, every image has windows of its own.

Shapes: S slots, R >= S rows of a pass, images of C x H x W, K classes.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..register import ATTACKS
from ..threat import Norm, ThreatModel
from .attack import (
    Arrivals,
    Phase,
    Seen,
    Setting,
    SlotArrays,
    SpeculativeRows,
    SpeculativeSearch,
    again_in_float32,
    copy_rows,
)
from .budget import AttackBudget

P_INIT = 0.8  # share of the image that the first windows cover, AutoAttack's setting
# From which query on the share is P_INIT divided by what; AutoAttack does not rescale it to the budget.
_SHRINKING = ((10, 2), (50, 4), (200, 8), (500, 16), (1000, 32), (2000, 64), (4000, 128), (6000, 256), (8000, 512))

# The draws of a query, in order: the corners of two windows (Linf uses one), a coin, and a sign for each channel.
ROW, COLUMN, ROW_2, COLUMN_2, COIN, SIGNS = range(6)
_START = -(1 << 40)  # the first counter of the start's draws: below 0, where no query has any

_TINY = 1e-12  # guards divisions by a norm, as published


class SquareState(SlotArrays):
    """All that Square remembers of each slot; no pixels where the norm needs none."""

    def __init__(self, like_SCHW: Tensor, norm: Norm) -> None:
        none, images = like_SCHW.new_zeros(len(like_SCHW), 0), torch.zeros_like(like_SCHW)
        self.x = none if norm == "Linf" else images  # clean image
        # Linf, (S, 2, C, H, W): the low and the high side of each pixel's interval. Every pixel of the start lies on
        # one of them, and published, a window adds 2 eps or subtracts it and cuts at the interval: it puts its pixels
        # on one side.
        self.sides = torch.stack([images, images], dim=1) if norm == "Linf" else none.clone()
        self.x_best = torch.zeros_like(like_SCHW)
        self.loss = torch.zeros(len(like_SCHW), dtype=torch.float64, device=like_SCHW.device)  # at the best point
        self.query = torch.zeros(len(like_SCHW), dtype=torch.long, device=like_SCHW.device)  # that is due; 0: the start
        self.key = torch.zeros_like(self.query)


@ATTACKS("square", describes="random search with squares, no gradients", options=("n_queries",), order=4)
class Square(SpeculativeSearch):
    """Square with AutoAttack's settings: one restart, the margin of the logits as its loss."""

    name = "square"
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
        self._windows = Windows(like_SCHW, self.setting.threat, self.setting.budget.n_queries)
        return SquareState(like_SCHW, self.setting.threat.norm)

    def begin(self, state: SquareState, slots: Tensor, arrivals: Arrivals) -> None:
        """At the random start."""
        ids = arrivals.sample_ids
        keys = torch.tensor([image_key(self.setting.seed, self.name, sample_id) for sample_id in ids]).to(slots.device)
        eps = self.setting.threat.eps
        if self.setting.threat.norm == "Linf":
            sides = [(arrivals.x - eps).clamp(min=0), (arrivals.x + eps).clamp(max=1)]
            state.sides[slots] = torch.stack(sides, dim=1)
        else:
            state.x[slots] = arrivals.x
        state.key[slots], state.query[slots] = keys, 0
        state.loss[slots] = torch.inf
        state.x_best[slots] = first_point(arrivals.x, keys, self.setting.threat)

    def propose(self, state: SquareState) -> Tensor:
        """(S, C, H, W): the start, or the best point with a window changed."""
        n_slots = len(state.query)
        return self.propose_speculative(state, SpeculativeRows.of(n_slots, n_slots, state.query.device))

    def propose_speculative(self, state: SquareState, layout: SpeculativeRows) -> Tensor:
        """(R, C, H, W): the windows of a slot's next queries."""
        assert self._windows is not None  # `state` makes them
        return self._windows.change(state, layout)

    def last(self, state: SquareState, seen: Seen, layout: SpeculativeRows) -> Tensor:
        """Queries that lower the loss (the published "or misclassified" follows: then it is negative), and the last."""
        last_query = state.query[layout.slot_R] + layout.depth_R >= self.setting.budget.n_queries
        return (self._losses(seen) < state.loss[layout.slot_R]) | last_query

    def absorb(self, state: SquareState, x_new: Tensor, seen: Seen) -> Tensor:
        """Keep what lowers the loss."""
        return self.absorb_speculative(state, x_new, seen, torch.ones_like(state.query))

    def absorb_speculative(self, state: SquareState, x_new: Tensor, seen: Seen, n_counted: Tensor) -> Tensor:
        """Keep the last of the queries that count where it lowers the loss."""
        n_slots = len(n_counted)
        row_S = (n_counted - 1).clamp(min=0) * n_slots + torch.arange(n_slots, device=n_counted.device)
        loss = self._losses(seen)[row_S]
        better = (loss < state.loss) & (n_counted > 0)
        copy_rows(state.x_best, x_new, better, row_S)
        state.loss = torch.where(better, loss, state.loss)
        state.query += n_counted
        return state.query > self.setting.budget.n_queries

    def _losses(self, seen: Seen) -> Tensor:
        return -seen.log_gap if self.loss == "probabilities" else logit_margin(seen.logits, seen.labels)


def logit_margin(logits_SK: Tensor, labels_S: Tensor) -> Tensor:
    """z_y - max_{j != y} z_j, (S,) float64: the published loss."""
    others_SK = logits_SK.scatter(1, labels_S[:, None], -torch.inf)
    return logits_SK.gather(1, labels_S[:, None]).squeeze(1).double() - others_SK.amax(dim=1).double()


@ATTACKS(
    "square-margin", describes="Square on log(1 - margin), as MMAA does on a black box", options=("n_queries",), order=7
)
class SquareMargin(Square):
    """The black-box MMAA (paper, appendix D): a window is kept where it lowers the signed margin itself."""

    name = "square-margin"
    loss = "probabilities"


class Windows:
    """The changes that queries try; what depends on the image's shape, the norm and the budget is computed once."""

    def __init__(self, like_BCHW: Tensor, threat: ThreatModel, n_queries: int) -> None:
        height, width = like_BCHW.shape[2:]
        sizes = [window_size(query, height, width, threat.norm) for query in range(1, n_queries + 1)]
        self.threat = threat
        self.size_Q = torch.tensor([0, *sizes], device=like_BCHW.device)  # by query; the start changes nothing
        self.rows_H1 = torch.arange(height, device=like_BCHW.device)[:, None]
        self.columns_1W = torch.arange(width, device=like_BCHW.device)[None]
        if threat.norm == "L2":
            kinds = sorted(set(sizes))
            self.kind_Q = torch.tensor([0, *map(kinds.index, sizes)], device=like_BCHW.device)
            self.bumps_NMM = torch.zeros(len(kinds), kinds[-1], kinds[-1], device=like_BCHW.device)
            for bump_MM, size in zip(self.bumps_NMM, kinds, strict=True):
                bump_MM[:size, :size] = bump(size)

    def change(self, state: SquareState, layout: SpeculativeRows) -> Tensor:
        """(R, C, H, W): the best points with the windows of their queries changed; the start as it is."""
        slot = layout.slot_R
        x_best = state.x_best.index_select(0, slot)
        query = (state.query[slot] + layout.depth_R).clamp(max=len(self.size_Q) - 1)  # of a slot that has ended
        draws = draws_of_query(state.key[slot], query, x_best.shape[1])
        size = self.size_Q[query]
        height, width = x_best.shape[2] - size, x_best.shape[3] - size
        top, left = below(draws[:, ROW], height), below(draws[:, COLUMN], width)
        high = draws[:, SIGNS:] >= 0
        if self.threat.norm == "Linf" and x_best.device.type == "cpu":
            put_on_sides(x_best, state.sides, size, top, left, 2 * slot[:, None] + high)
            return x_best
        window, signs = self._mask(top, left, size), high[:, :, None, None]
        if self.threat.norm == "Linf":
            sides = state.sides.index_select(0, slot)
            return torch.where(window, torch.where(signs, sides[:, 1], sides[:, 0]), x_best)
        x = state.x.index_select(0, slot)
        source = self._mask(below(draws[:, ROW_2], height), below(draws[:, COLUMN_2], width), size)
        bump_R1HW = self._bumps(top, left, query, draws[:, COIN] >= 0)
        delta = moved_mass(x_best - x, window, source, bump_R1HW * window, signs, self.threat.eps)
        on_sphere = (x + delta / (_norm(delta) + _TINY) * self.threat.eps).clamp(0.0, 1.0)
        return torch.where((query > 0).view(-1, 1, 1, 1), on_sphere, x_best)

    def _mask(self, top: Tensor, left: Tensor, size: Tensor) -> Tensor:
        """(S, 1, H, W) bool: the square of `size` whose corner is at (top, left)."""
        rows, columns = self.rows_H1 - top.view(-1, 1, 1, 1), self.columns_1W - left.view(-1, 1, 1, 1)
        size = size.view(-1, 1, 1, 1)
        return ((rows >= 0) & (rows < size)) & ((columns >= 0) & (columns < size))

    def _bumps(self, top: Tensor, left: Tensor, query: Tensor, turned: Tensor) -> Tensor:
        """(S, 1, H, W): each query's bump with its corner at (top, left), or turned; outside of the window anything."""
        rows, columns = self.rows_H1 - top.view(-1, 1, 1), self.columns_1W - left.view(-1, 1, 1)
        turned = turned.view(-1, 1, 1)
        last = self.bumps_NMM.shape[1] - 1
        first = torch.where(turned, columns, rows).clamp(0, last)
        second = torch.where(turned, rows, columns).clamp(0, last)
        return self.bumps_NMM[self.kind_Q[query].view(-1, 1, 1), first, second][:, None]


def put_on_sides(x_RCHW: Tensor, sides_S2CHW: Tensor, size: Tensor, top: Tensor, left: Tensor, side_RC: Tensor) -> None:
    """Write windows of one side, in place on a CPU: most are a few pixels wide, and only those are touched.

    `side_RC` counts the sides of all slots: 2 s is the low one of slot s, and 2 s + 1 the high one.
    """
    n_channels, n_rows, n_columns = x_RCHW.shape[1:]
    channel, corner = torch.arange(n_channels), (top * n_columns + left)[:, None]
    into_RC = (torch.arange(len(x_RCHW))[:, None] * n_channels + channel) * (n_rows * n_columns) + corner
    source_RC = (side_RC * n_channels + channel) * (n_rows * n_columns) + corner
    for each in set(size.tolist()):
        here = (size == each).nonzero().squeeze(1)
        inside = (torch.arange(each)[:, None] * n_columns + torch.arange(each)).view(-1)
        into, source = (of_all.index_select(0, here)[..., None] + inside for of_all in (into_RC, source_RC))
        x_RCHW.view(-1).scatter_(0, into.view(-1), sides_S2CHW.view(-1).gather(0, source.view(-1)))


def window_size(query: int, height: int, width: int, norm: Norm) -> int:
    """The side of the window of a query, counted from 1: it covers a share p of the image, which shrinks."""
    share = P_INIT / max((divisor for after, divisor in _SHRINKING if query - 1 > after), default=1)
    size = round(math.sqrt(share * height * width))
    if norm == "L2":  # bumps are odd and no smaller than 3
        size = max(size, 3) | 1
    return min(max(size, 1), height, width)


def moved_mass(delta: Tensor, window: Tensor, source: Tensor, bump: Tensor, signs: Tensor, eps: float) -> Tensor:
    """The L2 query: perturbation mass moves from the window `source` to `window`, where it takes the shape of a bump.

    In each channel the window becomes the sum of a bump of random sign and of what was there, scaled to length 1 each;
    it gets the squared norm of both windows together, plus its share of what eps^2 leaves unspent.
    """
    squared = delta.square()
    inside = delta * window
    raised = bump * torch.where(signs, 1.0, -1.0) + inside / (_TINY + (squared * window).sum((2, 3), True).sqrt())
    raised = raised / (_TINY + raised.square().sum((2, 3), True).sqrt())
    both = (squared * (window | source)).sum((2, 3), True)
    unspent = (eps**2 - squared.sum((1, 2, 3), True)).clamp(min=0) / delta.shape[1]
    return torch.where(window, raised * (unspent + both).sqrt(), delta.masked_fill(source, 0))


def first_point(x_BCHW: Tensor, keys_B: Tensor, threat: ThreatModel) -> Tensor:
    """The start: in Linf vertical stripes of x +- eps, in L2 a tiling of bumps scaled to the sphere."""
    n, n_channels, height, width = x_BCHW.shape
    if threat.norm == "Linf":
        draws = hashed(keys_B, _START, n_channels * width).view(n, n_channels, 1, width)
        return (x_BCHW + torch.where(draws >= 0, threat.eps, -threat.eps)).clamp(0.0, 1.0)
    # Published tiles have a fifth of the height and begin in the middle of the rest, which fits where five of them
    # fit into a square image. Here as many as fit into either side are centred: the same there, and it works anywhere.
    size = max(1, min(height, width) // 5)
    n_rows, n_columns = height // size, width // size
    top, left = (height - n_rows * size) // 2, (width - n_columns * size) // 2
    draws = hashed(keys_B, _START, n_rows * n_columns * (1 + n_channels)).view(n, n_rows, n_columns, 1 + n_channels)
    tile = bump(size).to(x_BCHW)
    turned = torch.where((draws[..., :1] >= 0)[..., None], tile.T, tile)  # (B, rows, columns, size, size)
    signs = torch.where(draws[..., 1:] >= 0, 1.0, -1.0).to(x_BCHW)
    tiles = torch.einsum("brcij,brck->bkricj", turned, signs).reshape(n, n_channels, n_rows * size, n_columns * size)
    delta = torch.zeros_like(x_BCHW)
    delta[:, :, top : top + n_rows * size, left : left + n_columns * size] = tiles
    return (x_BCHW + delta / (_norm(delta) + _TINY) * threat.eps).clamp(0.0, 1.0)


def bump(size: int) -> Tensor:
    """Two pyramids of opposite sign, one above the other, of norm 1 together; (size, size)."""
    upper = size // 2
    both = torch.cat([_pyramid(upper, size), -_pyramid(size - upper, size)])
    return both / both.square().sum().sqrt()


def _pyramid(height: int, width: int) -> Tensor:
    """Sum of rectangles around the centre, the k-th at distance k or less with weight 1 / (k + 1)^2, of norm 1."""
    steps = max(height, width) // 2 + 1
    weights = 1.0 / torch.arange(1, steps + 1, dtype=torch.float32).square()
    height_at = weights.flip(0).cumsum(0).flip(0)  # by distance: the rectangles that reach so far
    rows, columns = (torch.arange(height) - height // 2).abs(), (torch.arange(width) - width // 2).abs()
    pyramid = height_at[torch.maximum(rows[:, None], columns[None])]
    return pyramid / pyramid.square().sum().sqrt() if height else pyramid


def _norm(delta: Tensor) -> Tensor:
    return delta.square().sum((1, 2, 3), True).sqrt()


# Random numbers: SplitMix64 (Steele et al. 2014) as a hash of a key and a counter. Its constants, as signed 64 bits:
_GOLDEN, _MIX_1, _MIX_2 = (value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def image_key(*key: object) -> int:
    """64 bits, signed, that depend on `key` alone."""
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def draws_of_query(keys_S: Tensor, query_S: Tensor, n_channels: int) -> Tensor:
    """(S, 5 + C) int64, uniform over all 64 bits; the columns are `ROW` ... `SIGNS`."""
    n_draws = SIGNS + n_channels
    return hashed(keys_S, query_S * n_draws, n_draws)


def hashed(keys_B: Tensor, first: Tensor | int, n: int) -> Tensor:
    """The hashes of (key, counter) for the counters `first` ... `first + n - 1`; (B, n) int64, which wraps around."""
    counters = torch.arange(1, n + 1, device=keys_B.device) + (first[:, None] if isinstance(first, Tensor) else first)
    z = keys_B[:, None] + counters * _GOLDEN
    z = (z ^ _shifted(z, 30)) * _MIX_1
    z = (z ^ _shifted(z, 27)) * _MIX_2
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shifted right with zeros coming in; torch's own shift copies the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def below(draws: Tensor, limit: Tensor) -> Tensor:
    """Integers in [0, limit), 0 where the limit is 0: the upper 31 bits times the limit, divided by 2^31."""
    return (_shifted(draws, 33) * limit) >> 31
