"""The extension points: each attack, loss, clamp, dataset, ... is one file, which registers it under a name.

An entry of the package is a file in the package of its register, with a decorated class or function::

    @CLAMPS("relu", describes="max(v, 0)")
    def relu(u_BK: Tensor) -> Tensor: ...

Your own entry is the same in a Python file that the configuration names (`extensions: [my_clamp.py]`).

The names and one-line descriptions of the package's own entries are read from the source of their files, without
importing them, so a configuration with a wrong name is rejected before torch is imported.
"""

import ast
import difflib
import functools
import hashlib
import importlib
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from ..errors import ConfigError, InvalidInputError

T = TypeVar("T")
_PACKAGE = Path(__file__).parents[1]
REGISTERS: "list[Register[Any]]" = []
_LOADED: dict[Path, str] = {}  # an extension's file -> the module of its content


@dataclass(frozen=True)
class Entry:
    """The facts about an entry that are known without importing it."""

    name: str
    describes: str  # one line
    facts: Mapping[str, Any]  # the other literal arguments of the decorator
    home: str  # the module that registers it


class Register(Generic[T]):
    """Entries of one kind by name. In a section of the configuration, `Annotated[str, NORMS]` is one of the names.

    Args:
        constant: name of the constant that holds this register; decorators are found by it in the source.
        kind: noun for an entry, for messages.
        package: the subpackage whose files register the built-in entries.
    """

    def __init__(self, constant: str, kind: str, package: str) -> None:
        self.constant, self.kind, self.package = constant, kind, package
        self._made: dict[str, T] = {}
        self._added: dict[str, Entry] = {}  # by extensions
        REGISTERS.append(self)

    def __call__(self, name: str, *, describes: str = "", **facts: Any) -> Callable[[T], T]:
        """Return a decorator that registers an object under a name.

        Args:
            describes: one line; by default the first line of the docstring.
            facts: literal values that the code that uses the register needs to know.

        Raises:
            ConfigError: if another file has registered the name.
        """

        def register(made: T) -> T:
            home = str(getattr(made, "__module__", ""))
            taken = self.entries().get(name)
            if taken is not None and taken.home != home:
                raise ConfigError(
                    f"{self.kind} {name!r} of {home} has the same name as one of {taken.home}; choose another name"
                )
            self._made[name] = made
            if taken is None:
                self._added[name] = Entry(name, describes or _first_line(made.__doc__), facts, home)
            return made

        return register

    def entries(self) -> dict[str, Entry]:
        """Return every entry by name: the package's own by `order=`, then by file, and then those of extensions."""
        return {**_built_in(self.constant, self.package), **self._added}

    def names(self) -> tuple[str, ...]:
        """Return every valid name."""
        return tuple(self.entries())

    def check(self, name: str) -> str:
        """Return `name`, or raise an InvalidInputError that lists the valid names if it is not registered."""
        if name not in self.entries():
            raise InvalidInputError(unknown_name(self.kind, name, self.names()))
        return name

    def get(self, name: str) -> T:
        """Import and return the object that is registered under `name`. Raises as `check`."""
        self.check(name)
        if name not in self._made:
            importlib.import_module(self.entries()[name].home)
        return self._made[name]

    def __get_pydantic_core_schema__(self, text: Any, handler: Callable[[Any], Any]) -> Any:
        from pydantic_core import core_schema  # attacks without a configuration do not import pydantic

        return core_schema.no_info_after_validator_function(self.check, handler(text))

    def __get_pydantic_json_schema__(self, schema: Any, handler: Callable[[Any], Any]) -> dict[str, Any]:
        return {**handler(schema), "enum": list(self.names())}

    def forget(self, home: str) -> None:
        """Remove the entries that the module `home` of an extension has registered."""
        for name in [name for name, entry in self._added.items() if entry.home == home]:
            del self._added[name], self._made[name]


