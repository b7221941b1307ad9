"""One finished tiny run for all studies; their variants are computed in this process by the worker's own code."""

from pathlib import Path
from typing import Any

import pytest

from mixednuts_dist.config import parse_config
from mixednuts_dist.distributed.tasks import Task
from mixednuts_dist.distributed.worker import AttackWorker
from mixednuts_dist.stages.partitioned import worker_spec
from mixednuts_dist.stages.runs import Run, finished_partitions
from mixednuts_dist.studies.bench import Bench
from tests.conftest import tiny_content


class LocalBench(Bench):
    """A bench whose variants do without the pool: a plain worker does the partitions one by one."""

    worker: AttackWorker | None = None

    def _complete(self, part: Run, task: Task, label: str) -> None:  # noqa: ARG002
        done = finished_partitions(part, task.stage, task.fingerprint)
        if self.worker is None:
            self.worker = AttackWorker(worker_spec(self.run))
            self.worker.ready()
        for partition in part.partitions:
            if partition not in done:
                self.worker.process(partition, task)


@pytest.fixture(scope="session")
def bench(ray_session: Any, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """24 digits; attack, search and evaluate go through Ray, and so does the attack on the second robust classifier."""
    storage: Path = tmp_path_factory.mktemp("studies")
    content = tiny_content(storage)
    content["attack"] = {**content["attack"], "n_queries": 30}
    content["search"] = {**content["search"], "rounds": 0}  # the paper's search, which its studies are about
    return LocalBench(parse_config(content), session=ray_session)
