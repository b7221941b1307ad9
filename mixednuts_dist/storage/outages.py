"""When storage refuses: transient errors are retried, permanent ones raised at once and in words; bugs stay bugs."""

import errno
import logging
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, TypeVar

from ..errors import StoreError

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 300.0  # how long an outage may last before a run gives up
FIRST_ANSWER_SECONDS = 20.0  # the same before a run has begun, when nothing would be lost
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 15.0  # seconds between tries
_THROTTLED = {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "RequestTimeout"}
_EXPIRED = "the access token has expired ({said}). Renew it; the same command goes on from what is written"
_TOLD = {
    **dict.fromkeys(("ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"), _EXPIRED),
    "RequestTimeTooSkewed": "this machine's clock or the server's is wrong ({said}). Here it is {now}: set it right",
}
_PASSING_STATUS = {408, 409, 429, 500, 502, 503, 504}
_PASSING_ERRNO = {
    errno.EBUSY, errno.ECONNRESET, errno.ETIMEDOUT, errno.ENETUNREACH, errno.EHOSTUNREACH,
    errno.ESTALE, errno.EIO,  # of a shared folder whose server restarts
}  # fmt: skip
_FULL = {errno.ENOSPC, errno.EDQUOT}
_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "TokenRetrievalError"}

Result = TypeVar("Result")


def patiently(call: Callable[[], Result], address: str, patience_seconds: float) -> Result:
    """`call()`, tried again with growing, jittered waits while the storage is down or throttles.

    Raises:
        FileNotFoundError: as `call` raises it.
        StoreError: where trying again cannot help, at once; else after `patience_seconds`.
        Exception: what is no error of the storage's, as it was raised.
    """
    started, wait, tries = time.monotonic(), _FIRST_WAIT, 0
    while True:
        try:
            result = call()
        except FileNotFoundError:
            raise
        except Exception as error:  # every protocol's library has a tree of its own
            if not is_of_storage(error):
                raise
            if not passes(error):
                raise StoreError(in_words(error, address)) from error
            waited = time.monotonic() - started
            if waited >= patience_seconds:
                raise StoreError(_gave_up(error, address, waited)) from error
            tries += 1
            level = logging.WARNING if tries == 1 else logging.INFO
            logger.log(level, "%s: try %d failed (%s); trying again", address, tries, _one_line(error))
            time.sleep(min(wait, patience_seconds - waited) * random.SystemRandom().uniform(0.5, 1))
            wait = min(2 * wait, _LONGEST_WAIT)
        else:
            if tries:
                logger.warning("%s: answered again after %.0f s", address, time.monotonic() - started)
            return result


def is_of_storage(error: Exception) -> bool:
    """Whether the operating system or a storage library raised it, itself or as a cause; a bug of ours is neither.

    botocore says with a plain ValueError what is wrong with an address or a setting.
    """
    return any(
        isinstance(cause, OSError | ValueError) or type(cause).__module__ != "builtins" for cause in _causes(error)
    )


def passes(error: Exception) -> bool:
    """Whether this is an outage, a broken connection or throttling, which end without anybody's help."""
    status, code = _answer(error)
    if status is not None:
        return status in _PASSING_STATUS or code in _THROTTLED
    causes = list(_causes(error))
    if any(isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_NONAME for cause in causes):
        return False
    if any(isinstance(cause, _connection_errors()) for cause in causes):
        return True
    return isinstance(error, OSError) and error.errno in _PASSING_ERRNO


def precondition_failed(error: Exception) -> bool:
    """Whether a conditional write lost: the file is there already."""
    return any(isinstance(cause, FileExistsError) for cause in _causes(error)) or _answer(error)[0] == 412


def has_no_reason(error: Exception) -> bool:
    """Whether the server has refused with a status alone, as it does a HEAD, whose answer has no room for a reason."""
    status, code = _answer(error)
    return status is not None and code == str(status)


def has_expired(error: Exception) -> bool:
    """Whether the server no longer takes the access token or key: another may stand in its place by now."""
    code = _answer(error)[1]
    return code == "InvalidAccessKeyId" or _TOLD.get(str(code)) == _EXPIRED


def conditional_writes_unknown(error: Exception) -> bool:
    """Whether this kind of object store has never heard of them."""
    return _answer(error)[0] == 501


def in_words(error: Exception, address: str) -> str:  # noqa: PLR0911, one line a cause
    """What went wrong at `address`, and the next step."""
    said, (_, code) = _one_line(error), _answer(error)
    if code in _TOLD:
        return f"{address}: {_TOLD[code].format(said=said, now=datetime.now(UTC).isoformat(timespec='seconds'))}"
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, FileNotFoundError):
        return f"{address}: there is no such place ({said}). Create the bucket or folder, or correct `storage`"
    if number in _FULL:
        return f"{address}: the disk is full ({said}). Make room; the same command goes on from what is written"
    if type(error).__name__ in _NO_CREDENTIALS:
        return f"{address}: no usable credentials ({said}). Set AWS_PROFILE or AWS_ACCESS_KEY_ID and its secret"
    if isinstance(error, PermissionError) or number in (errno.EROFS, errno.EACCES):
        return f"{address}: access denied ({said}). Check the credentials and that they may list, read and write there"
    if any(isinstance(cause, socket.gaierror) for cause in _causes(error)):
        return f"{address}: its host has no address ({said}). Correct AWS_ENDPOINT_URL, the profile or `storage`"
    return f"{address}: the storage refused ({type(error).__name__}: {said})"


def _gave_up(error: Exception, address: str, waited: float) -> str:
    return (
        f"{address}: no answer for {waited:.0f} s ({_one_line(error)}). What is written is kept: "
        "the same command goes on from there once the storage answers"
    )


def _answer(error: Exception) -> tuple[int | None, str | None]:
    """(HTTP status, error code) of the server's answer, if there was one; botocore keeps it as `response`."""
    for cause in _causes(error):
        response: Any = getattr(cause, "response", None)
        if isinstance(response, dict) and "Error" in response:
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return status, str(response["Error"].get("Code"))
    return None, None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and those that led to it, the last one first."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _connection_errors() -> tuple[type[BaseException], ...]:
    if "s3fs" not in sys.modules:
        return (ConnectionError, TimeoutError)
    from botocore.exceptions import ChecksumError, FlexibleChecksumError, IncompleteReadError
    from s3fs.core import S3_RETRYABLE_ERRORS

    corrupted = ChecksumError, FlexibleChecksumError, IncompleteReadError  # an answer that is not what was stored
    return (ConnectionError, TimeoutError, *corrupted, *S3_RETRYABLE_ERRORS)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
