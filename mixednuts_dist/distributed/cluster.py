"""Connecting to Ray: the cluster that is named, or a private local one that leaves with the process; runs as Ray jobs.

With a job travels the current folder (the configuration, classifier files, a checkout's package), without what
`.gitignore` names; an installed package travels beside it. Its dependencies are the nodes' own, or `uv run` makes them
from pyproject.toml. No environment variable travels: the jobs API shows them to everyone, so credentials belong to the
nodes' roles. Ray refuses a submission id that was used before, so none is given: a run is identified by its run id and
resumed from its storage.
"""

import asyncio
import logging
import math
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.job_submission import JobStatus, JobSubmissionClient

from ..config import ComputeConfig
from ..config_file import shortened
from ..errors import ClusterError
from ..register import EXECUTORS
from .executor import Executor, Scoring
from .pool import LocalPool, Pool, PoolSettings, measure_on_one_worker
from .slabs import SearchInputs, SearchTask
from .tasks import Task
from .worker import AttackWorker, PassSeconds
from .worker_spec import WorkerSpec

_CONNECT_SECONDS = 10.0
_ANSWER_SECONDS = 60.0  # of a cluster that is there, on a busy machine; importing Ray takes seconds of them
_TRIED_VERSIONS = ("2.60.",)  # of Ray, whose private constants are known
_CONSTANTS = ("ENABLE_RAY_CLUSTER", "RAY_ENABLE_UV_RUN_RUNTIME_ENV")
_STARTS = 3  # of a local Ray, which gives itself 30 s; on a busy machine that may be too short
_TOO_SLOW = "timed out during startup"
_PACKAGE = Path(__file__).parents[1]
_STAYS = [".git", ".venv", "runs"]  # beside what .gitignore names
_UV = ("uv", "run", "--no-dev")
WITHOUT_RAY = (
    "The same command with --local needs no Ray: it does everything in this process, one piece after the other"
)

logger = logging.getLogger(__name__)


@EXECUTORS("ray", describes="a Ray cluster, or a Ray of its own on this machine", order=0)
class RayExecutor(Executor):
    """Ray on demand: at `address`, else at RAY_ADDRESS, else a new local one that leaves with the session.

    Nothing is started before the first `ensure`, so that a run with nothing to do never starts it. A Ray that the
    caller has started already is used as it is and left running.
    """

    def __init__(self, address: str | None = None) -> None:
        super().__init__(address or os.environ.get("RAY_ADDRESS"))
        self._started = False

    def start(self) -> None:
        """Connect or start, unless that is done.

        Raises:
            ClusterError: where nothing answers at the address.
        """
        if ray.is_initialized():
            return
        local = not self.address or self.address == "local"
        self.report("starting Ray on this machine" if local else f"connecting to Ray at {self.address}")
        if self.address:
            _require_answer(self.address)
        _start(self.address)
        self._started = True

    def close(self) -> None:
        """Disconnect, or stop the local Ray, if this session made the connection."""
        if self._started:
            ray.shutdown()
            self._started = False

    def workers(self, compute: ComputeConfig) -> PoolSettings:
        """As many as the cluster has room for, unless their number is given."""
        self.start()
        placement = {"accelerator_type": compute.accelerator_type, "label_selector": dict(compute.label_selector)}
        return pool_settings(
            compute.num_workers, compute.num_gpus, compute.num_cpus, compute.max_tries, compute.start_seconds,
            compute.watchdog or math.inf, placement,
        )  # fmt: skip

    def pool(self, spec: WorkerSpec, task: Task, compute: ComputeConfig) -> Pool:
        """Actors."""
        return Pool(spec, task, self.workers(compute))

    def time_passes(self, spec: WorkerSpec, workers: PoolSettings) -> dict[str, PassSeconds]:
        """On one actor."""
        return measure_on_one_worker(spec, workers)

    def scoring(self, inputs: SearchInputs, task: SearchTask) -> Scoring | None:
        """By Ray Tune."""
        from .tuning import SlabTuner  # imports Ray Tune, which takes two seconds

        self.start()
        return SlabTuner(inputs, task).scores


