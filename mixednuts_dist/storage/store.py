"""The storage of a run: a folder or any fsspec URI. A file appears whole or not at all."""

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import PurePosixPath
from typing import TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from ..errors import MissingArtifact, ReadOnlyStorage, StoreError, redacted
from .files import DRAFT, Files
from .folder import Folder
from .outages import PATIENCE_SECONDS, has_no_bucket, in_words, patiently
from .s3 import CONNECTIONS, S3, S3_OPTIONS

logger = logging.getLogger(__name__)

_BAD = ".bad-"  # `_<name>.bad-<checksum>` is a quarantined file; readers of Parquet folders ignore the underscore
Item = TypeVar("Item")
Result = TypeVar("Result")
Missing = TypeVar("Missing")


class Store:
    """Files below one root, addressed by relative paths ("attack/part-00007.parquet").

    Create it in the process that uses it, because the file systems of object stores do not survive a fork. Every call
    retries for `patience_seconds` while the storage is unavailable, and raises StoreError for any other error.

    Raises:
        StoreError: for a URI that fsspec cannot open, or a path that leads out of the root.
    """

    def __init__(self, uri: str, patience_seconds: float = PATIENCE_SECONDS) -> None:
        if redacted(uri) != uri:
            raise StoreError(f"storage={redacted(uri)}: credentials belong in the environment or a profile")
        s3 = uri.partition("://")[0] in ("s3", "s3a")
        try:
            fs, root = fsspec.core.url_to_fs(uri, **(S3_OPTIONS if s3 else {}))
        except (ValueError, ImportError) as error:
            raise StoreError(f"storage={uri!r} cannot be opened: {error}") from error
        local = isinstance(fs, LocalFileSystem)
        self._files = (Folder if local else S3 if s3 else Files)(fs, root)
        self._patience = patience_seconds
        self.uri = root if local else uri.rstrip("/")

    def child(self, name: str) -> "Store":
        """Return the store of a folder below this one."""
        return Store(f"{self.uri}/{self._checked(name)}", self._patience)

    def at(self, uri: str) -> "Store":
        """Return the store of another root, with the same patience."""
        return Store(uri, self._patience)

    def address(self, path: str) -> str:
        """Return the full path or URI of a file."""
        return f"{self.uri}/{path}" if path else self.uri

    def require_writable(self) -> None:
        """Raise ReadOnlyStorage unless a file can be written. No file or folder remains."""
        try:
            self._write("", self._files.require_writable)
        except StoreError as error:
            raise ReadOnlyStorage(str(error)) from error

    def exists(self, path: str) -> bool:
        """Whether the file exists."""
        return self._call(self._checked(path), self._files.exists, missing=False)

    def names(self, folder: str) -> list[str]:
        """Return the sorted names in a folder; an empty list if the folder does not exist."""
        return sorted(self._listed(folder))

    def sizes(self, folder: str) -> dict[str, int]:
        """Return name -> size of the files in a folder."""
        return {name: size for name, size in self._listed(folder).items() if size is not None}

    def _listed(self, folder: str) -> dict[str, int | None]:
        found = self._call(folder and self._checked(folder), self._files.listed, missing=dict[str, int | None]())
        return {name: size for name, size in found.items() if DRAFT not in name}

    def all_files(self) -> list[str]:
        """Return the sorted paths of all files below the root, except for drafts and quarantined files."""
        found = self._call("", self._files.all_files, missing=list[str]())
        return sorted(path for path in found if DRAFT not in path and _BAD not in path)

    def read(self, path: str, start: int | None = None, stop: int | None = None) -> bytes:
        """Return the bytes `[start:stop]` of a file, by default all; MissingArtifact if it does not exist."""
        content = self._call(self._checked(path), self._files.read, start, stop, missing=None)
        if content is None:
            raise MissingArtifact(f"{self.address(path)} does not exist")
        return content

    def write(self, path: str, content: bytes) -> None:
        """Write a whole file in one atomic step; an existing one is replaced."""
        self._write(self._checked(path), self._files.write, content)

    def create(self, path: str, content: bytes) -> bool:
        """Write a whole file unless one exists; returns whether this call wrote it. One of many writers wins."""
        return self._write(self._checked(path), self._files.create, content)

    def delete(self, path: str) -> None:
        """Delete a file if it exists."""
        self._call(self._checked(path), self._files.delete, missing=None)

    def set_aside(self, path: str, sha256: str) -> str | None:
        """Rename a file to `_<name>.bad-<checksum>` if it still has this checksum; returns the new path, or None.

        A file that another process replaces meanwhile is not renamed: a file in a folder is locked, and an object is
        deleted only if it still has the same ETag.
        """
        folder, slash, name = self._checked(path).rpartition("/")
        aside = f"{folder}{slash}_{name}{_BAD}{sha256[:8]}"
        if not self._call(path, self._files.set_aside, sha256, aside, missing=False):
            return None
        logger.warning("%s is damaged; it is kept as %s and computed again", self.address(path), aside)
        return aside

    def sweep(self) -> None:
        """Delete the drafts of writers that were killed."""
        self._files.sweep()

    def _checked(self, path: str) -> str:
        parts = PurePosixPath(path)
        if parts.is_absolute() or ".." in parts.parts or not parts.parts:
            raise StoreError(f"the path {path!r} leads out of the storage root {self.uri}")
        return str(parts)

    def _patiently(self, path: str, method: Callable[..., Result], *arguments: object) -> Result:
        return patiently(partial(method, path, *arguments), self.address(path), self._patience)

    def _call(self, path: str, method: Callable[..., Result], *arguments: object, missing: Missing) -> Result | Missing:
        """Call the file system; return `missing` if the file or folder does not exist.

        Raises:
            StoreError: if the bucket does not exist.
        """
        try:
            return self._patiently(path, method, *arguments)
        except FileNotFoundError as error:
            if has_no_bucket(error):
                raise StoreError(in_words(error, "/".join(self.uri.split("/")[:3]))) from error
            return missing

    def _write(self, path: str, method: Callable[..., Result], *arguments: object) -> Result:
        """Call the file system; if the bucket or folder is missing, raise a StoreError."""
        try:
            return self._patiently(path, method, *arguments)
        except FileNotFoundError as error:
            raise StoreError(in_words(error, self.address(path))) from error


def concurrently(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Return `function` of each item, in order, with many calls at a time; raises the first error."""
    with ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="store") as threads:
        return list(threads.map(function, items))
