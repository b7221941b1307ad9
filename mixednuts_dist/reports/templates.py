"""Fill the Jinja templates of pages, model cards and forms; each package has its templates in its own folder."""

import base64
import functools
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


def rendered(package: str, template: str, /, **content: Any) -> Markup:
    """Fill a template of a package, by its name without `.j2`; HTML escapes every text that is not markup."""
    return Markup(_environment(package).get_template(f"{template}.j2").render(content))


def png_uri(content: bytes) -> str:
    """Return a PNG as a data URI."""
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


@functools.cache
def _environment(package: str) -> Environment:
    """Return the environment of a package's templates, which may include templates of the reports."""
    return Environment(
        loader=ChoiceLoader([PackageLoader("mixednuts_dist", folder) for folder in (package, "reports")]),
        autoescape=lambda name: str(name).endswith(".html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
