"""The schema of `report/results.json`: every number of a report, in types that scripts can rely on.

`ResultsFile.model_json_schema()` is the JSON schema. A number that JSON cannot hold (NaN, infinity) is null.
"""

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict

from ..config.threat import ThreatModel


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Number = Annotated[float | None, BeforeValidator(_finite)]


class _Facts(BaseModel):
    model_config = ConfigDict(from_attributes=True, extra="ignore")


class CountFacts(_Facts):
    """`correct` of `total` images, the share in percent, and its 95% interval in percent."""

    correct: int
    total: int
    percent: float
    low: float
    high: float


class AccuracyFacts(_Facts):
    """A row of the accuracy table; `attack` is what `robust` was measured under."""

    clean: CountFacts
    robust: CountFacts
    attack: str


class StepFacts(CountFacts):
    """The images that are still correct after one step of the attack, and how many the step broke."""

    step: str
    lost: int


class CostFacts(_Facts):
    """The cost of one stage; `wall_seconds` is null if the run computed none of its rows."""

    stage: str
    images: int
    partitions: int
    nodes: int
    devices: tuple[str, ...]
    core_hours: float
    gpu_hours: float
    wall_seconds: float | None
    n_forward: int
    n_backward: int
    images_per_second: float | None


class TableFacts(_Facts):
    """A table of an added stage."""

    columns: list[str]
    rows: list[list[Any]]


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
    alpha: Number
    one_minus_alpha: Number
    cutoff: Number
    objective: Number
    criterion: str
    clamp: str
    ln_k: int | None
    surrogate_alpha: Number
    on_grid_edge: list[str]
    n_candidates: int
    n_undeployable: int


class RetentionFacts(_Facts):
    """Robust images of `rob` that beta requires, and that are predicted and measured to remain robust."""

    beta: float
    asked: int
    predicted: CountFacts
    measured: CountFacts | None
    only_mixed: int  # images that are robust under `mixed`, but not under `rob`


class RoundFacts(_Facts):
    """One refinement round at one beta."""

    round: int
    beta: float
    clean: CountFacts
    kept_predicted: CountFacts
    kept_measured: CountFacts
    passes: int  # total per round over all betas, in its first entry


class PredictedFacts(_Facts):
    """Predictions of the search for one beta."""

    beta: float
    s: float
    p: float
    c: float
    alpha: Number
    one_minus_alpha: Number
    clean: CountFacts
    robust_predicted: CountFacts  # among all images, under the stored adversarial examples


class TradeoffFacts(_Facts):
    """The predicted curve, largest beta first."""

    predicted: list[PredictedFacts]


class MedianFacts(_Facts):
    """Margins of one group of images; `distance` is the median of 1 - margin."""

    classifier: str
    images: Literal["clean", "attacked"]
    correct: bool
    n: int
    median: Number
    distance: Number


class SplitFacts(_Facts):
    """The groups that a margin threshold on one form of `rob` separates."""

    form: str
    log_cutoff: Number  # log(1 - threshold)
    kept: CountFacts  # among attacked and correct images
    left_to_std: CountFacts  # among clean and wrong images


class MarginFacts(_Facts):
    """Confidence margins; ratios and gaps are by classifier."""

    medians: list[MedianFacts]
    ratios: dict[str, Number]
    gaps: dict[str, Number]
    splits: list[SplitFacts]


class VerdictFacts(_Facts):
    """The class that one classifier predicts for an image, and the signed margin of the true class."""

    classifier: str
    images: str
    predicted: int
    margin: float


class WorstFacts(_Facts):
    """An image to look at."""

    sample_id: int
    label: int
    reason: str
    rob_survives: bool
    verdicts: list[VerdictFacts]


class ResultsFile(_Facts):
    """`report/results.json`; the keys from `parameters` on exist for runs with a standard classifier."""

    format: Literal["mixednuts-results/3"] = "mixednuts-results/3"
    run: RunFacts
    n_images: int
    summary: str
    provenance: dict[str, str]
    accuracy: dict[str, AccuracyFacts]
    stages: dict[str, AccuracyFacts]  # "CLASSIFIER, STAGE" of each added stage
    tables: dict[str, TableFacts]  # tables from added stages, by title
    survival: list[StepFacts]
    costs: list[CostFacts]
    seconds: dict[str, float]
    seconds_total: float
    notes: list[str]
    std_decides: int | None = None  # clean images on which `mixed` follows `std` against `rob`
    clean_difference: tuple[float, float, float] | None = None  # `mixed` minus `rob` in points, and its 95% interval
    parameters: ParameterFacts | None = None
    kept: RetentionFacts | None = None
    rounds: list[RoundFacts] | None = None
    tradeoff: TradeoffFacts | None = None
    margins: MarginFacts | None = None
    worst_images: list[WorstFacts] | None = None
