"""The sources of images and classifiers: each parses its URI once, and then checks, locates and opens itself.

A check takes milliseconds, because it loads no torch, weights or images. The decorators of the registers `DATASETS` and
`CLASSIFIERS` define the schemes with their targets and options, one entry per scheme::

    @DATASETS(
        "stripes",
        describes="striped images, for trying things out",
        forms=("stripes:N[?seed=0]",),  # as messages show them
        target="number",
        options={"seed": "number"},
    )
    def open_stripes(uri: DatasetSource) -> Dataset: ...

`target` and the kind of an option are one of the names in `_KINDS`, or the valid values separated by bars ("std|rob").
By default, an entry accepts any target and no option. Further facts: `any_option` (the options are keyword arguments of
a function), `gradients=False` (a black box), `random_weights` (`weights=none` builds it without files), `image_shape`
(C, H, W), `preprocess` (the default of that option), `missing` (the name of a function in the same file that lists what
is missing on this machine).
"""

import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self
from urllib.parse import parse_qsl, urlencode

from pydantic import GetCoreSchemaHandler, ValidationInfo, ValidatorFunctionWrapHandler
from pydantic_core import CoreSchema, core_schema

from ..errors import BaseClassifierError, DatasetError, MissingExtra, MixedNutsError
from .config_file import shortened
from .register import CLASSIFIERS, DATASETS, Entry, Register, did_you_mean

PREPROCESS = re.compile(r"(?=.)(?:(?P<cubic>Bicubic)?Res(?P<resize>[1-9]\d*))?(?:Crop(?P<crop>[1-9]\d*))?")
_KINDS: dict[str, tuple[str | re.Pattern[str], str]] = {  # kind -> what a value must match, and the message otherwise
    "any": ("(?s).*", ""),
    "nothing": ("", "is too much"),
    **dict.fromkeys(("text", "file", "folder", "place"), ("(?s).+", "")),  # a place is a folder or a URI
    "number": ("[0-9]{1,18}", "is not a whole number"),
    "factory": ("(?s).+:.+", "does not name a module and a function"),
    "host": (
        r"//(\[[\w:.]+\]|[^\s/:@\[\]]+)(:[0-9]{1,5})?(/.*)?",
        "is not //HOST/PATH (a user name or password belongs into ~/.netrc, because run.yaml shows the URI)",
    ),
    "repository": (r"[\w.-]+/[\w.-]+", "is not ORG/NAME"),
    "preprocess": (
        PREPROCESS,
        "is not known; valid: Res256Crop224 (shorter side to 256, center 224 x 224), Res224 (224 x 224), Crop288 "
        "(center), with any sizes, and Bicubic before Res",
    ),
}
_PATHS = ("file", "folder", "place")
_WEIGHTS = (".pth", ".pt", ".ckpt", ".safetensors", ".bin", ".tar", ".th")  # file name extensions of checkpoints

GIVEN = "given"  # scheme of the URI that a run records for an object that the caller passed
# Two checkpoints as two functions; `mixednuts init` writes them as nets.py.
TWO_CHECKPOINTS = Path(__file__).with_name("nets.py.txt").read_text(encoding="utf-8")

Find = Callable[[str], str]  # from a path as written to the path of the file on this machine


@dataclass(frozen=True)
class Missing:
    """Something that a URI needs and that is missing on this machine."""

    what: str  # "the weights of Carmon2019Unlabeled"
    path: str  # where it is expected
    command: str  # how to get it
    url: str = ""  # where `checkpoints.fetch` gets it; empty if unknown
    sha256: str = ""  # hash of the file, or its first digits, if the source publishes them
    get: Callable[[], str | Path] | None = None  # or a library's function that downloads and checks it


