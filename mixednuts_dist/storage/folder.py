"""Files in a local or shared folder. A file is written as a locked draft, which is then renamed or linked."""

import contextlib
import errno
import fcntl
import functools
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import StoreError
from .files import DRAFT, Files

_ABANDONED_SECONDS = 86_400.0  # the writer of an older draft is dead
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}


class Folder(Files):
    """Files in a folder. The methods raise OSError."""

    def _at(self, path: str) -> str:
        found = super()._at(path)
        if not Path(os.path.realpath(found)).is_relative_to(os.path.realpath(self._root)):  # through a link in the run
            raise StoreError(f"the path {path!r} leads out of the storage root {self._root}")
        return found

    def write(self, path: str, content: bytes, **_options: Any) -> None:
        """Write a file; an existing one is replaced."""
        final = Path(self._at(path))
        with _draft(Path(self._root), final, content) as draft:
            draft.replace(final)

    def create(self, path: str, content: bytes) -> bool:
        """Write a file unless the name is taken, which the file system decides; returns whether it was free."""
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

    def set_aside(self, path: str, is_good: Callable[[bytes], bool], free_name: Callable[[], str]) -> str | None:
        """Rename a file unless its bytes are good. Other processes do not rename a file that is locked."""
        source = Path(self._at(path))
        with source.open("rb+") as file:
            _lock(file)
            if is_good(file.read()) or not os.path.samestat(os.fstat(file.fileno()), source.stat()):
                return None
            aside = free_name()
            source.rename(self._at(aside))
            return aside

    def require_writable(self) -> None:
        """Create a file without a name in the root, or in the nearest existing folder above it."""
        root = Path(self._root)
        with tempfile.TemporaryFile(dir=next(path for path in (root, *root.parents) if path.exists())):
            pass

    def sweep(self) -> None:
        """Delete the drafts whose writers are dead."""
        for draft in Path(self._root).glob(f"{DRAFT}*"):
            if _is_abandoned(draft):
                draft.unlink(missing_ok=True)


@contextlib.contextmanager
def _draft(root: Path, final: Path, content: bytes) -> Iterator[Path]:
    """Write a draft for `final` in the root, and delete it afterwards. It is locked as long as its writer lives."""
    draft = root / f"{DRAFT}{_boot_id()}-{uuid.uuid4().hex}"
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
    """Whether the writer of a draft is dead. The lock shows this on the writer's kernel, elsewhere only the age."""
    with contextlib.suppress(OSError):
        about = draft.stat()
        if time.time() - about.st_mtime > _ABANDONED_SECONDS:
            return True
        if about.st_size and draft.name.startswith(f"{DRAFT}{_boot_id()}-"):  # an empty draft is not locked yet
            with draft.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
    return False


def _take_name(final: Path, draft: Path) -> bool:
    """Rename the draft on a file system without hard links, where the process that creates the empty file wins."""
    try:
        os.close(os.open(final, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    draft.replace(final)
    return True


def _lock(file: BinaryIO) -> None:
    """Lock a file until it is closed, if its file system supports locks."""
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX)
