"""A run's place in storage: a folder, or any fsspec URI. A file appears whole or not at all.

A folder gets a draft that is renamed; an object store one PUT, or above `_ONE_PUT` a multi-part upload, which the
store shows only once it is complete.
"""

import contextlib
import errno
import fcntl
import functools
import inspect
import io
import logging
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from ..errors import MissingArtifact, ReadOnlyStorage, StoreError, redacted
from .outages import (
    PATIENCE_SECONDS,
    conditional_writes_unknown,
    has_expired,
    has_no_reason,
    in_words,
    patiently,
    precondition_failed,
)

logger = logging.getLogger(__name__)

_TEMPORARY = ".tmp-"
_BAD = ".bad-"  # `_<name>.bad-<n>` is a quarantined file; readers of Parquet folders ignore the underscore
_ABANDONED_SECONDS = 86_400.0  # an older draft has lost its writer
_CONNECTIONS = 32
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
_ONE_PUT = 2**30  # bytes
_END_BYTES = 2**16  # what pyarrow reads first, for the footer
_ANSWER_SECONDS, _SLOWEST = 30.0, 2**20  # a call may take that long, and as long as its bytes at that many a second
# One try a call: `patiently` is the only one that tries again, so that the time it takes is known.
_S3_OPTIONS = {
    "use_listings_cache": False,
    "config_kwargs": {
        "retries": {"mode": "standard", "total_max_attempts": 1},
        "read_timeout": _ANSWER_SECONDS,
        "connect_timeout": 10,
        "max_pool_connections": _CONNECTIONS,
    },
}
_RENEWING = threading.Lock()
Item = TypeVar("Item")
Result = TypeVar("Result")


