"""Black-box MMAA (paper, appendix D): Square with the margin watched at every query; no gradient is asked for.

Shapes: B images of C x H x W, K classes.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..mixing.margins import log_one_minus_signed_margin
from ..threat import ThreatModel
from .engine import begin
from .minimum_margin import MinimumMarginResult, check_images, first_round, judged_result
from .published_attacks import KeyedSquare, PassCount
from .slots import Tracks
from .victim import Victim


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
    batch_size: int = 64,
) -> MinimumMarginResult:
    """Search each image's ball for the smallest signed margin of `model` through its answers alone.

    Arguments, result and errors are those of `minimum_margin_attack`; `n_queries` is Square's budget an image. A square
    is kept where it lowers the margin itself, as log(1 - margin), in place of the published difference of logits.
    """
    check_images(x_BCHW, y_B)
    count, ids = PassCount(), list(range(len(x_BCHW)) if sample_ids is None else sample_ids)
    victim = count.watched(Victim.of(model))
    tracks, _ = begin(victim, x_BCHW, y_B, batch_size)
    todo = first_round(tracks, stop_when_broken)
    for part in torch.split(todo, batch_size) if len(todo) else ():
        part_ids = [ids[example] for example in part.tolist()]
        square = MarginSquare(
            victim, threat=threat, n_queries=n_queries, seed=seed, sample_ids=part_ids, device=x_BCHW.device
        )
        square.watch(tracks, part, stop_when_broken=stop_when_broken)
        square.search(x_BCHW[part], y_B[part])
    result = judged_result(victim, tracks, y_B, batch_size)
    return replace(result, n_forward=count.n_forward)


class MarginSquare(KeyedSquare):
    """Square that minimises the signed margin and leaves the smallest one of each image, and where, in tracks."""

    def watch(self, tracks: Tracks, examples: Tensor, *, stop_when_broken: bool) -> None:
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
