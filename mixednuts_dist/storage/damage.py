"""Write and verify the checksums of a run's files.

Tables have checksums in their footers. JSON files that a run needs have one under the key `digest`.
"""

import json
from collections.abc import Mapping
from typing import Any

from ..config.config_file import read_json
from ..config.run_config import digest
from ..errors import DamagedFile
from .store import Store, concurrently
from .tables import table_problem

_TUNE = "/search/tune/"  # the folder of Ray Tune in a run


def signed_json(values: Mapping[str, Any], **options: Any) -> bytes:
    """Return a JSON file of the values and their digest; `options` are those of `json.dumps`."""
    return json.dumps({**values, "digest": digest(values)}, **options).encode()


def read_signed_json(content: bytes) -> dict[str, Any]:
    """Return the values that `signed_json` wrote; ValueError if they have changed."""
    values = read_json(content)
    if not isinstance(values, dict) or "digest" not in values:
        raise ValueError("it is not a file of this package")
    if values.pop("digest") != digest(values):
        raise ValueError("its content has changed")
    return values


def verify(store: Store) -> tuple[dict[str, DamagedFile], int]:
    """Read all files completely; return path -> damage of the damaged files, and the number of files."""

    def damage(path: str) -> DamagedFile | None:
        content = store.read(path)
        problem = _problem(path, content)
        return DamagedFile(problem, store.address(path), content) if problem else None

    paths = [path for path in store.all_files() if _TUNE not in f"/{path}"]
    found = zip(paths, concurrently(damage, paths), strict=True)
    return {path: damaged for path, damaged in found if damaged}, len(paths)


def _problem(path: str, content: bytes) -> str | None:
    """Describe the damage of a file, or return None. Only tables and JSON files have checksums."""
    if path.endswith(".parquet"):
        return table_problem(content)
    if not path.endswith(".json"):
        return None
    try:
        values = read_json(content)
        if not isinstance(values, dict) or "digest" in values or path.endswith("selected.json"):
            read_signed_json(content)
    except ValueError as error:
        return f"it is damaged: {error}"
    return None
