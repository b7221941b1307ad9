"""Workers read the stored adversarial examples, and find the hardest one of each image."""

from typing import Any

import torch
from torch import Tensor

from mixednuts_dist.mixing.margins import log_one_minus_signed_margin
from mixednuts_dist.stages.warm_start import StoredExamples, hardest_examples
from mixednuts_dist.storage.partitions import Partition
from tests.helpers.small_nets import images, small_net

SHAPE = (3, 16, 16)
N = 24
NETWORK = small_net(10, SHAPE, seed=0, sharpness=3)


class Worker:
    """A worker of one partition with given columns."""

    def __init__(self, x: Tensor, y: Tensor, columns: dict[str, Tensor]) -> None:
        self._images, self._columns = (x, y), columns

    def images(self, _: Partition) -> tuple[Tensor, Tensor]:
        return self._images

    def stored(self, _partition: Partition, _stage: str, _content_hash: str, column: str) -> Tensor:
        return self._columns[column]

    def logits(self, model: Any, x: Tensor) -> Tensor:
        logits: Tensor = model(x)
        return logits


def test_hardest_examples_have_the_smallest_margin() -> None:
    x = (images(N, SHAPE) * 255).round() / 255
    y = NETWORK(x).argmax(dim=1)
    noise = [(x + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(i))).clamp(0, 1) for i in range(3)]
    some = torch.arange(N) % 4 == 1
    examples = [noise[0], *(torch.where(some[:, None, None, None], each, x) for each in noise[1:])]
    worker: Any = Worker(x, y, dict(zip(("x_adv", "x_adv_0", "x_adv_1"), examples, strict=True)))
    sources = [StoredExamples("attack", "f0"), StoredExamples("search/round-1", "f1", ("x_adv_0", "x_adv_1"))]
    found = [x_adv for source in sources for x_adv in source.read(worker, Partition(0, 0, N))]
    assert all(torch.equal(one, other) for one, other in zip(found, examples, strict=True))
    (beyond,) = StoredExamples("attack", "f0", n_images=N).read(worker, Partition(1, N, 2 * N))
    assert beyond is x
    gaps = torch.stack([log_one_minus_signed_margin(NETWORK(each), y) for each in examples])
    expected = torch.stack(examples)[gaps.argmax(dim=0), torch.arange(N)]
    assert len(set(gaps.argmax(dim=0).tolist())) == 3
    assert torch.equal(hardest_examples(worker, NETWORK, x, y, found), expected)
