"""Print the table of all configuration keys, which docs/configuration.md contains.

python -m tools.config_reference
"""

import json
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from mixednuts_dist.config.keys import RangeConfig
from mixednuts_dist.config.register import Register
from mixednuts_dist.config.run_config import config_with_stages, stages_with_keys
from mixednuts_dist.config.section import Section

_NAMES = {bool: "true or false", int: "integer", float: "number", str: "text", type(None): "null"}


def config_reference() -> str:
    """Return a Markdown table with the path, type, default and meaning of every key."""
    head = ["| key | takes | default | meaning |", "| --- | --- | --- | --- |"]
    return "\n".join(
        [*head, *(_line(path, field) for path, field in fields_of(config_with_stages(stages_with_keys())))]
    )


def fields_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every key of a section and of the sections in it, in the order of the file."""
    for name, field in model.model_fields.items():
        kinds = (field.annotation, *get_args(field.annotation))
        section = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)
        if section is not None:
            yield from fields_of(section, f"{prefix}{name}.")
        if section is None or not section.model_fields:
            yield f"{prefix}{name}", field


def _line(path: str, field: FieldInfo) -> str:
    meaning = " ".join(str(field.description or "").split())
    cells = (f"`{path}`", _takes(field.annotation, field.metadata), _default(field), meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    value = field.default
    if isinstance(value, RangeConfig):
        value = value.model_dump()
    return f"`{json.dumps(value)}`"


def _takes(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Describe a type in words; `metadata` is what pydantic removed from an `Annotated`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    registered = next((mark for mark in (*metadata, *arguments) if isinstance(mark, Register)), None)
    if registered is not None or origin is Literal:
        return ", ".join(f"`{value}`" for value in (registered.names() if registered else arguments))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_takes(argument) for argument in arguments))
    if origin in (dict, Mapping):
        return f"map of {_takes(arguments[0])} to {_takes(arguments[1])}"
    if origin in (Annotated, tuple, list):
        inner = _takes(arguments[0])
        return inner if origin is Annotated else f"list of {inner}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "{" + ", ".join(annotation.model_fields) + "}"
    return next((_NAMES[kind] for kind in getattr(annotation, "__mro__", ()) if kind in _NAMES), str(annotation))


if __name__ == "__main__":
    print(config_reference())
