"""The notes of a driver in the run's folder: the seconds of each stage, and the stage that it computes now."""

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ..config.config_file import read_json
from ..errors import MissingArtifact, StoreError
from ..storage.outages import FIRST_ANSWER_SECONDS
from ..storage.store import Store

logger = logging.getLogger(__name__)

_SECONDS = "seconds.json"
_CURRENT = "current.json"  # `status` shows it during refinement rounds


@contextmanager
def stage_clock(store: Store, stage: str) -> Iterator[None]:
    """Add the wall-clock seconds of the block to the sum that the run keeps for the stage."""
    started = time.perf_counter()
    try:
        yield
    finally:
        seconds = time.perf_counter() - started
        impatient = Store(store.uri, FIRST_ANSWER_SECONDS)  # the stage may have failed because of the storage
        try:
            known = stage_seconds(impatient)
            impatient.write(_SECONDS, json.dumps({**known, stage: round(known.get(stage, 0.0) + seconds, 3)}).encode())
        except StoreError as error:  # it must not hide the stage's own error
            logger.warning("the time that the %s stage took is not kept: %s", stage, error)


def stage_seconds(store: Store) -> dict[str, float]:
    """Return the wall-clock seconds of each stage that has begun, summed over all the commands that worked on it."""
    try:
        return {str(stage): float(seconds) for stage, seconds in read_json(store.read(_SECONDS)).items()}
    except MissingArtifact:
        return {}
    except (ValueError, TypeError, AttributeError) as error:
        logger.warning("%s is damaged (%s) and counts as 0", store.address(_SECONDS), error)
        return {}


def record_current_stage(store: Store, stage: str, content_hash: str) -> None:
    """Write which rows the driver computes now."""
    store.write(_CURRENT, json.dumps({"stage": stage, "content_hash": content_hash}).encode())


def current_stage(store: Store) -> tuple[str, str] | None:
    """Return the folder and content hash of the last stage that a driver has begun to compute, or None."""
    try:
        found = read_json(store.read(_CURRENT))
        return str(found["stage"]), str(found["content_hash"])
    except (MissingArtifact, ValueError, KeyError, TypeError):
        return None
