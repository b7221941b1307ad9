"""The keys of the sections `threat`, `attack`, `search`, `evaluate` and `compute`."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from .register import ATTACKS, CLAMPS, CRITERIA, EXECUTORS, NORMS
from .section import Positive, Repeats, Section, read_fraction
from .threat import ThreatModel
from .versions import FAST, version_named

Finite = Annotated[float, Field(ge=-1e9, le=1e9)]
Beta = Annotated[float, Field(ge=0, le=1)]
_MOST_OF_ONE = 1000  # candidate values of s, p or c
_MOST_TOGETHER = 1_000_000  # candidates (s, p, c); the paper has 512
# Within the limits there are 22 scales, 37 powers and 23 biases, 37 times the default candidates. On the digits and on
# CIFAR images, four extensions were enough and resulted in 7,000 to 10,000 candidates.
_WIDENINGS = 16


class ThreatConfig(Section):
    """The threat model; see `ThreatModel`."""

    norm: Annotated[str, NORMS] = "Linf"
    """Norm of the perturbation."""
    eps: Annotated[float, BeforeValidator(read_fraction)]
    """Radius for pixels in [0, 1], for example 8/255."""

    @model_validator(mode="after")
    def _check(self) -> "ThreatConfig":
        self.threat_model()
        return self

    def threat_model(self) -> ThreatModel:
        return ThreatModel(self.norm, self.eps)


class AttackConfig(Section):
    """MMAA on the LayerNormed robust classifier."""

    method: Literal["apgd", "square"] = "apgd"
    """Method of minimum-margin AutoAttack (MMAA). `apgd` uses gradients, and `square` uses only queries, for a robust
    classifier without gradients."""
    n_iter: Positive = 100
    """Iterations of APGD-CE and of each target of APGD-T."""
    n_target_classes: Positive = 9
    """Target classes of APGD-T, at most the number of classes minus one."""
    stop_when_broken: bool = True
    """Stop attacking an image once it is broken. Set `false` to study confidence."""
    border_restarts: Repeats = 2
    """Extra restarts for borderline images. The paper uses 0."""
    n_queries: Positive = 5000
    """Queries per image if `method` is `square`."""


class RangeConfig(Section):
    """`count` values from `min` to `max`, both included, evenly spaced or evenly in the logarithm."""

    min: Finite
    max: Finite
    count: int = Field(default=8, gt=0, le=_MOST_OF_ONE)
    spacing: Literal["linear", "log"] = "linear"

    @model_validator(mode="after")
    def _check(self) -> "RangeConfig":
        if self.min > self.max:
            raise ValueError(f"min={self.min:g} is above max={self.max:g}")
        if self.spacing == "log" and self.min <= 0:
            raise ValueError(f"min={self.min:g} has no logarithm; use spacing: linear")
        return self

    def values(self) -> tuple[float, ...]:
        if self.count == 1:
            return (self.min,)
        to_scale, back = (math.log, math.exp) if self.spacing == "log" else (float, float)
        low, high = to_scale(self.min), to_scale(self.max)
        inner = [back(low + (high - low) * i / (self.count - 1)) for i in range(1, self.count - 1)]
        return (self.min, *inner, self.max)


def _grid_form(value: object) -> str:
    return "range" if isinstance(value, Mapping | RangeConfig) else "list"


Grid = Annotated[
    Annotated[RangeConfig, Tag("range")]
    | Annotated[tuple[Finite, ...], Field(min_length=1, max_length=_MOST_OF_ONE), Tag("list")],
    Discriminator(_grid_form),
]


def grid_values(grid: Grid) -> tuple[float, ...]:
    """Return the candidate values of a range or of an explicit list."""
    return grid.values() if isinstance(grid, RangeConfig) else grid


def _positive(grid: Grid) -> Grid:
    if min(grid_values(grid)) <= 0:
        raise ValueError(f"holds {min(grid_values(grid)):g}; every candidate must be positive")
    return grid


class SearchConfig(Section):
    """Algorithm 1 over the stored logits."""

    criterion: Annotated[str, CRITERIA] = "exact"
    """`exact` constrains signed margins and maximizes clean accuracy. `paper` is Algorithm 1, and `paper-interpolated`
    is Algorithm 1 with the quantile of the reference code."""
    clamp: Annotated[str, CLAMPS] = "gelu"
    """Clamp in the logit transformation M."""
    ln_k: Annotated[int, Field(ge=2, le=1_000_000)] | None = None
    """Number of largest logits to which LayerNorm applies, also under attack. By default, all logits, but at most
    250."""
    scales: Annotated[Grid, AfterValidator(_positive)] = RangeConfig(min=0.05, max=5, spacing="log")
    """Candidates of the scale s, as a range or a list."""
    powers: Annotated[Grid, AfterValidator(_positive)] = RangeConfig(min=1, max=4)
    """Candidates of the power p, as a range or a list."""
    biases: Grid = RangeConfig(min=-2.5, max=0)
    """Candidates of the bias c, as a range or a list."""
    betas: tuple[Beta, ...] = Field(
        default=(1.0, 0.99, 0.985, 0.98, 0.97, 0.96, 0.95, 0.93, 0.9, 0.85, 0.8, 0.7, 0.5),
        min_length=1,
        max_length=1000,
    )
    """Target retentions. The search selects parameters and predicts accuracies for each."""
    beta: Beta = 0.985
    """Target retention whose parameters are deployed and attacked."""
    sample: Positive | Literal["auto"] = "auto"
    """Number of images that the search reads, drawn at random if the run has more. `auto` reads up to 5 million logits
    per classifier (5,000 images with 1,000 classes) and at most 50,000 images."""
    first: Positive | None = None
    """Attack, search, and refine on the first N images only, as the paper does with 1000. MMAA attacks whole
    partitions, so it can include a few more. The evaluation still covers all images."""
    rounds: Repeats = 8
    """Maximum number of refinement rounds, which attack the selected parameters and search again until the achieved
    retention reaches `beta`. The paper uses 0."""
    measure: tuple[Beta, ...] | Literal["all"] = ()
    """Additional betas whose parameters the refinement rounds attack. `all` selects every beta."""
    tune: bool = True
    """Score the grid as a Ray Tune job if the executor is Ray. `false` scores it in the driver, with the same
    result."""
    surrogate_beta: Beta = 0.95
    """Target retention for which the search computes alpha_d, the weight of the robust classifier inside the surrogate.
    The paper uses 0.935 for CIFAR-100."""
    widen: Repeats | None = None
    """Maximum number of times that the search extends the grid beyond an edge with an optimum, within scales 0.001 to
    1000, powers 0.25 to 16, and biases -4 to 4. By default, 16, or 0 if scales, powers, or biases are set."""

    @model_validator(mode="before")
    @classmethod
    def _widen_the_default_grid(cls, content: Any) -> Any:
        """Set `widen`, whose default depends on whether the file has a grid."""
        if not isinstance(content, Mapping) or content.get("widen") is not None:
            return content
        return {**content, "widen": 0 if {"scales", "powers", "biases"} & content.keys() else _WIDENINGS}

    @model_validator(mode="after")
    def _check(self) -> "SearchConfig":
        together = math.prod(len(grid_values(grid)) for grid in (self.scales, self.powers, self.biases))
        if together > _MOST_TOGETHER:
            raise ValueError(
                f"scales, powers and biases make {together:,} candidates; at most {_MOST_TOGETHER:,} are possible"
            )
        return self

    def all_betas(self) -> tuple[float, ...]:
        """Return every beta of the search, including the deployed one, from the largest to the smallest."""
        measured = () if self.measure == "all" else self.measure
        return tuple(sorted({*self.betas, *measured, self.beta}, reverse=True))


class EvaluateConfig(Section):
    """The adaptive AutoAttack on the mixed classifier."""

    preset: Literal["standard", "fast"] = Field(default="standard", exclude=True)
    """Set of default values for the keys below. `fast`, for a first look, takes about a tenth of the passes and is not
    AutoAttack."""
    attacks: tuple[Annotated[str, ATTACKS], ...] = Field(default=("apgd-ce", "apgd-t", "fab-t", "square"), min_length=1)
    """Attacks, in this order. Each attacks the images that are still robust."""
    version: Literal["standard", "plus", "rand"] = "standard"
    """Version of AutoAttack, which defines the attacks and their restarts and targets for the norm."""
    eot: Positive | None = None
    """For a random classifier, the number of draws over which gradients are averaged. 100 other draws decide whether
    an image is misclassified. The version `rand` sets 20."""
    mode: Literal["transfer", "bypass"] = "transfer"
    """Source of the loss. `transfer` uses the surrogate, a smooth approximation of the mixed classifier. `bypass` uses
    the mixed classifier. Both use the gradient of the surrogate."""
    n_iter: Positive = 100
    """Iterations of APGD and FAB."""
    n_target_classes: Positive = 9
    """Target classes of APGD-T and FAB-T."""
    n_queries: Positive = 5000
    """Queries of Square per image."""
    rd: float = Field(default=0.9, ge=0, le=1)
    """Share of the raw logits of the robust classifier in the surrogate (r_d)."""
    joint_starts: Repeats = 3
    """Most random starts of the joint attack per target. 100 iterations allow 2. The paper uses 0."""
    warm_start: bool = True
    """Try the stored adversarial examples of the attack stage and the refinement rounds first."""
    check: Literal["pyautoattack"] | None = None
    """Cross-check: the unmodified package `pyautoattack` attacks the images that are still robust."""
    check_n: Positive | None = None
    """Number of images for the cross-check, evenly spaced. By default, all robust images."""

    @model_validator(mode="before")
    @classmethod
    def _of_preset_and_version(cls, content: Any) -> Any:
        if not isinstance(content, Mapping):
            return content
        if content.get("preset") == "fast":
            content = {**FAST, **content}
        if content.get("version", "standard") == "standard":
            return content
        version = version_named(str(content["version"]))
        if tuple(content.get("attacks", version.attacks)) != version.attacks:
            raise ValueError(
                f"version: {content['version']} defines which attacks run. Remove version, or attacks and preset: fast"
            )
        return {"eot": version.eot, **content, "attacks": version.attacks}

    @model_validator(mode="after")
    def _check(self) -> "EvaluateConfig":
        if twice := [name for name in self.attacks if self.attacks.count(name) > 1]:
            raise ValueError(f"attacks: {twice[0]!r} occurs twice; each attack has one column of the results")
        if "joint" in self.attacks and not self.joint_starts:
            raise ValueError(
                "joint_starts=0 disables the attack 'joint'. Set it to at least 1, or remove 'joint' from attacks"
            )
        return self

    @property
    def notes(self) -> list[str]:
        """Caveats about results with these settings; `docs/validation.md` has the count."""
        values = self.model_dump(mode="json")
        if any(values[key] != value for key, value in FAST.items()):
            return []
        return [
            "The fast preset is not AutoAttack: of 275 images that the standard attacks broke on the calibration "
            "classifiers it missed none (docs/validation.md)."
        ]


class ComputeConfig(Section):
    """Where and how fast a run is computed. No key is part of the run ID."""

    executor: Annotated[str, EXECUTORS] = "ray"
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
