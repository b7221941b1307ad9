"""Rows per pass and precisions of each type of device, as the first worker on such a device measured them.

The driver keeps them in `acceleration/<device>.json` and sends them with the work, so that all rows of a run on one
type of device are computed in the same way, also after the run is resumed.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ..config.config_file import read_json
from ..config.run_config import digest
from ..errors import MissingArtifact
from ..storage.damage import set_aside_if_damaged
from ..storage.store import Store
from .worker_spec import WorkerSpec

if TYPE_CHECKING:  # the driver does not import PyTorch
    from ..acceleration.precision import Precision

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeviceSettings:
    """How workers compute on a type of device."""

    rows: int  # images per pass
    float32_rows: int
    precision: Mapping[str, Precision]  # "rob" and "std" -> the precision of gradients
    repeatable: bool  # two passes over the same images give the same bits; otherwise only verified results repeat


class Measurements:
    """The measurements of one run; none are needed if the configuration leaves nothing to measure."""

    def __init__(self, store: Store, spec: WorkerSpec) -> None:
        self._store, self._needed = store, "auto" in (spec.batch_size, spec.precision)
        self._found: dict[str, DeviceSettings | None] = {}

    def of(self, device: str) -> DeviceSettings | None:
        """Return what was measured on this type of device, or None."""
        if self._needed and device not in self._found:
            self._found[device] = self._read(_path(device))
        return self._found.get(device)

    def missing(self, device: str) -> bool:
        """Return whether a worker on such a device has to measure first."""
        return self._needed and self.of(device) is None

    def keep(self, device: str, measured: DeviceSettings) -> None:
        """Write what a worker has measured; if another driver was faster, its measurements count."""
        values = asdict(measured)
        content = json.dumps({**values, "digest": digest(values)}).encode()
        created = self._store.create(_path(device), content)
        self._found[device] = measured if created else self._read(_path(device)) or measured

    def _read(self, path: str) -> DeviceSettings | None:
        try:
            found = read_json(self._store.read(path))
            if found.pop("digest", None) != digest(found):
                raise ValueError("its content has changed")
            return DeviceSettings(**found)
        except MissingArtifact:
            return None
        except (ValueError, AttributeError, TypeError) as error:
            logger.warning("%s is damaged (%s); it is measured again", self._store.address(path), error)
            set_aside_if_damaged(self._store, path)
            return None


def _path(device: str) -> str:
    return f"acceleration/{re.sub('[^A-Za-z0-9]+', '-', device)}.json"
