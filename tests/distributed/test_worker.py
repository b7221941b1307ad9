"""The worker without a cluster: a plain object under a debugger."""

import json
import os
import select
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event, Timer

import numpy as np
import pytest
import torch

from mixednuts_dist.acceleration.batch_shape import ON_CPU
from mixednuts_dist.attacks.budget import AttackBudget
from mixednuts_dist.distributed import workbench
from mixednuts_dist.distributed.ray_executor import end_with_parent
from mixednuts_dist.distributed.workbench import Workbench
from mixednuts_dist.distributed.worker import AttackWorker
from mixednuts_dist.errors import DatasetError, StoreError
from mixednuts_dist.images.datasets import open_dataset
from mixednuts_dist.mixing.margins import log_one_minus_signed_margin
from mixednuts_dist.mixing.transforms import layer_norm_logits
from mixednuts_dist.stages.attack import AttackTask
from mixednuts_dist.storage.manifest import verify
from mixednuts_dist.storage.partitions import Partition
from mixednuts_dist.storage.store import Store
from mixednuts_dist.storage.tables import finished_receipt, read_attack_records, read_footer
from tests.helpers.worker_specs import spec_of

TASK = AttackTask(stage="attack", fingerprint="f0", budget=AttackBudget(n_iter=2, n_target_classes=1))


@pytest.fixture
def worker(tmp_path: Path) -> AttackWorker:
    made = AttackWorker(spec_of(tmp_path))
    made.ready()
    return made


def test_a_partition_becomes_a_file_whose_rows_agree_with_each_other(worker: AttackWorker, tmp_path: Path) -> None:
    partition = Partition(3, 30, 42)
    task = AttackTask(stage="attack", fingerprint="f0", budget=AttackBudget(n_iter=10, n_target_classes=2))
    decided = list[float]()
    worker.bench.on_decided = decided.append
    receipt = worker.process(partition, task)[partition]
    assert decided == sorted(decided), "what std's engine has ended still counts while rob's goes on"
    assert decided[-1] == 12
    records = read_attack_records(Store(str(tmp_path)), [partition], "f0")
    x, y = worker.dataset.read(30, 42)
    assert torch.equal(records.labels_N, y)
    assert torch.allclose(records.rob_clean_NK, worker.bench.rob(x), atol=1e-5)
    normed = layer_norm_logits(records.rob_attacked_NK)
    assert torch.allclose(log_one_minus_signed_margin(normed, y), records.log_one_minus_margin_N, atol=1e-5)
    assert torch.equal(records.rob_broken_N, records.rob_attacked_NK.argmax(dim=1) != y)
    assert torch.equal(records.std_broken_N, records.std_attacked_NK.argmax(dim=1) != y)
    assert receipt.robust == int((~records.rob_broken_N).sum())
    assert receipt.clean_correct == int((records.rob_clean_NK.argmax(dim=1) == y).sum())
    assert receipt.n_images == 12
    assert int(records.std_broken_N.sum()) >= 10


def test_one_worker_decides_rows_and_precision_for_all_on_such_a_device(worker: AttackWorker, tmp_path: Path) -> None:
    x, _ = worker.dataset.read(0, 12)
    spec = replace(worker.spec, batch_size="auto", precision="auto")
    first = Workbench(spec, worker.bench.networks, worker.store, worker.dataset, worker.device)
    assert first.shape(x).rows == ON_CPU
    decided = json.loads((tmp_path / "acceleration" / "cpu.json").read_text())
    assert first.precisions(x) == ", ".join(f"{role} {value}" for role, value in decided["precision"].items())
    other = {"rows": 24, "precision": {"std": "bf16", "rob": "fp32"}}
    (tmp_path / "acceleration" / "cpu.json").write_text(json.dumps(other))
    second = Workbench(spec, worker.bench.networks, worker.store, worker.dataset, worker.device)
    assert second.shape(x).rows == 24
    assert second.precisions(x) == "std bf16, rob fp32"
    assert second.arithmetic.network_copy(second.std, x).precision == "bf16"
    (tmp_path / "acceleration" / "cpu.json").write_text(json.dumps({**decided, "rows": 65}))  # a bit is flipped
    (bad,) = verify(Store(str(tmp_path)))[0]
    assert (bad.path, bad.reason) == ("acceleration/cpu.json", "its content has changed")
    third = Workbench(spec, worker.bench.networks, worker.store, worker.dataset, worker.device)
    assert third.shape(x).rows == ON_CPU
    assert verify(Store(str(tmp_path)))[0] == []


