"""Black-box MMAA (paper, appendix D): Square with the margin watched at every query; no gradient is asked for.

Shapes: B images of C x H x W, K classes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..acceleration.batch_shape import ON_CPU, BatchShape
from ..mixing.margins import log_one_minus_signed_margin
from ..threat import ThreatModel
from .gradient_model import AttackedModel
from .judge import Judge, check_images
from .minimum_margin import MinimumMarginResult
from .published_attacks import KeyedSquare, PassCount, Victim
from .tracks import is_smaller


def black_box_margin_attack(
    model: Callable[[Tensor], Tensor],
    x_BCHW: Tensor,
    y_B: Tensor,
    *,
    threat: ThreatModel,
    n_queries: int = 5000,
    seed: int = 0,
    stop_when_broken: bool = True,
    sample_ids: Sequence[int] | None = None,
    batch_size: int | BatchShape = ON_CPU,
) -> MinimumMarginResult:
    """Search each image's ball for the smallest signed margin of `model` through its answers alone.

    Arguments, result and errors are those of `minimum_margin_attack`; `n_queries` is Square's budget an image. A square
    is kept where it lowers the margin itself, as log(1 - margin), in place of the published difference of logits.
    """
    check_images(x_BCHW, y_B)
    count, ids = PassCount(), list(range(len(x_BCHW)) if sample_ids is None else sample_ids)
    shape = BatchShape.of(batch_size)
    victim = count.watched(Victim.of(AttackedModel.of(model)))
    judge = Judge(model, shape)
    clean = judge.verdicts(x_BCHW, y_B)
    device = x_BCHW.device
    tracks = MarginTracks(x_BCHW.clone(), clean.log_gap.to(device), clean.wrong.to(device))
    todo = (~clean.wrong if stop_when_broken else torch.ones_like(clean.wrong)).nonzero().squeeze(1).to(device)
    for part in torch.split(todo, shape.rows) if len(todo) else ():
        part_ids = [ids[example] for example in part.tolist()]
        square = MarginSquare(
            victim, threat=threat, n_queries=n_queries, seed=seed, sample_ids=part_ids, device=x_BCHW.device
        )
        square.watch(tracks, part, stop_when_broken=stop_when_broken)
        square.search(x_BCHW[part], y_B[part])
    verdicts = judge.verdicts(tracks.x_adv, y_B)
    return MinimumMarginResult(
        tracks.x_adv, verdicts.logits.to(device), verdicts.margin.to(device), verdicts.log_gap.to(device),
        verdicts.wrong.to(device), count.n_forward + 2 * len(y_B), 0, torch.ones_like(y_B, dtype=torch.bool),
    )  # fmt: skip


@dataclass
class MarginTracks:
    """The smallest margin of each image."""

    x_adv: Tensor
    log_one_minus_margin: Tensor
    broken: Tensor

    def offer(self, examples: Tensor, x: Tensor, log_gap: Tensor, wrong: Tensor) -> None:
        """Keep those images whose margin is smaller than the smallest so far."""
        smaller = is_smaller(log_gap, wrong, self.log_one_minus_margin[examples], self.broken[examples])
        self.x_adv[examples] = torch.where(smaller.view(-1, *[1] * (x.dim() - 1)), x, self.x_adv[examples])
        self.log_one_minus_margin[examples] = torch.where(smaller, log_gap, self.log_one_minus_margin[examples])
        self.broken[examples] |= smaller & wrong


class MarginSquare(KeyedSquare):
    """Square that minimises the signed margin and leaves the smallest one of each image, and where, in tracks."""

    def watch(self, tracks: MarginTracks, examples: Tensor, *, stop_when_broken: bool) -> None:
        """Write to `tracks`, whose rows `examples` are the images of the coming run, in order."""
        self.tracks, self.stop_when_broken = tracks, stop_when_broken
        self._examples = examples  # of the next query: the published loop asks about those not yet fooled, in order

    def margin_and_loss(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The published hook: what ends an image's search where it is not positive, and what is minimised."""
        logits = self._asked(x)
        fooled, loss = logits.argmax(dim=1) != y, -log_one_minus_signed_margin(logits, y)
        self.tracks.offer(self._examples, self.cut(x), -loss, fooled)
        ended = fooled if self.stop_when_broken else torch.zeros_like(fooled)
        self._examples = self._examples[~ended]
        return torch.where(ended, -1.0, 1.0).to(loss), loss
