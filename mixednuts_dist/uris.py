"""What a dataset or base classifier URI says, checked in milliseconds: no torch, weights or images are loaded.

The two tuples of forms below are the only list of them; every error about an unknown form prints it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit

from .errors import BaseClassifierError, DatasetError, MixedNutsError

DATASET_FORMS = (
    "digits",
    "cifar10[:ROOT]",
    "cifar100[:ROOT]",
    "imagenet:ROOT[?preprocess=BicubicRes256Crop224]",
    "folder:ROOT[?preprocess=Res256Crop224]",
    "npz:FILE",
    "parquet:URI",
)
CLASSIFIER_FORMS = (
    "demo:std",
    "demo:rob",
    "robustbench:MODEL?dataset=cifar10&threat=Linf",
    "torchvision:NAME?weights=...",
    "timm:NAME[?checkpoint=FILE]",
    "hf:ORG/NAME",
    "py:package.module:factory",
    "py:path/to/file.py:factory",
)
BLACK_BOX_FORMS = ("callable:package.module:function[#classes=K]", "http://HOST/PATH[#classes=K]", "https://...")

DEMO_NAMES = ("std", "rob")
ROBUSTBENCH_DATASETS = ("cifar10", "cifar100", "imagenet")
ROBUSTBENCH_THREATS = ("Linf", "L2", "corruptions")
IMAGENET_PREPROCESS = "Res256Crop224"
PREPROCESS = re.compile(r"(?P<cubic>Bicubic)?(?:Res(?P<resize>[1-9]\d*))?(?:Crop(?P<crop>[1-9]\d*))?")

_DATASET_OPTIONS: Mapping[str, Sequence[str]] = {"imagenet": ("preprocess",), "folder": ("preprocess",)}
_CLASSIFIER_OPTIONS: Mapping[str, Sequence[str]] = {
    "demo": (),
    "robustbench": ("dataset", "threat", "part", "model_dir", "weights", "seed"),
    "torchvision": ("weights", "checkpoint", "num_classes", "seed"),
    "timm": ("weights", "checkpoint", "num_classes", "seed"),
    "hf": ("num_classes",),
}
_CHOICES = {"dataset": ROBUSTBENCH_DATASETS, "threat": ROBUSTBENCH_THREATS, "part": ("std",)}
_BLACK_BOX_SCHEMES = ("callable", "http", "https")
_FACTORY_SCHEMES = ("py", "callable")
_FOLDERS = ("imagenet", "folder")


@dataclass(frozen=True)
class ResourceUri:
    """`scheme:target?key=value&...#fragment`; `options` keeps the order in which they were written."""

    scheme: str
    target: str
    options: tuple[tuple[str, str], ...] = ()
    fragment: str = ""

    def option(self, key: str, default: str | None = None) -> str | None:
        """The value written for `key`."""
        return dict(self.options).get(key, default)


def parse_uri(uri: str) -> ResourceUri:
    """Split a URI; a missing target is empty. Only black boxes have a fragment: a path may hold a `#`."""
    scheme, fragment = uri.partition(":")[0], ""
    if scheme in _BLACK_BOX_SCHEMES:
        uri, _, fragment = uri.partition("#")
    address, _, query = uri.partition("?")
    scheme, _, target = address.partition(":")
    return ResourceUri(scheme, target, tuple(parse_qsl(query, keep_blank_values=True)), fragment)


def is_black_box(uri: str) -> bool:
    """Whether the classifier answers without gradients: a service or a plain function."""
    return parse_uri(uri).scheme in _BLACK_BOX_SCHEMES


def without_weights(uri: str) -> str | None:
    """The same classifier of a library with random weights; None for the forms that cannot be had without theirs."""
    parsed = parse_uri(uri)
    if parsed.scheme not in ("robustbench", "torchvision", "timm"):
        return None
    kept = [(key, value) for key, value in parsed.options if key not in ("weights", "checkpoint")]
    return f"{parsed.scheme}:{parsed.target}?{urlencode([*kept, ('weights', 'none')])}"


def known_image_shape(uri: str) -> tuple[int, int, int] | None:
    """(C, H, W) where the URI alone decides it, whether or not the images are at hand."""
    parsed = parse_uri(uri)
    if parsed.scheme == "digits":
        return 1, 8, 8
    if parsed.scheme in ("cifar10", "cifar100"):
        return 3, 32, 32
    default = IMAGENET_PREPROCESS if parsed.scheme == "imagenet" else ""
    match = PREPROCESS.fullmatch(parsed.option("preprocess") or default)
    side = match and (match["crop"] or match["resize"])
    return (3, int(side), int(side)) if side else None


def check_uris(*, data: str, std: str | None, rob: str) -> None:
    """Refuse a run whose forms or files cannot be right; errors as in the two checks below."""
    check_dataset_uri(data)
    if std is not None:
        check_classifier_uri(std, "std")
    check_classifier_uri(rob, "rob")


def check_dataset_uri(uri: str) -> None:
    """Refuse a dataset that cannot exist.

    Raises:
        DatasetError: for an unknown form (the valid ones are listed) or option, a missing file or folder.
    """
    parsed = parse_uri(uri)
    if parsed.scheme not in _schemes(DATASET_FORMS):
        raise _unknown(DatasetError, "data.uri", uri, DATASET_FORMS)
    if not parsed.target and parsed.scheme in (*_FOLDERS, "npz", "parquet"):
        raise _unknown(DatasetError, "data.uri", uri, _forms_of(parsed.scheme, DATASET_FORMS))
    _check_options(DatasetError, "data.uri", uri, parsed, _DATASET_OPTIONS.get(parsed.scheme, ()))
    if parsed.scheme == "npz" and not Path(parsed.target).is_file():
        raise DatasetError(f"data.uri={uri!r}: there is no file {Path(parsed.target).absolute()}")
    if parsed.scheme in _FOLDERS and not Path(parsed.target).is_dir():
        raise DatasetError(f"data.uri={uri!r}: there is no folder {Path(parsed.target).absolute()}")
    _check_preprocess(uri, parsed.option("preprocess"))


def check_classifier_uri(uri: str, role: str) -> None:
    """Refuse a base classifier (`role` "std" or "rob") that cannot exist.

    Raises:
        BaseClassifierError: for an unknown form (the valid ones are listed) or option, a missing file or name, or a
            black box as rob, whose gradients the attacks need.
    """
    parsed = parse_uri(uri)
    valid = CLASSIFIER_FORMS if role == "rob" else CLASSIFIER_FORMS + BLACK_BOX_FORMS
    if parsed.scheme not in _schemes(CLASSIFIER_FORMS + BLACK_BOX_FORMS):
        raise _unknown(BaseClassifierError, role, uri, valid)
    if role == "rob" and is_black_box(uri):
        raise BaseClassifierError(
            f"rob={uri!r} is a black box, but the minimum-margin attack needs rob's gradients; only std may be one. "
            f"Valid forms of rob: {', '.join(CLASSIFIER_FORMS)}"
        )
    allowed = _CLASSIFIER_OPTIONS.get(parsed.scheme)
    if allowed is not None:
        _check_options(BaseClassifierError, role, uri, parsed, allowed)
    _check_target(uri, role, parsed)
    checkpoint = parsed.option("checkpoint") if parsed.scheme in ("timm", "torchvision") else None
    if checkpoint is not None and not Path(checkpoint).is_file():
        raise BaseClassifierError(f"{role}={uri!r}: there is no checkpoint {Path(checkpoint).absolute()}")


def split_factory(target: str) -> tuple[str, str]:
    """ "package.module:factory" -> its two halves."""
    module, _, factory = target.rpartition(":")
    return module, factory


def _check_target(uri: str, role: str, parsed: ResourceUri) -> None:
    """What follows the scheme: a demo's name, a factory, a host, a model's name."""
    scheme, target = parsed.scheme, parsed.target
    forms = _forms_of(scheme, CLASSIFIER_FORMS + BLACK_BOX_FORMS)
    if scheme == "demo" and target not in DEMO_NAMES:
        raise _unknown(BaseClassifierError, role, uri, forms)
    if scheme in _FACTORY_SCHEMES:
        module, factory = split_factory(target)
        if not module or not factory:
            raise _unknown(BaseClassifierError, role, uri, forms)
        if module.endswith(".py") and not Path(module).is_file():
            raise BaseClassifierError(f"{role}={uri!r}: there is no file {Path(module).absolute()}")
    if scheme in ("http", "https"):
        address = urlsplit(uri)
        if not address.hostname:
            raise _unknown(BaseClassifierError, role, uri, forms)
        if address.username or address.password:
            raise BaseClassifierError(
                f"{role}: the URL of {address.hostname} holds a user name or password, which would be written into "
                "run.yaml; leave it out and put it into ~/.netrc"
            )
    if not target or (scheme == "hf" and "/" not in target):
        raise _unknown(BaseClassifierError, role, uri, forms)


def _check_options(
    error: type[MixedNutsError], key: str, uri: str, parsed: ResourceUri, allowed: Sequence[str]
) -> None:
    for name, value in parsed.options:
        if name not in allowed:
            valid = f"valid options: {', '.join(allowed)}" if allowed else "this form takes none"
            raise error(f"{key}={uri!r}: unknown option {name!r}; {valid}")
        if name in _CHOICES and value not in _CHOICES[name]:
            raise error(f"{key}={uri!r}: {name}={value!r} is not one of {', '.join(_CHOICES[name])}")
        if name in ("seed", "num_classes") and not value.isdecimal():
            raise error(f"{key}={uri!r}: {name}={value!r} is not a whole number")


def _check_preprocess(uri: str, name: str | None) -> None:
    if name is None:
        return
    match = PREPROCESS.fullmatch(name)
    if not match or not (match["resize"] or match["crop"]) or (match["cubic"] and not match["resize"]):
        raise DatasetError(
            f"data.uri={uri!r}: preprocess={name!r} is not known; valid: Res256Crop224 (shorter side to 256, centre "
            "224 x 224), Res224 (224 x 224), Crop288 (centre), with any sizes, and Bicubic before Res"
        )


def _schemes(forms: Sequence[str]) -> set[str]:
    return {re.split(r"[:\[]", form)[0] for form in forms}


def _forms_of(scheme: str, forms: Sequence[str]) -> list[str]:
    return [form for form in forms if re.split(r"[:\[]", form)[0] == scheme]


def _unknown(error: type[MixedNutsError], key: str, uri: str, forms: Sequence[str]) -> MixedNutsError:
    return error(f"{key}={uri!r} is not a known form; valid forms: {', '.join(forms)}")
