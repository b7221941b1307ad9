"""Load the mixed classifier of a run, and save and load mixed classifiers as folders.

A run is read from `run.yaml` and `search/selected.json` alone, so a copy of its folder works too.

A saved folder holds the numbers as JSON and each base classifier as a URI, as safetensors weights, or as both. With
both, the URI names the architecture and the file holds the weights. Loading then needs no download, and no code except
this package and the libraries that the URI names.
"""

import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import nn

from ..certification.smoothed_mixture import SmoothedMixture
from ..classifiers.base_classifiers import classifier_checksum, load_classifier
from ..classifiers.factories import without_weights_argument
from ..config.run_config import RunConfig
from ..config.uris import GIVEN, ClassifierSource, needs_trust
from ..errors import ContentHashMismatch, InvalidInputError, reason_of
from ..mixing.classifier import MixedClassifier
from ..mixing.transforms import LOGIT_MAPS
from ..selection.choice import Choice
from ..stages.runs import Run, RunFile, described_run, run_of
from ..stages.search_result import read_search_result
from ..storage.records import SearchResult
from ..storage.store import Store

PARAMETERS = "mixed_classifier.json"
HUB = "hf:"
_VERSION = 2  # format version in PARAMETERS
_MAP_NAMES = {kind: name for name, kind in LOGIT_MAPS.items()}


@dataclass(frozen=True)
class DeployedRun:
    """One run at one beta, as its folder describes it, before any classifier is built."""

    stored: Run
    run_id: str
    searched: SearchResult
    chosen: Choice  # at the requested beta
    code: Mapping[str, str]  # the user's Python files: as written -> path in the run

    @property
    def is_deployed(self) -> bool:
        """Return whether this is the beta that the run attacked."""
        return self.chosen.beta == self.searched.deployed_beta

    def classifier(self) -> MixedClassifier:
        """Build the mixed classifier, with the weights and the surrogate that the run used.

        Raises:
            BaseClassifierError: if a base classifier cannot be built here.
            ContentHashMismatch: if the weights of a base classifier, or the source of its factory, have changed.
        """
        config, bases = self.stored.config, dict[str, nn.Module]()
        for role, source in config.classifiers.items():
            if source.scheme == GIVEN:
                raise InvalidInputError(
                    f"{role} of run {self.run_id} was a module that the caller passed to `run` or `mix`. Keep the "
                    "mixed classifier with save_pretrained and load it with load_pretrained"
                )
            bases[role] = load_classifier(source, role)
            expected = self.stored.inputs.checksums[role]
            _require_weights(bases[role], role, source, expected, "Restore them, or make another run")
        mixture = replace(self.chosen.mixture(), rd=config.evaluate.rd)
        return MixedClassifier.from_mixture(bases["std"], bases["rob"], mixture)


def load_run(
    uri: str, beta: float | None = None, device: str | torch.device | None = None, trust_code: bool = False
) -> MixedClassifier:
    """Load the mixed classifier that a run chose: both base classifiers and the parameters at `beta`.

    Args:
        uri: the run's folder, `<storage>/<name>/runs/<run id>`: a path or any fsspec URI.
        beta: one of the searched values; by default the deployed one.
        device: where the classifier goes; by default it stays on the CPU.
        trust_code: use the Python code and the services that the run names. Read that code first.

    Raises:
        MissingArtifact: if there is no run, or if its search has not finished.
        InvalidInputError: if beta was not searched (the valid ones are listed), if the run has no standard classifier,
            or if an untrusted run names code and `trust_code` is not given.
        ContentHashMismatch: if the weights of a base classifier are not those that the run used.
    """
    return read_run(uri, beta=beta, trust_code=trust_code).classifier().to(device)


def load_smoothed(uri: str, beta: float | None = None, *, trust_code: bool = False, **noise: Any) -> SmoothedMixture:
    """Load the smoothed mixed classifier of a run, with the noise of its certify stage.

    Args:
        uri, beta, trust_code: as in `load_run`, which also lists the errors.
        noise: `sigma`, `confidence`, `n_choose` or `rows`, which replace the values of the run.

    Raises:
        InvalidInputError: if neither the run nor `noise` has a sigma.
    """
    run = read_run(uri, beta=beta, trust_code=trust_code)
    stored = run.stored.config.section("certify")
    given = {name: getattr(stored, name) for name in ("sigma", "confidence", "n_choose") if stored} | noise
    if "sigma" not in given:
        raise InvalidInputError(
            f"run {run.run_id} began without the key certify: {{sigma: ...}}, so the noise of the smoothed classifier "
            "is unknown. Pass it, for example sigma=0.25"
        )
    return SmoothedMixture(run.classifier(), **given)


