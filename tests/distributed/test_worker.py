"""The worker without a cluster: a plain object under a debugger."""

from dataclasses import replace
from pathlib import Path
from typing import Never

import numpy as np
import pytest
import torch

from mixednuts_dist.acceleration.batch_shape import ON_CPU
from mixednuts_dist.attacks.adaptive import autoattack
from mixednuts_dist.attacks.scheduler import Scheduler
from mixednuts_dist.config.uris import DatasetSource
from mixednuts_dist.distributed.workbench import device_settings
from mixednuts_dist.distributed.worker import AttackWorker
from mixednuts_dist.errors import BaseClassifierError, DatasetError
from mixednuts_dist.images.datasets import open_dataset
from mixednuts_dist.mixing.margins import log_one_minus_signed_margin
from mixednuts_dist.mixing.transforms import layer_norm_logits
from mixednuts_dist.storage.partitions import Partition
from mixednuts_dist.storage.records import PartitionSummary
from mixednuts_dist.storage.store import Store
from mixednuts_dist.storage.tables import finished_rows, read_attack_records
from tests.helpers.worker_specs import attack_task, spec_of

TASK = attack_task(2, 1)


@pytest.fixture
def worker(tmp_path: Path) -> AttackWorker:
    made = AttackWorker(spec_of(tmp_path))
    made.ready()
    return made


def test_worker_writes_consistent_rows(worker: AttackWorker, tmp_path: Path) -> None:
    partition = Partition(3, 30, 42)
    task = attack_task(10, 2)
    summary = worker.process(partition, task)
    records = read_attack_records(Store(str(tmp_path)), [partition], "f0")
    x, y = worker.dataset.read(30, 42)
    assert torch.equal(records.labels_N, y)
    assert torch.allclose(records.rob_clean_NK, worker.bench.rob(x), atol=1e-5)
    normed = layer_norm_logits(records.rob_attacked_NK)
    assert torch.allclose(log_one_minus_signed_margin(normed, y), records.log_one_minus_margin_N, atol=1e-5)
    assert torch.equal(records.rob_broken_N, records.rob_attacked_NK.argmax(dim=1) != y)
    assert torch.equal(records.std_broken_N, records.std_attacked_NK.argmax(dim=1) != y)
    assert summary.robust == int((~records.rob_broken_N).sum())
    assert summary.clean_correct == int((records.rob_clean_NK.argmax(dim=1) == y).sum())
    assert summary.n_images == 12
    assert int(records.std_broken_N.sum()) >= 10


def test_first_worker_measures_for_its_type_of_device(worker: AttackWorker, tmp_path: Path) -> None:
    process(worker)
    file = tmp_path / "acceleration" / "cpu.json"
    assert not file.exists(), "nothing is measured if nothing is auto"
    run, auto = Store(str(tmp_path)), replace(worker.spec, batch_size="auto", precision="auto")
    made = AttackWorker(auto)
    made.ready()
    assert process(made).rows == ON_CPU
    measured = device_settings(run, "cpu", interrupt)  # which is not called
    file.unlink()
    faster = replace(measured, rows=24, precision={"std": "bf16", "rob": "fp32"})
    used = device_settings(run, "cpu", lambda: device_settings(run, "cpu", lambda: faster) and measured)
    assert used == faster, "the settings that were stored first count"
    later = AttackWorker(auto)
    later.ready()
    summary = process(later)
    assert (summary.rows, summary.precision) == (24, "std bf16, rob fp32")
    x, _ = later.dataset.read(0, 12)
    assert later.bench.copies.of_network(later.bench.std, x).precision == "bf16"
    file.write_bytes(file.read_bytes().replace(b"24", b"25"))
    assert device_settings(run, "cpu", lambda: measured) == measured, "a damaged file is replaced"


def process(worker: AttackWorker) -> PartitionSummary:
    """Compute a partition that is not written yet."""
    return worker.process(Partition(0, 0, 4), replace(TASK, content_hash=f"f{id(worker)}"))


def test_interrupted_attack_of_a_worker_is_not_a_result(worker: AttackWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook, Ctrl-C returns what is verified; a worker would store it as complete rows."""
    (x, y), threat = worker.dataset.read(0, 4), worker.spec.threat
    monkeypatch.setattr(Scheduler, "step", interrupt)
    assert not autoattack(worker.bench.rob, x, y, threat=threat, attacks=["apgd-ce"]).decided.all()
    with worker.bench.at(Partition(0, 0, 4), "attack/f0"), pytest.raises(KeyboardInterrupt):
        autoattack(worker.bench.rob, x, y, threat=threat, attacks=["apgd-ce"])


def interrupt(*_: Scheduler) -> Never:
    raise KeyboardInterrupt


def test_other_images_or_weights_than_the_driver_s_are_refused(worker: AttackWorker, tmp_path: Path) -> None:
    dataset = open_dataset("digits")
    images, labels = dataset.read(0, 899)
    np.savez(tmp_path / "shifted.npz", images=images.roll(1, 0).numpy(), labels=labels.roll(1, 0).numpy())
    other = AttackWorker(replace(worker.spec, data=DatasetSource(f"npz:{tmp_path / 'shifted.npz'}")))
    with pytest.raises(DatasetError, match="holds 899 images, and their labels are not those that the driver saw"):
        other.ready()
    other = AttackWorker(replace(worker.spec, checksums={**worker.spec.checksums, "rob": "0" * 64}))
    with pytest.raises(BaseClassifierError, match="this machine holds other weights"):
        other.ready()


def test_worker_reports_existing_partitions(
    worker: AttackWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = Partition(0, 0, 4)
    path = tmp_path / "attack" / "f0" / partition.file_name
    first = worker.process(partition, TASK)
    content = path.read_bytes()
    assert worker.process(partition, TASK) == first
    looks = iter([None])  # it looked a moment too early
    monkeypatch.setattr(
        "mixednuts_dist.distributed.worker.finished_rows", lambda *where: next(looks, finished_rows(*where))
    )
    worker.process(partition, TASK)
    assert path.read_bytes() == content
    assert worker.store.names("attack/f0") == [partition.file_name]
