"""The keys that say where a run is computed, and how fast."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from .register import EXECUTORS
from .section import Positive, Registered, Section


class ComputeConfig(Section):
    """Where and how fast; nothing in here moves a result."""

    executor: Annotated[str, Registered(EXECUTORS)] = Field(
        default="ray",
        description="where the work is done: ray, a cluster or a local Ray; local, this machine "
        "without Ray; debug, this very thread",
    )
    num_workers: Annotated[int, Field(gt=0, le=100_000)] | None = Field(
        default=None, description="one per GPU, or one per core, by default"
    )
    num_gpus: Annotated[float, Field(ge=0, le=1024)] | None = Field(
        default=None, description="GPUs a worker; 1 where there are any, else 0"
    )

    @field_validator("num_gpus")
    @classmethod
    def _at_most_one(cls, value: float | None) -> float | None:
        if value is not None and value > 1:
            raise ValueError(
                f"{value:g} GPUs a worker: each would hold {value:g} and compute on one; give 1, and num_workers"
            )
        return value

    accelerator_type: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="workers only on nodes with this accelerator, as Ray names it: H100, A10G, L4"
    )
    label_selector: dict[str, str] = Field(
        default={}, description="workers only on nodes with these labels, e.g. {ray.io/market-type: spot}, {zone: '!b'}"
    )
    fallback_strategy: list[dict[Literal["label_selector"], dict[str, str]]] = Field(
        default=[],
        description="what will do, in this order, where no node has or gets the labels of label_selector, "
        "e.g. [{label_selector: {ray.io/market-type: on-demand}}]",
    )
    num_cpus: float = Field(default=1, gt=0, le=1024, description="cores a worker, and its number of threads")
    batch_size: Positive | Literal["auto"] = Field(
        default="auto",
        description="images under attack at a time in each worker; "
        "auto: what fits; on a CPU 64, for small networks 128",
    )
    compile: bool = Field(default=False, description="gradients through torch.compile; moves the last bits")
    max_tries: Positive = Field(default=3, description="failed tries of a partition before it is quarantined")
    start_seconds: float = Field(
        default=1800, gt=0, description="a stage that has no ready worker for this long ends with an error"
    )
    watchdog: float = Field(
        default=10,
        ge=0,
        le=10_000,
        description="a partition that takes this many times longer than the slowest finished one suggests, and more "
        "than 300 s, is taken from its worker, which is replaced; 0: no limit",
    )
