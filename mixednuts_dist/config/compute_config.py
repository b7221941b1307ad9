"""The keys of `compute`: where and how fast a run is computed."""

from typing import Annotated, Literal

from pydantic import Field

from .register import EXECUTORS
from .section import Positive, Registered, Section


class ComputeConfig(Section):
    """Where and how fast a run is computed. No key is part of the run ID."""

    executor: Annotated[str, Registered(EXECUTORS)] = "ray"
    """`ray` uses a cluster or a local Ray instance, `local` uses processes on this machine without Ray, and `debug`
    uses the thread of the command."""
    num_workers: Annotated[int, Field(gt=0, le=100_000)] | None = None
    """Number of workers. By default, one per GPU, or one per core without GPUs."""
    num_gpus: Annotated[float, Field(ge=0, le=1)] | None = None
    """GPUs per worker, at most 1. By default, 1 if the cluster has GPUs, otherwise 0."""
    accelerator_type: Annotated[str, Field(min_length=1)] | None = None
    """Start workers only on nodes with this accelerator. Use Ray's name, such as H100, A10G, or L4."""
    label_selector: dict[str, str] = Field(default={})
    """Start workers only on nodes with these labels, for example {ray.io/market-type: spot} or {zone: '!b'}."""
    fallback_strategy: list[dict[Literal["label_selector"], dict[str, str]]] = Field(default=[])
    """Alternatives, in this order, if no node has the labels of `label_selector`, for example [{label_selector:
    {ray.io/market-type: on-demand}}]."""
    num_cpus: float = Field(default=1, gt=0, le=1024)
    """Cores per worker. Each worker uses as many threads."""
    batch_size: Positive | Literal["auto"] = "auto"
    """Images that each worker attacks at a time. `auto` measures it on a GPU and uses 64 on a CPU."""
    compile: bool = False
    """Compute gradients with torch.compile, which changes their last bits."""
    max_tries: Positive = 3
    """Failures of a partition after which the run gives it up (quarantines it)."""
    start_seconds: float = Field(default=1800, gt=0)
    """Seconds without a ready worker after which a stage ends with an error. A worker that takes longer to load its
    models is replaced."""
    watchdog: float = Field(default=10, ge=0, le=10_000)
    """Replace a worker if its partition takes more than 600 s, and also this many times as long as expected from the
    slowest finished partition. 0 disables this limit."""