def test_a_worker_ends_with_the_process_that_started_it() -> None:
    """A child of this process starts one that would sleep for an hour, and ends."""
    told, telling = os.pipe()
    child = os.fork()
    if child == 0:
        if os.fork() == 0:
            end_with_parent()
            os.write(telling, b"at work")
            time.sleep(3600)
        os.close(telling)
        os.read(told, 7)
        os._exit(0)
    os.close(telling)
    os.waitpid(child, 0)
    ready, _, _ = select.select([told], [], [], 60)
    assert ready and os.read(told, 1) == b""  # nobody holds the other end any more
    os.close(told)


def test_other_images_than_the_driver_saw_are_refused(worker: AttackWorker, tmp_path: Path) -> None:
    dataset = open_dataset("digits")
    images, labels = dataset.read(0, 899)
    np.savez(tmp_path / "shifted.npz", images=images.roll(1, 0).numpy(), labels=labels.roll(1, 0).numpy())
    other = AttackWorker(replace(worker.spec, data_uri=f"npz:{tmp_path / 'shifted.npz'}"))
    with pytest.raises(DatasetError, match="holds 899 images, and their labels are not those that the driver saw"):
        other.ready()


def test_what_another_worker_has_written_is_reported_and_not_computed_again(
    worker: AttackWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = Partition(0, 0, 4)
    path = tmp_path / "attack" / partition.file_name
    first = worker.process(partition, TASK)
    content = path.read_bytes()
    assert worker.process(partition, TASK) == first
    looks = iter([None])  # it looked a moment too early
    monkeypatch.setattr(
        "mixednuts_dist.distributed.worker.finished_receipt", lambda *where: next(looks, finished_receipt(*where))
    )
    worker.process(partition, TASK)
    assert path.read_bytes() == content
    assert worker.store.names("attack") == [partition.file_name]


def test_attacks_go_on_while_the_storage_does_not_answer(worker: AttackWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [Partition(i, 4 * i, 4 * i + 4) for i in range(4)]
    answers, create = Event(), worker.store.create
    monkeypatch.setattr("mixednuts_dist.distributed.worker._WRITE_SECONDS", 0.1)
    monkeypatch.setattr(worker.store, "create", lambda *file: answers.wait() and create(*file))
    assert worker.process(parts[0], TASK) == {}
    assert worker.process(parts[1], TASK) == {}
    Timer(1.0, answers.set).start()
    assert parts[0] in worker.process(parts[2], TASK)  # at most two wait: this one returns when the first is written
    monkeypatch.setattr("mixednuts_dist.distributed.worker._WRITE_SECONDS", None)
    assert parts[3] in worker.process(parts[3], TASK)
    assert worker.flush() == {}
    records = read_attack_records(worker.store, parts, "f0")
    assert records.sample_ids_N.tolist() == list(range(16))


def test_a_storage_that_stays_away_is_an_error_of_the_next_call(
    worker: AttackWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = Partition(0, 0, 4)
    gone = Event()

    def create(*_: object) -> bool:
        gone.wait()
        raise StoreError("nobody answers")

    monkeypatch.setattr("mixednuts_dist.distributed.worker._WRITE_SECONDS", 0.1)
    monkeypatch.setattr(worker.store, "create", create)
    assert worker.process(partition, TASK) == {}
    gone.set()
    with pytest.raises(StoreError, match="nobody answers"):
        worker.flush()


def test_a_damaged_file_is_replaced(worker: AttackWorker, tmp_path: Path) -> None:
    partition = Partition(0, 0, 4)
    path = tmp_path / "attack" / partition.file_name
    path.parent.mkdir()
    path.write_bytes(b"PAR1 and then nothing")
    receipt = worker.process(partition, TASK)[partition]
    footer = read_footer(Store(str(tmp_path)), f"attack/{partition.file_name}")
    assert footer is not None
    assert footer.receipt == receipt


def test_workers_that_start_together_measure_once_and_a_lost_one_is_not_waited_for(
    worker: AttackWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, _ = worker.dataset.read(0, 12)
    spec = replace(worker.spec, batch_size="auto", precision="fp32")
    measured: list[int] = []

    def started(number: int) -> Workbench:
        made = Workbench(spec, worker.bench.networks, worker.store, worker.dataset, worker.device)

        def measure(_: torch.Tensor) -> dict[str, object]:
            measured.append(number)
            time.sleep(0.2)
            return {"rows": 8 + number, "precision": {"std": "fp32", "rob": "fp32"}}

        monkeypatch.setattr(made, "_measured", measure)
        return made

    with ThreadPoolExecutor() as pool:
        rows = set(pool.map(lambda number: started(number).shape(x).rows, range(6)))
    assert rows == {8 + measured[0]}
    assert len(measured) == 1
    assert [path.name for path in (tmp_path / "acceleration").iterdir()] == ["cpu.json"]
    (tmp_path / "acceleration" / "cpu.json").rename(tmp_path / "acceleration" / "cpu.json.begun")
    monkeypatch.setattr(workbench, "_MEASURED_SECONDS", 0.1)
    assert started(7).shape(x).rows == 15
