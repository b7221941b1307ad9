"""The schema of `report/results.json`: every number of a report, in types that scripts can rely on.

`ResultsFile.model_json_schema(mode="serialization")` is the JSON schema. A number that JSON cannot hold (NaN, infinity)
is null.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, computed_field

from ..config.threat import ThreatModel
from .counts import Count
from .margins import MarginGroup, MarginSplit
from .table import Cell, Table
from .worst_images import WorstImage


@dataclass(frozen=True)
class AccuracyRow:
    """One line of the accuracy table: `std`, `rob` or `mixed`, and the attack that `robust` was measured under."""

    classifier: Annotated[str, Field(default="", exclude=True)]  # its key in the file
    clean: Count
    robust: Count
    attack: str


@dataclass(frozen=True, kw_only=True)
class SurvivalStep(Count):
    """The images that are still correct after one step of the attack; the first step is `clean`."""

    step: str
    lost: int  # images that the step broke


@dataclass(frozen=True)
class StageCost:
    """The cost of one stage; rows that another run computed count with the cost that they had in that run."""

    stage: str
    images: int
    partitions: int
    nodes: int
    devices: tuple[str, ...]  # names of accelerators, or "cpu"
    core_hours: float  # cores held x time, for workers without an accelerator
    gpu_hours: float  # accelerators, or shares of one, held x time
    wall_seconds: float | None  # duration in this run; None if this run computed none of the rows
    n_forward: int  # forward passes of images
    n_backward: int  # backward passes of images

    @computed_field  # type: ignore[prop-decorator]
    @property
    def images_per_second(self) -> float | None:
        """Return the images of the stage per wall-clock second, all workers together."""
        return self.images / self.wall_seconds if self.wall_seconds else None


class _Facts(BaseModel):
    model_config = ConfigDict(extra="ignore")


class RunFacts(_Facts):
    """The classifiers, the dataset and the threat model."""

    id: str
    name: str
    dataset: str
    std: str | None
    rob: str
    threat: ThreatModel


class ParameterFacts(_Facts):
    """The deployed choice."""

    beta: float
    s: float
    p: float
    c: float
    alpha: float | None
    one_minus_alpha: float | None
    cutoff: float | None
    objective: float | None
    criterion: str
    clamp: str
    ln_k: int | None
    surrogate_alpha: float | None
    on_grid_edge: list[str]
    n_candidates: int
    n_undeployable: int


class RetentionFacts(_Facts):
    """The number of robust images of `rob` that `mixed` must keep robust, and the predicted and measured numbers."""

    beta: float
    asked: int
    predicted: Count
    measured: Count | None
    only_mixed: int  # images that are robust under `mixed`, but not under `rob`


class MarginFacts(_Facts):
    """Confidence margins, with the ratio and the difference (`gaps`) of two medians by classifier."""

    medians: list[MarginGroup]
    ratios: dict[str, float | None]
    gaps: dict[str, float | None]
    splits: list[MarginSplit]


class ResultsFile(_Facts):
    """`report/results.json`; the keys from `std_decides` on exist for runs with a standard classifier."""

    format: Literal["mixednuts-results/3"] = "mixednuts-results/3"
    run: RunFacts
    n_images: int
    summary: str
    provenance: dict[str, str]
    accuracy: dict[str, AccuracyRow]
    stages: dict[str, AccuracyRow]  # "CLASSIFIER, STAGE" of each added stage
    tables: dict[str, Table]  # tables from added stages, by title
    survival: list[SurvivalStep]
    costs: list[StageCost]
    seconds: dict[str, float]
    seconds_total: float
    notes: list[str]
    std_decides: int | None = None  # clean images on which `mixed` follows `std` against `rob`
    clean_difference: tuple[float, float, float] | None = None  # `mixed` minus `rob` in points, and its 95% interval
    parameters: ParameterFacts | None = None
    kept: RetentionFacts | None = None
    rounds: list[dict[str, Cell]] | None = None  # the table of the refinement rounds
    tradeoff: dict[str, list[dict[str, Cell]]] | None = None  # "predicted": parameters and counts, largest beta first
    margins: MarginFacts | None = None
    worst_images: list[WorstImage] | None = None
