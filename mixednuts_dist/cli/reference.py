"""The configuration's keys as a Markdown table, made from the pydantic models that check the file."""

import json
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ..config import RangeConfig, Registered, RunConfig

_NAMES = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "null"}


def config_reference() -> str:
    """One line a key: its path, what it takes, its default and what it means."""
    head = ["| key | takes | default | meaning |", "| --- | --- | --- | --- |"]
    return "\n".join([*head, *(_line(path, field) for path, field in fields_of(RunConfig))])


def fields_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key of a section and of the sections in it, in the order of the file."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from fields_of(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def _line(path: str, field: FieldInfo) -> str:
    cells = (f"`{path}`", _takes(field.annotation, field.metadata), _default(field), field.description or "")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    value = field.default
    if isinstance(value, RangeConfig):
        value = value.model_dump()
    return f"`{json.dumps(value)}`"


def _takes(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A type as a person would say it; `metadata` is what pydantic has taken off an `Annotated`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    registered = next((mark for mark in (*metadata, *arguments) if isinstance(mark, Registered)), None)
    if registered is not None or origin is Literal:
        return ", ".join(f"`{value}`" for value in (registered.register.names() if registered else arguments))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_takes(argument) for argument in arguments))
    if origin in (Annotated, tuple):
        inner = _takes(arguments[0])
        return f"list of {inner}" if origin is tuple else inner
    if annotation is RangeConfig:
        return "{" + ", ".join(RangeConfig.model_fields) + "}"
    return _NAMES.get(annotation, str(annotation))
