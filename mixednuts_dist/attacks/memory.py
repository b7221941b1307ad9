"""How many images fit: found by trying on the device."""

import torch
from torch import Tensor

from ..acceleration.arithmetic import tf32_allowed
from ..acceleration.batch_shape import FEWEST_ROWS, padded
from .victim import Victim, release_memory

ON_CPU = 128  # where memory is not what limits the batch
MOST = 4096


def largest_batch(victim: Victim, x_BCHW: Tensor, *, most: int = MOST) -> int:
    """The largest batch, up to a quarter, that goes forward and backward where the images `x_BCHW` are.

    Doubles until memory ends, then tries three quarters of that. On a CPU it is a fixed number: memory is swapped there
    before it ends, and larger batches are no faster.

    Raises:
        torch.OutOfMemoryError: where not even one image fits.
    """
    if x_BCHW.device.type == "cpu":
        return min(ON_CPU, most)
    return tried_batch(victim, x_BCHW, most=most)


def tried_batch(victim: Victim, x_BCHW: Tensor, *, most: int = MOST) -> int:
    """`largest_batch` by trying, on any device."""
    size = FEWEST_ROWS
    while not _fits(victim, x_BCHW, size):
        if size == 1:
            raise torch.OutOfMemoryError(
                f"not even one image of shape {tuple(x_BCHW.shape[1:])} fits on {x_BCHW.device}"
            )
        size //= 2
    while 2 * size <= most and _fits(victim, x_BCHW, 2 * size):
        size *= 2
    between = size + size // 2
    return between if size < between <= most and _fits(victim, x_BCHW, between) else size


def _fits(victim: Victim, x_BCHW: Tensor, size: int) -> bool:
    with_state = size + size // 8  # the attack keeps a few images for each under attack
    try:
        x = padded(x_BCHW[:with_state], with_state).detach().requires_grad_()
        with tf32_allowed(victim.tf32), torch.enable_grad():
            climbed, _ = victim.climb_and_judge(x)
            torch.autograd.grad(climbed.sum(), x)
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        release_memory()
