"""No test sees the extensions of another."""

import sys
from collections.abc import Iterator

import pytest

from mixednuts_dist import register


@pytest.fixture(autouse=True)
def _own_extensions() -> Iterator[None]:
    yield
    for module in [name for name in sys.modules if name.startswith("mixednuts_extension_")]:
        register._forget(module)
