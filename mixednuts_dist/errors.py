"""The exceptions of the package, all subclasses of `MixedNutsError`, and the log as JSON, one object per line.

The message of each exception contains what is wrong, the value, and the next step.
"""

import hashlib
import json
import logging
import re
from datetime import UTC, datetime


def printable(text: str) -> str:
    """Escape the control characters of a text, for example in the message of an exception that a classifier raised.

    >>> printable("red: \\x1b[31m")
    'red: \\\\x1b[31m'
    """
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text)


class MixedNutsError(Exception):
    """Root of every error that this package raises on purpose."""


class InvalidInputError(MixedNutsError, ValueError):
    """An argument of a public function is outside its domain (NaN logits, K = 1, beta = 98.5)."""


class ConfigError(MixedNutsError):
    """The configuration file or an override cannot be used as written."""


class ThreatModelError(InvalidInputError):
    """The norm or the radius of a threat model is not usable."""


class DatasetError(MixedNutsError):
    """A dataset URI cannot be resolved to images."""


class BaseClassifierError(MixedNutsError):
    """A base classifier URI cannot be resolved, or its object is not a usable classifier."""


class MissingExtra(MixedNutsError):
    """A feature needs a package that an extra of mixednuts_dist installs."""

    def __init__(self, feature: str, package: str, extra: str) -> None:
        super().__init__(f"{feature} needs {package}. Run in the clone: pip install '.[{extra}]'")


class StoreError(MixedNutsError):
    """The storage rejected a request, or an address points outside of it."""


class ReadOnlyStorage(StoreError):
    """The storage cannot be written: a folder without permission, a file instead of a folder, or a missing bucket."""


class ContentHashMismatch(StoreError):
    """A stored file belongs to another run or other weights, or it is damaged."""


class DamagedFile(ContentHashMismatch):
    """A stored file has changed since it was written. It is quarantined (renamed) and computed again by the next run.

    It is quarantined only if it still has the `content` that was read.
    """

    def __init__(self, message: str, address: str = "", content: bytes = b"") -> None:
        super().__init__(message)
        self.address = address
        self.sha256 = hashlib.sha256(content).hexdigest()


class MissingArtifact(MixedNutsError):
    """An earlier stage has not yet written the input of the requested stage."""


class PartitionFailed(MixedNutsError):
    """At least one partition failed all of its tries. The others were finished first, unless every try failed."""


class ClusterError(MixedNutsError):
    """Ray cannot be reached, or its workers cannot start."""


_PASSWORD = re.compile(r"://[^/@\s'\"]+@")
_TOKEN = re.compile(r"(?i)([?&][^=&\s]*(?:token|secret|password|signature|credential|key|sig)[^=&\s]*=)[^&\s'\"]+")


def redacted(text: str) -> str:
    """Remove the passwords and tokens of addresses from a text.

    >>> redacted("s3://key:secret@bucket/runs, https://host/x?token=abc&n=1")
    's3://...@bucket/runs, https://host/x?token=...&n=1'
    """
    return _TOKEN.sub(r"\1...", _PASSWORD.sub("://...@", text))


_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Formats a record as JSON: time, level, logger, message, and the `extra` of the call (run, stage, node, ...).

    Names that begin with an underscore are left out, because Ray adds them to every record.
    """

    def format(self, record: logging.LogRecord) -> str:
        content = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": redacted(record.getMessage()),
            **{key: value for key, value in vars(record).items() if key not in _STANDARD and key[0] != "_"},
        }
        if record.exc_info:
            content["traceback"] = redacted(self.formatException(record.exc_info))
        return json.dumps(content, default=str)


def log_json() -> None:
    """Write the log of this process to stderr as JSON. Only the entry points of processes call this function."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def reason_of(error: BaseException) -> str:
    """Return the first 300 characters of an error's text on one line, or its type if it has no text."""
    return " ".join(str(error).split())[:300] or type(error).__name__
