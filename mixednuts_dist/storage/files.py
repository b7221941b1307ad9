"""The files below a folder or bucket of any file system that fsspec opens."""

import hashlib
import uuid
from typing import Any

from .outages import conditionally

DRAFT = ".tmp-"  # prefix of the names of drafts, which are renamed when they are complete
ONE_PUT = 2**30  # bytes; larger files are written in several requests
# A call may take `ANSWER_SECONDS`, plus the time to transfer its content at `_SLOWEST` bytes per second.
ANSWER_SECONDS, _SLOWEST = 30.0, 2**20


class Files:
    """The files below one root, by relative path. The methods raise the errors of the file system's library."""

    def __init__(self, fs: Any, root: str) -> None:
        self._fs, self._root = fs, root.rstrip("/")

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}".rstrip("/")

    def _call(self, method: str, path: str, *content: bytes, n_bytes: int = 0, **options: Any) -> Any:
        """Call the file system; without a time limit, a call to a server that stops responding would never end."""
        self._fs.invalidate_cache()
        if self._fs.async_impl:
            options["timeout"] = ANSWER_SECONDS + n_bytes / _SLOWEST
        return getattr(self._fs, method)(self._at(path), *content, **options)

    def exists(self, path: str) -> bool:
        return bool(self._call("exists", path))

    def read(self, path: str, start: int | None = None, stop: int | None = None) -> bytes:
        """Return the bytes `[start:stop]` of a file."""
        n_bytes = ONE_PUT if start is None else (stop or 0) - start
        return bytes(self._call("cat_file", path, n_bytes=n_bytes, start=start, end=stop))

    def listed(self, folder: str) -> dict[str, int | None]:
        """Return name -> size of the entries; the size of a folder is None."""
        entries = self._call("ls", folder, detail=True)
        sizes = {entry["name"].rstrip("/"): entry["size"] if entry["type"] == "file" else None for entry in entries}
        sizes.pop(self._at(folder), None)  # some stores list an empty folder in itself
        return {path.rpartition("/")[2]: size for path, size in sizes.items()}

    def all_files(self, folder: str) -> list[str]:
        """Return the paths of all files below a folder."""
        return [str(path).partition(f"{self._root}/")[2] for path in self._call("find", folder)]

    def write(self, path: str, content: bytes, **options: Any) -> None:
        """Write a file; an existing one is replaced."""
        self._call("pipe_file", path, content, n_bytes=len(content), **options)

    def create(self, path: str, content: bytes) -> bool:
        """Write a file unless the name is taken; returns whether it was free.

        The last writer wins on a store without conditional writes.
        """
        return conditionally(lambda: self.write(path, content, mode="create"), lambda: self.write(path, content))

    def delete(self, path: str) -> None:
        self._call("rm_file", path)

    def set_aside(self, path: str, sha256: str, aside: str) -> bool:
        """Rename a file to `aside` if it has this checksum; returns whether this call renamed it."""
        content = self.read(path)
        if hashlib.sha256(content).hexdigest() != sha256:
            return False
        self.create(aside, content)
        self.delete(path)
        return True

    def require_writable(self, _root: str) -> None:
        """Write an empty file and delete it, which raises an error if the storage is read-only."""
        probe = f"{DRAFT}{uuid.uuid4().hex}"
        self.write(probe, b"")
        self.delete(probe)

    def sweep(self) -> None:
        """Delete abandoned drafts, if the file system needs drafts."""