def loading_line(config: RunConfig, run: str) -> str:
    """Return the line of Python that loads the mixed classifier of a run; `run` is its folder or URI."""
    return f"load_run({json.dumps(run)}{', trust_code=True' if config.extensions or config.runs_code else ''})"


def read_run(uri: str, *, beta: float | None = None, trust_code: bool = False) -> DeployedRun:
    """Read a run's folder at `beta`, by default the deployed one, and import the run's extensions.

    Python files come from the folder of the configuration or, if they have changed or are gone, from the run's copies.

    Raises as `load_run`, except for the weights, and DamagedFile if `run.yaml` or `search/selected.json` is damaged.
    """
    run, described = open_stored(uri, trust_code)
    run_id = described.run_id
    if run.config.std is None:
        raise InvalidInputError(f"run {run_id} attacks `rob` alone; without `std` there is no mixed classifier to load")
    searched = read_search_result(run)
    wanted = searched.deployed_beta if beta is None else beta
    chosen = next((choice for choice in searched.entries if math.isclose(choice.beta, wanted, rel_tol=1e-9)), None)
    if chosen is None:
        valid = ", ".join(f"{choice.beta:g}" for choice in searched.entries)
        raise InvalidInputError(f"beta={wanted:g} was not searched in run {run_id}; these were: {valid}")
    return DeployedRun(run, run_id, searched, chosen, described.code)


def open_stored(uri: str, trust_code: bool) -> tuple[Run, RunFile]:
    """Open a run's folder and import the run's extensions; return the run and the content of `run.yaml`.

    Raises:
        InvalidInputError: if the run names Python code or a service and `trust_code` is not given.
    """
    store = Store(str(uri))
    described = described_run(store)
    config = described.config
    named = {key: config[key] for key in ("std", "rob") if ClassifierSource(config.get(key) or "").runs_code}
    if extensions := config.get("extensions"):
        named["extensions"] = ", ".join(extensions)
    if named and not trust_code:
        raise InvalidInputError(needs_trust(store.uri, named, "pass trust_code=True (--trust-code to a command)"))
    return run_of(store, described), described


@dataclass(frozen=True)
class StoredBase:
    """The data from which `load_pretrained` builds a base classifier of a saved folder."""

    uri: str | None  # the classifier or, if the folder has weights, its architecture
    weights: str | None = None  # the file in the folder
    sha256: str | None = None  # the expected `classifier_checksum`
    code: str | None = None  # the Python file in the folder that has the URI's function


def save_pretrained(
    mixed: MixedClassifier, folder: str | Path, *, std_uri: str | None = None, rob_uri: str | None = None
) -> None:
    """Write `mixed_classifier.json` and, for each base classifier without a URI, its weights as safetensors."""
    uris = {"std": std_uri, "rob": rob_uri}
    bases = {role: StoredBase(uri, None if uri else f"{role}.safetensors") for role, uri in uris.items()}
    write_folder(mixed, Path(folder), bases)


