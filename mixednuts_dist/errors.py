"""What goes wrong and what goes on: the error tree, with one root to catch, and the log as JSON, one object a line.

Each error's message says what is wrong, the value and the next step.
"""

import json
import logging
import re
from datetime import UTC, datetime


def printable(text: str) -> str:
    """The text with its control characters written out; what a classifier raises may hold escape sequences.

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
    """A base classifier URI cannot be resolved, or what it resolves to is not a classifier in our sense."""


class MissingExtra(MixedNutsError):
    """A feature needs a package of an extra that is not installed.

    Args:
        feature: what was asked for.
        package: that is missing.
        extra: of this package that brings it.
    """

    def __init__(self, feature: str, package: str, extra: str) -> None:
        super().__init__(f"{feature} needs {package}. Run in the clone: pip install '.[{extra}]'")


class StoreError(MixedNutsError):
    """The storage refused, or an address points outside of it."""


class ReadOnlyStorage(StoreError):
    """The storage takes no files: a folder without write permission, a file in a folder's place, no such bucket."""


class FingerprintMismatch(StoreError):
    """A stored file belongs to another run, another schema version or other weights, or it is damaged."""


class NewerSchema(FingerprintMismatch):
    """A stored file is of a release that this one does not know; nothing of it is read or changed."""


class DamagedFile(FingerprintMismatch):
    """A stored file is not what was written. Readers leave it as it is; the stage that computes it again renames it.

    Args:
        message: what is wrong.
        address: the address of the file.
    """

    def __init__(self, message: str, address: str = "") -> None:
        super().__init__(message)
        self.address = address


class MissingArtifact(MixedNutsError):
    """A stage was asked for whose input an earlier stage has not written yet."""


class PartitionFailed(MixedNutsError):
    """At least one partition failed all of its tries; every other partition was finished first."""


class ClusterError(MixedNutsError):
    """Ray cannot be reached, or its workers cannot start."""


_SECRETS = (
    (re.compile(r"://[^/@\s'\"]+@"), "://...@"),
    (
        re.compile(r"(?i)([?&][^=&\s]*(?:token|secret|password|signature|credential|key|sig)[^=&\s]*=)[^&\s'\"]+"),
        r"\1...",
    ),
)


def redacted(text: str) -> str:
    """The text without the passwords and tokens of the addresses in it.

    Example:
        >>> redacted("s3://key:secret@bucket/runs, https://host/x?token=abc&n=1")
        's3://...@bucket/runs, https://host/x?token=...&n=1'
    """
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """time, level, logger and message, then whatever the call gave as `extra` (run, stage, partition, node, ...).

    Ray gives every record of its process a name with an underscore before it; those are left out.
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


def log_json(level: int = logging.INFO) -> None:
    """Write this process's log to stderr as JSON; for entry points only."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
