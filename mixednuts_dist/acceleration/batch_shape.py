"""Logits that do not depend on how few images share a batch.

Linear algebra takes other paths, which round differently, for a batch of one to three images than for more; who is left
alone in a batch depends on how the images were shared out, and so would the last bits of every result.

Shapes: B images of C x H x W, K classes.
"""

import torch
from torch import Tensor, nn

FEWEST_ROWS = 4  # from here on the CPU's kernels gave every image the same bits, alone or in company


def padded(x_BCHW: Tensor, size: int) -> Tensor:
    """`x` with its last image repeated until there are `size`; no image stays none."""
    missing = size - len(x_BCHW) if len(x_BCHW) else 0
    return torch.cat([x_BCHW, x_BCHW[-1:].expand(missing, *x_BCHW.shape[1:])]) if missing > 0 else x_BCHW


class SteadyRows(nn.Module):
    """`model` on at least `FEWEST_ROWS` images: a smaller batch is filled up with its last image."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Logits (B, K)."""
        logits_BK: Tensor = self.model(padded(x_BCHW, FEWEST_ROWS))
        return logits_BK[: len(x_BCHW)]
