"""`torchvision:`, `timm:` and `hf:` URIs: a library's classifier with the normalization of its weights inside."""

import contextlib
import difflib
import os
import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.register import CLASSIFIERS
from ..config.uris import ClassifierSource, Missing
from ..errors import BaseClassifierError
from .checkpoints import import_quietly, load_weights, quietly, tensors_only

if TYPE_CHECKING:
    from torch import nn

    from .base_classifiers import Normalized

_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_LINES = re.MULTILINE | re.DOTALL
_HUB_FILES = ("model.safetensors", "pytorch_model.bin")  # in the order in which timm asks for them


def missing_hub_files(repository: str, *needed: Sequence[str]) -> Iterator[Missing]:
    """Yield the first file of each list of `needed` of which the local cache of the Hugging Face hub has no file."""
    hub = import_quietly("huggingface_hub")
    for names in needed:
        if not any(isinstance(hub.try_to_load_from_cache(repository, name), str) for name in names):
            folder = Path(hub.constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
            yield Missing(
                f"{names[0]} of the hub's {repository}", str(folder), f"huggingface-cli download {repository}",
                url=f"hf://{repository}/{names[0]}",
            )  # fmt: skip


def missing_from_timm(uri: ClassifierSource) -> Iterator[Missing]:
    """List the missing files of `timm:` URIs."""
    if uri.option("weights") or uri.option("checkpoint"):
        return
    timm = import_quietly("timm")  # the one library that must be imported to say where its weights are
    config = timm.models.get_pretrained_cfg(uri.target) if timm.is_model(uri.target.partition(".")[0]) else None
    if config is None or not (config.hf_hub_id or config.url):
        raise _no_model("timm", uri.target, timm.list_pretrained())
    if config.hf_hub_id:
        yield from missing_hub_files(config.hf_hub_id, _HUB_FILES)
    else:
        yield from missing_checkpoint(config.url, f"timm:{uri.target}")


def missing_from_hub(uri: ClassifierSource) -> Iterator[Missing]:
    """List the missing files of `hf:` URIs."""
    return missing_hub_files(uri.target, ("config.json",), _HUB_FILES)


def missing_from_torchvision(uri: ClassifierSource) -> Iterator[Missing]:
    """List the missing files of `torchvision:` URIs."""
    if uri.option("weights") != "none" and not uri.option("checkpoint"):
        url = torchvision_url(uri.target, uri.option("weights") or "DEFAULT")
        yield from missing_checkpoint(url, f"torchvision:{uri.target}") if url else ()


def missing_checkpoint(url: str, what: str, folder: Path | None = None) -> Iterator[Missing]:
    """Yield the file of `url` if it is not in `folder`, by default PyTorch's cache. Its name may contain its sha256."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "torch"
    name = url.rpartition("/")[2]
    path = (folder or Path(os.environ.get("TORCH_HOME", cache)).expanduser() / "hub" / "checkpoints") / name
    digits = Path(name).stem.rpartition("-")[2]
    if not path.is_file():
        known = len(digits) == 8 and set(digits) <= set("0123456789abcdef")
        command = f"curl -L --create-dirs -o {path} {url}"
        yield Missing(f"the weights of {what}", str(path), command, url, digits if known else "")


def torchvision_url(name: str, weights: str) -> str | None:
    """Return the address of a model's weights, read from torchvision's source, because its import takes seconds.

    `def resnet18(*, weights: Optional[ResNet18_Weights] = None, ...)` names the class of the weights, and
    `class ResNet18_Weights: IMAGENET1K_V1 = Weights(url="https://...")` has their address; `DEFAULT = IMAGENET1K_V1`.
    """
    package = find_spec("torchvision")
    folders = package.submodule_search_locations if package else None
    for path in sorted(Path(folders[0], "models").glob("*.py")) if folders else ():
        text = path.read_text(encoding="utf-8")
        if function := re.search(rf"^def {re.escape(name)}\(.*?\[(\w+)\]", text, _LINES):
            kind = re.search(rf"^class {function[1]}\(.*?(?=^\S)", text, _LINES)
            members = kind[0] if kind else ""
            default = re.search(r"^    DEFAULT = (\w+)", members, _LINES)
            wanted = default[1] if default and weights == "DEFAULT" else re.escape(weights)
            url = re.search(rf'^    {wanted} = Weights\(.*?url="(.+?)"', members, _LINES)
            return url[1] if url else None
    return None


@CLASSIFIERS("timm", describes="a timm model", order=4, forms=("timm:NAME[?checkpoint=FILE]",), target="text",
             options={"weights": ("text", "none: random ones"), "checkpoint": ("file", "of weights"),
                      "num_classes": ("number", "of the last layer"), "seed": ("number", "of weights=none")},
             random_weights=True, missing="missing_from_timm")  # fmt: skip
def load_timm(uri: ClassifierSource) -> "Normalized":
    """Build a timm model with its pretrained weights, `checkpoint=FILE`, or `weights=none`.

    Raises:
        BaseClassifierError: for an unknown name (close ones are listed), or weights that are not available.
    """
    timm = import_quietly("timm")
    architecture = uri.target.partition(".")[0]
    if not timm.is_model(architecture):
        raise _no_model("timm", uri.target, timm.list_models())
    if uri.option("weights") not in (None, "none"):
        raise BaseClassifierError(
            f"weights={uri.option('weights')!r}: timm names weights in the model's name, "
            f"timm:{architecture}.TAG; the option takes none only. A file is checkpoint=FILE"
        )
    pretrained = not (uri.option("weights") or uri.option("checkpoint"))
    with downloads(uri):
        net = timm.create_model(uri.target, pretrained=pretrained, **_n_classes(uri))
    return _with_checkpoint(_normalized(net), uri)


@CLASSIFIERS("hf", describes="a model of the Hugging Face hub that timm can build", order=5, forms=("hf:ORG/NAME",),
             target="repository", options={"num_classes": ("number", "of the last layer")},
             missing="missing_from_hub")  # fmt: skip
def load_hub(uri: ClassifierSource) -> "Normalized":
    """Build a timm model of the Hugging Face hub, from the local cache or the network.

    Raises:
        BaseClassifierError: if the hub has no such timm model, or cannot be reached.
    """
    timm = import_quietly("timm")
    with downloads(uri):
        net = timm.create_model(f"hf-hub:{uri.target}", pretrained=True, **_n_classes(uri))
    return _normalized(net)


@CLASSIFIERS("torchvision", describes="a torchvision classifier", order=3, forms=("torchvision:NAME?weights=...",),
             target="text",
             options={"weights": ("text", "their name, DEFAULT, or none"), "checkpoint": ("file", "of weights"),
                      "num_classes": ("number", "of the last layer"), "seed": ("number", "of weights=none")},
             random_weights=True, missing="missing_from_torchvision")  # fmt: skip
def load_torchvision(uri: ClassifierSource) -> "Normalized":
    """Build a torchvision classifier with `weights=NAME` (by default DEFAULT), `checkpoint=FILE`, or `weights=none`.

    Raises:
        BaseClassifierError: for an unknown model or weights name (the valid ones are listed), or a failed download.
    """
    from .base_classifiers import Normalized

    models = import_quietly("torchvision.models")
    names = models.list_models(module=models)
    if uri.target not in names:
        raise _no_model("torchvision", uri.target, names)
    choices = models.get_model_weights(uri.target)
    name = "none" if uri.option("checkpoint") else (uri.option("weights") or "DEFAULT")
    if name != "none" and name not in choices.__members__:
        raise BaseClassifierError(
            f"torchvision:{uri.target} has no weights {name!r}; valid: {', '.join(choices.__members__)}, none"
        )
    weights = None if name == "none" else choices[name]
    with downloads(uri):
        net = models.get_model(uri.target, weights=weights, **_n_classes(uri))
    recipe = weights.transforms() if weights is not None else None
    mean, std = getattr(recipe, "mean", _IMAGENET_MEAN), getattr(recipe, "std", _IMAGENET_STD)
    return _with_checkpoint(Normalized(net, mean, std), uri)


def _normalized(net: "nn.Module") -> "Normalized":
    """Add the normalization that timm records for the weights."""
    from .base_classifiers import Normalized

    config: Any = net.pretrained_cfg
    return Normalized(net, config["mean"], config["std"])


def _with_checkpoint(model: "Normalized", uri: ClassifierSource) -> "Normalized":
    path = uri.option("checkpoint")
    if path is not None:
        load_weights(model.net, Path(path))
    return model


def _n_classes(uri: ClassifierSource) -> dict[str, int]:
    wanted = uri.option("num_classes")
    return {} if wanted is None else {"num_classes": int(wanted)}


@contextlib.contextmanager
def downloads(uri: ClassifierSource) -> Iterator[None]:
    """Let a library download only tensors in the block. The error explains how to work without a network."""
    try:
        with quietly(), tensors_only():
            yield
    except (OSError, RuntimeError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        local = f", or give a local file, {uri.scheme}:{uri.target}?checkpoint=FILE"
        other = local if "checkpoint" in uri.fact("options", {}) else ""
        raise BaseClassifierError(
            f"the weights are not in the local cache and cannot be downloaded ({reason}). "
            f"Load them once on a machine with a network and copy its cache (HF_HOME, TORCH_HOME){other}"
        ) from error


def _no_model(library: str, name: str, names: Sequence[str]) -> BaseClassifierError:
    close = difflib.get_close_matches(name, names, n=5, cutoff=0.4)
    hint = f"close ones: {', '.join(close)}" if close else f"for instance {', '.join(list(names)[:5])}"
    return BaseClassifierError(f"{library} has no model {name!r}; {hint}")
