"""Read the configuration, one YAML file, into frozen models, and validate it before anything expensive starts."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, create_model, field_validator, model_validator

from ..errors import ConfigError, redacted
from .config_file import apply_override, read_yaml_file
from .keys import AttackConfig, ComputeConfig, EvaluateConfig, SearchConfig, ThreatConfig
from .register import ATTACKS, STAGES, load_extensions
from .section import Positive, Section
from .threat import check_norm
from .uris import ClassifierSource, DatasetSource, Find, Located, Source, beside
from .versions import FAST

RUNS = "runs"  # the folder of the runs of one name
RUN = "run.yaml"  # describes a run in its folder
_RUN_FOLDERS = ("acceleration", "check", "errors", "report", RUNS, "studies")
_STAGE = r"[a-z][a-z0-9_]{0,31}"
_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "fast": {
        "attack": {key: FAST[key] for key in ("n_iter", "n_target_classes")},
        "evaluate": FAST,
    },
    "paper": {
        "attack": {"border_restarts": 0},
        "search": {"criterion": "paper-interpolated", "rounds": 0},
        "evaluate": {"joint_starts": 0, "warm_start": False},
        "precision": "fp32",
    },
}
RESULTS_VERSION = 5  # part of every content hash; it rises if rows or their format change


class DataConfig(Section):
    """Which images: a dataset URI and, if set, its first `n` images."""

    uri: DatasetSource = Field(description=", ".join(DatasetSource.forms()))
    n: int | None = Field(default=None, gt=0, le=10**9)
    """Use only the first `n` images. By default, all images."""
    class_names: tuple[str, ...] = ()
    """Names of the classes 0, 1, ... for the report. The names of CIFAR, ImageNet, and folders are known."""


class RunConfig(Section):
    """One run: the keys of the YAML file."""

    name: str = Field(
        pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
    )  # followed by the hash, it is a valid folder name on any file system
    """Name of the run and first part of its run ID."""
    data: DataConfig
    std: ClassifierSource | None = None
    """URI of the standard (accurate) classifier, which may be a black box. Without it, the run is AutoAttack on the
    robust classifier alone."""
    rob: ClassifierSource
    """URI of the robust classifier. A black box needs `attack.method: square` and is evaluated with Square alone."""
    names: Mapping[Literal["std", "rob", "mixed"], str] = Field(default={})
    """Names that the report uses for the classifiers, for example {rob: WRN-70-16}."""
    threat: ThreatConfig
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of all random numbers."""
    partition_size: Positive | None = None
    """Images per partition, the unit of work. By default, 32, or 16 for up to 512 images."""
    precision: Literal["fp32", "tf32", "bf16", "auto"] = "auto"
    """Precision in which attacks compute gradients. `auto` selects the fastest one for each network, once per run and
    device type. Stored results are always computed in float32."""
    preset: Literal["standard", "fast", "paper"] = Field(default="standard", exclude=True)
    """Set of default values for other keys. `fast`, for a first look, sets `evaluate.preset: fast` and the same
    iterations and targets in `attack`. `paper` restores the algorithm and the evaluation of the paper: its criterion
    and quantile, float32, and no refinement rounds, extra restarts, joint attack, or warm start."""
    attack: AttackConfig = AttackConfig()
    search: SearchConfig = SearchConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    extensions: tuple[Located, ...] = ()
    """Your Python files that register attacks, losses, clamps, datasets, and so on."""
    storage: str = "runs"
    """Folder or fsspec URI for results, for example s3://bucket/prefix."""
    compute: ComputeConfig = ComputeConfig()

    _folder: str = ""
    _trusted: bool = True

    def with_changes(self, **changes: Any) -> Self:
        """Return the configuration with some keys changed."""
        changed = super().with_changes(**changes)
        changed._folder, changed._trusted = self._folder, self._trusted
        return changed

    @property
    def classifiers(self) -> dict[str, ClassifierSource]:
        """The base classifiers: "std" if the run has one, and "rob"."""
        return {"rob": self.rob} if self.std is None else {"std": self.std, "rob": self.rob}

    @property
    def sources(self) -> dict[str, Source]:
        """The dataset and the base classifiers, by key: "data.uri", "std" if the run has one, and "rob"."""
        return {"data.uri": self.data.uri, **self.classifiers}

    @property
    def runs_code(self) -> bool:
        """Whether a base classifier runs Python code outside the package, or uses a service."""
        return any(source.runs_code for source in self.classifiers.values())

    def check_sources(self) -> None:
        """Check the forms and files of the dataset and the base classifiers. Raises as `Source.check`."""
        for key, source in self.sources.items():
            source.check(key)

    @property
    def trusted(self) -> bool:
        """Whether the user wrote or trusts this configuration. One from the folder of a run is untrusted at first."""
        return self._trusted

    def outside_of_stages(self) -> dict[str, str]:
        """Return the stages that name files, and their keys; even reading a run's files needs these files."""
        reading = [name for name in self.added_stages() if STAGES.entries()[name].facts.get("names_files")]
        return {name: str(keys) for name in reading if (keys := self.section(name)) is not None}

    @property
    def folder(self) -> str:
        """The folder of this configuration's file; without a file, the working folder."""
        return self._folder or str(Path.cwd())

    def code_files(self) -> dict[str, str]:
        """Return the Python files that URIs and `extensions` name: path as written -> path."""
        sources = [source for source in self.classifiers.values() if source.code_file]
        found = {ClassifierSource(source.written).code_file: source.code_file for source in sources}
        return found | {file.written: file for file in self.extensions}

    @model_validator(mode="before")
    @classmethod
    def _set_defaults(cls, content: dict[str, Any]) -> dict[str, Any]:
        """Add the defaults of the preset, and of a black box, which only Square attacks."""
        is_black_box = ClassifierSource(str(content.get("rob"))).is_black_box
        black_box = {"evaluate": {"attacks": ["square"]}} if is_black_box else {}
        for key, value in (*_PRESETS.get(str(content.get("preset")), {}).items(), *black_box.items()):
            given = content.get(key, value)
            both = isinstance(value, Mapping) and isinstance(given, Mapping)
            content = {**content, key: {**value, **given} if both else given}
        return content

    @field_validator("storage")
    @classmethod
    def _without_secrets(cls, storage: str) -> str:
        protocol, separator, place = storage.partition("://")
        if redacted(storage) != storage or (separator and "?" in place):
            raise ValueError("credentials and queries do not belong in it: set them in the environment or a profile")
        if not storage.strip() or (separator and not place.strip("/") and protocol != "memory"):
            raise ValueError("does not name a folder or bucket; give a folder or s3://bucket/prefix")
        return storage

    @model_validator(mode="after")
    def _attacks_fit(self) -> "RunConfig":
        if self.rob.is_black_box and self.attack.method != "square":
            raise ValueError(
                f"rob={self.rob.written!r} is a black box without gradients. Set attack.method: square, or give "
                "a network"
            )
        if self.evaluate.eot is not None and self.section("certify") is not None:
            raise ValueError(
                f"certify: evaluate.eot={self.evaluate.eot} admits a random classifier, whose votes cannot be "
                "reproduced. Certify a run without eot"
            )
        facts = {name: ATTACKS.entries()[name].facts for name in self.evaluate.attacks}
        for name, of_attack in facts.items():
            if self.std is None and of_attack.get("mixtures_only"):
                raise ValueError(
                    f"evaluate.attacks: {name!r} attacks mixed classifiers, and this run has no `std`; leave it out"
                )
            if self.rob.is_black_box and of_attack.get("gradients", True):
                raise ValueError(f"evaluate.attacks: {name!r} needs the gradients of `rob`, which is a black box")
        check_norm([*["square-margin"] * (self.attack.method == "square"), *facts], self.threat.norm)
        return self

    @classmethod
    def valid_keys(cls) -> list[str]:
        """Return the valid keys, including those of all stages."""
        return sorted({*cls.model_fields, *stages_with_keys()})

    def section(self, stage: str) -> Section | None:
        """Return the keys of a stage, and None if the configuration does not request the stage."""
        keys: Section | None = getattr(self, stage, None)
        return keys

    @classmethod
    def added_stages(cls) -> tuple[str, ...]:
        """Return the stages that this configuration requests in addition to those of every run."""
        return tuple(name for name in cls.model_fields if name not in RunConfig.model_fields)

    @property
    def required_std(self) -> ClassifierSource:
        """The standard classifier; ConfigError if the run has none."""
        if self.std is None:
            raise ConfigError(
                f"{self.name}: `std` is missing, and a mixed classifier needs `std` and `rob`. With `rob` alone, use "
                "mixednuts attack, evaluate, report or run"
            )
        return self.std

    def determinants(self) -> dict[str, Any]:
        """Return what determines the results: the content of extensions, and all keys except those that change no row.

        The content hashes of the cross-check and of the optional stages include their own keys.
        """
        left_out: dict[str, Any] = {
            **dict.fromkeys(self.added_stages(), True),
            "storage": True,
            "compute": True,
            "names": True,
            "data": {"class_names"},
            "extensions": True,
            "evaluate": {"check", "check_n"},
            "search": {"tune"} if self.search.first else {"tune", "first"},
        }
        values = self.model_dump(mode="json", exclude=left_out)
        contents = sorted(load_extensions(self.extensions).values())
        return {"version": RESULTS_VERSION, **values, **({"extensions": contents} if contents else {})}

    def attack_determinants(self) -> dict[str, Any]:
        """Return everything that determines the rows of the attack stage. Runs with equal values share these rows."""
        keys = ("version", "data", "std", "rob", "threat", "seed", "partition_size", "precision", "attack")
        values = self.determinants()
        return {**{key: values[key] for key in (*keys, "extensions") if key in values}, "ln_k": self.search.ln_k}

    def run_id(self) -> str:
        """Return the name and 8 hex digits of the hash of everything that determines the results."""
        return f"{self.name}-{digest(self.determinants())}"

    def place(self) -> str:
        """Return the path of the run's folder in its storage."""
        return f"{self.name}/{RUNS}/{self.run_id()}"


