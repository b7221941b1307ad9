"""From a run's folder to the mixture that it chose: the parameters, and both classifiers with their weights checked.

A run is read from its files alone, `run.yaml` and `search/selected.json`, without its configuration file: a folder that
was copied elsewhere, or that the release before wrote, is read all the same.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

import yaml
from torch import nn

from ..classifiers.base_classifiers import classifier_checksum, load_classifier
from ..config import digest
from ..errors import DamagedFile, FingerprintMismatch, InvalidInputError, MissingArtifact
from ..mixing.classifier import MixedClassifier
from ..register import load_extensions
from ..selection.choice import Choice
from ..storage.records import SearchResult
from ..storage.store import Store

RUN = "run.yaml"
SELECTED = "search/selected.json"
ROLES = ("std", "rob")


@dataclass(frozen=True)
class DeployedRun:
    """One run and one of its betas, as its folder says it; nothing is built yet."""

    store: Store
    run_id: str
    config: dict[str, Any]  # as it was resolved, in the keys of the release that wrote it
    n_images: int
    n_classes: int
    image_shape: tuple[int, ...]
    checksums: dict[str, str]  # sha256 of "std" and "rob"
    searched: SearchResult
    chosen: Choice  # at the beta that was asked for

    @property
    def is_deployed(self) -> bool:
        """Whether this is the beta that the run attacked."""
        return self.chosen.beta == self.searched.deployed_beta

    def base(self, role: str) -> nn.Module:
        """The base classifier "std" or "rob", with the weights that the run was made with.

        Raises:
            BaseClassifierError: where it cannot be built here.
            FingerprintMismatch: where its weights (or the source of its factory) are others now.
        """
        uri = self.config[role]
        model = load_classifier(uri, role)
        now, then = classifier_checksum(model, uri), self.checksums[role]
        if now != then:
            raise FingerprintMismatch(
                f"{role}={uri!r}: its weights are not those of run {self.run_id} (sha256 was {then[:12]} and is "
                f"{now[:12]}): the parameters that the run chose are not for them. Restore the weights, or make "
                "another run"
            )
        return model

    def classifier(self, *roles: str) -> MixedClassifier:
        """The mixed classifier, with the base classifiers of `roles` alone where any are named; errors as in `base`.

        A base classifier that is left out is an `nn.Identity`: for processes that hold one half of the lazy pair.
        """
        mixture = self.chosen.mixture()
        std, rob = (self.base(role) if role in (roles or ROLES) else nn.Identity() for role in ROLES)
        return MixedClassifier(
            std, rob, mixture.transform, mixture.alpha,
            one_minus_alpha=mixture.one_minus_alpha, temperature=mixture.temperature,
            surrogate_alpha=self.searched.surrogate_alpha, rd=self.config["evaluate"]["rd"],
        )  # fmt: skip


def load_run(uri: str, *, beta: float | None = None) -> MixedClassifier:
    """See `MixedClassifier.from_run`."""
    return read_run(uri, beta=beta).classifier()


def loading_line(run: str) -> str:
    """The line of Python that loads a run's mixture; `run` is its folder or URI.

    >>> loading_line("runs/digits-bc980c1c")
    'MixedClassifier.from_run("runs/digits-bc980c1c")'
    """
    return f"MixedClassifier.from_run({json.dumps(run)})"


def read_run(uri: str, *, beta: float | None = None) -> DeployedRun:
    """What a run's folder says of the mixture at `beta`, the deployed one by default; imports the run's extensions.

    Raises:
        MissingArtifact: where there is no run, or its search has not been done.
        InvalidInputError: for a beta that was not searched, or a run of one classifier alone.
        DamagedFile: where one of the two files is not what was written.
    """
    store = Store(str(uri))
    described = _described(store)
    run_id, config, inputs = described["run_id"], described["config"], described["inputs"]
    if config.get("std") is None:
        raise InvalidInputError(f"run {run_id} attacks rob alone; without std there is no mixture to load")
    load_extensions(config.get("extensions") or ())
    searched = _searched(store, run_id)
    return DeployedRun(
        store, run_id, config, inputs["n_images"], inputs["n_classes"], tuple(inputs["image_shape"]),
        inputs["checksums"],
        searched=searched, chosen=_chosen(searched, run_id, beta),
    )  # fmt: skip


def _described(store: Store) -> dict[str, Any]:
    """`run.yaml`."""
    if not store.exists(RUN):
        runs = [name for name in store.names("") if store.exists(f"{name}/{RUN}")][:5]
        hint = f"; these folders below it do: {', '.join(runs)}" if runs else ""
        raise MissingArtifact(f"{store.uri} holds no run (no {RUN}){hint}. Give the folder <storage>/<run id>")
    content = yaml.safe_load(store.read(RUN))
    if not isinstance(content, dict) or not {"run_id", "config", "inputs", "versions"} <= content.keys():
        raise DamagedFile(f"{store.address(RUN)} is damaged: the next `mixednuts run` writes it anew")
    return content


def _searched(store: Store, run_id: str) -> SearchResult:
    """`search/selected.json`."""
    address = store.address(SELECTED)
    if not store.exists(SELECTED):
        raise MissingArtifact(f"run {run_id} has not been searched yet: {address} does not exist. Run: mixednuts run")
    try:
        content = json.loads(store.read(SELECTED))
        if content.pop("digest") != digest(content):
            raise ValueError("its content has changed")
        return SearchResult.from_json(content["result"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFile(f"{address} is damaged ({error}): `mixednuts run` searches again") from error


def _chosen(searched: SearchResult, run_id: str, beta: float | None) -> Choice:
    wanted = searched.deployed_beta if beta is None else beta
    for choice in searched.entries:
        if math.isclose(choice.beta, wanted, rel_tol=1e-9):
            return choice
    valid = ", ".join(f"{choice.beta:g}" for choice in searched.entries)
    raise InvalidInputError(f"beta={wanted:g} was not searched in run {run_id}; these were: {valid}")
