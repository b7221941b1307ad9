"""A run's place in storage: a folder or any fsspec URI. A file appears whole or not at all."""

import contextlib
import io
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import PurePosixPath
from typing import Any, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from ..errors import MissingArtifact, ReadOnlyStorage, StoreError, redacted
from .files import DRAFT, Files
from .folder import Folder
from .outages import PATIENCE_SECONDS, in_words, patiently
from .s3 import CONNECTIONS, S3, S3_OPTIONS

logger = logging.getLogger(__name__)

_BAD = ".bad-"  # `_<name>.bad-<n>` is a quarantined file; readers of Parquet folders ignore the underscore
_END_BYTES = 2**16  # pyarrow reads this many first, for the footer
Item = TypeVar("Item")
Result = TypeVar("Result")


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
            self._call(self._files.require_writable, "")
        except (StoreError, FileNotFoundError) as error:  # /proc raises FileNotFoundError
            raise ReadOnlyStorage(str(error) if isinstance(error, StoreError) else in_words(error, self.uri)) from error

    def require_bucket(self) -> None:
        """Raise StoreError if the bucket does not exist or is unreachable."""
        self._call(self._files.require_bucket, "")

    def exists(self, path: str) -> bool:
        """Whether the file exists."""
        try:
            return self._call(partial(self._files.exists, self._checked(path)), path)
        except FileNotFoundError:  # there is no such bucket
            return False

    def names(self, folder: str) -> list[str]:
        """Return the sorted names in a folder; an empty list if the folder does not exist."""
        return sorted(self._listed(folder, ""))

    def sizes(self, folder: str, stems: Iterable[str] = ("",)) -> dict[str, int]:
        """Return name -> size of the files in a folder whose names begin with one of the stems."""
        wanted = stems if self._files.lists_by_stem else ("",)
        listings = concurrently(partial(self._listed, folder), wanted)
        return {name: size for listed in listings for name, size in listed.items() if size is not None}

    def _listed(self, folder: str, stem: str) -> dict[str, int | None]:
        checked = self._checked(folder) if folder else ""
        try:
            found = self._call(partial(self._files.listed, checked, stem), folder)
        except FileNotFoundError:
            self.require_bucket()
            return {}
        return {name: size for name, size in found.items() if DRAFT not in name}

    def all_files(self) -> list[str]:
        """Return the sorted paths of all files below the root, except for drafts and quarantined files."""
        try:
            found = self._call(self._files.all_files, "")
        except FileNotFoundError:
            return []
        return sorted(path for path in found if DRAFT not in path and _BAD not in path)

    def read(self, path: str) -> bytes:
        """Return the content of a file; MissingArtifact if it does not exist."""
        return self._read(path)

    def read_tail(self, path: str, n_bytes: int) -> bytes:
        """Return the last `n_bytes` of a file, or all bytes of a shorter one."""
        return self._read(path, -n_bytes)

    def _read(self, path: str, start: int | None = None, stop: int | None = None) -> bytes:
        try:
            return self._call(partial(self._files.read, self._checked(path), start, stop), path)
        except FileNotFoundError as error:
            raise MissingArtifact(f"{self.address(path)} does not exist") from error

    def open(self, path: str, size: int | None = None) -> "RangeReader":
        """Return a seekable file for readers that need only a part of it; a known `size` saves a request."""
        end = b""
        if size is None:
            end = self.read_tail(path, _END_BYTES)
            whole = len(end) < _END_BYTES
            size = len(end) if whole else self._call(partial(self._files.size, self._checked(path)), path)
        return RangeReader(partial(self._read, path), size, end)

    def write(self, path: str, content: bytes) -> None:
        """Write a whole file in one atomic step; an existing one is replaced."""
        self._write(self._files.write, path, content)

    def create(self, path: str, content: bytes) -> bool:
        """Write a whole file unless one exists; returns whether this call wrote it. One of many writers wins."""
        return self._write(self._files.create, path, content)

    def _write(self, method: Callable[[str, bytes], Result], path: str, content: bytes) -> Result:
        try:
            return self._call(partial(method, self._checked(path), content), path)
        except FileNotFoundError as error:
            raise StoreError(in_words(error, self.address(path))) from error

    def write_all(self, folder: str, files: Mapping[str, bytes]) -> None:
        """Write files of a folder, the JSON files last, because they announce the others."""
        last = [name for name in files if name.endswith(".json")]
        for names in (files.keys() - last, last):
            concurrently(lambda name: self.write(f"{folder}/{name}", files[name]), names)

    def delete(self, path: str) -> None:
        """Delete a file if it exists."""
        with contextlib.suppress(FileNotFoundError):
            self._call(partial(self._files.delete, self._checked(path)), path)

    def set_aside(self, path: str, unless: Callable[[bytes], bool]) -> str | None:
        """Rename a file to `_<name>.bad-<n>` and return that path; None if its bytes are good or it does not exist.

        Only the bytes that were checked are renamed: a folder's file is locked meanwhile, and an object is deleted only
        while it has the same ETag. No existing file is replaced.
        """
        try:
            rename = partial(self._files.set_aside, self._checked(path), unless, partial(self._free_name, path))
            aside = self._call(rename, path)
        except FileNotFoundError:
            return None
        if aside:
            logger.warning("%s is damaged; it is kept as %s and computed again", self.address(path), aside)
        return aside

    def _free_name(self, path: str) -> str:
        folder, slash, name = path.rpartition("/")
        taken, n = self._listed(folder, f"_{name}{_BAD}"), 1
        while f"_{name}{_BAD}{n}" in taken:
            n += 1
        return f"{folder}{slash}_{name}{_BAD}{n}"

    def sweep(self) -> None:
        """Delete the drafts of writers that were killed; those of live writers remain."""
        self._files.sweep()

    def _checked(self, path: str) -> str:
        parts = PurePosixPath(path)
        if parts.is_absolute() or ".." in parts.parts or not parts.parts:
            raise StoreError(f"the path {path!r} leads out of the storage root {self.uri}")
        return str(parts)

    def _call(self, call: Callable[[], Result], path: str) -> Result:
        """Call the file system; FileNotFoundError passes, and any other error becomes a StoreError."""
        return patiently(call, self.address(path), self._patience)


def concurrently(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Return `function` of each item, in order, with many calls at a time; raises the first error."""
    with ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="store") as threads:
        return list(threads.map(function, items))


class RangeReader(io.RawIOBase):
    """A file of a store that is read by ranges; its end, or all of a small file, is read once."""

    def __init__(self, read_range: Callable[[int, int], bytes], size: int, end: bytes) -> None:
        self._read_range, self._size, self._position = read_range, size, 0
        self._end, self._end_from = end, max(0, size - _END_BYTES)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        stop = min(self._position + len(buffer), self._size)
        if stop <= self._position:
            return 0
        if self._position >= self._end_from:
            self._end = self._end or self._read_range(self._end_from, self._size)
            content = self._end[self._position - self._end_from : stop - self._end_from]
        else:
            content = self._read_range(self._position, stop)
        if len(content) != stop - self._position:
            raise OSError(f"{len(content)} bytes arrived instead of {stop - self._position}")
        buffer[: len(content)] = content
        self._position = stop
        return len(content)
