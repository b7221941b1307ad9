"""The `local` executor replaces lost processes as Ray does; and an executor from a user's file."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from mixednuts_dist.config.run_config import load_config
from mixednuts_dist.distributed.executor import PoolSettings, WorkerLost, executing, make_executor
from mixednuts_dist.distributed.local import LocalExecutor
from mixednuts_dist.errors import PartitionFailed
from mixednuts_dist.stages import attack
from mixednuts_dist.stages.partitioned import worker_spec
from mixednuts_dist.stages.runs import open_run
from tests.helpers.runs import ATTACK, EVALUATE, Finished, MakeConfig, rows, tiny_file
from tests.helpers.touchy_classifiers import FACTORY, table

RUN = """
import sys
from mixednuts_dist.cli import main

main(sys.argv[1:], standalone_mode=False)
assert "ray" not in sys.modules
"""


def children() -> list[psutil.Process]:
    running = [one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE]
    return [one for one in running if "local import serve" in " ".join(one.cmdline())]


@pytest.mark.parametrize("option", ["--local", "--set=compute.executor=debug"])
def test_run_without_ray_equals_the_debug_run(tiny_run: Finished, tmp_path: Path, option: str) -> None:
    config = tiny_file(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", RUN, "run", str(config), option], capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    here = tmp_path / "runs" / load_config(config).place()
    for stage, columns in (("attack", ATTACK), ("evaluate", EVALUATE)):
        assert rows(here, stage, columns) == rows(tiny_run.folder, stage, columns)
    found = "search/candidates.parquet"
    assert (here / found).read_bytes() == (tiny_run.folder / found).read_bytes()


@pytest.mark.parametrize(
    ("compute", "n_workers", "n_threads"),
    [({}, 8, 1), ({"num_cpus": 4}, 2, 4), ({"num_cpus": 16}, 1, 16), ({"num_workers": 3}, 3, 1)],
)
def test_the_processes_take_every_core_once(
    compute: dict[str, float], n_workers: int, n_threads: int,
    tiny: MakeConfig, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The cores that the command may use, also in a container."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    config = tiny(compute=compute)
    assert LocalExecutor().workers(config.compute).n_workers == n_workers
    assert worker_spec(open_run(config)).n_threads == n_threads


@pytest.mark.parametrize(
    ("name", "reason", "log"),
    [
        ("dying", "the worker died: exit status 3", "exit status 3"),
        ("exiting", "RuntimeError: SystemExit: 3", "in act"),
    ],
)
def test_failing_partition_is_retried_and_named(
    tiny: MakeConfig, tmp_path: Path, name: str, reason: str, log: str
) -> None:
    (tmp_path / "touchy.py").write_text(FACTORY)
    config = tiny(rob=f"py:{tmp_path}/touchy.py:{name}", partition_size=2, compute={"max_tries": 2, "num_workers": 1})
    with LocalExecutor() as executor, pytest.raises(PartitionFailed) as failed:
        attack.run(config, executor=executor)
    assert str(failed.value).startswith("partition 5 (images 10-11) failed 2 of 2 tries: ")
    assert f"{reason}. Log: " in str(failed.value)
    assert sorted(table(config)["sample_id"]) == [*range(10), *range(12, 24)]
    assert log in (Path(config.storage) / config.place() / "errors" / "attack-00005.txt").read_text()
    assert children() == []


def test_worker_is_kept_until_the_executor_closes(tiny: MakeConfig) -> None:
    config = tiny()
    spec, settings = worker_spec(open_run(config)), PoolSettings(config.compute, 1, 0)
    with make_executor("local") as made, executing(made, config.compute) as executor:
        first = executor.begin(spec, settings)
        first.call("ready").result(60)
        executor.release(spec, settings, first)
        assert executor.kept(spec, settings) is first
        (process,) = children()
        process.kill()
        with pytest.raises(
            WorkerLost, match=r"killed by signal 9 \(SIGKILL\), possibly by the kernel because memory ran out"
        ):
            first.call("ready").result(60)
        first.end()
        second = executor.begin(spec, settings)
        second.call("ready").result(60)
        executor.release(spec, settings, second)
        assert len(children()) == 1
    assert children() == []


THREADED = """
from concurrent.futures import ThreadPoolExecutor
from mixednuts_dist.distributed.executor import Executor, PoolSettings
from mixednuts_dist.distributed.worker import AttackWorker
from mixednuts_dist.config.register import EXECUTORS


@EXECUTORS("threads", describes="two threads of this process")
class Threads(Executor):
    def workers(self, compute):
        return PoolSettings(compute, n_workers=2, num_gpus=0)

    def begin(self, spec, settings):
        return Thread(AttackWorker(spec))


class Thread:
    def __init__(self, worker):
        self.worker, self.thread = worker, ThreadPoolExecutor(1)

    def call(self, method, *arguments):
        return self.thread.submit(getattr(self.worker, method), *arguments)

    def end(self):
        self.thread.shutdown(wait=False, cancel_futures=True)
"""


def test_an_executor_is_one_file_of_a_user_s(tiny_run: Finished, tiny: MakeConfig, tmp_path: Path) -> None:
    file = tmp_path / "threads.py"
    file.write_text(THREADED)
    config = tiny(extensions=[str(file)], compute={"executor": "threads"})
    attack.run(config)
    here = Path(config.storage) / config.place()
    assert rows(here, "attack", ATTACK) == rows(tiny_run.folder, "attack", ATTACK)