def config_with_stages(names: Iterable[str]) -> type[RunConfig]:
    """Return the configuration class with an optional key for each of these registered stages."""
    added: dict[str, Any] = {}
    for name in sorted(names):
        description = f"Optional stage: {STAGES.entries()[name].describes}"
        added[name] = (STAGES.get(name).Keys | None, Field(default=None, description=description))
    if not added:
        return RunConfig
    described = {"use_attribute_docstrings": False}  # the base class has read them, which takes time
    return create_model("RunConfig", __base__=RunConfig, __cls_kwargs__=described, **added)


def stages_with_keys() -> list[str]:
    """Return the registered stages that a configuration requests by a key.

    ConfigError if the stage of an extension has the name of another key, or of a folder that every run has.
    """
    own = [name for name, entry in STAGES.entries().items() if entry.home.startswith("mixednuts_dist.")]
    for name in STAGES.names():
        if name not in own and (name in {*RunConfig.model_fields, *_RUN_FOLDERS} or not re.fullmatch(_STAGE, name)):
            raise ConfigError(
                f"a stage cannot be named {name!r}: its name is its key in the configuration and its folder in the "
                "run. Give it lower-case letters, digits and underscores, and not the name of another key, "
                f"{', '.join(_RUN_FOLDERS)}"
            )
    return [name for name in STAGES.names() if name not in RunConfig.model_fields]


