"""Check dataset and base classifier URIs in milliseconds, without loading torch, weights or images.

The decorators of the registers `DATASETS` and `CLASSIFIERS` define the schemes with their targets and options, one
entry per scheme::

    @DATASETS(
        "stripes",
        describes="striped images, for trying things out",
        forms=("stripes:N[?seed=0]",),  # as messages show them
        target="number",
        options={"seed": ("number", "of the stripes")},
    )
    def open_stripes(uri: ResourceUri) -> Dataset: ...

`target` and the kind of an option are one of the kinds of `_wrong_value`. By default, an entry accepts any target and
no option. Further facts: `any_option` (the options are keyword arguments of a function), `gradients=False` (a
black box), `random_weights` (`weights=none` builds it without files), `image_shape` (C, H, W), `preprocess` (the
default of that option), `downloads` (a function lists what is missing on this machine: see `with_missing`).
"""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit

from ..errors import BaseClassifierError, DatasetError, MixedNutsError
from .register import CLASSIFIERS, DATASETS, Entry, Register

PREPROCESS = re.compile(r"(?P<cubic>Bicubic)?(?:Res(?P<resize>[1-9]\d*))?(?:Crop(?P<crop>[1-9]\d*))?")
_KINDS = ("any", "nothing", "text", "number", "file", "folder", "place", "factory", "repository", "host", "preprocess")
_PATHS = ("file", "folder", "place")
_SHORT = 80  # characters of a value in a message

_WEIGHTS = (".pth", ".pt", ".ckpt", ".safetensors", ".bin", ".tar", ".th")  # file name extensions of checkpoints

GIVEN = "given"  # scheme that a run writes for an object that the caller passed instead of a URI
# Two checkpoints as two functions; `mixednuts init` writes them as nets.py.
TWO_CHECKPOINTS = Path(__file__).with_name("nets.py.txt").read_text(encoding="utf-8")

Opener = TypeVar("Opener", bound=Callable[..., Any])


@dataclass(frozen=True)
class ResourceUri:
    """`scheme:target?key=value&...#fragment`, with the options in the order in which they were written."""

    scheme: str
    target: str
    options: tuple[tuple[str, str], ...] = ()
    fragment: str = ""
    text: str = ""  # the whole URI, as written

    def option(self, key: str, default: str | None = None) -> str | None:
        """Return the value of `key`."""
        return dict(self.options).get(key, default)


@dataclass(frozen=True)
class Missing:
    """Something that a URI needs and that is missing on this machine."""

    what: str  # "the weights of Carmon2019Unlabeled"
    path: str  # where it is expected
    command: str  # how to get it
    url: str = ""  # where `checkpoints.fetch` gets it; empty if unknown
    sha256: str = ""  # hash of the file, or its first digits, if the source publishes them
    mirrors: tuple[str, ...] = ()  # sources that are tried after `url`


def with_missing(find: Callable[[ResourceUri], Iterable[Missing]]) -> Callable[[Opener], Opener]:
    """Return a decorator that attaches to an opener the function that lists what is missing.

    Its entry has the fact `downloads=True`. Its module imports torch only in functions, so `missing_inputs` is quick.
    """

    def mark(opener: Opener) -> Opener:
        opener.missing = find  # type: ignore[attr-defined]
        return opener

    return mark


def parse_uri(uri: str) -> ResourceUri:
    """Split a URI. A missing target is empty. Only black boxes have a fragment, because a path may contain a `#`."""
    scheme, fragment, text = uri.partition(":")[0], "", uri
    if _fact(CLASSIFIERS, scheme, "gradients") is False:
        uri, _, fragment = uri.partition("#")
    address, _, query = uri.partition("?")
    scheme, _, target = address.partition(":")
    return ResourceUri(scheme, target, tuple(parse_qsl(query, keep_blank_values=True)), fragment, text)


def is_black_box(uri: str) -> bool:
    """Whether the classifier has no gradients: a service or a plain function."""
    return _fact(CLASSIFIERS, uri.partition(":")[0], "gradients") is False


