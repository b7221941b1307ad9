"""A real object store for the tests: SeaweedFS's server from PyPI, on loopback, with a separate folder and ports."""

import contextlib
import http.client
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.helpers.ports import free_ports

_PARTS = ("master", "volume", "filer", "admin", "s3")
_READY_SECONDS = 60.0


class ObjectStore:
    """One server process; acknowledged writes survive `kill` and `restart`."""

    bucket = "bucket"

    def __init__(self, folder: Path) -> None:
        self.folder, self._ports = folder, free_ports(2 * len(_PARTS))
        self.endpoint = f"http://127.0.0.1:{self._ports[-2]}"
        self.secret = f"secret{os.urandom(12).hex()}"
        self.environment = {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        self.restart()

    def restart(self) -> None:
        """Start, on the same ports and the same data, and wait until it serves the bucket."""
        data = self.folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        with (self.folder / "log.txt").open("ab") as log:
            self._process = subprocess.Popen(
                self._command(data), env={**os.environ, **self.environment}, cwd=data, stdout=log, stderr=log
            )
        deadline = time.monotonic() + _READY_SECONDS
        while not self._serves():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self.folder / "log.txt").read_text()[-2000:])
            time.sleep(0.1)

    def kill(self) -> None:
        """SIGKILL: no goodbye, no flush."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()
        for port in self._ports:
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                left.unlink()
        shutil.rmtree(self.folder, ignore_errors=True)

    def uri(self, prefix: str) -> str:
        return f"s3://{self.bucket}/{prefix}"

    def _command(self, data: Path) -> list[str]:
        ports = [
            f"-{part}.port{kind}={port}"
            for (part, kind), port in zip(((p, k) for p in _PARTS for k in ("", ".grpc")), self._ports, strict=True)
        ]
        return [
            str(Path(sys.executable).with_name("weed")), "mini", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
            "-master.telemetry=false", "-webdav=false", "-admin.ui=false", "-s3.port.iceberg=0", "-s3.port.lance=0",
            "-s3.autoCreateBucket=false", f"-bucket={self.bucket}", *ports,
        ]  # fmt: skip

    def _serves(self) -> bool:
        """Wait for the server: it first refuses unsigned requests (403) and makes the bucket a moment later."""
        filer = self._ports[2 * _PARTS.index("filer")]
        return _status(self._ports[-2], self.bucket) == 403 and _status(filer, f"buckets/{self.bucket}/") < 300


def _status(port: int, path: str) -> int:
    """Return the status of a HEAD request, or 599 if nothing answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("HEAD", f"/{path}")
        return connection.getresponse().status
    return 599
