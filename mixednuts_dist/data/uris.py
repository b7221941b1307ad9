"""What a dataset or base classifier URI says, checked in milliseconds: no torch, weights or images are loaded."""

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl

from ..errors import BaseClassifierError, DatasetError, MixedNutsError

DATASET_FORMS = ("digits", "cifar10", "cifar100", "npz:FILE")
CLASSIFIER_FORMS = ("demo:std", "demo:rob", "py:package.module:factory", "py:path/to/file.py:factory")
DEMO_NAMES = ("std", "rob")


@dataclass(frozen=True)
class ResourceUri:
    """`scheme:target?key=value&...`; `options` keeps the order in which they were written."""

    scheme: str
    target: str
    options: tuple[tuple[str, str], ...] = ()


def parse_uri(uri: str) -> ResourceUri:
    """Split a URI; a missing target is empty."""
    address, _, query = uri.partition("?")
    scheme, _, target = address.partition(":")
    return ResourceUri(scheme, target, tuple(parse_qsl(query, keep_blank_values=True)))


def check_uris(*, data: str, std: str, rob: str) -> None:
    """Refuse a run whose forms or files cannot be right; errors as in the two checks below."""
    check_dataset_uri(data)
    check_classifier_uri(std, "std")
    check_classifier_uri(rob, "rob")


def check_dataset_uri(uri: str) -> None:
    """Refuse a dataset that cannot exist.

    Raises:
        DatasetError: for an unknown form (the valid ones are listed) or a missing file.
    """
    parsed = parse_uri(uri)
    known = {form.split(":")[0] for form in DATASET_FORMS}
    if parsed.scheme not in known:
        raise _unknown(DatasetError, "data.uri", uri, DATASET_FORMS)
    if parsed.scheme == "npz" and not Path(parsed.target).is_file():
        raise DatasetError(f"data.uri={uri!r}: there is no file {Path(parsed.target).absolute()}")


def check_classifier_uri(uri: str, role: str) -> None:
    """Refuse a base classifier (`role` "std" or "rob") that cannot exist.

    Raises:
        BaseClassifierError: for an unknown form (the valid ones are listed), a missing file or factory name.
    """
    parsed = parse_uri(uri)
    if parsed.scheme == "demo":
        if parsed.target not in DEMO_NAMES:
            raise _unknown(BaseClassifierError, role, uri, [f"demo:{name}" for name in DEMO_NAMES])
        return
    if parsed.scheme != "py":
        raise _unknown(BaseClassifierError, role, uri, CLASSIFIER_FORMS)
    module, factory = split_factory(parsed.target)
    if not module or not factory:
        raise _unknown(BaseClassifierError, role, uri, CLASSIFIER_FORMS[2:])
    if module.endswith(".py") and not Path(module).is_file():
        raise BaseClassifierError(f"{role}={uri!r}: there is no file {Path(module).absolute()}")


def split_factory(target: str) -> tuple[str, str]:
    """ "package.module:factory" -> its two halves."""
    module, _, factory = target.rpartition(":")
    return module, factory


def _unknown(error: type[MixedNutsError], key: str, uri: str, forms: "list[str] | tuple[str, ...]") -> MixedNutsError:
    return error(f"{key}={uri!r} is not a known form; valid forms: {', '.join(forms)}")