@EXECUTORS("local", describes="this machine, without Ray", order=1)
class LocalExecutor(Executor):
    """No Ray at all: the stages do their work in this process, one piece after the other."""

    cuts_partitions = False

    def __init__(self, address: str | None = None) -> None:
        super().__init__(address)
        self._worker: AttackWorker | None = None

    def workers(self, compute: ComputeConfig) -> PoolSettings:
        """One, in this process."""
        return PoolSettings(1, compute.num_cpus, 0, compute.max_tries)

    def pool(self, spec: WorkerSpec, task: Task, compute: ComputeConfig) -> LocalPool:
        """This process."""
        return LocalPool(spec, task, self.workers(compute), worker=self.worker(spec))

    def time_passes(self, spec: WorkerSpec, workers: PoolSettings) -> dict[str, PassSeconds]:  # noqa: ARG002
        """In this process."""
        return self.worker(spec).time_passes()

    def worker(self, spec: WorkerSpec) -> AttackWorker:
        """The one worker; a further stage of the same run finds its classifiers loaded."""
        if self._worker is None or self._worker.spec != spec:
            self._worker = AttackWorker(spec)
            self._worker.ready()
        return self._worker


def _require_answer(address: str) -> None:
    """Ray itself would go on trying a dead address for minutes, and one where something else answers for ever."""
    if address in ("auto", "local"):
        return
    asked = re.fullmatch(r"(ray://)?(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})", address)
    if not asked or not 0 < int(asked[3]) < 2**16:
        raise ClusterError(
            f"{shortened(address)} is no address of a Ray cluster; give host:port as `ray start --head` prints it, "
            "ray://host:10001, auto, or local"
        )
    try:
        socket.create_connection((asked[2].strip("[]"), int(asked[3])), timeout=_CONNECT_SECONDS).close()
        if not asked[1]:  # a client's connection has a time limit of its own
            _ask_for_status(address)
    except OSError as error:
        raise ClusterError(
            f"no Ray cluster answers at {address!r} ({error}); start one, or leave the address out"
        ) from error


def _ask_for_status(address: str) -> None:
    """In a process of its own: inside Ray's connection neither a time limit nor Ctrl-C would be heard.

    Raises:
        OSError: where what listens there is no Ray, or does not answer in time.
    """
    command = [sys.executable, "-m", "ray.scripts.scripts", "status", "--address", address]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"what listens there did not answer as Ray within {_ANSWER_SECONDS:g} s") from error
    if told.returncode:
        raise OSError(shortened(" ".join((told.stderr or told.stdout).split())[-200:], 200))


def _start(address: str | None) -> None:
    if address and address != "local":
        try:
            with _own_signal_handlers():
                ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
        except (ConnectionError, RuntimeError, ValueError) as error:  # another version of Ray or Python, for instance
            raise ClusterError(f"the Ray cluster at {address!r} cannot be used: {error}") from error
        return
    for left in reversed(range(_STARTS)):
        try:
            with _for_this_process_alone(), _own_signal_handlers():
                ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
        except Exception as error:  # Ray has no class for it
            if _TOO_SLOW not in str(error):
                raise ClusterError(f"a local Ray does not start: {error}\n{WITHOUT_RAY}") from error
            if not left:
                raise ClusterError(
                    f"a local Ray did not start, {_STARTS} times; is the machine busy? {error}\n{WITHOUT_RAY}"
                ) from error
            logger.warning("a local Ray did not start in time; trying again")
        else:
            return


