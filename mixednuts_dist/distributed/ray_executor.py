"""Workers as Ray actors, on a cluster or on this machine."""

import functools
import logging
import math
import os
import re
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.util.metrics import Gauge

from ..config.keys import ComputeConfig
from ..config.register import EXECUTORS
from ..errors import ClusterError, log_json
from ..selection.inputs import CachedLogits
from .cluster import connect
from .executor import Executor, PoolSettings, Scoring, WorkerLost
from .worker import AttackWorker
from .worker_spec import Place, WorkerSpec

logger = logging.getLogger(__name__)

DESCRIPTIONS = {  # gauge -> description; `jobs/grafana.json` shows every gauge
    "images": "finished images of the stage",
    "broken": "finished images that the attack broke",
    "forward_passes": "images passed forward",
    "retries": "partitions queued again by this driver",
    "partitions_left": "partitions that are not written yet",
    "workers_ready": "workers that have loaded the classifiers",
    "workers_requested": "workers that the driver has asked for",
}


@EXECUTORS("ray", describes="a Ray cluster, or a private Ray instance on this machine", order=0)
class RayExecutor(Executor):
    """Uses the Ray cluster at `address` or RAY_ADDRESS; without an address, it starts a private Ray on this machine.

    If the caller has already connected to Ray, that connection is used and left open.
    """

    def __init__(self, address: str | None = None) -> None:
        super().__init__(address or os.environ.get("RAY_ADDRESS") or "local")
        self._disconnects: threading.Event | None = None  # set before disconnecting; None if the caller has connected

    def start(self) -> None:
        """Connect to a cluster, or start a private Ray, unless this process is connected; errors as in `connect`."""
        if ray.is_initialized():
            return
        self.report(
            "starting Ray on this machine" if self.address == "local" else f"connecting to Ray at {self.address}"
        )
        self._disconnects = connect(self.address)

    def close(self) -> None:
        """Disconnect, or stop the local Ray, if this executor made the connection."""
        if self._disconnects is not None:
            self._disconnects.set()
            self._disconnects = None
            ray.shutdown()

    def workers(self, compute: ComputeConfig) -> PoolSettings:
        """Return the configured number of workers or, by default, one per GPU or (without GPUs) per `num_cpus` cores.

        Only the nodes that `accelerator_type` and the label selectors allow count. A cluster that grows needs
        `num_workers` and `num_gpus`, because its autoscaler only makes room for workers that have been requested.

        Raises:
            ClusterError: if there is no room for a single worker and no number is configured.
        """
        self.start()
        num_workers, num_gpus, num_cpus = compute.num_workers, compute.num_gpus, compute.num_cpus
        gpus, cores = (_resources(compute)[name] for name in ("GPU", "CPU"))
        gpus_each = num_gpus if num_gpus is not None else (1.0 if gpus else 0.0)
        if num_workers and num_gpus is None and not gpus and self.address != "local":
            logger.warning(
                "the cluster has no GPU now, so its %d workers will compute on CPUs. If GPU machines join later, set "
                "compute.num_gpus=1. If you want CPUs, set compute.num_gpus=0",
                num_workers,
            )
        room = int(min(gpus / gpus_each if gpus_each else math.inf, cores / num_cpus))
        settings = PoolSettings(compute, num_workers or room, gpus_each)
        if not settings.n_workers:
            options = " and ".join(f"compute.{name}={value}" for name, value in settings.placement.items())
            raise ClusterError(
                f"the cluster has {cores:g} cores and {gpus:g} GPUs{options and f' on nodes with {options}'}, and a "
                f"worker needs {num_cpus:g} and {gpus_each:g}. If the cluster grows, set compute.num_workers to the "
                "most GPUs that it may have, and compute.num_gpus=1"
            )
        return settings

    def begin(self, spec: WorkerSpec, settings: PoolSettings) -> "ActorWorker":
        options = {"num_cpus": settings.compute.num_cpus, "num_gpus": settings.num_gpus, **settings.placement}
        actor = _Actor.options(**options, max_restarts=0, max_task_retries=0).remote(spec, settings.num_gpus)
        return ActorWorker(actor)

    def is_gone(self, node: str) -> bool:
        return bool(node) and node not in {each["NodeID"] for each in _alive_nodes()}

    def room(self) -> str:
        has: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
        counts = (f"{has.get(name, 0):g} {name}s ({free.get(name, 0):g} free)" for name in ("CPU", "GPU"))
        return f"the cluster has {', '.join(counts)}"

    def export(self, run_id: str, stage: str, values: Mapping[str, float]) -> None:
        """Set the gauges for Prometheus, `ray_mixednuts_*`, to 0 if nothing has happened yet.

        The `stage` label is the first part of the stage's folder: refinement rounds count as "search".
        """
        for name in DESCRIPTIONS:
            _gauge(name).set(values.get(name, 0), tags={"run": run_id, "stage": stage.partition("/")[0]})

    def scoring(self, spec: WorkerSpec, compute: ComputeConfig, rows: CachedLogits, criterion: str) -> Scoring:
        """Return a function that scores a grid in a Ray Tune job.

        If idle workers hold all cores, a trial reserves the memory of its cores instead of the cores. The idle workers
        are then kept and need not start again after the search.
        """
        from .tuning import score_on_tune  # imports Ray Tune, which takes two seconds

        self.start()
        has: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
        held = sum(settings.compute.num_cpus for _, settings, _ in self._idle)  # Ray's count of free cores may be late
        free_cores = min(free.get("CPU", 0.0), has.get("CPU", 0.0) - held)
        reserved, n_trials = {"CPU": compute.num_cpus}, int(has.get("CPU", 0.0) / compute.num_cpus)
        if self._idle and free_cores < compute.num_cpus:
            if memory := _memory_per_core():
                reserved, n_trials = {"memory": compute.num_cpus * memory}, len(self._idle)
            else:
                self.end_idle()
        if compute.accelerator_type:
            reserved[f"accelerator_type:{compute.accelerator_type}"] = 0.001
        return functools.partial(
            score_on_tune, spec=spec, rows=rows, criterion=criterion, reserved=reserved, labels=trial_labels(compute),
            n_trials=max(1, n_trials), start_seconds=compute.start_seconds,
        )  # fmt: skip