class Located(str):
    """A path of the configuration. The text is the path on this machine, and `written` is what the user wrote."""

    written: str

    def __new__(cls, text: str, written: str | None = None) -> Self:
        made = super().__new__(cls, text)
        made.written = str(text) if written is None else written
        return made

    def located(self, find: Find) -> Self:
        """Return the path that `find` returns, with the same `written`."""
        return type(self)(find(self), self.written)

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, _handler: GetCoreSchemaHandler) -> CoreSchema:
        def locate(value: Any, as_text: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
            if isinstance(value, cls):
                return value
            return cls(as_text(value)).located((info.context or {}).get("find", str))

        written = core_schema.plain_serializer_function_ser_schema(lambda value: value.written)
        return core_schema.with_info_wrap_validator_function(locate, core_schema.str_schema(), serialization=written)


class Source(Located):
    """A dataset or a classifier: `scheme:target?key=value&...#fragment`, parsed, or an object that the caller passed.

    Only black boxes have a fragment, because a path may contain a `#`. A missing target is empty.
    """

    register: ClassVar[Register[Any]]
    error: ClassVar[type[MixedNutsError]]

    scheme: str
    target: str
    options: tuple[tuple[str, str], ...]  # in the order in which they were written
    fragment: str
    given: Any  # the caller's object; None for a URI

    def __new__(cls, text: str, written: str | None = None, given: Any = None) -> Self:
        made = super().__new__(cls, text, written)
        made.scheme, made.given, rest, made.fragment = text.partition(":")[0], given, text, ""
        if made.fact("gradients") is False:
            rest, _, made.fragment = text.partition("#")
        address, _, query = rest.partition("?")
        made.scheme, _, made.target = address.partition(":")
        made.options = tuple(parse_qsl(query, keep_blank_values=True))
        return made

    @classmethod
    def of(cls, uri: str) -> Self:
        """Return `uri` as a source, parsed unless it is one."""
        return uri if isinstance(uri, cls) else cls(uri)

    @classmethod
    def holding(cls, given: Any, checksum: str) -> Self:
        """Return the source of an object that the caller passed, which a run names by its checksum."""
        return cls(f"{GIVEN}:{checksum[:12]}", given=given)

    @classmethod
    def forms(cls) -> tuple[str, ...]:
        """Return every valid form, including those of extensions."""
        return tuple(form for entry in cls.register.entries().values() for form in _forms(entry))

    def option(self, key: str, default: str | None = None) -> str | None:
        """Return the value of `key`."""
        return dict(self.options).get(key, default)

    @property
    def entry(self) -> Entry | None:
        """The entry of its scheme, or None for an unknown one."""
        return self.register.entries().get(self.scheme)

    def fact(self, name: str, default: Any = None) -> Any:
        """Return a fact of its scheme."""
        return self.entry.facts.get(name, default) if self.entry else default

    def open(self, key: str) -> Any:
        """Check the source and open it: images, or a torch module.

        Messages name the `key` of the configuration: "data.uri", "std" or "rob".

        Raises:
            DatasetError, BaseClassifierError: if it cannot be opened.
            MissingExtra: if it needs a library that is not installed.
        """
        if self.given is not None:
            return self.given
        self.check(key)
        try:
            return self.register.get(self.scheme)(self)
        except (MissingExtra, DatasetError):
            raise
        except MixedNutsError as error:
            raise self.error(f"{key}={self!r}: {error}") from error
        except (Exception, SystemExit) as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            where = f"; relative paths in it start at {Path.cwd()}" if isinstance(error, FileNotFoundError) else ""
            raise self.error(f"{key}={self!r} cannot be opened: {reason}{where}") from error

    def check(self, key: str) -> None:
        """Check the form, the options and the files of the URI; `key` and errors as in `open`."""
        if self.given is not None:
            return
        entry = self.entry
        if entry is None:
            raise self.error(self._unknown(key))
        where, kind = f"{key}={shortened(self)}", entry.facts.get("target", "any")
        if reason := _wrong_value(self.target, kind):
            shown = "it" if kind == "host" else repr(self.target)  # an address may hold a password
            raise self.error(f"{where}: {shown} {reason}; valid forms: {', '.join(_forms(entry))}")
        options = entry.facts.get("options", {})
        for name, value in () if entry.facts.get("any_option") else self.options:
            if name not in options:
                listed = _listed("options", options, name, options) if options else "; this form takes none"
                raise self.error(f"{where}: unknown option {name!r}{listed}")
            if reason := _wrong_value(value, options[name]):
                raise self.error(f"{where}: {name}={value!r} {reason}")
        for lacking in self._lacking_files():
            raise self.error(f"{where}: there is no {lacking.what} {lacking.path}")

    def missing(self, key: str) -> list[Missing]:
        """Return what is missing on this machine. Raises as `check`."""
        lacking = list(self._lacking_files())
        if not lacking:
            self.check(key)
            if self.entry and (name := self.fact("missing")):
                lacking = list(getattr(importlib.import_module(self.entry.home), name)(self))
        return lacking

    @property
    def runs_code(self) -> bool:
        """Whether it runs Python code outside the package, or uses a service.

        >>> [ClassifierSource(uri).runs_code for uri in ("py:os:system?command=ls", "timm:resnet18?checkpoint=a.pt")]
        [True, False]
        """
        return self.fact("target") in ("factory", "host")

    @property
    def reaches_out(self) -> bool:
        """Whether it uses code, a service or files outside the package and its downloads."""
        named_data = self.register is DATASETS and self.entry is not None and self.target != ""
        return self.runs_code or named_data or any(path for _, path in self._paths())

    @property
    def is_black_box(self) -> bool:
        """Whether it is a classifier without gradients: a service or a plain function."""
        return self.fact("gradients") is False

    def located(self, find: Find) -> Self:
        """Return the source with each path in the URI replaced by `find(path)`. URIs of black boxes do not change.

        >>> ClassifierSource("py:nets.py:rob?depth=3").located(lambda path: f"/nets/{path}")
        'py:/nets/nets.py:rob?depth=3'
        """
        if not self.target or self.is_black_box:  # the checksum of a black box contains its URI
            return self
        rest = self.removeprefix(f"{self.scheme}:")
        for _, path in self._paths():
            before = "" if rest.startswith(path) else "="
            rest = rest.replace(f"{before}{path}", f"{before}{find(path)}", 1) if path else rest
        there = f"{self.scheme}:{rest}"
        return self if there == self else type(self)(there, self.written, self.given)

    def _paths(self) -> Iterator[tuple[str, str]]:
        """Yield (kind, path as written) for the paths in the URI, the target first."""
        options, kind = self.fact("options", {}), self.fact("target", "any")
        if kind == "factory" and (module := self.target.rpartition(":")[0]).endswith(".py"):
            yield "file", module
        written = [(kind, self.target), *((options.get(key, "any"), value) for key, value in self.options)]
        yield from (item for item in written if item[0] in _PATHS)

    def _lacking_files(self) -> Iterator[Missing]:
        """Yield the files and folders that the URI names and that do not exist."""
        for kind, value in self._paths():
            if value and kind != "place" and not _exists(value, Path.is_dir if kind == "folder" else Path.is_file):
                yield Missing(kind, str(Path(value).absolute()), "copy it there, or correct the path")

    def _unknown(self, key: str) -> str:
        suffix, names = Path(self.target or self.scheme).suffix[1:], self.register.names()
        unknown = f"{key}={shortened(self)} is not a known form"
        if suffix in names:  # a file name without a scheme
            return f"{unknown}; did you mean {shortened(f'{suffix}:{self}')}?"
        if suffix and f".{suffix}" in _WEIGHTS and self.register is CLASSIFIERS:
            return (
                f"{key}={shortened(self)} is a file of weights, which does not name the network. Write a function "
                f"that builds it and loads them, and give {key}: py:nets.py:{key}. `mixednuts init` writes this "
                f"nets.py to start from:\n\n{TWO_CHECKPOINTS}"
            )
        return unknown + _listed("forms", self.forms(), self.scheme, names)


class DatasetSource(Source):
    """The URI of a dataset."""

    register, error = DATASETS, DatasetError

    @property
    def image_shape(self) -> tuple[int, int, int] | None:
        """(C, H, W) if the URI alone determines it, even if the images are missing."""
        shape: tuple[int, int, int] | None = self.fact("image_shape")
        if shape:
            return shape
        match = PREPROCESS.fullmatch(self.option("preprocess") or self.fact("preprocess") or "")
        side = match and (match["crop"] or match["resize"])
        return (3, int(side), int(side)) if side else None


class ClassifierSource(Source):
    """The URI of a base classifier."""

    register, error = CLASSIFIERS, BaseClassifierError

    @property
    def is_factory(self) -> bool:
        """Whether it is a function that returns a torch module."""
        return self.fact("target") == "factory" and not self.is_black_box

    @property
    def code_file(self) -> str:
        """The Python file of the form `py:FILE.py:FUNCTION`, or ""."""
        module = self.target.rpartition(":")[0]
        return module if self.is_factory and module.endswith(".py") else ""

    def without_weights(self) -> Self | None:
        """Return the same network with random weights, and None for forms that always load weights."""
        if not self.fact("random_weights"):
            return None
        kept = [(key, value) for key, value in self.options if key not in ("weights", "checkpoint", "pretrained")]
        return type(self)(f"{self.scheme}:{self.target}?{urlencode([*kept, ('weights', 'none')])}")


def needs_trust(run: str, outside: Mapping[str, str], ask: str = "pass --trust-code, or the configuration file") -> str:
    """Return the message about a run that names code, services or files outside its folder, by key."""
    named = ", ".join(f"{key}: {shortened(value)}" for key, value in outside.items())
    return f"{run} references resources outside its folder ({named}). Review them, then {ask}"


def beside(folder: str | Path) -> Find:
    """Return a function that looks up a relative path in the folder, and otherwise returns it as written."""

    def find(path: str) -> str:
        there = str(Path(folder, path))
        return path if "://" in path or "?" in there or not _exists(there) else there  # "?" begins a URI's options

    return find


def travelled(working_folder: str) -> Find:
    """Return a function that finds a path of the driver on the machine of a worker, to which Ray copies a job."""
    if not working_folder or Path(working_folder) == Path.cwd():
        return str
    in_folder = beside(working_folder)

    def find(path: str) -> str:
        is_copied = Path(path).is_relative_to(working_folder) and not _exists(path)
        return str(Path(path).relative_to(working_folder)) if is_copied else in_folder(path)

    return find


def _exists(path: str | Path, test: Callable[[Path], bool] = Path.exists) -> bool:
    """Return the result of the test, and False for a name that is too long or contains a NUL."""
    try:
        return test(Path(path))
    except (OSError, ValueError):
        return False


def _wrong_value(value: str, kind: str) -> str | None:
    """Return what is wrong with a target or an option of this kind, or None."""
    if kind not in _KINDS:
        choices = kind.split("|")
        return None if value in choices else f"is not one of {', '.join(choices)}"
    pattern, problem = _KINDS[kind]
    return None if re.fullmatch(pattern, value) else problem if value else "is missing"


def _listed(what: str, valid: Iterable[str], written: str, names: Iterable[str]) -> str:
    """Return the end of a message: the valid values, and the name that is closest to the written one."""
    return f"; valid {what}: {', '.join(valid)}{did_you_mean(written, names)}"


def _forms(entry: Entry) -> Sequence[str]:
    forms: Sequence[str] = entry.facts.get("forms") or (f"{entry.name}:...",)
    return forms
