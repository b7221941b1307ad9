"""A mixed classifier as files: its numbers as JSON, each base classifier as a URI or as safetensors weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_model, save_model
from torch import nn

from ..errors import InvalidInputError
from .transforms import LOGIT_MAPS, LogitMap

_PARAMETERS = "mixed_classifier.json"
_VERSION = 1


def save_mixture(
    folder: Path,
    *,
    bases: dict[str, tuple[nn.Module, str | None]],
    transform: LogitMap,
    settings: dict[str, Any],
) -> None:
    """Writes a mixed classifier; see `MixedClassifier.save_pretrained`.

    Args:
        bases: "std" and "rob" -> the module, and its URI or None where its weights are to be saved.
        settings: the keyword arguments of `MixedClassifier` beside the bases and the transformation.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, (module, uri) in bases.items():
        if uri is None:
            save_model(module, str(folder / f"{name}.safetensors"))
    content = {
        "version": _VERSION,
        "transform": {"map": _map_name(transform), **transform.settings()},
        "mixture": settings,
        "base_classifiers": {name: uri for name, (_, uri) in bases.items()},
    }
    (folder / _PARAMETERS).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load_mixture(
    folder: Path,
    *,
    std: nn.Module | None,
    rob: nn.Module | None,
    resolve: Callable[[str], nn.Module] | None,
) -> tuple[nn.Module, nn.Module, LogitMap, dict[str, Any]]:
    """(std, rob, transformation, settings) of what `save_mixture` wrote; see `MixedClassifier.from_pretrained`.

    Raises:
        InvalidInputError: where `folder` holds no mixed classifier of this version, or a base classifier cannot be had.
    """
    content = _read_parameters(folder)
    uris = content["base_classifiers"]
    std, rob = (_base(name, folder, given, uris[name], resolve) for name, given in (("std", std), ("rob", rob)))
    settings = dict(content["transform"])
    return std, rob, LOGIT_MAPS[settings.pop("map")](**settings), content["mixture"]


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
