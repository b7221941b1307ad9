"""Other people's weights and packages: tensors only, never code, and what the usual wrong files are, told in words.

Torch is imported where it is needed: what is missing on a machine can be told without it.
"""

import contextlib
import importlib
import io
import os
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..errors import BaseClassifierError

if TYPE_CHECKING:
    from torch import Tensor, nn

_NESTED = ("state_dict_ema", "model_ema", "state_dict", "model")
_PREFIXES = ("module.", "_orig_mod.")
_HEAD_BYTES = 512
_TENSORS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """No warnings and nothing on stdout from other people's imports and constructors."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def import_quietly(name: str) -> ModuleType:
    """Import a module of timm or torchvision, whose first import warns of what is deprecated in PyTorch."""
    with quietly():
        return importlib.import_module(name)


@contextlib.contextmanager
def tensors_only() -> Iterator[None]:
    """Other libraries' `torch.load` reads tensors and never code, whatever they ask for."""
    before = os.environ.get(_TENSORS_ONLY)
    os.environ[_TENSORS_ONLY] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_TENSORS_ONLY]
        else:
            os.environ[_TENSORS_ONLY] = before


def load_weights(model: "nn.Module", path: Path) -> "nn.Module":
    """Put the tensors of a .safetensors or PyTorch file into `model`, every one of them.

    Raises:
        BaseClassifierError: for a file that is no checkpoint, or one of another architecture.
    """
    state = read_state_dict(path)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise BaseClassifierError(f"{path} does not fit {type(model).__name__}: {_shortened(str(error))}") from error
    return model


def read_state_dict(path: Path) -> "dict[str, Tensor]":
    """The named tensors of a checkpoint, out of its usual wrappings and without the prefixes of parallel training.

    Raises:
        BaseClassifierError: for a missing or damaged file, an HTML page or Git LFS pointer saved as one, or pickled
            objects other than tensors.
    """
    import torch
    from safetensors.torch import load_file

    require_checkpoint(path)
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with quietly():  # torch warns of pickle protocols, on its way to refusing them
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise BaseClassifierError(
            f"{path} holds more than tensors, and loading it could run any code: {_shortened(str(error))}. If you "
            "trust it, convert it once: torch.save(torch.load(FILE, weights_only=False)['state_dict'], FILE)"
        ) from error
    except Exception as error:  # at damaged bytes the two parsers raise almost any of Python's errors
        reason = _shortened(str(error)) or type(error).__name__
        raise BaseClassifierError(f"{path} is damaged: {reason}; copy or download it again") from error
    return _unwrapped(content, path)


def require_checkpoint(path: Path) -> None:
    """Refuse, by its first bytes, a file that is not there or that a failed download left."""
    if not path.is_file():
        raise BaseClassifierError(f"there is no checkpoint {path.absolute()}")
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES).lstrip().lower()
    if not head:
        raise BaseClassifierError(f"{path} is empty; copy or download it again")
    if head.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        raise BaseClassifierError(
            f"{path} is a web page, not a checkpoint: the server answered the download with a page (a quota, a "
            "confirmation or an error). Delete it and download the file again, with a browser if need be"
        )
    if head.startswith(b"version https://git-lfs"):
        raise BaseClassifierError(f"{path} is a Git LFS pointer, not the file itself; run: git lfs pull")


def _unwrapped(content: Any, path: Path) -> "dict[str, Tensor]":
    import torch

    for key in _NESTED:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        found = sorted(map(str, content))[:10] if isinstance(content, dict) else type(content).__name__
        raise BaseClassifierError(f"{path} holds {found}; it needs a state dict: names and their tensors")
    state: dict[str, Tensor] = content
    for prefix in _PREFIXES:
        if state and all(str(name).startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): value for name, value in state.items()}
    return state


def _shortened(text: str, most: int = 300) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= most else f"{flat[:most]} ..."
