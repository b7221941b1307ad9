"""Fetch what `missing_inputs` lists: resumed where it broke off, held against the checksum, whole or not at all."""

import hashlib
import logging
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

from ..errors import BaseClassifierError, MixedNutsError
from ..uris import Missing
from .checkpoints import import_quietly, require_checkpoint

logger = logging.getLogger(__name__)

_BLOCK = 1 << 16
_TRIES = 5
_TIMEOUT_SECONDS = (10, 60)  # to connect, and without a byte
_ARCHIVE = ".tar.gz"


def fetch(item: Missing, on_bytes: Callable[[int, int], None] = lambda _done, _all: None) -> str:
    """Put a missing file into its place; returns its sha256.

    What has arrived lies in `<file>.part` until all of it has, and the next call goes on from there. `on_bytes` is told
    how many bytes there are and how many there will be (0 where the server does not say).

    Raises:
        BaseClassifierError: where nobody knows where to get it, the server refuses, or the bytes are not those that
            were published; what is damaged is not put into place.
    """
    if not item.url:
        raise BaseClassifierError(f"{item.what}: it cannot be fetched; {item.command}")
    if item.url.startswith("hf://"):
        return _from_hub(item)
    path = Path(item.path)
    folder = path.parents[1] if item.url.endswith(_ARCHIVE) else path.parent  # an archive holds the file's own folder
    target = folder / item.url.rpartition("/")[2] if item.url.endswith(_ARCHIVE) else path
    part = target.with_name(f"{target.name}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    _download(item, part, on_bytes)
    sha256 = _sha256(part)
    if not sha256.startswith(item.sha256):
        part.unlink()
        raise BaseClassifierError(
            f"{item.url} gave a file with sha256 {sha256[:12]}..., published is {item.sha256}...; it was thrown away"
        )
    if target == path:
        require_checkpoint(part)  # a page that says why not is no file
        part.replace(path)
        return sha256
    part.replace(target)
    try:
        with tarfile.open(target) as archive:
            archive.extractall(folder, filter="data")
    except (tarfile.TarError, OSError, EOFError) as error:
        raise BaseClassifierError(f"{target} is damaged ({error}); delete it and fetch it again") from error
    return sha256


def _download(item: Missing, part: Path, on_bytes: Callable[[int, int], None]) -> None:
    """Append to `part` until the server has sent all; a connection that breaks is taken up again where it broke."""
    import requests
    import urllib3

    for attempt in range(_TRIES):
        have = part.stat().st_size if part.exists() else 0
        headers = {"Range": f"bytes={have}-"} if have else {}
        try:
            with requests.get(item.url, headers=headers, timeout=_TIMEOUT_SECONDS, stream=True) as response:
                if response.status_code == 416:  # all of it is there
                    return
                if response.status_code >= 400:
                    raise _refused(item, f"{response.status_code} {response.reason}")
                if response.status_code != 206:
                    have = 0  # a server that does not take up again begins again
                length = int(response.headers.get("Content-Length", 0))
                with part.open("ab" if have else "wb") as file:
                    for block in response.iter_content(_BLOCK):
                        file.write(block)
                        on_bytes(file.tell(), have + length)
                return
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
            if attempt == _TRIES - 1:
                raise _refused(item, f"{type(error).__name__}: {error}") from error
            logger.warning("%s broke off (%s); going on from byte %d", item.url, error, have)
            time.sleep(min(2**attempt, 10) * 0.5)


def _from_hub(item: Missing) -> str:
    """The hub's own client: it resumes, checks and puts the file into its cache."""
    repository, _, name = item.url.removeprefix("hf://").rpartition("/")
    hub = import_quietly("huggingface_hub")
    try:
        return _sha256(Path(hub.hf_hub_download(repository, name)))
    except (OSError, ValueError, hub.errors.HfHubHTTPError) as error:
        raise _refused(item, " ".join(str(error).split())[:300]) from error


def _refused(item: Missing, reason: str) -> MixedNutsError:
    return BaseClassifierError(f"{item.what} cannot be fetched from {item.url} ({reason}); by hand: {item.command}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
