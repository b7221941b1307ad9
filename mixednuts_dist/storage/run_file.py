"""`run.yaml`, the description of a run: its id, inputs, configuration and versions."""

from __future__ import annotations

from typing import Any

from ..config.config_file import read_yaml
from ..config.run_config import RESULTS_VERSION
from ..errors import ConfigError, DamagedFile

RUN = "run.yaml"
LAST_KEY = "versions"  # a truncated file is often valid YAML, so the last key must be there
_KEYS = {"run_id", "inputs", "config", LAST_KEY}


def parse_run_file(content: bytes, address: str) -> dict[str, Any]:
    """Parse the bytes of a `run.yaml`.

    Raises:
        DamagedFile: if the file has changed since it was written.
        ConfigError: if another version of this package wrote it.
    """
    try:
        found = read_yaml(content.decode(), RUN)
        if not isinstance(found, dict) or not found.keys() >= _KEYS:
            raise ValueError("keys are missing")
    except (ValueError, ConfigError) as error:
        message = f"{address} is damaged ({error}); the next `mixednuts run` writes it again"
        raise DamagedFile(message, address) from error
    if found.get("version") != RESULTS_VERSION:
        versions = found[LAST_KEY]
        release = versions.get("mixednuts-dist", "unknown") if isinstance(versions, dict) else "unknown"
        raise ConfigError(
            f"{address} was written by release {release}, whose runs this release does not read. Run its configuration "
            "again, or install that release"
        )
    return found
