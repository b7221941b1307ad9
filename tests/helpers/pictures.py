"""The renderer of figures, and one that draws empty figures: drawing takes most of the time of a tiny run."""

from collections.abc import Mapping
from typing import Any

import pytest
import vl_convert

EMPTY = {
    "vegalite_to_svg": '<svg xmlns="http://www.w3.org/2000/svg"></svg>', "svg_to_pdf": b"%PDF-1.4 empty",
    "svg_to_png": b"\x89PNG empty",
}  # fmt: skip
REAL = {name: getattr(vl_convert, name) for name in EMPTY}


def draw(patch: pytest.MonkeyPatch, renderers: Mapping[str, Any] = REAL) -> None:
    """Draw figures by these functions, or with this content."""
    for name, renderer in renderers.items():
        patch.setattr(vl_convert, name, renderer if callable(renderer) else lambda *_, made=renderer, **__: made)
