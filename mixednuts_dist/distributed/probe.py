"""One worker that is started to measure how fast the cluster's devices are, and then dismissed."""

import ray
from ray.exceptions import RayTaskError

from ..errors import ClusterError, MixedNutsError
from .pool import PoolSettings
from .tasks import WorkerSpec
from .timing import PassSeconds
from .worker import AttackActor


def measure_on_one_worker(spec: WorkerSpec, settings: PoolSettings) -> dict[str, PassSeconds]:
    """Seconds a pass of "rob", and of "std" and "mixed" where there are, on one worker of the cluster; needs Ray."""
    actor = AttackActor.options(num_cpus=settings.num_cpus, num_gpus=settings.num_gpus).remote(spec)
    try:
        ray.get(actor.ready.remote())
        measured: dict[str, PassSeconds] = ray.get(actor.time_passes.remote())
    except RayTaskError as error:
        if isinstance(error.cause, MixedNutsError):
            raise error.cause from error
        raise ClusterError(f"a worker cannot start: {error}") from error
    finally:
        ray.kill(actor)
    return measured
