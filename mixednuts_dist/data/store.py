"""A run's place in storage: a folder, or any fsspec URI. A file appears whole or not at all."""

import os
import uuid
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec

from ..errors import MissingArtifact, StoreError

_TEMPORARY = ".tmp-"


class Store:
    """Files below one root, addressed by relative paths ("attack/part-00007.parquet").

    Make one in the process that uses it: the file systems of object stores do not survive a fork.

    Raises:
        StoreError: for a URI that fsspec cannot open, or a path that leads out of the root.
    """

    def __init__(self, uri: str) -> None:
        try:
            self._fs, self._root = fsspec.core.url_to_fs(uri)
        except (ValueError, ImportError) as error:
            raise StoreError(f"storage={uri!r} cannot be opened: {error}") from error
        self._local = "file" in _protocols(self._fs)
        self.uri = self._root if self._local else uri.rstrip("/")

    def child(self, name: str) -> "Store":
        """The store of a folder below this one."""
        self._path(name)
        return Store(f"{self.uri}/{name}")

    def address(self, path: str) -> str:
        """The path as a person would type it."""
        return f"{self.uri}/{path}"

    def exists(self, path: str) -> bool:
        self._fs.invalidate_cache()
        return bool(self._fs.exists(self._path(path)))

    def names(self, folder: str) -> list[str]:
        """Names in a folder, sorted; none where there is no such folder."""
        self._fs.invalidate_cache()
        try:
            entries = self._fs.ls(self._path(folder) if folder else self._root, detail=False)
        except FileNotFoundError:
            return []
        names = (PurePosixPath(str(entry)).name for entry in entries)
        return sorted(name for name in names if _TEMPORARY not in name)

    def read(self, path: str) -> bytes:
        try:
            return bytes(self._fs.cat_file(self._path(path)))
        except FileNotFoundError as error:
            raise MissingArtifact(f"{self.address(path)} does not exist") from error

    def open(self, path: str) -> Any:
        """A seekable binary file, for readers that need only a part of it."""
        try:
            return self._fs.open(self._path(path), "rb")
        except FileNotFoundError as error:
            raise MissingArtifact(f"{self.address(path)} does not exist") from error

    def write(self, path: str, content: bytes) -> None:
        """Write the whole file in one atomic step; an existing one is replaced."""
        target = self._path(path)
        if not self._local:
            self._fs.pipe_file(target, content)
            return
        final = Path(target)
        final.parent.mkdir(parents=True, exist_ok=True)
        draft = final.with_name(f"{final.name}{_TEMPORARY}{uuid.uuid4().hex}")
        try:
            with draft.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(final)
        finally:
            draft.unlink(missing_ok=True)

    def delete(self, path: str) -> None:
        """Remove a file; a missing one is no error."""
        if self.exists(path):
            self._fs.rm_file(self._path(path))

    def _path(self, path: str) -> str:
        parts = PurePosixPath(path)
        if parts.is_absolute() or ".." in parts.parts or not parts.parts:
            raise StoreError(f"the path {path!r} leads out of the storage root {self.uri}")
        return f"{self._root}/{parts}"


def _protocols(fs: Any) -> tuple[str, ...]:
    protocol = fs.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)
