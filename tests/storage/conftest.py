"""Storage that the tests of this package write to: a folder, or a bucket on a real server."""

from pathlib import Path

import pytest


@pytest.fixture(params=["folder", "bucket"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path)
    found: str = request.getfixturevalue("object_store").uri(f"test-{tmp_path.name}")
    return found
