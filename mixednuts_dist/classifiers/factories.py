"""Classifiers that a function makes: your function (`py:`, `callable:`), or the package's for digits (`demo:`).

`demo:std` is accurate and not robust. `demo:rob` is robust. `demo:rob_light` is smaller and was trained at a smaller
radius, for studies that compare robust classifiers. `demo:noisy` was trained with normal noise of standard deviation
0.25, for certificates by smoothing. `tools/demo_training.py` made the weights in `weights/`.
"""

import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import quote

import safetensors.torch
import yaml
from torch import Tensor, nn

from ..config.register import CLASSIFIERS, import_file
from ..config.uris import ClassifierSource
from ..errors import BaseClassifierError

DEMO_EPS = 0.15  # Linf radius of the demo, in units of the pixel range
DEMO_WIDTHS = {"std": (16, 32), "rob": (16, 32), "rob_light": (12, 24), "noisy": (16, 32)}

_PIXEL_MEAN = 0.307  # mean and standard deviation are those of the training half
_PIXEL_STD = 0.377
_N_CLASSES = 10


@CLASSIFIERS("py", describes="your function, which returns a torch module", order=6,
             forms=("py:package.module:factory", "py:path/to/file.py:factory"),
             target="factory", any_option=True)  # fmt: skip
def load_factory(uri: ClassifierSource) -> Any:
    """Call the function with the URI's options as keyword arguments."""
    return find_function(uri.target)(**keyword_arguments(uri))


def keyword_arguments(uri: ClassifierSource) -> dict[str, Any]:
    """Return the options with their values read as YAML: `?bias=2.5&names=[a,b]`."""
    return {key: yaml.safe_load(value) for key, value in uri.options}


def find_function(target: str) -> Callable[..., Any]:
    """Import the function "package.module:name" or "path/to/file.py:name".

    Raises:
        BaseClassifierError: if the module cannot be imported, or has no such function (the message lists what it has).
    """
    module_name, _, name = target.rpartition(":")
    module = _module(module_name)
    function = getattr(module, name, None)
    if not callable(function):
        found = [key for key, value in vars(module).items() if inspect.isfunction(value) and key[0] != "_"]
        raise BaseClassifierError(f"{module_name} has no factory {name!r}; it has: {', '.join(found)}")
    return function  # type: ignore[no-any-return]


def without_weights_argument(source: ClassifierSource) -> str | None:
    """Return the URI with `weights=null`, which builds the bare network, or None if the function takes no `weights`."""
    if not source.is_factory or "weights" not in inspect.signature(find_function(source.target)).parameters:
        return None
    kept = [f"{key}={quote(value)}" for key, value in source.options if key != "weights"]
    return f"{source.scheme}:{source.target}?{'&'.join([*kept, 'weights=null'])}"


def source_of(function: Callable[..., Any]) -> bytes:
    """Return the content of the source file of a function, or nothing if it has none."""
    try:
        file = inspect.getsourcefile(function)
    except TypeError:
        file = None
    return Path(file).read_bytes() if file else b""


def _module(name: str) -> ModuleType:
    """Import a module, or a Python file once under a unique name."""
    path = Path(name)
    try:
        if path.suffix != ".py":
            return importlib.import_module(name)
        unique = f"mixednuts_factory_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
        return sys.modules.get(unique) or import_file(unique, path)
    except ImportError as error:
        advice = (
            f", which is neither installed nor in {path.absolute().parent}. Set PYTHONPATH to the folder that holds it"
        )
        found = isinstance(error, ModuleNotFoundError)
        raise BaseClassifierError(f"cannot import {name!r}: {error}{advice if found else ''}") from error


class DigitsNet(nn.Module):
    """A classifier of images (B, 1, 8, 8) in [0, 1], with normalization inside and without batch normalization."""

    def __init__(self, widths: tuple[int, int]) -> None:
        super().__init__()
        first, second = widths  # channels
        self.layers = nn.Sequential(
            nn.Conv2d(1, first, kernel_size=3, padding=1),
            nn.SiLU(),
            nn.Conv2d(first, second, kernel_size=3, stride=2, padding=1),  # 8 x 8 -> 4 x 4
            nn.SiLU(),
            nn.Conv2d(second, second, kernel_size=3),  # 4 x 4 -> 2 x 2
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(4 * second, _N_CLASSES),
        )

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Return logits of shape (B, 10)."""
        logits_BK: Tensor = self.layers((images_BCHW - _PIXEL_MEAN) / _PIXEL_STD)
        return logits_BK


@CLASSIFIERS("demo", describes="the packaged classifiers of the digits", order=1,
             forms=("demo:std", "demo:rob", "demo:rob_light", "demo:noisy"),
             target="std|rob|rob_light|noisy")  # fmt: skip
def load_demo(uri: ClassifierSource) -> DigitsNet:
    """Return the embedded classifier of that name, frozen, in eval mode, and on the CPU."""
    classifier = DigitsNet(DEMO_WIDTHS[uri.target])
    weights = Path(__file__).with_name("weights") / f"demo_{uri.target}.safetensors"
    classifier.load_state_dict(safetensors.torch.load_file(weights))
    return classifier.eval().requires_grad_(False)


def demo_std() -> DigitsNet:
    """Return `demo:std`."""
    return load_demo(ClassifierSource("demo:std"))  # type: ignore[no-any-return]


def demo_rob() -> DigitsNet:
    """Return `demo:rob`."""
    return load_demo(ClassifierSource("demo:rob"))  # type: ignore[no-any-return]