def reaches_out(uri: str) -> str | None:
    """Return what a URI uses outside the package and its downloads: "code", "a service", "files", or None.

    >>> reaches_out("py:os:system?command=ls"), reaches_out("folder:photos"), reaches_out("digits")
    ('code', 'files', None)
    """
    parsed = parse_uri(uri)
    entry = CLASSIFIERS.entries().get(parsed.scheme) or DATASETS.entries().get(parsed.scheme)
    if entry is None:
        return None
    kind = {"factory": "code", "host": "a service"}.get(entry.facts.get("target", "any"))
    has_files = any(path for _, path in _named_paths(parsed, entry)) or (
        parsed.scheme in DATASETS.names() and parsed.target
    )
    return kind or ("files" if has_files else None)


def named_code(*, std: str | None, rob: str, extensions: Iterable[str] = ()) -> dict[str, str]:
    """Return those that run Python code or use a service: key -> value as written."""
    found = {key: uri for key, uri in (("std", std), ("rob", rob)) if uri and reaches_out(uri) in ("code", "a service")}
    files = ", ".join(extensions)
    return {**found, "extensions": files} if files else found


def needs_trust(run: str, outside: Mapping[str, str], ask: str = "pass --trust-code, or the configuration file") -> str:
    """Return the message about a run that names code, services or files outside its folder, by key."""
    named = ", ".join(f"{key}: {_short(value)}" for key, value in outside.items())
    return f"{run} references resources outside its folder ({named}). Review them, then {ask}"


def without_weights(uri: str) -> str | None:
    """Return the URI of the same network with random weights, and None for forms that always load weights."""
    parsed = parse_uri(uri)
    if not _fact(CLASSIFIERS, parsed.scheme, "random_weights"):
        return None
    kept = [(key, value) for key, value in parsed.options if key not in ("weights", "checkpoint", "pretrained")]
    return f"{parsed.scheme}:{parsed.target}?{urlencode([*kept, ('weights', 'none')])}"


def known_image_shape(uri: str) -> tuple[int, int, int] | None:
    """Return (C, H, W) if the URI alone determines it, even if the images are missing."""
    parsed = parse_uri(uri)
    shape: tuple[int, int, int] | None = _fact(DATASETS, parsed.scheme, "image_shape")
    if shape:
        return shape
    match = PREPROCESS.fullmatch(parsed.option("preprocess") or _fact(DATASETS, parsed.scheme, "preprocess") or "")
    side = match and (match["crop"] or match["resize"])
    return (3, int(side), int(side)) if side else None


def placed(uri: str, find: Callable[[str], str]) -> str:
    """Replace each path in a URI by `find(path)`. URIs of black boxes do not change.

    >>> placed("py:nets.py:rob?depth=3", lambda path: f"/nets/{path}")
    'py:/nets/nets.py:rob?depth=3'
    """
    parsed = parse_uri(uri)
    entry = CLASSIFIERS.entries().get(parsed.scheme) or DATASETS.entries().get(parsed.scheme)
    if entry is None or not parsed.target or is_black_box(uri):  # its checksum contains the URI
        return uri
    rest = uri.removeprefix(f"{parsed.scheme}:")
    for _, path in _named_paths(parsed, entry):
        before = "" if rest.startswith(path) else "="
        rest = rest.replace(f"{before}{path}", f"{before}{find(path)}", 1) if path else rest
    return f"{parsed.scheme}:{rest}"


def code_files(*uris: str) -> list[str]:
    """Return the Python files, as written, that URIs of the form `py:FILE.py:FUNCTION` name."""
    parsed = [parse_uri(uri) for uri in uris]
    modules = [split_factory(one.target)[0] for one in parsed if one.scheme == "py"]
    return list(dict.fromkeys(module for module in modules if module.endswith(".py")))


def beside(*folders: str | Path) -> Callable[[str], str]:
    """Return a function that looks up a relative path in the folders, and otherwise returns it as written."""

    def find(path: str) -> str:
        if "://" in path or Path(path).is_absolute():
            return path
        try:
            there = next((str(Path(folder, path)) for folder in folders if Path(folder, path).exists()), path)
        except (OSError, ValueError):  # a name that is too long or contains a NUL
            return path
        return path if "?" in there else there  # the options of a URI begin with "?"

    return find


def travelled(working_folder: str) -> Callable[[str], str]:
    """Return a function that finds a path of the driver on the machine of a worker.

    It looks in the working folder of the driver, and otherwise in that of the worker, to which Ray copies a job.
    """
    own = not working_folder or Path(working_folder) == Path.cwd()

    def find(path: str) -> str:
        there = Path(working_folder, path)
        if own or "://" in path or there.exists():
            return path if own or "://" in path else str(there)
        return str(there.relative_to(working_folder)) if there.is_relative_to(working_folder) else path

    return find