class Store:
    """Files below one root, addressed by relative paths ("attack/part-00007.parquet").

    Make one in the process that uses it: the file systems of object stores do not survive a fork. Every call waits
    out an outage of `patience_seconds` and then raises StoreError, as it does at once where waiting cannot help.

    Raises:
        StoreError: for a URI that fsspec cannot open, or a path that leads out of the root.
    """

    def __init__(self, uri: str, patience_seconds: float = PATIENCE_SECONDS) -> None:
        protocol, _, _ = uri.partition("://")
        if redacted(uri) != uri:
            raise StoreError(f"storage={redacted(uri)}: credentials belong in the environment or a profile")
        s3 = protocol in ("s3", "s3a")
        try:
            self._fs, self._root = fsspec.core.url_to_fs(uri, **(_S3_OPTIONS if s3 else {}))
        except (ValueError, ImportError) as error:
            raise StoreError(f"storage={uri!r} cannot be opened: {error}") from error
        if s3:
            self._fs.retries = 1
            _read_dates_quickly(self._fs)
        self._bucket = self._fs.split_path(self._root)[0] if s3 else None
        self._put_options = {"chunksize": _ONE_PUT} if s3 else {}
        # With more, a newer s3fs asks for the size before each read; an older one neither asks nor takes the option.
        self._get_options = {"max_concurrency": 1} if s3 and _takes(self._fs._cat_file, "max_concurrency") else {}
        self._local = isinstance(self._fs, LocalFileSystem)
        self._real_root = os.path.realpath(self._root) if self._local else ""
        self._patience = patience_seconds
        self.uri = self._root if self._local else uri.rstrip("/")

    def child(self, name: str) -> "Store":
        """The store of a folder below this one."""
        self._path(name)
        return Store(f"{self.uri}/{name}", self._patience)

    def at(self, uri: str) -> "Store":
        """Return the store of another root, with the same patience."""
        return Store(uri, self._patience)

    def address(self, path: str) -> str:
        """The path as a person would type it."""
        return f"{self.uri}/{path}"

    def require_writable(self) -> None:
        """Write something and remove it again; nothing of it is left, no folder either.

        Raises:
            ReadOnlyStorage: where that cannot be done.
        """
        try:
            if self._local:
                patiently(self._try_folder, self.uri, self._patience)
            else:
                probe = f"{_TEMPORARY}{uuid.uuid4().hex}"
                self.write(probe, b"")
                self.delete(probe)
        except StoreError as error:
            raise ReadOnlyStorage(str(error)) from error
        except FileNotFoundError as error:  # /proc takes none
            raise ReadOnlyStorage(in_words(error, self.uri)) from error

    def _try_folder(self) -> None:
        """A file without a name in the root, or in the nearest folder above it that is there."""
        root = Path(self._root)
        with tempfile.TemporaryFile(dir=next(path for path in (root, *root.parents) if path.exists())):
            pass

    def exists(self, path: str) -> bool:
        """Whether there is such a file. On S3 by its head alone: fsspec would list what could lie below it as well."""
        if self._bucket is None:
            return bool(self._call("exists", path))
        try:
            self._object("head_object", path)
        except FileNotFoundError:
            return False
        return True

    def require_bucket(self) -> None:
        """Ask for the bucket itself, on S3: a listing and `exists` answer the same for an absent and an empty one.

        Raises:
            StoreError: where it is not there, or not to be reached.
        """
        if self._bucket is None:
            return
        head = partial(self._fs.call_s3, "head_bucket", Bucket=self._bucket, timeout=_ANSWER_SECONDS)
        address = f"s3://{self._bucket}"
        try:
            patiently(head, address, self._patience)
        except FileNotFoundError as error:
            raise StoreError(in_words(error, address)) from error

    def names(self, folder: str, stem: str = "") -> list[str]:
        """Names in a folder that begin with `stem`, sorted; none where there is no such folder. S3 sends no others."""
        try:
            entries = (
                self._call("ls", folder, detail=False)
                if self._bucket is None
                else [entry["name"] for entry in self._pages(folder, stem)]
            )
        except FileNotFoundError:
            return []
        itself = PurePosixPath(self._path(folder) if folder else self._root)  # listed by some where it is empty
        found = {path.name for path in map(PurePosixPath, map(str, entries)) if path != itself}
        return sorted(name for name in found if name.startswith(stem) and _TEMPORARY not in name)

    def sizes(self, folder: str, stems: Iterable[str] = ("",)) -> dict[str, int]:
        """Name -> bytes of each file in a folder, in one listing; none where there is no such folder.

        An object store lists a thousand files a request, and each request needs the answer to the one before. With
        `stems`, the beginnings of the names that are wanted, the files of each are listed at the same time.
        """
        wanted = stems if self._fs.async_impl else ("",)
        entries = [entry for listed in concurrently(partial(self._listed, folder), wanted) for entry in listed]
        files = {entry["name"].rpartition("/")[2]: entry["size"] for entry in entries if entry["type"] == "file"}
        return {name: int(size) for name, size in files.items() if _TEMPORARY not in name}

    def _listed(self, folder: str, stem: str) -> list[dict[str, Any]]:
        if self._bucket is not None:
            return self._pages(folder, stem)
        if stem:
            return list(self._call("find", folder, maxdepth=1, prefix=stem, detail=True).values())
        try:
            return list(self._call("ls", folder, detail=True))
        except FileNotFoundError:
            return []

    def _pages(self, folder: str, stem: str) -> list[dict[str, Any]]:
        """A folder on S3, a request a thousand entries; where fsspec finds none, it lists the folder above as well."""
        bucket, key, _ = self._fs.split_path(self._path(folder) if folder else self._root)
        prefix, more, found = f"{key}/{stem}" if key else stem, dict[str, str](), list[dict[str, Any]]()
        while True:
            ask = partial(
                self._fs.call_s3, "list_objects_v2", Bucket=bucket, Prefix=prefix, Delimiter="/",
                timeout=_ANSWER_SECONDS, **more,
            )  # fmt: skip
            try:
                page = patiently(self._renewing(ask), self.address(folder), self._patience)
            except FileNotFoundError as error:
                raise StoreError(in_words(error, self.address(folder))) from error
            files = ((f"{bucket}/{one['Key']}", one["Size"], "file") for one in page.get("Contents", ()))
            folders = ((f"{bucket}/{one['Prefix']}", 0, "directory") for one in page.get("CommonPrefixes", ()))
            found += [dict(zip(("name", "size", "type"), one, strict=True)) for one in (*files, *folders)]
            if not page.get("IsTruncated"):
                return found
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def all_files(self) -> list[str]:
        """The paths of all files below the root, sorted, drafts and what was set aside left out."""
        try:
            found = self._call("find", "")
        except FileNotFoundError:
            return []
        relative = (str(path)[len(self._root) :].lstrip("/") for path in found)
        return sorted(path for path in relative if path and _TEMPORARY not in path and _BAD not in path)

    def read(self, path: str) -> bytes:
        return self._cat(path, _ONE_PUT, **self._get_options)

    def read_tail(self, path: str, n_bytes: int) -> bytes:
        """The last `n_bytes` of a file, or all of a shorter one, in one call."""
        return self._cat(path, n_bytes, start=-n_bytes)

    def open(self, path: str, size: int | None = None) -> Any:
        """A seekable binary file, for readers that need only a part of it; a known `size` spares a request."""
        try:
            if self._local:
                return patiently(lambda: Path(self._path(path)).open("rb"), self.address(path), self._patience)
            end = self.read_tail(path, _END_BYTES) if size is None else b""  # of a small file that is all
            if size is None:
                size = len(end) if len(end) < _END_BYTES else int(self._call("info", path)["size"])
        except FileNotFoundError as error:
            raise self._missing(path) from error
        return _RemoteFile(partial(self._read_range, path), size, end)

    def _read_range(self, path: str, start: int, stop: int) -> bytes:
        content = self._cat(path, stop - start, start=start, end=stop)
        if len(content) != stop - start:
            raise OSError(f"{self.address(path)}: {len(content)} bytes came of {stop - start}")
        return content

    def write(self, path: str, content: bytes) -> None:
        """Write the whole file in one atomic step; an existing one is replaced."""
        final = Path(self._path(path))
        try:
            if self._local:
                patiently(lambda: _write_draft(Path(self._root), final, content), self.address(path), self._patience)
            else:
                self._put(path, content)
        except FileNotFoundError as error:
            raise StoreError(in_words(error, self.address(path))) from error

    def create(self, path: str, content: bytes) -> bool:
        """Write the whole file unless there is one; False, and nothing is changed, where there is.

        Of several writers exactly one wins: a folder gets a link, which the file system refuses where the name is
        taken; an object store a conditional write. On one that has never heard of those, the last writer's file stays.
        """
        if self._local:
            final = Path(self._path(path))
            try:
                return patiently(
                    lambda: _link_draft(Path(self._root), final, content), self.address(path), self._patience
                )
            except FileNotFoundError as error:
                raise StoreError(in_words(error, self.address(path))) from error
        try:
            self._put(path, content, mode="create")
        except FileNotFoundError as error:
            raise StoreError(in_words(error, self.address(path))) from error
        except StoreError as error:
            if precondition_failed(error):
                return False
            if not conditional_writes_unknown(error):
                raise
            self.write(path, content)
        return True

    def write_all(self, folder: str, files: Mapping[str, bytes]) -> None:
        """Write these files of a folder, JSON last, since it says that the other files are there."""
        last = [name for name in files if name.endswith(".json")]
        for names in (files.keys() - last, last):
            concurrently(lambda name: self.write(f"{folder}/{name}", files[name]), names)

    def delete(self, path: str) -> None:
        """Remove a file; a missing one is no error."""
        with contextlib.suppress(FileNotFoundError):
            self._call("rm_file", path)

    def delete_empty_folder(self, path: str) -> None:
        """Remove a folder without files; object stores have none."""
        if self._local:
            with contextlib.suppress(OSError):  # it is not there, or not empty
                Path(self._path(path)).rmdir()

    def set_aside(self, path: str, unless: Callable[[bytes], bool]) -> str | None:
        """Give a file another name, `_<name>.bad-<n>`, unless its bytes are good; returns that path.

        None, and nothing is changed, where they are good or the file is gone. The bytes that are renamed are those that
        were judged: in a folder nobody else renames a file that is locked, and none replaces one that is there; an
        object is deleted only as long as its ETag is that of the bytes.
        """
        try:
            aside = self._rename_bad(path, unless) if self._local else self._move_bad(path, unless)
        except (FileNotFoundError, MissingArtifact):
            return None
        if aside:
            logger.warning("%s is damaged; it is kept as %s and computed again", self.address(path), aside)
        return aside

    def _rename_bad(self, path: str, is_good: Callable[[bytes], bool]) -> str | None:
        source = Path(self._path(path))

        def rename() -> str | None:
            with source.open("rb+") as file:
                _lock(file)
                if is_good(file.read()) or not os.path.samestat(os.fstat(file.fileno()), source.stat()):
                    return None
                aside = self._free_name(path)
                source.rename(self._path(aside))
                return aside

        return patiently(rename, self.address(path), self._patience)

    def _move_bad(self, path: str, is_good: Callable[[bytes], bool]) -> str | None:
        """An object has no other name: it is copied, then deleted."""
        etag, content = self._call("info", path).get("ETag"), self.read(path)
        if is_good(content) or self.read(path) != content:  # what the way has damaged differs from time to time
            return None
        aside = self._free_name(path)
        while not self.create(aside, content):
            aside = self._free_name(path)
        if self._delete_if(path, etag):
            return aside
        self.delete(aside)  # another driver was faster
        return None

    def _delete_if(self, path: str, etag: str | None) -> bool:
        """Delete an object whose ETag is still this one; whether it is gone. Where a store has no ETags: delete it."""
        if etag is None:
            self.delete(path)
            return True
        try:
            self._object("delete_object", path, IfMatch=etag)
        except FileNotFoundError:
            return False
        except StoreError as error:
            if precondition_failed(error):
                return False
            if not conditional_writes_unknown(error):
                raise
            self.delete(path)
        return True

    def _free_name(self, path: str) -> str:
        folder, slash, name = path.rpartition("/")
        taken, n = set(self.names(folder)), 1
        while f"_{name}{_BAD}{n}" in taken:
            n += 1
        return f"{folder}{slash}_{name}{_BAD}{n}"

    def sweep(self) -> None:
        """Remove the drafts of writers that were killed; those of live writers stay."""
        if self._local:
            for draft in Path(self._root).glob(f"{_TEMPORARY}*"):
                if _is_abandoned(draft):
                    draft.unlink(missing_ok=True)

    def _path(self, path: str) -> str:
        parts = PurePosixPath(path)
        if parts.is_absolute() or ".." in parts.parts or not parts.parts:
            raise StoreError(f"the path {path!r} leads out of the storage root {self.uri}")
        found = f"{self._root}/{parts}"
        if self._local and not Path(os.path.realpath(found)).is_relative_to(self._real_root):  # by a link in the run
            raise StoreError(f"the path {path!r} leads out of the storage root {self.uri}")
        return found

    def _call(self, method: str, path: str, *content: bytes, n_bytes: int = 0, **options: Any) -> Any:
        """One call of the file system; FileNotFoundError passes, any other error becomes a StoreError."""
        target = self._root if method in ("ls", "find") and not path else self._path(path)
        if self._fs.async_impl:  # without a limit an s3fs call to a server that has stopped answering never ends
            options["timeout"] = _ANSWER_SECONDS + n_bytes / _SLOWEST
        self._fs.invalidate_cache()
        return self._ask(partial(getattr(self._fs, method), target, *content, **options), path)

    def _object(self, method: str, path: str, **options: Any) -> Any:
        """One request of S3's about an object; errors as in `_call`."""
        bucket, key, _ = self._fs.split_path(self._path(path))
        call = partial(self._fs.call_s3, method, Bucket=bucket, Key=key, timeout=_ANSWER_SECONDS, **options)
        return self._ask(call, path)

    def _ask(self, call: Callable[[], Result], path: str) -> Result:
        call = self._renewing(call)
        try:
            return patiently(call, self.address(path), self._patience)
        except StoreError as error:
            if self._bucket is None or not has_no_reason(error):
                raise
        self._pages("", _TEMPORARY)  # which raises with the reason, or finds that an expired token has been renewed
        return patiently(call, self.address(path), self._patience)

    def _renewing(self, call: Callable[[], Result]) -> Callable[[], Result]:
        """On S3 `call`, once more where its token has expired: its profile's file may have been written anew."""
        fs = self._fs
        if self._bucket is None:
            return call

        def renewing() -> Result:
            used = getattr(fs, "_s3", None)
            try:
                return call()
            except Exception as error:
                if not has_expired(error):
                    raise
            with _RENEWING:
                if fs._s3 is used:  # else another thread has read it meanwhile
                    fs.session = None
                    _read_dates_quickly(fs)
                    fs.connect(refresh=True)
            return call()

        return renewing

    def _cat(self, path: str, most_bytes: int, **options: int) -> bytes:
        try:
            return bytes(self._call("cat_file", path, n_bytes=most_bytes, **options))
        except FileNotFoundError as error:
            raise self._missing(path) from error

    def _put(self, path: str, content: bytes, **options: Any) -> None:
        self._call("pipe_file", path, content, n_bytes=len(content), **options, **self._put_options)

    def _missing(self, path: str) -> MissingArtifact:
        return MissingArtifact(f"{self.address(path)} does not exist")


