"""The number of images per pass and the precisions for each type of device, measured by the first worker on one.

The measurements are stored in `acceleration/<device>.json`, so that all partitions of a run are computed in the same
way on the same type of device, also after the run is resumed.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from ..acceleration.precision import Precision
from ..errors import MissingArtifact
from ..storage.damage import read_signed_json, signed_json
from ..storage.store import Store


@dataclass(frozen=True)
class DeviceSettings:
    """How workers compute on a type of device."""

    rows: int  # images per pass
    float32_rows: int
    precision: Mapping[str, Precision]  # "rob" and "std" -> the precision of gradients
    repeatable: bool  # two passes over the same images give the same bits; otherwise only verified results repeat


def device_settings(run: Store, device: str, measure: Callable[[], DeviceSettings]) -> DeviceSettings:
    """Return the settings that a run stores for a type of device, after measuring and storing them if there are none.

    If two workers measure at the same time, the settings that are stored first count.
    """
    path = f"acceleration/{re.sub('[^A-Za-z0-9]+', '-', device)}.json"
    while (found := _read(run, path)) is None:
        run.create(path, signed_json(asdict(measure())))
    return found


def _read(run: Store, path: str) -> DeviceSettings | None:
    try:
        content = run.read(path)
    except MissingArtifact:
        return None
    try:
        return DeviceSettings(**read_signed_json(content))
    except (ValueError, TypeError):
        run.set_aside(path, hashlib.sha256(content).hexdigest())
        return None
