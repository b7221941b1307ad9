"""The configuration: one YAML file, read into frozen models and validated once, before anything expensive starts."""

import difflib
import functools
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PrivateAttr,
    Tag,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from .config_file import read_yaml, read_yaml_file, shortened
from .errors import ConfigError, redacted
from .register import ATTACKS, CLAMPS, CRITERIA, EXECUTORS, NORMS, STAGES, Register, load_extensions
from .threat import ThreatModel, check_norm
from .uris import beside, code_files, dataset_forms, placed
from .versions import version_named

_RUN_FOLDERS = ("acceleration", "check", "errors", "report", "studies")
_STAGE = r"[a-z][a-z0-9_]{0,31}"
_DEEPEST_KEY = 8  # parts of a key.path
_MOST_LINES = 12  # of a message; a list of ten thousand wrong values is one mistake
RESULTS_VERSION = 3  # part of every fingerprint: raised when the same configuration would give other rows


def read_fraction(value: object) -> object:
    """Read "8/255" or "0.5/255" as a number; anything else is left to the type check."""
    if isinstance(value, str) and value.count("/") == 1:
        above, _, below = value.partition("/")
        try:
            read = float(above) / float(below)
        except (ValueError, ArithmeticError):
            return value
        return read if math.isfinite(read) else value
    return value


def _holds_truth_value(value: object) -> bool:
    """Whether `value` is true or false, or a list with one in it; Python would take them for 1 and 0."""
    return isinstance(value, bool) or (isinstance(value, list | tuple) and any(map(_holds_truth_value, value)))


Positive = Annotated[int, Field(gt=0, le=10_000_000)]
Repeats = Annotated[int, Field(ge=0, le=1000)]
Width = Annotated[int, Field(ge=2, le=1_000_000)]
Finite = Annotated[float, Field(ge=-1e9, le=1e9)]


