"""A worker on a simulated GPU writes the rows that it writes on a CPU."""

from pathlib import Path

import pytest
import torch

from mixednuts_dist.acceleration.batch_shape import FLOAT32_ROWS
from mixednuts_dist.distributed.worker import AttackWorker
from mixednuts_dist.storage.partitions import Partition
from mixednuts_dist.storage.records import AttackRecords, PartitionSummary
from mixednuts_dist.storage.store import Store
from mixednuts_dist.storage.tables import read_attack_records
from tests.helpers.simulated_card import SimulatedCard
from tests.helpers.worker_specs import attack_task, spec_of

PARTITION = Partition(0, 30, 54)


def attacked(folder: Path, n_gpus: float) -> tuple[PartitionSummary, AttackRecords]:
    worker = AttackWorker(spec_of(folder, batch_size=32, precision="fp32"), n_gpus)
    worker.ready()
    task = attack_task(4, 2)
    summary = worker.process(PARTITION, task)
    return summary, read_attack_records(Store(str(folder)), [PARTITION], "f0")


def test_partition_on_a_gpu_equals_the_cpu(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    _, expected = attacked(tmp_path / "here", 0.0)
    with SimulatedCard() as card:
        summary, found = attacked(tmp_path / "there", 0.5)
    assert torch.equal(found.rob_broken_N, expected.rob_broken_N)
    assert torch.equal(found.std_broken_N, expected.std_broken_N)
    assert torch.allclose(found.rob_attacked_NK, expected.rob_attacked_NK, atol=1e-4)
    assert (summary.device, summary.n_devices) == ("a simulated card", 0.5)
    assert (summary.rows, summary.float32_rows, summary.repeatable) == (32, FLOAT32_ROWS, True)
    assert card.fractions == [pytest.approx(0.5 - 1 / 141)]
    # The GPU makes noise from keys that arrive with the other numbers of a run.
    assert not [line for line in (*card.copies, *card.waits) if line.startswith("norms/")]
