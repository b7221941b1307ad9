"""Files on S3. A file is written by one PUT, or by a multi-part upload, which creates the file when it is complete."""

import hashlib
import threading
from collections.abc import Callable
from typing import Any

from .files import ANSWER_SECONDS, ONE_PUT, Files
from .outages import conditionally, has_expired

CONNECTIONS = 32
# One try per call, because `patiently` is the only place that tries again.
S3_OPTIONS = {
    "use_listings_cache": False,
    "max_concurrency": 1,  # otherwise s3fs requests the size of a file before it reads the file
    "config_kwargs": {
        "retries": {"mode": "standard", "total_max_attempts": 1},
        "read_timeout": ANSWER_SECONDS,
        "connect_timeout": 10,
        "max_pool_connections": CONNECTIONS,
    },
}
_RENEWING = threading.Lock()


class S3(Files):
    """Objects below one prefix of a bucket. No HEAD request is sent, because the response cannot explain an error."""

    def __init__(self, fs: Any, root: str) -> None:
        super().__init__(fs, root)
        fs.retries = 1
        self._bucket, self._prefix, _ = fs.split_path(self._root)

    def _renewing(self, call: Callable[[], Any]) -> Any:
        """Return `call()`; if the token has expired, read the profile file, which may have a new one, and try again."""
        used = getattr(self._fs, "_s3", None)
        try:
            return call()
        except Exception as error:
            if not has_expired(error):
                raise
        with _RENEWING:
            if self._fs._s3 is used:  # otherwise another thread has already read the file again
                self._fs.session = None
                self._fs.connect(refresh=True)
        return call()

    def _call(self, method: str, path: str, *content: bytes, n_bytes: int = 0, **options: Any) -> Any:
        return self._renewing(lambda: super(S3, self)._call(method, path, *content, n_bytes=n_bytes, **options))

    def _request(self, operation: str, **options: Any) -> Any:
        """Send a request that fsspec has no method for."""
        options |= {"Bucket": self._bucket, "timeout": ANSWER_SECONDS}
        return self._renewing(lambda: self._fs.call_s3(operation, **options))

    def _entry(self, path: str) -> dict[str, Any] | None:
        """Return an object's entry in a listing, or None. It comes first among the keys that begin with its key."""
        page = self._request("list_objects_v2", Prefix=self._key(path), MaxKeys=1)
        return next((entry for entry in page.get("Contents", ()) if entry["Key"] == self._key(path)), None)

    def _key(self, path: str) -> str:
        return f"{self._prefix}/{path}".strip("/")

    def exists(self, path: str) -> bool:
        return self._entry(path) is not None

    def write(self, path: str, content: bytes, **options: Any) -> None:
        super().write(path, content, chunksize=ONE_PUT, **options)

    def set_aside(self, path: str, sha256: str, aside: str) -> bool:
        """Copy a file that has this checksum, and delete it unless its ETag has changed."""
        entry, content = self._entry(path), self.read(path)
        if entry is None or hashlib.sha256(content).hexdigest() != sha256:
            return False
        self.create(aside, content)
        return conditionally(
            lambda: self._request("delete_object", Key=self._key(path), IfMatch=entry["ETag"]),
            lambda: self.delete(path),
        )