class Section(BaseModel):
    """Keys of the configuration: frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, str_max_length=4096)

    @field_validator("*", mode="before")
    @classmethod
    def _plain(cls, value: object, info: ValidationInfo) -> object:
        """true and false only where they belong, and text that can be printed."""
        takes = cls.model_fields[str(info.field_name)].annotation
        if takes is not bool and _holds_truth_value(value):
            raise ValueError("takes no true or false; text such as yes, no, on and off needs quotes in YAML")
        if isinstance(value, str) and not value.isprintable():
            raise ValueError("holds characters that cannot be printed")
        return value

    def with_changes(self, **changes: Any) -> Self:
        """The same section with some keys changed, checked as the file is.

        Raises:
            ConfigError: for a value that the file could not have either.
        """
        return _validated(type(self), {**{key: getattr(self, key) for key in type(self).model_fields}, **changes})


class Registered:
    """Text that must be a name in a register: `Annotated[str, Registered(CLAMPS)]`; the schema lists the names."""

    def __init__(self, register: Register[Any]) -> None:
        self.register = register

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.register.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), "enum": list(self.register.names())}


class DataConfig(Section):
    """Which images: a dataset URI and, if set, its first `n` images."""

    uri: str = Field(description=", ".join(dataset_forms()))
    n: int | None = Field(default=None, gt=0, le=10**9, description="use the first n images; all by default")
    class_names: tuple[str, ...] = Field(
        default=(),
        description="names of the classes 0, 1, ... for the report; those of CIFAR, ImageNet and folders are known",
    )


class ThreatConfig(Section):
    """The threat model, as `ThreatModel`."""

    norm: Annotated[str, Registered(NORMS)] = Field(default="Linf", description="norm of the perturbation")
    eps: Annotated[float, BeforeValidator(read_fraction)] = Field(
        description="radius in [0, 1] pixels, e.g. 8/255; or several"
    )

    @model_validator(mode="after")
    def _check(self) -> "ThreatConfig":
        self.threat_model()
        return self

    def threat_model(self) -> ThreatModel:
        return ThreatModel(self.norm, self.eps)


class AttackConfig(Section):
    """MMAA on the LayerNormed robust classifier."""

    method: Literal["apgd", "square"] = Field(
        default="apgd", description="apgd: along rob's gradients; square: by queries alone, for a rob without gradients"
    )
    n_iter: Positive = Field(default=100, description="APGD iterations, of APGD-CE and of each target of APGD-T")
    n_target_classes: Positive = Field(default=9, description="targets of APGD-T; capped to the classes less one")
    stop_when_broken: bool = Field(default=True, description="false: attack to the end, for studies of confidence")
    border_restarts: Repeats = Field(default=2, description="repeats for images that survive by a hair; 0: the paper")
    n_queries: Positive = Field(default=5000, description="of method square, an image")


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
        if self.spacing == "log":
            low, high = math.log(self.min), math.log(self.max)
            inner = [math.exp(low + (high - low) * i / (self.count - 1)) for i in range(1, self.count - 1)]
        else:
            inner = [self.min + (self.max - self.min) * i / (self.count - 1) for i in range(1, self.count - 1)]
        return (self.min, *inner, self.max)


def _some(grid: "Grid") -> "Grid":
    if not grid_values(grid):
        raise ValueError("the list of candidates is empty")
    return grid


def _grid_form(value: object) -> str:
    return "range" if isinstance(value, Mapping | RangeConfig) else "list"


Grid = Annotated[
    Annotated[RangeConfig, Tag("range")] | Annotated[tuple[Finite, ...], Field(max_length=_MOST_OF_ONE), Tag("list")],
    Discriminator(_grid_form),
    AfterValidator(_some),
]
_GRID_FORMS = {"range", "list"}


def grid_values(grid: Grid) -> tuple[float, ...]:
    """The candidate values of a range or of an explicit list."""
    return grid.values() if isinstance(grid, RangeConfig) else grid


def _positive(grid: Grid) -> Grid:
    if min(grid_values(grid)) <= 0:
        raise ValueError(f"holds {min(grid_values(grid)):g}; every candidate must be positive")
    return grid


Beta = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, le=1)]
ClampName = Annotated[str, Registered(CLAMPS)]
CriterionName = Annotated[str, Registered(CRITERIA)]
AttackName = Annotated[str, Registered(ATTACKS)]
ExecutorName = Annotated[str, Registered(EXECUTORS)]


_WIDENINGS = 3  # from 8 values an axis to 20: 16 times the candidates, a minute at K = 1,000 and 5,000 images
# Keys that earlier releases wrote into every run.yaml: their defaults are read, and stay in the run id.
_GONE_FROM_SEARCH = {"sampler": "grid", "n_trials": 64}


class SearchConfig(Section):
    """Algorithm 1 over the cached logits."""

    criterion: CriterionName = Field(
        default="exact", description="exact: signed margins and exact clean accuracy; paper: Algorithm 1 to the letter"
    )
    clamp: ClampName = Field(default="gelu", description="Clamp of the logit transformation")
    clamps: tuple[ClampName, ...] = Field(default=(), description="clamps to try beside `clamp`, which ties prefer")
    ln_k: Width | None = Field(
        default=None, description="LayerNorm over the top ln_k logits, also under attack; 250 where K > 250"
    )
    ln_ks: tuple[Width, ...] = Field(
        default=(), description="LayerNorm widths to try beside `ln_k`, on the logits that were attacked under `ln_k`"
    )
    scales: Annotated[Grid, AfterValidator(_positive)] = Field(
        default=RangeConfig(min=0.05, max=5, spacing="log"), description="candidates of s: a range or a list"
    )
    powers: Annotated[Grid, AfterValidator(_positive)] = Field(
        default=RangeConfig(min=1, max=4), description="candidates of p: a range or a list"
    )
    biases: Grid = Field(default=RangeConfig(min=-2.5, max=0), description="candidates of c: a range or a list")
    betas: tuple[Beta, ...] = Field(
        default=(1.0, 0.99, 0.985, 0.98, 0.97, 0.96, 0.95, 0.93, 0.9, 0.85, 0.8, 0.7, 0.5),
        min_length=1,
        max_length=1000,
        description="shares of rob's attacked images to keep; each gets its parameters and predictions",
    )
    beta: Beta = Field(default=0.985, description="the beta whose parameters are deployed and attacked")
    keep: Beta | None = Field(
        default=None, exclude=True, description="another word for `beta`: the share of rob's robust images to keep"
    )
    robust: Share | None = Field(
        default=None, description="in place of `beta`: the measured robust accuracy to reach, as a share of all images"
    )
    clean: Share | None = Field(
        default=None, description="in place of `beta`: the least clean accuracy; the choice that keeps most is deployed"
    )
    sample: Positive | Literal["auto"] = Field(
        default="auto",
        description="images that the search reads, drawn at random where the run has more; auto: 5 million logits of "
        "one classifier (5,000 images at 1,000 classes), and at most 50,000 images",
    )
    rounds: Repeats = Field(
        default=8,
        description="rounds, at most, of attacking the choice and choosing again with what was found, until the "
        "measured share reaches `beta`; 0: the paper",
    )
    measure: tuple[Beta, ...] | Literal["all"] = Field(
        default=(), description="betas, beside `beta`, whose choices the rounds attack as well; all: every one"
    )
    surrogate_beta: Beta | None = Field(default=None, description="beta of alpha_d; `beta` by default")
    refine: Repeats = Field(
        default=0, description="rounds, at most, of a finer grid around the best candidate at `beta`"
    )
    widen: Repeats | None = Field(
        default=None,
        description="times, at most, that the grid grows beyond an edge on which the best candidate at `beta` lies, "
        "within scales 0.001 to 1000, powers 0.25 to 16, biases -4 to 4; by default 3, and 0 where scales, powers or "
        "biases are given",
    )

    @model_validator(mode="before")
    @classmethod
    def _one_target(cls, content: Any) -> Any:
        """`keep` becomes `beta`; two targets, and values of keys that are gone, are refused."""
        if not isinstance(content, Mapping):
            return content
        for name, default in _GONE_FROM_SEARCH.items():
            if content.get(name, default) != default:
                raise ValueError(
                    f"{name} is gone: a grid takes seconds, so none is sampled any more. Do leave search.sampler and "
                    "search.n_trials out; clamps, ln_ks and refine try more than one grid"
                )
        content = {name: value for name, value in content.items() if name not in _GONE_FROM_SEARCH}
        given = [name for name in ("beta", "keep", "robust", "clean") if content.get(name) is not None]
        # A resolved configuration names the default beta beside its target.
        targets = [name for name in given if name != "beta" or content[name] != cls.model_fields["beta"].default]
        if len(targets) > 1:
            values = ", ".join(f"{name}: {shortened(content[name])}" for name in targets)
            raise ValueError(f"{values} are {len(targets)} targets; a search has one of beta, keep, robust and clean")
        if content.get("widen") is None:  # a grid that is given, also one of a released run.yaml, stays as it is
            content["widen"] = 0 if {"scales", "powers", "biases"} & content.keys() else _WIDENINGS
        return {**content, "beta": content["keep"]} if "keep" in targets else content

    @model_validator(mode="after")
    def _check(self) -> "SearchConfig":
        if (self.robust or self.clean) and not CRITERIA.get(self.criterion).inequality:
            raise ValueError(f"criterion {self.criterion!r} fixes the cutoff by beta: robust and clean need exact")
        together = math.prod(len(grid_values(grid)) for grid in (self.scales, self.powers, self.biases))
        if together > _MOST_TOGETHER:
            raise ValueError(
                f"scales, powers and biases make {together:,} candidates; at most {_MOST_TOGETHER:,} are possible"
            )
        return self

    def pairs(self) -> tuple[tuple[ClampName, int | None], ...]:
        """Every clamp with every LayerNorm width, the configured ones first."""
        clamps, widths = dict.fromkeys((self.clamp, *self.clamps)), dict.fromkeys((self.ln_k, *self.ln_ks))
        return tuple((clamp, ln_k) for clamp in clamps for ln_k in widths)

    def all_betas(self) -> tuple[float, ...]:
        """Every beta to answer for, the deployed one included, largest first."""
        measured = () if self.measure == "all" else self.measure
        return tuple(sorted({*self.betas, *measured, self.beta}, reverse=True))


# What `preset: fast` stands for, and of how many images that standard broke it missed how many (docs/attacks.md).
FAST: dict[str, Any] = {"attacks": ["apgd-ce", "apgd-t"], "n_iter": 100, "n_target_classes": 3, "joint_starts": 1}
_FAST_MISSED, _FAST_OF = 0, 275


class EvaluateConfig(Section):
    """The adaptive AutoAttack on the mixed classifier."""

    preset: Literal["standard", "fast"] = Field(
        default="standard",
        exclude=True,
        description="what the keys below are by default; fast, for a first look: a tenth of the passes, and no "
        "AutoAttack",
    )
    attacks: tuple[AttackName, ...] = Field(
        default=("apgd-ce", "apgd-t", "fab-t", "square"),
        min_length=1,
        description="in this order, each on what still stands",
    )
    version: Literal["standard", "plus", "rand"] | None = Field(
        default=None,
        description="in place of `attacks`: those of AutoAttack's version, with its restarts and targets",
    )
    eot: Positive | None = Field(
        default=None,
        description="for a random classifier: gradients are averaged over so many draws, and the verdict is how often "
        "the final point fools; the version rand has 20",
    )
    mode: Literal["transfer", "bypass"] = Field(
        default="transfer", description="loss and gradient of the surrogate, or loss of the mixture itself"
    )
    n_iter: Positive = Field(default=100, description="iterations of APGD and FAB")
    n_target_classes: Positive = Field(default=9, description="targets of APGD-T and FAB-T")
    n_queries: Positive = Field(default=5000, description="queries of Square an image")
    rd: float = Field(default=0.9, ge=0, le=1, description="share of rob's raw logits in the surrogate (r_d)")
    joint_starts: Repeats = Field(
        default=3, description="starts of the joint attack on images that stand by a hair; 0: the paper"
    )
    check: Literal["pyautoattack"] | None = Field(
        default=None, description="a second opinion: this package, unmodified, attacks the images that still stand"
    )
    check_n: Positive | None = Field(
        default=None, description="of the second opinion: how many of them, spread evenly; all by default"
    )
    until: Annotated[float, Field(gt=0, le=50)] | None = Field(
        default=None,
        description="for screening: partitions go in random order, and it is enough once robust accuracy is known to "
        "so many points up or down, with 95 % confidence over all looks; by default every image is evaluated",
    )

    @model_validator(mode="before")
    @classmethod
    def _of_preset(cls, content: Any) -> Any:
        if not isinstance(content, Mapping):
            return content
        content = with_joint_starts(content)
        if content.get("version") is not None:
            version = version_named(str(content["version"]))
            named = version.attacks
            if tuple(content.get("attacks", named)) != named or content.get("preset") == "fast":
                other = "preset: fast" if content.get("preset") == "fast" else "attacks"
                raise ValueError(f"version: {content['version']} says which attacks run; leave it or {other} out")
            content = {"eot": version.eot, **content, "attacks": named}
        return {**FAST, **content} if content.get("preset") == "fast" else content

    @field_validator("attacks")
    @classmethod
    def _once(cls, attacks: tuple[str, ...]) -> tuple[str, ...]:
        twice = next((name for i, name in enumerate(attacks) if name in attacks[:i]), None)
        if twice is not None:
            raise ValueError(f"{twice!r} is there twice; each attack has one column of the results")
        return attacks

    @model_validator(mode="after")
    def _runs(self) -> "EvaluateConfig":
        if "joint" in self.attacks and not self.joint_starts:
            raise ValueError("joint_starts=0 leaves the attack 'joint' out; give it at least 1 or do not name it")
        return self


def with_joint_starts(evaluate: Mapping[str, Any]) -> Mapping[str, Any]:
    """The evaluate section with `joint_starts` under that name; up to release 0.2 it was `border_restarts`."""
    if "border_restarts" not in evaluate or "joint_starts" in evaluate:
        return evaluate
    return {("joint_starts" if key == "border_restarts" else key): value for key, value in evaluate.items()}


def fast_notes(evaluate: Mapping[str, Any]) -> list[str]:
    """What to say beside results of the fast preset's settings, as run.yaml has them; nothing for others."""
    evaluate = with_joint_starts(evaluate)
    if any(evaluate.get(key) != value for key, value in FAST.items()):
        return []
    return [
        f"The fast preset is not AutoAttack: of {_FAST_OF} images that the standard attacks broke on the calibration "
        f"classifiers it missed {_FAST_MISSED or 'none'} (docs/attacks.md)."
    ]