@contextmanager
def _for_this_process_alone() -> Iterator[None]:
    """A Ray that starts in here listens on loopback only, and its workers share the driver's environment.

    `ray.init` has no arguments for either: it trades a loopback address for the machine's own, and under `uv run` it
    packs the current folder and builds an environment for each worker. What it does is read from two private
    constants. They are set in the versions of Ray in which this was tried; in another one that lacks them Ray starts
    as it likes, and a warning says so.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # no token in the home folder
    from ray._private import ray_constants

    known = ray.__version__.startswith(_TRIED_VERSIONS) and all(hasattr(ray_constants, name) for name in _CONSTANTS)
    if not known:
        logger.warning(
            "Ray %s is not one of the versions that were tried (%s): its local cluster may listen beyond loopback, and "
            "under `uv run` its workers may build environments of their own",
            ray.__version__, ", ".join(f"{version}*" for version in _TRIED_VERSIONS),
        )  # fmt: skip
    before = {name: getattr(ray_constants, name) for name in _CONSTANTS} if known else {}
    for name in before:
        setattr(ray_constants, name, False)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(ray_constants, name, value)


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Ray's start puts its own handler for SIGTERM in the place of the caller's; in here the caller's comes back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # it was not set from Python
                signal.signal(number, handler)


def pool_settings(
    num_workers: int | None,
    num_gpus: float | None,
    num_cpus: float,
    max_tries: int,
    start_seconds: float = math.inf,
    watchdog: float = math.inf,
    placement: Mapping[str, Any] | None = None,
) -> PoolSettings:
    """One worker a GPU where the cluster has any, otherwise one for every `num_cpus` cores.

    With `placement` (Ray's `accelerator_type` and `label_selector`) only nodes that it allows count.

    That is the cluster as it is now. One that grows needs `num_workers` (and `num_gpus`): the workers that wait for
    room are what its autoscaler listens to.

    Raises:
        ClusterError: where there is no room for a single worker and no number is asked for.
    """
    placement = {name: value for name, value in (placement or {}).items() if value}
    resources = _resources(placement)
    gpus = resources.get("GPU", 0.0)
    gpus_each = num_gpus if num_gpus is not None else (1.0 if gpus else 0.0)
    cores = resources.get("CPU", 0.0)
    room = int(min(gpus / gpus_each if gpus_each else math.inf, cores / num_cpus))
    if not num_workers and not room:
        asked = ", ".join(f"compute.{name}={value}" for name, value in placement.items())
        where = f" on nodes with {asked}" if placement else ""
        raise ClusterError(
            f"the cluster has {cores:g} cores and {gpus:g} GPUs{where}, and a worker wants {num_cpus:g} and "
            f"{gpus_each:g}: "
            "if the cluster grows, set compute.num_workers and compute.num_gpus to what it may grow to"
        )
    return PoolSettings(num_workers or room, num_cpus, gpus_each, max_tries, start_seconds, placement, watchdog)


def _resources(placement: Mapping[str, Any]) -> dict[str, float]:
    """What the nodes have together on which `placement` allows workers."""
    labels: Mapping[str, str] = placement.get("label_selector", {})
    found: dict[str, float] = {}
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    for node in nodes:
        has, kind = node["Resources"], placement.get("accelerator_type")
        if node["Alive"] and (not kind or f"accelerator_type:{kind}" in has) and _fits(node.get("Labels", {}), labels):
            for name, amount in has.items():
                found[name] = found.get(name, 0.0) + amount
    return found


def _fits(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Whether a node's labels are what Ray's label selector asks for: `value`, `!value`, `in(a, b)` or `!in(a, b)`."""
    for key, condition in selector.items():
        negated, plain = condition.startswith("!"), condition.removeprefix("!")
        listed = re.fullmatch(r"in\((.*)\)", plain)
        values = [value.strip() for value in listed[1].split(",")] if listed else [plain]
        if (labels.get(key) in values) == negated:
            return False
    return True


def submit_job(address: str, arguments: Sequence[str], *, folder: Path, run_id: str, with_uv: bool) -> str:
    """Start `mixednuts ARGUMENTS` on the cluster whose dashboard answers at `address`; returns the submission id.

    Raises:
        ClusterError: where nothing answers, the upload is refused, or uv has no project to install.
    """
    if with_uv and not (folder / "pyproject.toml").is_file():
        raise ClusterError(f"--uv installs what {folder}/pyproject.toml declares, and there is no such file")
    command = [*(_UV if with_uv else ()), "python", "-m", _PACKAGE.name, *arguments]
    entrypoint, declared, metadata = shlex.join(command), runtime_env(folder), {"run_id": run_id}
    return str(
        _asked(
            address, lambda client: client.submit_job(entrypoint=entrypoint, runtime_env=declared, metadata=metadata)
        )
    )


def runtime_env(folder: Path) -> dict[str, Any]:
    """What the job's driver and workers find: `folder`, and the package where it does not lie in there."""
    declared: dict[str, Any] = {"working_dir": str(folder), "excludes": _STAYS}
    if not (folder / _PACKAGE.name / "__init__.py").is_file():
        declared["py_modules"] = [str(_PACKAGE)]
    return declared


def follow_job(address: str, submission_id: str, show: Callable[[str], None]) -> bool:
    """Show the job's log until it ends; True where it succeeded."""

    async def follow(client: JobSubmissionClient) -> None:
        async for text in client.tail_job_logs(submission_id):
            show(text)

    _asked(address, lambda client: asyncio.run(follow(client)))
    status: JobStatus = _asked(address, lambda client: client.get_job_status(submission_id))
    return status == JobStatus.SUCCEEDED


def _asked(address: str, question: Callable[[JobSubmissionClient], Any]) -> Any:
    try:
        return question(JobSubmissionClient(address))
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterError(f"the cluster's dashboard at {address}: {error}") from error