def write_folder(
    mixed: MixedClassifier, folder: Path, bases: Mapping[str, StoredBase], about: Mapping[str, Any] | None = None
) -> None:
    """Write the parameters, and the weights for which `bases` has a file name; `about` is added to the JSON."""
    kind = type(mixed.transform)
    if kind not in _MAP_NAMES:
        raise InvalidInputError(
            f"a transform of type {kind.__name__} cannot be saved; these can: {', '.join(_MAP_NAMES.values())}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "version": _VERSION,
        "transform": {"map": _MAP_NAMES[kind], **mixed.transform.settings()},
        "mixture": mixed.mixture.weights(),
        "base_classifiers": {role: asdict(base) for role, base in bases.items()},
        **(about or {}),
    }
    for role, base in bases.items():
        if base.weights:
            weights = folder / base.weights
            weights.touch()
            mode = weights.stat().st_mode  # set by the user's umask; safetensors lets only the owner read the file
            save_model(getattr(mixed, role), str(weights))
            weights.chmod(mode)
    (folder / PARAMETERS).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load_pretrained(
    source: str | Path, *, std: nn.Module | None = None, rob: nn.Module | None = None, trust_code: bool = False
) -> MixedClassifier:
    """Load what `save_pretrained` or `mixednuts export` wrote.

    Args:
        source: a folder, an fsspec URI of one, or `hf:ORG/NAME`.
        std: module to use instead of the one that the folder names; it receives the saved weights.
        rob: the same for the robust base classifier.
        trust_code: run the Python code and use the services that `source` names for base classifiers. Read it first.

    Raises:
        BaseClassifierError: if a URI cannot be built here.
        InvalidInputError: if `source` does not hold a mixed classifier of a known version, if a base classifier is
            not available, or if one runs code and `trust_code` is not given.
        ContentHashMismatch: if the weights of a base classifier differ from the saved ones.
    """
    endings = (".json", ".safetensors", *((".py",) if trust_code else ()))
    with tempfile.TemporaryDirectory() as temporary:
        folder = _local_folder(str(source), endings, Path(temporary))
        content = _read_parameters(folder)
        std, rob = (
            _base(role, folder, StoredBase(**content["base_classifiers"][role]), given, trust_code)
            for role, given in (("std", std), ("rob", rob))
        )
    settings = dict(content["transform"])
    transform = LOGIT_MAPS[settings.pop("map")](**settings)
    return MixedClassifier(std, rob, transform, **content["mixture"])


def _local_folder(source: str, endings: tuple[str, ...], temporary: Path) -> Path:
    """Return a local folder; download the files with these endings first if `source` is on the hub or in a bucket."""
    if source.startswith(HUB):
        from huggingface_hub import snapshot_download

        try:
            return Path(snapshot_download(source.removeprefix(HUB), allow_patterns=[f"*{end}" for end in endings]))
        except (OSError, ValueError) as error:  # the hub's errors are of these two kinds
            raise InvalidInputError(
                f"{source} is not in the local cache and cannot be downloaded ({reason_of(error)})"
            ) from error
    if "://" not in source:
        return Path(source)
    store = Store(source)
    for name in store.names(""):
        if name.endswith(endings):
            (temporary / name).write_bytes(store.read(name))
    return temporary


def _read_parameters(folder: Path) -> dict[str, Any]:
    path = folder / PARAMETERS
    if not path.is_file():
        raise InvalidInputError(f"{path} does not exist; write a mixed classifier there with save_pretrained")
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version = content.get("version")
    except (ValueError, AttributeError) as error:
        raise InvalidInputError(f"{path} is damaged ({error}); write it again with save_pretrained") from error
    if version != _VERSION:
        raise InvalidInputError(f"{path} has version {version}, this package reads version {_VERSION}")
    return content


def _base(role: str, folder: Path, stored: StoredBase, given: nn.Module | None, trust_code: bool) -> nn.Module:
    """Return a base classifier with the saved weights; errors as in `load_pretrained`."""
    model, source = given, ClassifierSource(str(stored.uri))
    if model is None:
        if stored.uri is None:
            raise InvalidInputError(f"{role} is saved as weights: pass {role}=module of the same architecture")
        if source.runs_code and not trust_code:
            what = f"the Python file {stored.code}" if stored.code else repr(stored.uri)
            raise InvalidInputError(
                f"{role} is built by {what} of {folder}, which is run only if you ask for it: "
                f"read it, then pass trust_code=True, or {role}=module"
            )
        if stored.code:
            source = ClassifierSource(source.located(lambda _: str(folder / str(stored.code))))
        bare = (source.without_weights() or without_weights_argument(source)) if stored.weights else None
        model = load_classifier(bare or source, role)
    if stored.weights:
        try:
            load_model(model, str(folder / stored.weights))
        except (OSError, RuntimeError, SafetensorError) as error:
            raise InvalidInputError(
                f"{folder / stored.weights} does not fit {role}, a {type(model).__name__}: {reason_of(error)}"
            ) from error
    if given is None and stored.sha256:
        _require_weights(model, role, source, stored.sha256, f"Pass {role}=module to use other ones anyway")
    return model


def _require_weights(model: nn.Module, role: str, uri: str, expected: str, advice: str) -> None:
    """Raise ContentHashMismatch if the checksum of a classifier is not the expected one."""
    if (found := classifier_checksum(model, uri)) != expected:
        raise ContentHashMismatch(
            f"{role}={uri!r}: its weights are not those that were saved with the parameters (sha256 was "
            f"{expected[:12]} and is {found[:12]}). {advice}"
        )