class ComputeConfig(Section):
    """Where and how fast; nothing in here moves a result."""

    executor: ExecutorName = Field(
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
    max_tries: Positive = Field(default=3, description="tries of a partition before it is set aside")
    start_seconds: float = Field(
        default=1800, gt=0, description="a stage without any ready worker for so long ends and says what was asked for"
    )
    watchdog: float = Field(
        default=10,
        ge=0,
        le=10_000,
        description="a piece that takes so many times what the slowest finished one lets expect, at least 300 s, is "
        "computed a second time elsewhere, and is ended as hung after twice that time; 0: waited for",
    )


class RunConfig(Section):
    """Everything about one run; the keys of the YAML file."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="begins the run id")
    data: DataConfig
    std: str | None = Field(
        default=None,
        description="URI of the standard classifier: accurate, robust or not; a black box will do; "
        "without one, AutoAttack on rob alone",
    )
    rob: str = Field(description="URI of the robust classifier")
    names: Mapping[Literal["std", "rob", "mixed"], str] = Field(
        default={}, description="what the report calls the classifiers, {rob: WRN-70-16} for instance"
    )
    threat: ThreatConfig
    seed: int = Field(default=0, ge=0, lt=2**63, description="of every random start")
    partition_size: Positive = Field(default=100, description="images a partition")
    precision: Literal["fp32", "tf32", "bf16", "auto"] = Field(
        default="auto",
        description="of the attacks' passes; auto: the fastest of each network, found once a run and type of device; "
        "what is stored is computed in float32 in any case",
    )
    preset: Literal["standard", "fast"] = Field(
        default="standard",
        exclude=True,
        description="what the attacks spend by default; fast, for a first look: `evaluate.preset`, and as many "
        "iterations and targets in `attack`",
    )
    attack: AttackConfig = AttackConfig()
    search: SearchConfig = SearchConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    bpda: bool = Field(
        default=True,
        description="where a module of a classifier cuts the gradient, attack and evaluate attack once more with the "
        "identity as its backward pass (docs/threats.md)",
    )
    extensions: tuple[str, ...] = Field(
        default=(), description="Python files of yours that register attacks, losses, clamps, data sets and so on"
    )
    storage: str = Field(default="runs", description="a folder or any fsspec URI, s3://bucket/prefix for instance")
    compute: ComputeConfig = ComputeConfig()

    _written: dict[str, str] = PrivateAttr(default_factory=dict)  # a value with its paths placed -> as written

    _folder: str = PrivateAttr(default="")

    def with_changes(self, **changes: Any) -> Self:
        """As of every section; what is written stays known."""
        changed = super().with_changes(**changes)
        changed._written, changed._folder = self._written, self._folder
        return changed

    @property
    def folder(self) -> str:
        """Where the file of this configuration lay; the working folder for one that comes from no file."""
        return self._folder or str(Path.cwd())

    def code_files(self) -> dict[str, str]:
        """The user's Python files that URIs and `extensions` name: as written -> where they lie."""
        uris = [uri for uri in (self.std, self.rob) if uri is not None]
        found = {written: file for uri in uris
                 for written, file in zip(code_files(self.written(uri)), code_files(uri), strict=True)}  # fmt: skip
        extensions = {self.written(file): file for file in self.extensions}
        return found | {file.removeprefix("py:"): there.removeprefix("py:") for file, there in extensions.items()}

    def written(self, value: str) -> str:
        """A URI or path of this configuration as it was written."""
        return self._written.get(value, value)

    def as_written(self, **options: Any) -> dict[str, Any]:
        """All values as plain ones, paths as they were written; `options` are those of `model_dump`."""
        values = self.model_dump(mode="json", **options)
        values["data"]["uri"] = self.written(self.data.uri)
        values |= {role: uri and self.written(uri) for role in ("std", "rob") for uri in [values[role]]}
        if "extensions" in values:
            values["extensions"] = [self.written(file) for file in self.extensions]
        return values

    @model_validator(mode="before")
    @classmethod
    def _of_preset(cls, content: Any) -> Any:
        if not isinstance(content, Mapping) or content.get("preset") != "fast":
            return content
        defaults = {
            "attack": {key: FAST[key] for key in ("n_iter", "n_target_classes")},
            "evaluate": {"preset": "fast"},
        }
        given = {key: content.get(key, {}) for key in defaults}
        changed = {key: {**defaults[key], **given[key]} for key in defaults if isinstance(given[key], Mapping)}
        return {**content, **changed}

    @field_validator("storage")
    @classmethod
    def _without_secrets(cls, storage: str) -> str:
        protocol, separator, place = storage.partition("://")
        if redacted(storage) != storage or (separator and "?" in place):
            raise ValueError("credentials and queries do not belong in it: set them in the environment or a profile")
        if not storage.strip() or (separator and not place.strip("/") and protocol != "memory"):
            raise ValueError("names no place; give a folder or s3://bucket/prefix")
        return storage

    @model_validator(mode="after")
    def _mixture_to_attack(self) -> "RunConfig":
        entries = ATTACKS.entries()
        for attack in self.evaluate.attacks if self.std is None else ():
            if entries[attack].facts.get("mixtures_only"):
                raise ValueError(
                    f"evaluate.attacks: {attack!r} attacks a mixture, and this run has no std; leave it out"
                )
        return self

    @model_validator(mode="after")
    def _attacks_in_the_norm(self) -> "RunConfig":
        method = ["square-margin"] if self.attack.method == "square" else []
        check_norm([*method, *self.evaluate.attacks], self.threat.norm)
        return self

    def section(self, stage: str) -> Section | None:
        """The keys of a stage; None where the run is not asked for it."""
        keys: Section | None = getattr(self, stage, None)
        return keys

    @classmethod
    def added_stages(cls) -> tuple[str, ...]:
        """Stages whose key stands in this configuration beside the ones that every configuration has."""
        return tuple(name for name in cls.model_fields if name not in RunConfig.model_fields)

    @property
    def required_std(self) -> str:
        """URI of std, for what needs two classifiers.

        Raises:
            ConfigError: where the run has none.
        """
        if self.std is None:
            raise ConfigError(
                f"{self.name}: std is missing, and a mixture needs std and rob. With rob alone there are: mixednuts "
                "attack, evaluate, report and run"
            )
        return self.std

    def determinants(self) -> dict[str, Any]:
        """What the rows depend on: everything but where they are stored and computed; of extensions, their content.

        The second opinion and stages with a key of their own have fingerprints of their own, and where an evaluation
        ends does not move a row.
        """
        left_out: dict[str, Any] = {
            **dict.fromkeys(self.added_stages(), True),
            "storage": True,
            "compute": True,
            "names": True,
            "data": {"class_names"},
            "extensions": True,
            "evaluate": {"check", "check_n", "until"},
        }
        values = self.as_written(exclude=left_out)
        values["search"] |= _GONE_FROM_SEARCH
        if values["bpda"]:  # as in releases without it; what is cut is part of the inputs' checksums
            del values["bpda"]
        for key in ("version", "eot"):  # as in releases without them
            if values["evaluate"][key] is None:
                del values["evaluate"][key]
        if not values["search"]["widen"]:  # as in releases that knew no widening
            del values["search"]["widen"]
        values["evaluate"]["border_restarts"] = values["evaluate"].pop("joint_starts")  # the name in older run ids
        contents = sorted(load_extensions(self.extensions).values())
        return {"version": RESULTS_VERSION, **values, **({"extensions": contents} if contents else {})}

    def attack_determinants(self) -> dict[str, Any]:
        """What the attack stage's rows depend on: runs that agree here share them."""
        keys = ("version", "data", "std", "rob", "threat", "seed", "partition_size", "precision", "attack")
        values = self.determinants()
        return {**{key: values[key] for key in (*keys, "extensions") if key in values}, "ln_k": self.search.ln_k}

    def run_id(self) -> str:
        """The name and 8 hex digits of what determines the results."""
        return f"{self.name}-{digest(self.determinants())}"


_AnySection = TypeVar("_AnySection", bound=Section)


def section_in(annotation: Any) -> type[Section] | None:
    """The section that a key holds, where it holds one, required or not."""
    kinds = (annotation, *get_args(annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)


def config_with_stages(names: Iterable[str]) -> type[RunConfig]:
    """The configuration with a key for each of these registered stages; None, the default, does not ask for it."""
    return _with_keys(tuple((name, STAGES.get(name).Keys, STAGES.entries()[name].describes) for name in sorted(names)))


@functools.cache
def _with_keys(stages: tuple[tuple[str, type[Section], str], ...]) -> type[RunConfig]:
    added: dict[str, Any] = {
        name: (keys | None, Field(default=None, description=f"a stage of its own: {describes}"))
        for name, keys, describes in stages
    }
    return create_model("RunConfig", __base__=RunConfig, **added) if added else RunConfig


def stages_with_keys() -> list[str]:
    """Registered stages that a configuration asks for by a key of their own.

    Raises:
        ConfigError: for an extension's stage with the name of another key, or of a folder that every run has.
    """
    own = [name for name, entry in STAGES.entries().items() if entry.home.startswith(f"{__package__}.")]
    for name in STAGES.names():
        if name not in own and (name in {*RunConfig.model_fields, *_RUN_FOLDERS} or not re.fullmatch(_STAGE, name)):
            raise ConfigError(
                f"a stage cannot be named {name!r}: its name is its key in the configuration and its folder in the "
                "run. Give it lower-case letters, digits and underscores, and not the name of another key, "
                f"{', '.join(_RUN_FOLDERS)}"
            )
    return [name for name in STAGES.names() if name not in RunConfig.model_fields]


def digest(value: Mapping[str, Any]) -> str:
    """8 hex digits of the sha256 of `value` as canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read the YAML file at `path`, apply `key.path=value` overrides (values are YAML), and validate.

    Relative paths in URIs and `extensions` are relative to the file's folder, where they exist there, else to the
    working folder; `storage` to the working folder.

    Raises:
        ConfigError: for a missing or unreadable file, an unknown key, a wrong type or value; it names the key, the
            value and what is valid, in one line each.
    """
    content = read_yaml_file(Path(path))
    for override in overrides:
        _apply(content, override)
    folder = Path(path).absolute().parent
    find = None if folder == Path.cwd() else beside(folder)
    return parse_config(content, str(path), folder=str(folder), find=find)


def parse_config(
    content: Mapping[str, Any],
    source: str = "configuration",
    *,
    folder: str = "",
    find: Callable[[str], str] | None = None,
) -> RunConfig:
    """Validate a mapping as a RunConfig, after importing the extensions that it names; errors as in `load_config`.

    Args:
        folder: where the configuration's file lay; the working folder by default.
        find: from a path as written to where it lies; relative to the working folder by default.
    """
    written: dict[str, str] = {}
    content = _with_places(content, find, written) if find else content
    extensions = content.get("extensions")
    if extensions is not None and _are_texts(extensions):
        load_extensions(extensions)
    content = _with_places(content, find, written) if find else content  # of URIs whose forms the extensions register
    content = _with_radii(content, source)
    asked = [name for name in stages_with_keys() if name in content]
    content = {key: {} if key in asked and value is True else value for key, value in content.items()}
    config = _validated(config_with_stages(asked), content, f"{source}: ")
    config._written, config._folder = written, folder
    return config


def _are_texts(values: Any) -> bool:
    return isinstance(values, list | tuple) and all(isinstance(value, str) for value in values)


def _with_places(content: Mapping[str, Any], find: Callable[[str], str], written: dict[str, str]) -> dict[str, Any]:
    """The content with its paths where `find` says that they lie; notes in `written` what stood there."""

    def place(value: Any, where: Callable[[str], str]) -> Any:
        if not isinstance(value, str) or (there := where(value)) == value:
            return value
        written[there] = written.get(value, value)
        return there

    changed = dict(content)
    for role in {"std", "rob"} & content.keys():
        changed[role] = place(content[role], lambda uri: placed(uri, find))
    if isinstance(content.get("data"), Mapping) and "uri" in content["data"]:
        uri = place(content["data"]["uri"], lambda uri: placed(uri, find))
        changed["data"] = {**content["data"], "uri": uri}
    files = content.get("extensions")
    if files is not None and _are_texts(files):
        changed["extensions"] = [place(file, lambda file: find(file.removeprefix("py:"))) for file in files]
    return changed


def _with_radii(content: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """A list under `threat.eps` is the largest radius, at which the search asks for beta, and `radii: {eps: list}`."""
    threat = content.get("threat")
    radii = threat.get("eps") if isinstance(threat, Mapping) else None
    if not isinstance(threat, Mapping) or not isinstance(radii, list | tuple) or not radii:
        return content
    if content.get("radii"):
        raise ConfigError(
            f"{source}: threat.eps lists radii, and so does `radii`; give one radius or leave `radii` out"
        )
    return {**content, "threat": {**threat, "eps": radii[-1]}, "radii": {"eps": list(radii)}}


def _validated(section: type[_AnySection], content: Mapping[str, Any], prefix: str = "") -> _AnySection:
    try:
        return section.model_validate(content)
    except ValidationError as error:
        lines = list(dict.fromkeys(_explain(section, dict(detail)) for detail in error.errors(include_url=False)))
        more = [f"and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
        raise ConfigError("\n".join(f"{prefix}{line}" for line in (*lines[:_MOST_LINES], *more))) from error


def _apply(content: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts) or len(parts) > _DEEPEST_KEY:
        raise ConfigError(f"--set {shortened(override)} is not of the form key.path=value, e.g. --set search.beta=0.97")
    *parents, last = parts
    node = content
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {shortened(override)}: {parent!r} holds the value {shortened(child)}, not keys")
        node = child
    node[last] = read_yaml(text, f"--set {shortened(override)}")


def _explain(section: type[BaseModel], detail: dict[str, Any]) -> str:
    """One line an error: the key, what is wrong, the value, the valid ones."""
    location = [part for part in detail["loc"] if part not in _GRID_FORMS]
    key = ".".join(str(part) if re.fullmatch(r"\w{1,40}", str(part)) else shortened(part, 40) for part in location)
    if detail["type"] == "extra_forbidden":
        valid = _valid_keys(section, location[:-1])
        close = difflib.get_close_matches(str(location[-1])[:80], valid, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        return f"{key}: unknown key (value {shortened(detail['input'])}).{hint} Valid keys here: {', '.join(valid)}"
    if detail["type"] == "missing":
        return f"{key}: this key is required and missing"
    message = str(detail["msg"]).removeprefix("Value error, ")
    return f"{key}: {message[:1].lower()}{message[1:]} (value {shortened(detail['input'])})"


def _valid_keys(section: type[BaseModel], location: Sequence[Any]) -> list[str]:
    """The keys of the section at `location`."""
    model = section
    for part in location:
        found = section_in(model.model_fields[part].annotation) if part in model.model_fields else None
        model = found or RangeConfig
    return sorted({*model.model_fields, *(stages_with_keys() if issubclass(model, RunConfig) else ())})