def unknown_name(kind: str, name: object, valid: Iterable[str]) -> str:
    """Return the message for a name that is not one of the valid ones."""
    shown, valid = str(name)[:80], list(valid)
    return f"{kind} {shown!r} is not known{did_you_mean(shown, valid) or '.'} Valid names: {', '.join(valid)}"


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" with the valid name that is closest to `name`, or "" if none is close.

    >>> did_you_mean("cifr10", ["digits", "cifar10"])
    "; did you mean 'cifar10'?"
    """
    close = difflib.get_close_matches(name, list(valid), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


NORMS: Register[Any] = Register("NORMS", "norm", "norms")
ATTACKS: Register[Any] = Register("ATTACKS", "attack", "attacks")
LOSSES: Register[Any] = Register("LOSSES", "loss", "attacks")
CLAMPS: Register[Any] = Register("CLAMPS", "clamp", "mixing")
CRITERIA: Register[Any] = Register("CRITERIA", "criterion", "selection")
DATASETS: Register[Any] = Register("DATASETS", "dataset", "images")
CLASSIFIERS: Register[Any] = Register("CLASSIFIERS", "classifier", "classifiers")
STAGES: Register[Any] = Register("STAGES", "stage", "stages")
EXECUTORS: Register[Any] = Register("EXECUTORS", "executor", "distributed")
CHARTS: Register[Any] = Register("CHARTS", "chart", "reports")
STUDIES: Register[Any] = Register("STUDIES", "study", "studies")


def load_extensions(files: Iterable[str]) -> dict[str, str]:
    """Import the Python files, each once per process and content, and return file -> sha256 of its content.

    ConfigError if a file does not exist or cannot be imported.
    """
    return {file: _load(Path(file)) for file in files}


def require_extensions(expected: Mapping[str, str], find: Callable[[str], str] = str) -> None:
    """Import in a worker the files that the driver imported (file -> sha256), at the paths that `find` returns.

    ConfigError if a file is missing here, cannot be imported, or has another content.
    """
    for file, expects in expected.items():
        sha256 = _load(Path(find(file)))
        if sha256 != expects:
            raise ConfigError(
                f"extensions: {file} on {platform.node()} has checksum {sha256[:12]}, the driver's has "
                f"{expects[:12]}: copy the same file to every node"
            )


def _load(path: Path) -> str:
    if not path.is_file():
        raise ConfigError(f"extensions: {path} does not exist (working folder: {Path.cwd()})")
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    name = f"mixednuts_extension_{path.stem}_{sha256[:12]}"
    if name not in sys.modules:
        _forget(_LOADED.get(path.resolve(), ""))  # the same file, edited meanwhile
        try:
            import_file(name, path)
        except (Exception, SystemExit) as error:
            raise ConfigError(f"extensions: {path} cannot be imported: {type(error).__name__}: {error}") from error
    _LOADED[path.resolve()] = name
    return sha256


def import_file(name: str, path: Path) -> ModuleType:
    """Import a Python file as the module `name`, under which other processes unpickle its objects.

    ImportError if it is not a Python file, or another error that the file raises.
    """
    if path.suffix != ".py":
        raise ImportError(f"{path} is not a Python file")
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = str(path)
    try:  # without a bytecode cache, which misses an edit in the same second that keeps the file's size
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))  # noqa: S102, as any import does
    except BaseException as error:
        _forget(name)
        folder, top = path.resolve().parent, str(getattr(error, "name", "")).partition(".")[0]
        is_beside = (folder / f"{top}.py").is_file() or (folder / top).is_dir()
        if not (isinstance(error, ModuleNotFoundError) and is_beside):
            raise
        raise ImportError(
            f"{error}. It is next to {path.name}: export PYTHONPATH={folder}, or move the required code into "
            f"{path.name}, because a run keeps only a copy of {path.name}"
        ) from error
    return module


def _forget(module: str) -> None:
    sys.modules.pop(module, None)
    for register in REGISTERS:
        register.forget(module)


@functools.cache
def _built_in(constant: str, package: str) -> Mapping[str, Entry]:
    """Return the entries that the files of a package register, read from their source."""
    found = [
        entry for path in sorted((_PACKAGE / package).glob("*.py")) for entry in _registered(path, constant, package)
    ]
    found.sort(key=lambda entry: entry.facts.get("order", len(found)))  # stable: then by file
    return {entry.name: entry for entry in found}


def _registered(path: Path, constant: str, package: str) -> Iterator[Entry]:
    text = path.read_text(encoding="utf-8")
    if f"{constant}(" not in text:
        return
    home = f"{_PACKAGE.name}.{package}.{path.stem}"
    for node in ast.parse(text).body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == constant:
                facts = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in decorator.keywords}
                describes = facts.pop("describes", None) or _first_line(ast.get_docstring(node))
                yield Entry(ast.literal_eval(decorator.args[0]), describes, facts, home)


def _first_line(docstring: str | None) -> str:
    return (docstring or "").strip().partition("\n")[0].removesuffix(".")
