"""Copies of the user's Python files in a run's folder, for machines that do not have the original files.

`run.yaml` records the folder of the configuration (`folder`) and the copy of each file (`code`: path as written -> path
in the run). The code of a run is executed only if the user trusts the run (`--trust-code`, `trust_code=True`).
"""

import atexit
import functools
import hashlib
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from ..config.uris import beside
from ..errors import DamagedFile
from .store import Store


def keep_code(store: Store, files: Mapping[str, str]) -> dict[str, str]:
    """Copy files (path as written -> path on this machine) into the run; returns path as written -> path in the run."""
    kept = {}
    for written, file in files.items():
        content = Path(file).read_bytes()
        kept[written] = f"code/{_digest(content)}/{Path(file).name}"
        store.write(kept[written], content)  # the folder's name is the checksum, so only a damaged copy changes
    return kept


def places(store: Store, kept: Mapping[str, str], folder: str) -> Callable[[str], str]:
    """Return a function that finds the paths of a configuration in `folder` on this machine.

    The original file is used if its content has not changed, otherwise the copy in the run, which `keep_code` made.
    """
    original = beside(folder) if folder else str

    def find(path: str) -> str:
        there = original(path)
        if path not in kept or (Path(there).is_file() and _digest(Path(there).read_bytes()) in kept[path]):
            return there
        return _local_copy(store.uri, kept[path])

    return find


def code_of(store: Store, path: str) -> bytes:
    """Return the content of a copy (path in the run); DamagedFile if it has changed since it was written."""
    content = store.read(path)
    if _digest(content) != path.split("/")[1]:
        message = f"{store.address(path)} is damaged: its content does not match the name of its folder"
        raise DamagedFile(message, store.address(path))
    return content


@functools.cache
def _local_copy(store_uri: str, path: str) -> str:
    """Return the path of a copied file that Python can import.

    A copy in a bucket is downloaded to a temporary folder, which is deleted when this process ends.
    """
    store = Store(store_uri)
    content = code_of(store, path)
    if "://" not in store.uri:
        return store.address(path)
    folder = tempfile.mkdtemp(prefix="mixednuts-code-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    copy = Path(folder, Path(path).name)
    copy.write_bytes(content)
    return str(copy)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]
