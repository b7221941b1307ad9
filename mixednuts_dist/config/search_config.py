"""The keys of `search`: the grid of candidates, and the criterion and target of the selection."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from .register import CLAMPS, CRITERIA
from .section import Positive, Registered, Repeats, Section

Finite = Annotated[float, Field(ge=-1e9, le=1e9)]
_MOST_OF_ONE = 1000  # candidate values of s, p or c
_MOST_TOGETHER = 1_000_000  # candidates (s, p, c); the paper has 512


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


Beta = Annotated[float, Field(ge=0, le=1)]
# Within the limits there are 22 scales, 37 powers and 23 biases, 37 times the default candidates. On the digits and on
# CIFAR images, four extensions were enough and resulted in 7,000 to 10,000 candidates.
_WIDENINGS = 16


class SearchConfig(Section):
    """Algorithm 1 over the stored logits."""

    criterion: Annotated[str, Registered(CRITERIA)] = "exact"
    """`exact` constrains signed margins and maximizes clean accuracy. `paper` is Algorithm 1, and `paper-interpolated`
    is Algorithm 1 with the quantile of the reference code."""
    clamp: Annotated[str, Registered(CLAMPS)] = "gelu"
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