def dataset_forms() -> tuple[str, ...]:
    """Return every valid form of `data.uri`, including those of extensions."""
    return tuple(form for entry in DATASETS.entries().values() for form in _forms(entry))


def classifier_forms() -> tuple[str, ...]:
    """Return every valid form of `std` and `rob`, including those of extensions."""
    return tuple(form for entry in CLASSIFIERS.entries().values() for form in _forms(entry))


def check_uris(*, data: str | None, std: str | None, rob: str | None) -> None:
    """Check the forms and files of URIs. Raises as the two functions below."""
    if data is not None:
        check_dataset_uri(data)
    for role, uri in (("std", std), ("rob", rob)):
        if uri is not None:
            check_classifier_uri(uri, role)


def check_dataset_uri(uri: str) -> None:
    """Check the URI of a dataset.

    Raises:
        DatasetError: for an unknown form (with the valid ones) or option, or a missing file or folder.
    """
    _check_uri(uri, "data.uri", DATASETS, dataset_forms(), DatasetError)


def check_classifier_uri(uri: str, role: str) -> None:
    """Check the URI of a base classifier.

    Raises:
        BaseClassifierError: for an unknown form (with the valid ones) or option, or a missing file or name.
    """
    _check_uri(uri, role, CLASSIFIERS, classifier_forms(), BaseClassifierError)


def missing_inputs(*, data: str, std: str | None, rob: str) -> list[tuple[str, Missing]]:
    """Return (key of the configuration, missing item) for everything that is missing here, without importing torch.

    Raises:
        DatasetError, BaseClassifierError: for wrong URIs, as in the checks above.
    """
    wanted = (("data.uri", data), ("std", std), ("rob", rob))
    return [(key, item) for key, uri in wanted if uri is not None for item in missing_input(key, uri)]


def missing_input(key: str, uri: str) -> list[Missing]:
    """Return what is missing for one URI, of the key `data.uri`, `std` or `rob`."""
    register = DATASETS if key == "data.uri" else CLASSIFIERS
    parsed = parse_uri(uri)
    lacking = list(_lacking_files(parsed, register.entries().get(parsed.scheme)))
    if not lacking:
        check_dataset_uri(uri) if register is DATASETS else check_classifier_uri(uri, key)
        if _fact(register, parsed.scheme, "downloads"):
            lacking = list(register.get(parsed.scheme).missing(parsed))
    return lacking


def split_factory(target: str) -> tuple[str, str]:
    """Split "package.module:factory" into its two halves."""
    module, _, factory = target.rpartition(":")
    return module, factory


def _check_uri(uri: str, key: str, register: Register[Any], forms: Sequence[str], error: type[MixedNutsError]) -> None:
    parsed = parse_uri(uri)
    entry = register.entries().get(parsed.scheme)
    if entry is None:
        suffix = Path(parsed.target or parsed.scheme).suffix[1:]
        if suffix in register.names():  # a file name without a scheme
            raise error(f"{key}={_short(uri)!r} is not a known form; did you mean '{suffix}:{_short(uri)}'?")
        if suffix and f".{suffix}" in _WEIGHTS and register is CLASSIFIERS:
            raise error(
                f"{key}={_short(uri)!r} is a file of weights, which does not name the network. Write a function "
                f"that builds it and loads them, and give {key}: py:nets.py:{key}. `mixednuts init` writes this "
                f"nets.py to start from:\n\n{TWO_CHECKPOINTS}"
            )
        listed = _listed("forms", forms, parsed.scheme, register.names())
        raise error(f"{key}={_short(uri)!r} is not a known form{listed}")
    where = f"{key}={_without_password(uri)!r}"
    target = entry.facts.get("target", "any")
    if reason := _wrong_value(parsed.target, target):
        raise error(f"{where}: {parsed.target!r} {reason}; valid forms: {', '.join(_forms(entry))}")
    if target == "host":
        _check_address(uri, key, entry, error)
    if not entry.facts.get("any_option"):
        _check_options(where, parsed, entry.facts.get("options", {}), error)
    for lacking in _lacking_files(parsed, entry):
        raise error(f"{where}: there is no {lacking.what} {lacking.path}")