def concurrently(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """`function` of each item, in order, as many at a time as an object store likes; the first error is raised."""
    with ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="store") as threads:
        return list(threads.map(function, items))


def _read_dates_quickly(fs: Any) -> None:
    """Let botocore read the dates of a listing with `fromisoformat`: dateutil takes four fifths of a listing's time."""
    from aiobotocore.session import AioSession
    from botocore.utils import parse_timestamp

    def date(value: Any) -> Any:
        return datetime.fromisoformat(value) if str(value).endswith("Z") else parse_timestamp(value)

    if fs.session is None:
        fs.session = AioSession(**fs.kwargs)
        fs.session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=date)


def _takes(function: Callable[..., Any], option: str) -> bool:
    return option in inspect.signature(function).parameters


class _RemoteFile(io.RawIOBase):
    """A remote file that is read by ranges, each one a call of its store; its end, or all of a small one, by one."""

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
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)


@contextlib.contextmanager
def _draft(root: Path, final: Path, content: bytes) -> Iterator[Path]:
    """Write a draft in the root, which can be renamed or linked to `final`; remove the draft afterwards.

    The draft is locked as long as its writer lives.
    """
    draft = root / f"{_TEMPORARY}{_boot_id()}-{uuid.uuid4().hex}"
    root.mkdir(parents=True, exist_ok=True)
    try:
        with draft.open("xb") as file:
            _lock(file)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            final.parent.mkdir(parents=True, exist_ok=True)
            yield draft
    finally:
        draft.unlink(missing_ok=True)


