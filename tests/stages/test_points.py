"""Workers read the stored adversarial examples, and find the hardest one of each image."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mixednuts_dist.mixing.margins import log_one_minus_signed_margin
from mixednuts_dist.stages.points import StoredPoints, hardest_points, read_points
from mixednuts_dist.storage.partitions import Partition
from tests.helpers.small_nets import images, small_net

SHAPE = (3, 16, 16)
N = 24
NETWORK = small_net(10, SHAPE, seed=0, sharpness=3)


@pytest.fixture(scope="module")
def clean() -> tuple[Tensor, Tensor]:
    x = (images(N, SHAPE) * 255).round() / 255
    return x, NETWORK(x).argmax(dim=1)


class Worker:
    """A worker of one partition with given columns that counts the model's images."""

    def __init__(self, x: Tensor, y: Tensor, columns: dict[str, Tensor]) -> None:
        self._images, self._columns, self.n_passed = (x, y), columns, 0

    def images(self, _: Partition) -> tuple[Tensor, Tensor]:
        return self._images

    def stored(self, _partition: Partition, _stage: str, _content_hash: str, column: str) -> Tensor:
        return self._columns[column]

    def logits(self, model: Any, x: Tensor) -> Tensor:
        self.n_passed += len(x)
        logits: Tensor = model(x)
        return logits


def test_read_points_finds_the_hardest(clean) -> None:
    x, y = clean
    noise = [(x + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(i))).clamp(0, 1) for i in range(3)]
    some = torch.arange(N) % 4 == 1
    points = [noise[0], *(torch.where(some[:, None, None, None], each, x) for each in noise[1:])]
    rounds = {f"x_adv_{i}": points[i + 1] for i in range(2)}
    worker: Any = Worker(x, y, {"x_adv": points[0], **rounds})
    sources = [StoredPoints("attack", "f0"), StoredPoints("search/round-1", "f1", ("x_adv_0", "x_adv_1"))]
    found = read_points(worker, SimpleNamespace(), sources)
    assert all(torch.equal(one, other) for one, other in zip(found, points, strict=True))
    gaps = torch.stack([log_one_minus_signed_margin(NETWORK(each), y) for each in points])
    expected = torch.stack(points)[gaps.argmax(dim=0), torch.arange(N)]
    assert len(set(gaps.argmax(dim=0).tolist())) == 3
    assert torch.equal(hardest_points(worker, NETWORK, x, y, found), expected)
    assert worker.n_passed == N + N + 2 * int(some.sum()), (
        "the attack's points, the clean images, and what rounds tried"
    )
