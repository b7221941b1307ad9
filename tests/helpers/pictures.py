"""A renderer that draws empty figures: the real one takes most of the time of a tiny run with a report."""

from typing import Any

import pytest
import vl_convert

EMPTY = {
    "vegalite_to_svg": '<svg xmlns="http://www.w3.org/2000/svg"></svg>',
    "svg_to_pdf": b"%PDF-1.4 empty",
    "svg_to_png": b"\x89PNG empty",
}
RENDERERS = {name: getattr(vl_convert, name) for name in EMPTY}


def draw_nothing(patch: pytest.MonkeyPatch) -> None:
    """Replace the renderer."""
    for name, content in EMPTY.items():

        def draw(*_: Any, content: str | bytes = content, **__: Any) -> str | bytes:
            return content

        patch.setattr(vl_convert, name, draw)


def draw(patch: pytest.MonkeyPatch) -> None:
    """Restore the renderer."""
    for name, renderer in RENDERERS.items():
        patch.setattr(vl_convert, name, renderer)
