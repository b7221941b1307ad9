"""What an attack sees of a classifier: logits to climb on and logits to be judged by.

For one classifier both are its own. Against the mixed classifier they may differ (paper, appendix B.2): the climb goes
on the differentiable surrogate, and only the real mixture decides whether an image is broken. With an `Arithmetic` the
climb goes on fast copies of the networks, what it reports of the judge is a belief, and the judge stays in float32.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..acceleration.arithmetic import Arithmetic, ModelCopy, tf32_allowed
from ..acceleration.batch_shape import FEWEST_ROWS, padded
from ..errors import InvalidInputError
from ..mixing.classifier import MixedClassifier

AttackMode = str  # "transfer" or "bypass"
ATTACK_MODES = ("transfer", "bypass")


@dataclass(frozen=True)
class Victim:
    """A classifier under attack; every callable takes images (B, C, H, W) in [0, 1] and returns logits (B, K)."""

    judge: Callable[[Tensor], Tensor]  # the classifier itself; called without gradients
    climb_and_judge: Callable[[Tensor], tuple[Tensor, Tensor]]  # differentiable logits, and the classifier's own
    exact: bool = True  # False: the second of them only approximates the judge, who has to confirm
    finer: "Victim | None" = None  # for gradients below float32: what the last steps are climbed on
    tf32: bool = False
    fixed_shapes: bool = False  # few batch sizes only: each new one would be compiled

    @classmethod
    def of(
        cls, model: Callable[[Tensor], Tensor], arithmetic: Arithmetic | None = None, x_BCHW: Tensor | None = None
    ) -> "Victim":
        """A single differentiable classifier; an `arithmetic` tries its copies on a few of the images `x_BCHW`."""

        def exactly(x_BCHW: Tensor) -> tuple[Tensor, Tensor]:
            logits_BK = model(x_BCHW)
            return logits_BK, logits_BK.detach()

        victim = cls(model, exactly)
        if arithmetic is None:
            return victim
        copied = arithmetic.copy_of(model, _required(x_BCHW))
        return victim._climbed_on(cls.of, copied, arithmetic.compile)

    @classmethod
    def of_mixed(
        cls,
        mixed: MixedClassifier,
        mode: AttackMode,
        arithmetic: Arithmetic | None = None,
        x_BCHW: Tensor | None = None,
    ) -> "Victim":
        """The mixed classifier: "transfer" climbs on f_aux, "bypass" on f_mix's value with f_aux's gradient."""
        if mode not in ATTACK_MODES:
            raise InvalidInputError(f"mode={mode!r} is not an attack mode; valid modes: {', '.join(ATTACK_MODES)}")
        if mode == "transfer":
            victim = cls(mixed, mixed.forward_with_surrogate)
        else:
            victim = cls(mixed, Victim.of(mixed.as_bypass()).climb_and_judge)
        if arithmetic is None:
            return victim
        copied = arithmetic.copy_of(mixed, _required(x_BCHW))
        return victim._climbed_on(lambda model: cls.of_mixed(model, mode), copied, arithmetic.compile)

    def _climbed_on(self, of: Callable[[Any], "Victim"], copied: ModelCopy, compiled: bool) -> "Victim":
        finer = replace(self, climb_and_judge=of(copied.finer).climb_and_judge, exact=copied.finer_exact)
        return replace(
            self,
            climb_and_judge=of(copied.model).climb_and_judge,
            exact=copied.exact,
            finer=finer if copied.coarse else None,
            tf32=copied.tf32,
            fixed_shapes=compiled,
        )


def _required(x_BCHW: Tensor | None) -> Tensor:
    if x_BCHW is None:
        raise InvalidInputError("an arithmetic needs a few images to try its copies of the networks on: give x_BCHW")
    return x_BCHW


@torch.no_grad()
def judged_logits(victim: Victim, x_BCHW: Tensor, batch_size: int) -> Tensor:
    """The classifier's own logits in float32, at most `batch_size` images at a time, fewer where memory ends; (B, K).

    Raises:
        torch.OutOfMemoryError: where not even one image fits.
    """
    smallest = FEWEST_ROWS
    while True:
        try:
            with tf32_allowed(False):
                parts = [victim.judge(padded(x, smallest))[: len(x)].float() for x in torch.split(x_BCHW, batch_size)]
            return torch.cat(parts)
        except torch.OutOfMemoryError:
            if max(batch_size, smallest) == 1:
                raise
        batch_size = max(1, batch_size // 2)
        smallest = min(smallest, batch_size)
        release_memory()


def release_memory() -> None:
    """Give the accelerator's cached blocks back, after it ran out of memory."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
