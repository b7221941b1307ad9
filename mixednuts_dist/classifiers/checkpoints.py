"""Download and read weights of other packages as tensors only, never as code, with clear errors for wrong files."""

import contextlib
import hashlib
import importlib
import io
import os
import pickle
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from types import ModuleType

import requests
from torch import Tensor, nn

from ..config.uris import Missing
from ..errors import BaseClassifierError, reason_of

_TENSORS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_BLOCK = 1 << 16
_TIMEOUT_SECONDS = (10, 60)  # to connect, and without a byte


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Hide the warnings and the output of other libraries in the block."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def import_quietly(name: str) -> ModuleType:
    """Import a module without showing warnings, such as timm, which warns about deprecated parts of PyTorch."""
    with quietly():
        return importlib.import_module(name)


@contextlib.contextmanager
def tensors_only() -> Iterator[None]:
    """Let other libraries read only tensors with `torch.load` in the block, even if they pass `weights_only=False`."""
    before = os.environ.get(_TENSORS_ONLY)
    os.environ[_TENSORS_ONLY] = "1"
    try:
        yield
    finally:
        del os.environ[_TENSORS_ONLY]
        if before is not None:
            os.environ[_TENSORS_ONLY] = before


def load_weights(model: nn.Module, path: Path, may_lack: Collection[str] = ()) -> nn.Module:
    """Load all tensors of a .safetensors or PyTorch file into `model`.

    Args:
        may_lack: names of tensors that may be missing in the file; the model then keeps its own value.

    Raises:
        BaseClassifierError: for a file that is not a checkpoint, or one of another architecture.
    """
    own = {name: value for name, value in model.state_dict().items() if name in may_lack}
    try:
        model.load_state_dict(own | read_state_dict(path))
    except RuntimeError as error:
        raise BaseClassifierError(f"{path} does not fit {type(model).__name__}: {reason_of(error)}") from error
    return model


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Return the named tensors of a checkpoint, without outer keys such as `model` and prefixes such as `module.`.

    Raises:
        BaseClassifierError: for a missing or damaged file, an HTML page, a Git LFS pointer, or pickled objects.
    """
    if problem := checkpoint_problem(path):
        raise BaseClassifierError(problem)
    try:
        with quietly():  # torch warns about pickle protocols
            state: dict[str, Tensor] = import_quietly("timm.models").load_state_dict(str(path), weights_only=True)
    except pickle.UnpicklingError as error:
        raise BaseClassifierError(
            f"{path} holds more than tensors, and loading it could run any code: {reason_of(error)}. If you "
            "trust it, convert it once: torch.save(torch.load(FILE, weights_only=False)['state_dict'], FILE)"
        ) from error
    except Exception as error:  # at damaged bytes the parsers raise almost any of Python's errors
        raise BaseClassifierError(
            f"{path} is damaged or holds no state dict: {reason_of(error)}; copy or download it again"
        ) from error
    if not all(isinstance(value, Tensor) for value in state.values()):
        raise BaseClassifierError(f"{path} holds {list(state)[:10]}; it needs a state dict: names and their tensors")
    return state


def checkpoint_problem(path: Path) -> str | None:
    """Return what is wrong with a file that is missing or empty, a web page, or a Git LFS pointer, otherwise None."""
    if not path.is_file():
        return f"there is no checkpoint {path.absolute()}"
    with path.open("rb") as file:
        head = file.read(512).lstrip().lower()
    if not head:
        return f"{path} is empty; copy or download it again"
    if head.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        advice = "Delete it and download the file again, with a browser if the server asks for a confirmation"
        return f"{path} is a web page, not a checkpoint. {advice}"
    is_pointer = head.startswith(b"version https://git-lfs")
    return f"{path} is a Git LFS pointer, not the file itself; run: git lfs pull" if is_pointer else None


def fetch(item: Missing) -> str:
    """Download a missing file and return its sha256.

    The bytes are written to `<file>.part`, which is renamed when it is complete and checked.

    Raises:
        BaseClassifierError: if no source is known, if the download fails, or if the file is not the published one.
    """
    path, part = Path(item.path), Path(f"{item.path}.part")
    if item.get is None and not item.url:
        raise BaseClassifierError(f"{item.what} cannot be fetched automatically; {item.command}")
    try:
        if item.get is not None:
            with quietly():
                return _sha256(Path(item.get()))
        part.parent.mkdir(parents=True, exist_ok=True)
        with requests.get(item.url, timeout=_TIMEOUT_SECONDS, stream=True) as response, part.open("wb") as file:
            response.raise_for_status()
            file.writelines(response.iter_content(_BLOCK))  # raises if fewer bytes arrive than were announced
    except Exception as error:  # libraries raise their own errors
        source = item.url or "its library"
        raise BaseClassifierError(
            f"{item.what} cannot be fetched from {source} ({reason_of(error)}). Get it manually: {item.command}"
        ) from error
    sha256 = _sha256(part)
    if not sha256.startswith(item.sha256):
        part.unlink()
        raise BaseClassifierError(
            f"{item.url} sent a file with sha256 {sha256[:12]}..., but {item.sha256}... is published. It was deleted"
        )
    if problem := checkpoint_problem(part):  # the server may have sent a page
        raise BaseClassifierError(problem)
    part.replace(path)
    return sha256


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
