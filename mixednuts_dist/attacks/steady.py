"""Logits that do not depend on how few images share a batch.

Linear algebra takes other paths, which round differently, for a batch of one to three images than for more; who is left
alone in a batch depends on how the images were shared out, and so would the last bits of every result.

Shapes: B images of C x H x W, K classes.
"""

import torch
from torch import Tensor, nn

FEWEST_ROWS = 4  # from here on the CPU's kernels gave every image the same bits, alone or in company


class SteadyRows(nn.Module):
    """`model` on at least `FEWEST_ROWS` images: a smaller batch is filled up with its last image."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Logits (B, K)."""
        missing = FEWEST_ROWS - len(x_BCHW)
        if missing <= 0 or not len(x_BCHW):
            logits_BK: Tensor = self.model(x_BCHW)
            return logits_BK
        filled = torch.cat([x_BCHW, x_BCHW[-1:].expand(missing, -1, -1, -1)])
        return self.model(filled)[: len(x_BCHW)]  # type: ignore[no-any-return]
