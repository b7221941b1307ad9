"""What the engine remembers of each slot, and of each example across its slots.

Shapes: N examples, S slots, images of C x H x W.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .apgd import ApgdState
from .rows import Rows


@dataclass
class Tracks:
    """What is known of each example across all of its phases; all of it is claimed by the judge."""

    x_adv: Tensor  # where the smallest signed margin was seen so far
    log_one_minus_margin: Tensor  # float64, log(1 - margin) there: the larger, the smaller the margin
    broken: Tensor  # bool
    n_forward: int = 0
    n_backward: int = 0

    def margin(self) -> Tensor:
        """The smallest signed margin so far, float64."""
        return -torch.expm1(self.log_one_minus_margin)

    def offer(self, examples: Tensor, x: Tensor, log_gap: Tensor, wrong: Tensor) -> None:
        """Keep those images whose margin is smaller than the smallest so far."""
        smaller = is_smaller(log_gap, wrong, self.log_one_minus_margin[examples], self.broken[examples])
        self.x_adv[examples] = torch.where(smaller.view(-1, *[1] * (x.dim() - 1)), x, self.x_adv[examples])
        self.log_one_minus_margin[examples] = torch.where(smaller, log_gap, self.log_one_minus_margin[examples])
        self.broken[examples] |= smaller & wrong


def is_smaller(log_gap: Tensor, wrong: Tensor, log_gap_before: Tensor, wrong_before: Tensor) -> Tensor:
    """Whether a margin is below the one before; of two ties the one that fools is."""
    return (log_gap > log_gap_before) | ((log_gap == log_gap_before) & wrong & ~wrong_before)


@dataclass
class Slots(Rows):
    """Examples under attack, one a row; what the host has to know stays on the host."""

    example: Tensor  # on the host: which example sits here
    phase: Tensor  # on the host: where in the plan it is
    left: Tensor  # on the host: evaluations until the phase is over
    labels: Tensor
    targets: Tensor  # as `mixed_loss` takes them
    state: ApgdState
    x_found: Tensor  # where the smallest margin was seen
    gap_found: Tensor  # float64, log(1 - margin) there
    wrong_found: Tensor  # bool: it fools, as far as the climb can tell

    def __len__(self) -> int:
        return len(self.example)

    def watch(self, x: Tensor, log_gap: Tensor, wrong: Tensor, until_broken: bool) -> None:
        """Keep the arg-min margin over everything that was tried; `until_broken` lets the first success stand."""
        better = is_smaller(log_gap, wrong, self.gap_found, self.wrong_found)
        if until_broken:
            better &= ~self.wrong_found
        self.x_found = torch.where(better.view(-1, *[1] * (x.dim() - 1)), x, self.x_found)
        self.gap_found = torch.where(better, log_gap, self.gap_found)
        self.wrong_found = torch.where(better, wrong, self.wrong_found)
