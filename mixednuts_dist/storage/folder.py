"""Files in a local or shared folder. A file is written as a draft, which then gets its name by a rename or a link."""

import contextlib
import errno
import fcntl
import hashlib
import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import StoreError
from .files import DRAFT, Files

_ABANDONED_SECONDS = 3600.0  # the process that wrote an older draft is dead
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}  # this file system has no hard links


class Folder(Files):
    """Files in a folder. The methods raise OSError."""

    def _at(self, path: str) -> str:
        found = super()._at(path)
        if not Path(os.path.realpath(found)).is_relative_to(os.path.realpath(self._root)):  # by a symbolic link
            raise StoreError(f"the path {path!r} leads out of the storage root {self._root}")
        return found

    def write(self, path: str, content: bytes, **_options: Any) -> None:
        final = Path(self._at(path))
        with _draft(Path(self._root), final, content) as draft:
            draft.replace(final)

    def create(self, path: str, content: bytes) -> bool:
        """Write a file unless the name is taken; returns whether it was free. The first of several writers wins."""
        final = Path(self._at(path))
        if final.exists():
            return False
        with _draft(Path(self._root), final, content) as draft:
            try:
                os.link(draft, final)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                return _take_name(final, draft)
        return True

    def set_aside(self, path: str, sha256: str, aside: str) -> bool:
        """Rename a file to `aside` if it has this checksum; returns whether this call renamed it.

        The file is locked meanwhile, so that only one process renames it.
        """
        source = Path(self._at(path))
        with source.open("rb+") as file:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            same = os.path.samestat(os.fstat(file.fileno()), source.stat())
            if not same or hashlib.sha256(file.read()).hexdigest() != sha256:
                return False
            source.rename(self._at(aside))
            return True

    def require_writable(self, _root: str) -> None:
        """Create a file without a name in the root, or in the nearest existing folder above it."""
        root = Path(self._root)
        with tempfile.TemporaryFile(dir=next(path for path in (root, *root.parents) if path.exists())):
            pass

    def sweep(self) -> None:
        """Delete the drafts of killed processes, which are older than any write takes."""
        if drafts := list(Path(self._root).glob(f"{DRAFT}*")):
            with tempfile.TemporaryFile(dir=self._root) as file:
                now = os.fstat(file.fileno()).st_mtime  # by the file system's clock, which also dates the drafts
            for draft in drafts:
                with contextlib.suppress(OSError):
                    if now - draft.stat().st_mtime > _ABANDONED_SECONDS:
                        draft.unlink()


@contextlib.contextmanager
def _draft(root: Path, final: Path, content: bytes) -> Iterator[Path]:
    """Write a draft for `final` in the root, and delete it afterwards."""
    draft = root / f"{DRAFT}{uuid.uuid4().hex}"
    root.mkdir(parents=True, exist_ok=True)
    try:
        with draft.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        final.parent.mkdir(parents=True, exist_ok=True)
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def _take_name(final: Path, draft: Path) -> bool:
    """Rename the draft on a file system without hard links: the process that creates `final` as an empty file wins."""
    try:
        final.open("x").close()
    except FileExistsError:
        return False
    draft.replace(final)
    return True