def digest(value: Mapping[str, Any]) -> str:
    """Return 8 hex digits of the sha256 of `value` as canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read the YAML file at `path`, apply `key.path=value` overrides (values are YAML), and validate.

    Paths in URIs and `extensions` are relative to the folder of the file if they exist there, and otherwise to the
    working folder. `storage` is relative to the working folder.

    Raises:
        ConfigError: for a missing or unreadable file, an unknown key, or a wrong type or value. Each mistake has one
            line with the key, the value and the valid ones.
    """
    content = read_yaml_file(Path(path))
    for override in overrides:
        apply_override(content, override)
    folder = Path(path).absolute().parent
    find = str if folder == Path.cwd() else beside(folder)
    return parse_config(content, str(path), folder=str(folder), find=find)


def parse_config(
    content: Mapping[str, Any],
    source: str = "configuration",
    *,
    folder: str = "",
    find: Find = str,
) -> RunConfig:
    """Import the extensions that a mapping names, and return the mapping as a RunConfig. Raises as `load_config`.

    Args:
        folder: folder of the file of the configuration. By default, the working folder.
        find: function from a path as written to a path that exists. By default, paths are kept as written.
    """
    extensions = content.get("extensions")
    if isinstance(extensions, list | tuple) and all(isinstance(file, str) for file in extensions):
        load_extensions(map(find, extensions))
    asked = [name for name in stages_with_keys() if name in content]
    content = {key: {} if key in asked and value is True else value for key, value in content.items()}
    config = config_with_stages(asked).checked(content, f"{source}: ", find)
    config._folder = folder
    return config
