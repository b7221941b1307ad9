"""The storage of a run: a folder or any fsspec URI. A file appears whole or not at all."""

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import fsspec

from ..errors import MissingArtifact, ReadOnlyStorage, StoreError, redacted
from .outages import PATIENCE_SECONDS, conditionally, has_expired, has_no_bucket, patiently

logger = logging.getLogger(__name__)

_DRAFT = ".tmp-"  # prefix of the names of drafts, which are renamed when they are complete
_ABANDONED_SECONDS = 3600.0  # the process that wrote an older draft is dead
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}  # this file system has no hard links
_BAD = ".bad-"  # `_<name>.bad-<checksum>` is a quarantined file; readers of Parquet folders ignore the underscore
_CONNECTIONS = 32
# A call may take `ANSWER_SECONDS`, plus the time to transfer its content at `_SLOWEST` bytes per second.
ANSWER_SECONDS, _SLOWEST, _LARGE_FILE = 30.0, 2**20, 2**30
# One try per call, because `patiently` is the only place that tries again.
_S3_OPTIONS = {
    "use_listings_cache": False,
    "max_concurrency": 1,  # otherwise s3fs requests the size of a file before it reads the file
    "config_kwargs": {
        "retries": {"mode": "standard", "total_max_attempts": 1},
        "read_timeout": ANSWER_SECONDS,
        "connect_timeout": 10,
        "max_pool_connections": _CONNECTIONS,
    },
}
_RENEWING = threading.Lock()

Item = TypeVar("Item")
Result = TypeVar("Result")
Missing = TypeVar("Missing")


