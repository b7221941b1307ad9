"""Pages, cards and forms: Jinja templates in the folder of the room that fills them."""

import base64
import functools
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

_MEDIA_TYPES = {
    "png": "image/png",
    "svg": "image/svg+xml",
}


def rendered(room: str, template: str, /, **content: Any) -> Markup:
    """A template of a room, by its name without `.j2`, filled; in HTML every text that is no markup is escaped."""
    return Markup(_environment(room).get_template(f"{template}.j2").render(content))


def data_uri(name: str, content: bytes) -> str:
    """The content as an address that fetches nothing; its kind by the name's ending."""
    media_type = _MEDIA_TYPES[name.rpartition(".")[2]]
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


@functools.cache
def _environment(room: str) -> Environment:
    """A room's templates, which may include those of the reports."""
    return Environment(
        loader=ChoiceLoader([PackageLoader("mixednuts_dist", folder) for folder in (room, "reports")]),
        autoescape=lambda name: str(name).endswith(".html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
