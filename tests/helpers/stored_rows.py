"""Small synthetic rows of a partition, and their summary."""

import torch
from torch import Tensor

from mixednuts_dist.storage.partitions import Partition
from mixednuts_dist.storage.records import PartitionSummary


def summary(part: Partition) -> PartitionSummary:
    return PartitionSummary("attack", part.index, part.start, part.stop, 1, 1, 0.5, 10, 9, "node")


def columns(part: Partition) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(part.index)
    n = len(part)
    return {
        "sample_id": torch.arange(part.start, part.stop),
        "logits": torch.randn(n, 10, generator=generator),
        "margin": torch.randn(n, dtype=torch.float64, generator=generator),
        "broken": torch.rand(n, generator=generator) > 0.5,
        "x_adv": torch.rand(n, 1, 4, 5, generator=generator),
    }


def quarantined(path: str, n: int = 1) -> str:
    """Return the path of the n-th quarantined copy of `path`."""
    folder, _, name = path.rpartition("/")
    return f"{folder}/_{name}.bad-{n}"