@functools.cache
def _boot_id() -> str:
    """Return 8 characters that identify the running kernel, which all containers of a machine share."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        return uuid.uuid4().hex[:8]


def _is_abandoned(draft: Path) -> bool:
    """Whether the writer of a draft is dead.

    A lock tells if the writer runs on this kernel; in other cases only the age does.
    """
    with contextlib.suppress(OSError):
        about = draft.stat()
        if time.time() - about.st_mtime > _ABANDONED_SECONDS:
            return True
        if about.st_size and draft.name.startswith(f"{_TEMPORARY}{_boot_id()}-"):  # empty: it is not locked yet
            with draft.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
    return False


def _write_draft(root: Path, final: Path, content: bytes) -> None:
    with _draft(root, final, content) as draft:
        draft.replace(final)


def _link_draft(root: Path, final: Path, content: bytes) -> bool:
    """Whether the name was free; the file has appeared whole, or another writer's is untouched."""
    if final.exists():
        return False
    with _draft(root, final, content) as draft:
        try:
            os.link(draft, final)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return _take_name(final, draft)
    return True


def _take_name(final: Path, draft: Path) -> bool:
    """The same on a file system without hard links: who creates the empty file may replace it."""
    try:
        os.close(os.open(final, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    draft.replace(final)
    return True


def _lock(file: BinaryIO) -> None:
    """Lock a file until it is closed, if its file system has locks."""
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX)
