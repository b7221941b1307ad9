"""Handle errors of the storage: retry after transient ones, and raise a StoreError for permanent ones at once."""

import errno
import logging
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, TypeVar

from ..errors import StoreError, reason_of

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 300.0  # a run gives up after an outage of this length
FIRST_ANSWER_SECONDS = 20.0  # the same limit before a run has begun, when giving up costs nothing
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 15.0  # seconds between tries
_THROTTLED = {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "RequestTimeout"}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"}
_PASSING_STATUS = {408, 409, 429, 500, 502, 503, 504}
_PASSING_ERRNO = {
    errno.EBUSY, errno.ECONNRESET, errno.ETIMEDOUT, errno.ENETUNREACH, errno.EHOSTUNREACH,
    errno.ESTALE, errno.EIO,  # a shared folder reports these while its server restarts
}  # fmt: skip
_FULL = {errno.ENOSPC, errno.EDQUOT}
_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "TokenRetrievalError"}
_RESUME = "and run the same command again, which resumes"

Result = TypeVar("Result")


def patiently(call: Callable[[], Result], address: str, patience_seconds: float) -> Result:
    """Return `call()`, retried with growing, jittered waits while the storage is unavailable or throttles.

    Raises:
        StoreError: at once for a permanent error, otherwise after `patience_seconds`.
        Exception: unchanged if the error does not come from the storage.
    """
    started, tries = time.monotonic(), 0
    while True:
        try:
            return call()
        except StoreError:
            raise
        except Exception as error:  # the library of each protocol has its own exceptions
            # botocore reports an invalid address or setting as a plain ValueError
            if type(error).__module__ == "builtins" and not isinstance(error, OSError | ValueError):
                raise
            if not passes(error):
                raise StoreError(in_words(error, address)) from error
            waited = time.monotonic() - started
            if waited >= patience_seconds:
                raise StoreError(
                    f"{address}: no answer for {waited:.0f} s ({reason_of(error)}). Finished partitions are kept: "
                    "the same command resumes from them once the storage answers"
                ) from error
            tries += 1
            level = logging.WARNING if tries == 1 else logging.INFO
            logger.log(level, "%s: try %d failed (%s); trying again", address, tries, reason_of(error))
            wait = min(_FIRST_WAIT * 2 ** (tries - 1), _LONGEST_WAIT, patience_seconds - waited)
            time.sleep(wait * random.SystemRandom().uniform(0.5, 1))


def passes(error: Exception) -> bool:
    """Whether the error is an outage, a broken connection or throttling, which end without user action."""
    status, code = _answer(error)
    if status is not None:
        return status in _PASSING_STATUS or code in _THROTTLED
    causes = list(_causes(error))
    if any(isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_NONAME for cause in causes):
        return False
    if any(isinstance(cause, _connection_errors()) for cause in causes):
        return True
    return isinstance(error, OSError) and error.errno in _PASSING_ERRNO


def conditionally(call: Callable[[], object], unconditional: Callable[[], object]) -> bool:
    """Make a conditional call and return whether its condition held.

    If the store does not support conditional calls, make the unconditional call.
    """
    try:
        call()
    except Exception as error:
        status, _ = _answer(error)
        if status == 412 or any(isinstance(cause, FileExistsError) for cause in _causes(error)):
            return False
        if status != 501:
            raise
        unconditional()
    return True


def has_expired(error: Exception) -> bool:
    """Whether the server no longer accepts the access token or key. The user may have renewed it meanwhile."""
    return _answer(error)[1] in {"InvalidAccessKeyId", *_EXPIRED}


def has_no_bucket(error: Exception) -> bool:
    """Whether the bucket of a file does not exist."""
    return _answer(error)[1] == "NoSuchBucket"


def in_words(error: Exception, address: str) -> str:
    """Return the message for a storage error at `address`, with the next step."""
    shown, code = reason_of(error), _answer(error)[1]
    number = error.errno if isinstance(error, OSError) else None
    now = datetime.now(UTC).isoformat(timespec="seconds")
    no_host = any(isinstance(cause, socket.gaierror) for cause in _causes(error))
    causes = [
        (code in _EXPIRED, f"the access token has expired ({shown}). Renew it {_RESUME}"),
        (code == "RequestTimeTooSkewed",
         f"this machine's clock or the server's is wrong ({shown}). Here it is {now}: correct the clock"),
        (isinstance(error, FileNotFoundError),
         f"there is no such place ({shown}). Create the bucket or folder, or correct `storage`"),
        (number in _FULL, f"the disk is full ({shown}). Free some space {_RESUME}"),
        (type(error).__name__ in _NO_CREDENTIALS,
         f"no usable credentials ({shown}). Set AWS_PROFILE or AWS_ACCESS_KEY_ID and its secret"),
        (isinstance(error, PermissionError) or number in (errno.EROFS, errno.EACCES),
         f"access denied ({shown}). Check the credentials and that they allow listing, reading and writing"),
        (no_host, f"its host has no address ({shown}). Correct AWS_ENDPOINT_URL, the profile or `storage`"),
        (True, f"the storage refused ({type(error).__name__}: {shown})"),
    ]  # fmt: skip
    if has_no_bucket(error):
        address = "/".join(address.split("/")[:3])
    return f"{address}: {next(what for applies, what in causes if applies)}"


def _answer(error: Exception) -> tuple[int | None, str | None]:
    """Return the HTTP status and error code of the server's response, which botocore keeps as `response`."""
    for cause in _causes(error):
        response: Any = getattr(cause, "response", None)
        if isinstance(response, dict) and "Error" in response:
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return status, str(response["Error"].get("Code"))
    return None, None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error itself, then its cause, the cause of that one, and so on."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _connection_errors() -> tuple[type[BaseException], ...]:
    if "s3fs" not in sys.modules:
        return (ConnectionError, TimeoutError)
    from botocore.exceptions import ChecksumError, FlexibleChecksumError, IncompleteReadError
    from s3fs.core import S3_RETRYABLE_ERRORS

    corrupted = ChecksumError, FlexibleChecksumError, IncompleteReadError  # the response was damaged on the way
    return (ConnectionError, TimeoutError, *corrupted, *S3_RETRYABLE_ERRORS)
