"""A mixed classifier as files: its numbers as JSON, each base classifier as a URI or as safetensors weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_model, save_model
from torch import nn

from ..errors import InvalidInputError
from .classifier import MixedClassifier
from .transforms import LOGIT_MAPS, LogitMap

_PARAMETERS = "mixed_classifier.json"
_VERSION = 1


def save_pretrained(mixed: MixedClassifier, folder: Path, *, std_uri: str | None, rob_uri: str | None) -> None:
    """See `MixedClassifier.save_pretrained`."""
    folder.mkdir(parents=True, exist_ok=True)
    bases = {"std": (mixed.std, std_uri), "rob": (mixed.rob, rob_uri)}
    for name, (module, uri) in bases.items():
        if uri is None:
            save_model(module, str(folder / f"{name}.safetensors"))
    content = {
        "version": _VERSION,
        "transform": {"map": _map_name(mixed.transform), **mixed.transform.settings()},
        "mixture": mixed.settings(),
        "base_classifiers": {name: uri for name, (_, uri) in bases.items()},
    }
    (folder / _PARAMETERS).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load_pretrained(
    folder: Path,
    *,
    std: nn.Module | None,
    rob: nn.Module | None,
    resolve: Callable[[str], nn.Module] | None,
) -> MixedClassifier:
    """See `MixedClassifier.from_pretrained`.

    Raises:
        InvalidInputError: where `folder` holds no mixed classifier of this version, or a base classifier cannot be had.
    """
    content = _read_parameters(folder)
    uris = content["base_classifiers"]
    modules = [_base(name, folder, given, uris[name], resolve) for name, given in (("std", std), ("rob", rob))]
    settings = dict(content["transform"])
    transform = LOGIT_MAPS[settings.pop("map")](**settings)
    return MixedClassifier(modules[0], modules[1], transform, **content["mixture"])


def _read_parameters(folder: Path) -> dict[str, Any]:
    path = folder / _PARAMETERS
    if not path.is_file():
        raise InvalidInputError(
            f"{path} does not exist: {folder} holds no mixed classifier; write one with save_pretrained"
        )
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if content.get("version") != _VERSION:
        raise InvalidInputError(f"{path} has version {content.get('version')}, this package reads version {_VERSION}")
    return content


def _base(
    name: str, folder: Path, given: nn.Module | None, uri: str | None, resolve: Callable[[str], nn.Module] | None
) -> nn.Module:
    if uri is not None:
        if given is not None:
            return given
        if resolve is None:
            raise InvalidInputError(
                f"{name} is saved as the URI {uri!r}: pass {name}=module or resolve=function of the URI"
            )
        return resolve(uri)
    if given is None:
        raise InvalidInputError(
            f"{name} is saved as weights: pass {name}=module of the same architecture to receive them"
        )
    load_model(given, str(folder / f"{name}.safetensors"))
    return given


def _map_name(transform: LogitMap) -> str:
    for name, kind in LOGIT_MAPS.items():
        if type(transform) is kind:
            return name
    raise InvalidInputError(
        f"a transform of type {type(transform).__name__} cannot be saved; these can: {', '.join(LOGIT_MAPS)}"
    )
