"""Read a YAML file as plain values, and report what is wrong with it in one line."""

import json
from collections.abc import Hashable
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from ..errors import ConfigError, redacted

# PyYAML raises these errors for `!!int ''`, for deeply nested lists, and so on.
_UNREADABLE = (ValueError, LookupError, AttributeError, TypeError, ArithmeticError, RecursionError)


def shortened(value: object, length: int = 80) -> str:
    """Return the value as Python writes it, on one line, without passwords, and shortened in the middle."""
    try:
        text = redacted(repr(value))
    except ValueError:
        return "a number of thousands of digits"  # `repr` raises ValueError for such a number
    if len(text) <= length:
        return text
    half = (length - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def read_yaml_file(path: Path) -> dict[str, Any]:
    """Return the keys and values of a YAML file.

    ConfigError, in one line, if the file is missing, not UTF-8, not YAML (with line and column), not a mapping, or if
    it contains a key twice.
    """
    try:
        with path.open("rb") as file:
            found = read_yaml(file, str(path))
    except OSError as error:
        reason = f"{error.strerror}. Working folder: {Path.cwd()}"
        raise ConfigError(f"{path}: no configuration file can be read here: {reason}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: must hold keys and values; it holds {type(found).__name__}")
    return found


def read_yaml(text: str | bytes | BinaryIO, source: str) -> Any:
    """Return the value of a YAML text. Raises as `read_yaml_file`, with messages that begin with `source`."""
    try:
        return _Loader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = error.problem or error.context
        problem = f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark else problem
    except yaml.reader.ReaderError as error:
        problem = f"character {error.position + 1} is {error.character:#x}, which is not UTF-8 text"
    except _UNREADABLE as error:
        problem = f"a value cannot be read: {error}"
    raise ConfigError(f"{source}: not readable as YAML: {problem}")


def apply_override(content: dict[str, Any], override: str) -> None:
    """Set the value of `key.path=value`, which is YAML, in the content of a file. Raises as `read_yaml_file`."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"--set {shortened(override)} is not of the form key.path=value, e.g. --set search.beta=0.97")
    *parents, last = parts
    node = content
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {shortened(override)}: {parent!r} holds the value {shortened(child)}, not keys")
        node = child
    node[last] = read_yaml(text, f"--set {shortened(override)}")


def read_json(content: bytes) -> Any:
    """Return the value of a JSON file of a run; ValueError if it is not JSON, or is nested too deeply."""
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("its lists and keys are nested too deeply") from error


class _Loader(yaml.SafeLoader):
    """PyYAML's loader of plain values, which also rejects a key that occurs twice, and a reference (`*name`).

    References are rejected because nested ones could expand to a billion values.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event: Any = self.peek_event()  # type: ignore[no-untyped-call]
            raise _refused(f"*{event.anchor} refers to another value. Write the value itself", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[Any, yaml.ScalarNode] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            first = seen.setdefault((key.tag, key.value), key)
            if first is not key:
                line = first.start_mark.line + 1
                raise _refused(f"the key {shortened(key.value)} already occurs on line {line}", key.start_mark)
        return super().construct_mapping(node, deep)


def _refused(problem: str, mark: yaml.Mark) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
