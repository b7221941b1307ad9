"""The user's Python files of a run: copies in its folder, so that the folder is enough where the originals are not.

`run.yaml` says beside the configuration in which folder it was read (`folder`) and where the copy of each file lies
(`code`: path as written -> path in the run). Code of a run is executed only if the user trusts the run (`--trust-code`,
`trust_code=True`).
"""

import atexit
import functools
import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ..config.uris import beside
from ..errors import DamagedFile
from .store import Store

_FOLDER = "code"
_DIGITS = 12  # of the sha256 that names a copy's folder


def keep_code(store: Store, files: Mapping[str, str]) -> dict[str, str]:
    """Copy files (as written -> where they lie) into the run; returns as written -> path in the run."""
    kept = {}
    for written, file in files.items():
        content = Path(file).read_bytes()
        kept[written] = f"{_FOLDER}/{_digest(content)}/{Path(file).name}"
        store.create(kept[written], content)
    return kept


def places(store: Store, described: Mapping[str, Any]) -> Callable[[str], str]:
    """Where the paths of a run's configuration lie now: beside it as long as its code is the same, else in the run.

    Args:
        described: the content of `run.yaml`.
    """
    kept, folder = described.get("code") or {}, described.get("folder") or ""
    original = beside(folder) if folder else str

    def find(path: str) -> str:
        there = original(path)
        if path not in kept or (Path(there).is_file() and _digest(Path(there).read_bytes()) in kept[path]):
            return there
        return _local_copy(store.uri, kept[path])

    return find


def code_of(store: Store, path: str) -> bytes:
    """The content of a copy.

    Raises:
        DamagedFile: where it is not what was written.
    """
    content = store.read(path)
    if _digest(content) != path.split("/")[1]:
        raise DamagedFile(
            f"{store.address(path)} is damaged: its content does not match the name of its folder", store.address(path)
        )
    return content


@functools.cache
def _local_copy(store_uri: str, path: str) -> str:
    """A file of Python's import; one of a bucket is fetched into a folder that ends with the process."""
    store = Store(store_uri)
    content = code_of(store, path)
    if "://" not in store.uri:
        return store.address(path)
    folder = tempfile.mkdtemp(prefix="mixednuts-code-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    copy = Path(folder, Path(path).name)
    copy.write_bytes(content)
    return str(copy)


def code_paths(paths: Iterable[str], find: Callable[[str], str]) -> dict[str, str]:
    """As written -> where it lies, of the files that are there."""
    found = {path: find(path) for path in paths}
    return {path: there for path, there in found.items() if Path(there).is_file()}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_DIGITS]