class Store:
    """Files below one root, addressed by relative paths ("attack/part-00007.parquet"). For a folder, it is a `Folder`.

    Create it in the process that uses it, because the file systems of object stores do not survive a fork. Every call
    retries for `patience_seconds` while the storage is unavailable, and raises StoreError for any other error.

    Raises:
        StoreError: for a URI that fsspec cannot open, or a path that leads out of the root.
    """

    def __new__(cls, uri: str, patience_seconds: float = PATIENCE_SECONDS) -> "Store":  # noqa: ARG004
        is_folder = fsspec.core.split_protocol(uri)[0] in (None, "file", "local")
        return super().__new__(Folder if is_folder else cls)

    def __init__(self, uri: str, patience_seconds: float = PATIENCE_SECONDS) -> None:
        if redacted(uri) != uri:
            raise StoreError(f"storage={redacted(uri)}: credentials belong in the environment or a profile")
        is_s3 = uri.startswith(("s3://", "s3a://"))
        try:
            self._fs, root = fsspec.core.url_to_fs(uri, **(_S3_OPTIONS if is_s3 else {}))
        except (ValueError, ImportError) as error:
            raise StoreError(f"storage={uri!r} cannot be opened: {error}") from error
        if is_s3:
            self._fs.retries, self._fs.session = 1, self._fs.session or _s3_session(self._fs.kwargs)
        self._root, self._patience = root.rstrip("/"), patience_seconds
        self.uri = self._root if isinstance(self, Folder) else uri.rstrip("/")

    def child(self, name: str) -> "Store":
        """Return the store of a folder below this one."""
        return self.at(f"{self.uri}/{name}")

    def at(self, uri: str) -> "Store":
        """Return the store of another root, with the same patience."""
        return Store(uri, self._patience)

    def address(self, path: str) -> str:
        """Return the full path or URI of a file."""
        return f"{self.uri}/{path}" if path else self.uri

    def require_writable(self) -> None:
        """Raise ReadOnlyStorage unless a file can be written. No file or folder remains."""
        try:
            self._patiently("", self._probe)
        except StoreError as error:
            raise ReadOnlyStorage(str(error)) from error

    def exists(self, path: str) -> bool:
        """Whether the file exists. It reads a byte, because the response to a HEAD request cannot explain an error."""
        return self._bytes(path, 0, 1) is not None

    def names(self, folder: str) -> list[str]:
        """Return the sorted names in a folder; an empty list if the folder does not exist."""
        return sorted(self.sizes(folder))

    def sizes(self, folder: str) -> dict[str, int | None]:
        """Return name -> size, or None for a folder, of everything in a folder; empty if the folder does not exist."""
        where = self._at(folder) if folder else self._root
        entries: list[dict[str, Any]] = self._if_found(folder, lambda: self._call("ls", where, detail=True), [])
        sizes = {entry["name"].rstrip("/"): entry["size"] if entry["type"] == "file" else None for entry in entries}
        sizes.pop(where, None)  # some stores list an empty folder in itself
        return {path.rpartition("/")[2]: size for path, size in sizes.items() if _DRAFT not in path}

    def all_files(self) -> list[str]:
        """Return the sorted paths of all files below the root, except for drafts and quarantined files."""
        found: list[str] = self._if_found("", lambda: self._call("find", self._root), [])
        return sorted(path.removeprefix(f"{self._root}/") for path in found if _DRAFT not in path and _BAD not in path)

    def read(self, path: str, start: int | None = None, stop: int | None = None) -> bytes:
        """Return the bytes `[start:stop]` of a file, by default all; MissingArtifact if it does not exist."""
        content = self._bytes(path, start, stop)
        if content is None:
            raise MissingArtifact(f"{self.address(path)} does not exist")
        return content

    def _bytes(self, path: str, start: int | None, stop: int | None) -> bytes | None:
        where, n_bytes = self._at(path), _LARGE_FILE if start is None else (stop or 0) - start

        def read() -> bytes:
            try:
                return bytes(self._call("cat_file", where, n_bytes=n_bytes, start=start, end=stop))
            except OSError as error:
                if start is None or error.errno != errno.EINVAL:
                    raise
                return b""  # S3 rejects a range that begins after the end of an object

        return self._if_found(path, read, None)

    def write(self, path: str, content: bytes) -> None:
        """Write a whole file in one atomic step; an existing one is replaced."""
        self._patiently(path, lambda: self._put(self._at(path), content, replace=True))

    def create(self, path: str, content: bytes) -> bool:
        """Write a whole file unless one exists; returns whether this call wrote it.

        One of many writers wins, or the last one on a store without conditional writes.
        """
        return self._patiently(path, lambda: self._put(self._at(path), content, replace=False))

    def delete(self, path: str) -> None:
        """Delete a file if it exists."""
        self._if_found(path, lambda: self._call("rm_file", self._at(path)), None)

    def set_aside(self, path: str, sha256: str) -> str | None:
        """Rename a file to `_<name>.bad-<checksum>` if it still has this checksum; returns the new path, or None.

        A file that another process replaces meanwhile is not renamed: a file in a folder is locked, and an object is
        deleted only if it still has the same ETag.
        """
        folder, slash, name = path.rpartition("/")
        aside = f"{folder}{slash}_{name}{_BAD}{sha256[:8]}"
        if not self._if_found(path, lambda: self._rename(self._at(path), self._at(aside), sha256), missing=False):
            return None
        logger.warning("%s is damaged; it is kept as %s and computed again", self.address(path), aside)
        return aside

    def sweep(self) -> None:
        """Delete the drafts of writers that were killed. Object stores need no drafts."""

    def _put(self, where: str, content: bytes, *, replace: bool) -> bool:
        """Write a file, and return False if another one exists that must not be replaced."""
        put = partial(self._call, "pipe_file", where, content, n_bytes=len(content))
        return conditionally(put if replace else partial(put, mode="create"), put)

    def _rename(self, where: str, aside: str, sha256: str) -> bool:
        entry, content = self._call("info", where), self._call("cat_file", where, n_bytes=_LARGE_FILE)
        if hashlib.sha256(content).hexdigest() != sha256:
            return False
        self._put(aside, content, replace=False)
        if "ETag" not in entry:
            self._call("rm_file", where)
            return True
        bucket, key, _ = self._fs.split_path(where)
        delete = partial(self._fs.call_s3, "delete_object", Bucket=bucket, Key=key, timeout=ANSWER_SECONDS)
        return conditionally(partial(delete, IfMatch=entry["ETag"]), delete)

    def _probe(self) -> None:
        where = self._at(f"{_DRAFT}{uuid.uuid4().hex}")
        self._call("pipe_file", where, b"")
        self._call("rm_file", where)

    def _at(self, path: str) -> str:
        parts = PurePosixPath(path)
        if parts.is_absolute() or ".." in parts.parts or not parts.parts:
            raise StoreError(f"the path {path!r} leads out of the storage root {self.uri}")
        return f"{self._root}/{parts}"

    def _call(self, method: str, where: str, *content: bytes, n_bytes: int = 0, **options: Any) -> Any:
        """Call the file system; without a time limit, a call to a server that stops responding would never end."""
        self._fs.invalidate_cache()
        if self._fs.async_impl:
            options["timeout"] = ANSWER_SECONDS + n_bytes / _SLOWEST
        return self._renewing(partial(getattr(self._fs, method), where, *content, **options))

    def _renewing(self, call: Callable[[], Result]) -> Result:
        """Return `call()`; if a token has expired, read the profile file, which may have a new one, and try again."""
        used = getattr(self._fs, "_s3", None)
        try:
            return call()
        except Exception as error:
            if not has_expired(error):
                raise
        with _RENEWING:
            if self._fs._s3 is used:  # otherwise another thread has already read the file again
                self._fs.session = _s3_session(self._fs.kwargs)
                self._fs.connect(refresh=True)
        return call()

    def _patiently(self, path: str, call: Callable[[], Result]) -> Result:
        return patiently(call, self.address(path), self._patience)

    def _if_found(self, path: str, call: Callable[[], Result], missing: Missing) -> Result | Missing:
        """Return `call()`, or `missing` if the file or folder does not exist. A missing bucket is an error."""

        def found() -> Result | Missing:
            try:
                return call()
            except FileNotFoundError as error:
                if has_no_bucket(error):
                    raise
                return missing

        return self._patiently(path, found)