def _check_options(
    where: str, parsed: ResourceUri, options: dict[str, tuple[str, str]], error: type[MixedNutsError]
) -> None:
    for name, value in parsed.options:
        if name not in options:
            listed = _listed("options", list(options), name, options) if options else "; this form takes none"
            raise error(f"{where}: unknown option {name!r}{listed}")
        if reason := _wrong_value(value, options[name][0]):
            raise error(f"{where}: {name}={value!r} {reason}")


def _check_address(uri: str, key: str, entry: Entry, error: type[MixedNutsError]) -> None:
    try:
        address = urlsplit(uri)
        named = address.hostname and (address.port is None or address.port >= 0)
    except ValueError:  # an open bracket, or a port that is not a number
        named = None
    if not named:
        raise error(f"{key}={_short(uri)!r}: no host; valid forms: {', '.join(_forms(entry))}")
    if address.username or address.password:
        raise error(
            f"{key}: the URL of {address.hostname} holds a user name or password, which would be written into "
            "run.yaml; leave it out and put it into ~/.netrc"
        )


def _wrong_value(value: str, kind: str) -> str | None:  # noqa: PLR0911, one line per kind
    """Return what is wrong with a target or an option of this kind, or None.

    Kinds: any, nothing, text, number, file, folder, place (a folder or a URI), factory ("module:function"), repository
    ("ORG/NAME"), host, preprocess, or the valid values separated by bars ("std|rob").
    """
    if kind not in _KINDS:
        choices = kind.split("|")
        return None if value in choices else f"is not one of {', '.join(choices)}"
    if kind == "any":
        return None
    if kind == "nothing":
        return "is too much" if value else None
    if not value:
        return "is missing"
    if kind == "number" and not (value.isascii() and value.isdecimal() and len(value) <= 18):
        return "is not a whole number"
    if kind == "factory" and not all(split_factory(value)):
        return "does not name a module and a function"
    if kind == "repository" and not re.fullmatch(r"[\w.-]+/[\w.-]+", value):
        return "is not ORG/NAME"
    if kind == "preprocess":
        match = PREPROCESS.fullmatch(value)
        if not match or not (match["resize"] or match["crop"]) or (match["cubic"] and not match["resize"]):
            return (
                "is not known; valid: Res256Crop224 (shorter side to 256, centre 224 x 224), Res224 (224 x 224), "
                "Crop288 (centre), with any sizes, and Bicubic before Res"
            )
    return None


def _lacking_files(parsed: ResourceUri, entry: Entry | None) -> Iterator[Missing]:
    """Yield the files and folders that the URI names and that do not exist."""
    if entry is None:
        return
    for kind, value in _named_paths(parsed, entry):
        try:
            there = not value or (Path(value).is_dir() if kind == "folder" else Path(value).is_file())
        except (OSError, ValueError):  # a name that is too long, or holds a NUL
            there = False
        if kind in ("file", "folder") and not there:
            yield Missing(kind, str(Path(value).absolute()), "copy it there, or correct the path")


def _named_paths(parsed: ResourceUri, entry: Entry) -> Iterator[tuple[str, str]]:
    """Yield (kind, path as written) for the paths in a URI, the target first."""
    options, target = entry.facts.get("options", {}), entry.facts.get("target", "any")
    if target == "factory" and split_factory(parsed.target)[0].endswith(".py"):
        yield "file", split_factory(parsed.target)[0]
    written = [(target, parsed.target), *((options.get(key, ("any",))[0], value) for key, value in parsed.options)]
    yield from (item for item in written if item[0] in _PATHS)


def _listed(what: str, valid: Sequence[str], written: str, names: Iterable[str]) -> str:
    """Return the end of a message: the valid values, and the name that is closest to the written one."""
    close = difflib.get_close_matches(written, list(names), n=1)
    return f"; valid {what}: {', '.join(valid)}" + (f"; did you mean {close[0]!r}?" if close else "")


def _forms(entry: Entry) -> Sequence[str]:
    forms: Sequence[str] = entry.facts.get("forms") or (f"{entry.name}:...",)
    return forms


def _fact(register: Register[Any], scheme: str, name: str) -> Any:
    entry = register.entries().get(scheme)
    return None if entry is None else entry.facts.get(name)


def _without_password(uri: str) -> str:
    return _short(re.sub(r"//[^/@]*@", "//...@", uri))


def _short(text: str) -> str:
    return text if len(text) <= _SHORT else f"{text[:_SHORT]}..."
