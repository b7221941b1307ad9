"""A section of the configuration: frozen keys with checked types, and one line per mistake."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from ..errors import ConfigError
from .config_file import shortened
from .register import did_you_mean

_MOST_LINES = 12  # in a message; a list of ten thousand wrong values is one mistake
# Pydantic adds these names to the place of an error in a value that may have several forms.
_FORM = re.compile(r"range|list|\[key\]|int|constrained-\w+|(literal|tuple)\[.*\]")


def read_fraction(value: object) -> object:
    """Read "8/255" or "0.5/255" as a number, and leave anything else to the type check."""
    if isinstance(value, str) and value.count("/") == 1:
        above, below = value.split("/")
        with suppress(ValueError, ArithmeticError):
            if math.isfinite(read := float(above) / float(below)):
                return read
    return value


def _holds_truth_value(value: object) -> bool:
    """Whether `value` contains true or false, which Python accepts as 1 and 0."""
    return isinstance(value, bool) or (isinstance(value, list | tuple) and any(map(_holds_truth_value, value)))


Positive = Annotated[int, Field(gt=0, le=10_000_000)]
Repeats = Annotated[int, Field(ge=0, le=1000)]


class Section(BaseModel):
    """Keys of the configuration. They are frozen, and an unknown key is an error."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, str_max_length=4096, use_attribute_docstrings=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _plain(cls, value: object, info: ValidationInfo) -> object:
        """Reject true and false except for keys of that type, and text that cannot be printed."""
        takes = cls.model_fields[str(info.field_name)].annotation
        if takes is not bool and _holds_truth_value(value):
            raise ValueError("takes no true or false; text such as yes, no, on and off needs quotes in YAML")
        if isinstance(value, str) and not value.isprintable():
            raise ValueError("holds characters that cannot be printed")
        return value

    def with_changes(self, **changes: Any) -> Self:
        """Return the section with some keys changed; ConfigError for a value that is not valid in the file."""
        return self.checked({**{key: getattr(self, key) for key in type(self).model_fields}, **changes})

    @classmethod
    def checked(cls, content: Mapping[str, Any], prefix: str = "", find: Callable[[str], str] = str) -> Self:
        """Validate these values, and locate their paths by `find`. By default, paths are kept as written.

        The ConfigError has one line per mistake, which begins with `prefix` and the key.
        """
        try:
            return cls.model_validate(content, context={"find": find})
        except ValidationError as error:
            details = error.errors(include_url=False)
            lists = {detail["loc"][:-1] for detail in details}  # pydantic also calls a list of wrong values too short
            told = [each for each in details if each["type"] != "too_short" or each["loc"] not in lists]
            mistakes: dict[tuple[Any, str], list[Any]] = {}  # by place and value; each form of a value has a mistake
            for each in told:
                place = tuple(part for part in each["loc"] if not _FORM.fullmatch(str(part)))
                mistakes.setdefault((place, shortened(each["input"])), []).append(each)
            lines = [cls._explain(place, forms) for (place, _), forms in mistakes.items()]
            more = [f"and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
            raise ConfigError("\n".join(f"{prefix}{line}" for line in (*lines[:_MOST_LINES], *more))) from error

    @classmethod
    def valid_keys(cls) -> list[str]:
        """Return the valid keys."""
        return sorted(cls.model_fields)

    @classmethod
    def _explain(cls, location: tuple[Any, ...], forms: Sequence[Any]) -> str:
        """Return one line: the key, what is wrong with each form of the value, the value, and the valid ones."""
        detail = forms[0]
        key = ".".join(str(part) if re.fullmatch(r"\w{1,40}", str(part)) else shortened(part, 40) for part in location)
        if detail["type"] == "extra_forbidden":
            valid = cls._keys_at(location[:-1])
            hint = did_you_mean(str(location[-1]), valid) or "."
            return f"{key}: unknown key (value {shortened(detail['input'])}){hint} Valid keys here: {', '.join(valid)}"
        if detail["type"] == "missing":
            return f"{key}: this key is required and missing"
        first, *others = dict.fromkeys(each["msg"].removeprefix("Value error, ") for each in forms)
        message = " or ".join([first, *(each.removeprefix("Input should be ") for each in others)])
        place = f"{key}: " if key else ""  # a rule about several keys has no place
        return f"{place}{message[:1].lower()}{message[1:]} (value {shortened(detail['input'])})"

    @classmethod
    def _keys_at(cls, location: Sequence[Any]) -> list[str]:
        section: type[Section] = cls
        for part in location:
            field = section.model_fields.get(part)
            section = next(sections_in(field.annotation), section) if field else section
        return section.valid_keys()


def sections_in(annotation: Any) -> Iterator[type[Section]]:
    """Yield every section that a key may contain, also if it accepts other forms."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for inner in get_args(annotation):
        yield from sections_in(inner)