def _s3_session(options: dict[str, Any]) -> Any:
    """Return a session that parses ISO dates quickly. botocore's parser takes most of the time of a listing."""
    from aiobotocore.session import AioSession
    from botocore.utils import parse_timestamp

    def date(value: Any) -> Any:
        return datetime.fromisoformat(value) if str(value).endswith("Z") else parse_timestamp(value)

    session = AioSession(**options)
    session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=date)
    return session


class Folder(Store):
    """The store of a local or shared folder. A file is written as a draft, and then renamed or linked to its name."""

    def _at(self, path: str) -> str:
        found = super()._at(path)
        if not Path(os.path.realpath(found)).is_relative_to(os.path.realpath(self._root)):  # by a symbolic link
            raise StoreError(f"the path {path!r} leads out of the storage root {self._root}")
        return found

    def _put(self, where: str, content: bytes, *, replace: bool) -> bool:
        root, final = Path(self._root), Path(where)
        if not replace and final.exists():
            return False
        for folder in (root, final.parent):
            folder.mkdir(parents=True, exist_ok=True)
        draft = root / f"{_DRAFT}{uuid.uuid4().hex}"
        try:
            with draft.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            (draft.replace if replace else partial(_take_name, draft))(final)
        except FileExistsError:
            return False
        finally:
            draft.unlink(missing_ok=True)
        return True

    def _rename(self, where: str, aside: str, sha256: str) -> bool:
        """Lock the file meanwhile, so that only one process renames it."""
        source = Path(where)
        with source.open("rb+") as file:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            same = os.path.samestat(os.fstat(file.fileno()), source.stat())
            if not same or hashlib.sha256(file.read()).hexdigest() != sha256:
                return False
            source.rename(aside)
            return True

    def _probe(self) -> None:
        root = Path(self._root)
        with tempfile.TemporaryFile(dir=next(path for path in (root, *root.parents) if path.exists())):
            pass

    def sweep(self) -> None:
        if drafts := list(Path(self._root).glob(f"{_DRAFT}*")):
            with tempfile.TemporaryFile(dir=self._root) as file:
                now = os.fstat(file.fileno()).st_mtime  # by the file system's clock, which also dates the drafts
            for draft in drafts:
                with contextlib.suppress(OSError):
                    if now - draft.stat().st_mtime > _ABANDONED_SECONDS:
                        draft.unlink()


def _take_name(draft: Path, final: Path) -> None:
    """Give the draft its name; FileExistsError if the name is taken."""
    try:
        os.link(draft, final)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        final.open("x").close()  # without hard links, the process that creates `final` as an empty file wins
        draft.replace(final)


def concurrently(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Return `function` of each item, in order, with many calls at a time; raises the first error."""
    with ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="store") as threads:
        return list(threads.map(function, items))