@functools.cache
def _gauge(name: str) -> Any:
    return Gauge(f"mixednuts_{name}", description=DESCRIPTIONS[name], tag_keys=("run", "stage"))


class RayWorker(AttackWorker):
    """The worker as an actor, which writes its log as JSON to Ray's log folder."""

    def locate(self) -> Place:
        return super().locate()._replace(node=str(ray.get_runtime_context().get_node_id()))

    def ready(self) -> float:
        log_json()
        return super().ready()


_Actor: Any = ray.remote(RayWorker)


class ActorWorker:
    """An actor as a `Worker`."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def call(self, method: str, *arguments: Any) -> "Future[Any]":
        future = Future[Any]()

        def settle(done: "Future[Any]") -> None:
            try:
                future.set_result(done.result())
            except BaseException as error:  # whatever it is, the pool waits for the future
                future.set_exception(_plain(error))

        getattr(self._actor, method).remote(*arguments).future().add_done_callback(settle)
        return future

    def end(self) -> None:
        ray.kill(self._actor)


def _plain(error: BaseException) -> BaseException:
    """Translate an error of Ray into the worker's own exception or WorkerLost.

    A node reports the death of a single process at once. If the whole machine dies, the connection breaks seconds
    before Ray declares the node dead. A broken connection therefore counts as a lost machine.
    """
    if isinstance(error, RayTaskError):
        cause = error.cause if isinstance(error.cause, Exception) else RuntimeError(str(error))
        with suppress(Exception):  # an exception that is a frozen dataclass accepts no cause
            cause.__cause__ = RuntimeError(str(error))  # with the worker's traceback
        return cause
    if isinstance(error, RayError):
        machine = isinstance(error, ActorUnavailableError) or (isinstance(error, RayActorError) and error.preempted)
        return WorkerLost(str(error).strip() or type(error).__name__, machine=machine)
    return error


def _resources(compute: ComputeConfig) -> Counter[str]:
    """Return the sum of the resources of the nodes on which workers may run."""
    kind, found = compute.accelerator_type, Counter[str]()
    for node in _alive_nodes():
        allowed = any(_fits(node.get("Labels", {}), selector) for selector in _selectors(compute))
        if allowed and (not kind or f"accelerator_type:{kind}" in node["Resources"]):
            found.update(node["Resources"])
    return found


def trial_labels(compute: ComputeConfig) -> Mapping[str, str]:
    """Return the labels of the nodes on which the trials of a search may run.

    A placement group accepts no fallback, so these are the first alternative that a node of the cluster satisfies now.
    """
    nodes, selectors = _alive_nodes(), _selectors(compute)
    found = (selector for selector in selectors if any(_fits(node.get("Labels", {}), selector) for node in nodes))
    return next(found, selectors[0])


def _selectors(compute: ComputeConfig) -> list[Mapping[str, str]]:
    """Return the label selectors of workers, the preferred one first."""
    return [compute.label_selector, *(each["label_selector"] for each in compute.fallback_strategy)]


def _memory_per_core() -> int:
    """Return the least memory per core of any node; 0 if a node offers no cores, so that no trial runs there."""
    resources = [node["Resources"] for node in _alive_nodes()]
    return min(int(has.get("memory", 0.0) / has["CPU"]) if has.get("CPU") else 0 for has in resources)


def _alive_nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node for node in nodes if node["Alive"]]


def _fits(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Whether a node's labels match Ray's label selector: `value`, `!value`, `in(a, b)` or `!in(a, b)`."""
    for key, condition in selector.items():
        negated, plain = condition.startswith("!"), condition.removeprefix("!")
        listed = re.fullmatch(r"in\((.*)\)", plain)
        values = [value.strip() for value in listed[1].split(",")] if listed else [plain]
        if (labels.get(key) in values) == negated:
            return False
    return True
