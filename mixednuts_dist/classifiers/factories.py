"""Classifiers that a function makes: your function (`py:`, `callable:`), or the package's for digits (`demo:`).

`demo:std` is accurate and fragile, `demo:rob` and `demo:rob_light` robust, `demo:noisy` right under normal noise, which
is what certificates by smoothing ask for. Each is three small convolutions and a
linear layer, without batch normalization: a CPU core takes tens of thousands of forward and backward passes a second
through them. `demo_training` made the weights in `weights/`.
"""

import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import quote

import safetensors.torch
import yaml
from safetensors import SafetensorError
from torch import Tensor, nn

from ..config.register import CLASSIFIERS, import_file
from ..config.uris import ClassifierSource, split_factory
from ..errors import BaseClassifierError

DEMO_EPS = 0.15
"""Linf radius, in units of the pixel range, at which the pair's robust figures are stated and the demo attacks it."""

STD_WIDTHS = (16, 32)
ROB_WIDTHS = (16, 32)
ROB_LIGHT_WIDTHS = (12, 24)

_PIXEL_MEAN = 0.307  # training half
_PIXEL_STD = 0.377
_N_CLASSES = 10


@CLASSIFIERS("py", describes="your function, which returns a torch module", order=6,
             forms=("py:package.module:factory", "py:path/to/file.py:factory"),
             target="factory", any_option=True)  # fmt: skip
def load_factory(uri: ClassifierSource) -> Any:
    """Call the function with the URI's options as keyword arguments."""
    return find_function(uri.target)(**keyword_arguments(uri))


def keyword_arguments(uri: ClassifierSource) -> dict[str, Any]:
    """The options, their values read as YAML: `?bias=2.5&names=[a,b]`.

    Raises:
        BaseClassifierError: for a value that is not YAML.
    """
    try:
        return {key: yaml.safe_load(value) for key, value in uri.options}
    except yaml.YAMLError as error:
        raise BaseClassifierError(
            f"an option's value is not readable as YAML: {' '.join(str(error).split())}"
        ) from error


def find_function(target: str) -> Callable[..., Any]:
    """The function that "package.module:name" or "path/to/file.py:name" names.

    Raises:
        BaseClassifierError: if the module cannot be imported, or has no such function (those it has are listed).
    """
    module_name, name = split_factory(target)
    module = _module(module_name)
    function = getattr(module, name, None)
    if not callable(function):
        found = [key for key, value in vars(module).items() if inspect.isfunction(value) and key[0] != "_"]
        raise BaseClassifierError(f"{module_name} has no factory {name!r}; it has: {', '.join(found)}")
    return function  # type: ignore[no-any-return]


def without_weights_argument(uri: str) -> str | None:
    """A factory's URI with `weights=null`, where the factory takes `weights`: it then builds the bare architecture."""
    parsed = ClassifierSource.of(uri)
    if parsed.scheme != "py" or "weights" not in inspect.signature(find_function(parsed.target)).parameters:
        return None
    kept = [f"{key}={quote(value)}" for key, value in parsed.options if key != "weights"]
    return f"py:{parsed.target}?{'&'.join([*kept, 'weights=null'])}"


def source_of(function: Callable[..., Any]) -> bytes:
    """Return the source file that defines a function; empty if there is none."""
    try:
        file = inspect.getsourcefile(function)
    except TypeError:
        file = None
    return Path(file).read_bytes() if file else b""


def _module(name: str) -> ModuleType:
    try:
        return _module_from_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)
    except ModuleNotFoundError as error:
        searched = Path(name).absolute().parent if name.endswith(".py") else Path.cwd()
        raise BaseClassifierError(
            f"cannot import {name!r}: {error}, which is neither installed nor in {searched}. "
            "Set PYTHONPATH to the folder that holds it"
        ) from error
    except ImportError as error:
        raise BaseClassifierError(f"cannot import {name!r}: {error}") from error


def _module_from_file(path: Path) -> ModuleType:
    """Import a file once, under a unique name."""
    name = f"mixednuts_factory_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    return sys.modules[name] if name in sys.modules else import_file(name, path)


class DigitsNet(nn.Module):
    """Images (B, 1, 8, 8) in [0, 1] to logits (B, 10); the normalization is inside.

    Args:
        widths: channels of the first convolution, and of the second and third.
    """

    def __init__(self, widths: tuple[int, int]) -> None:
        super().__init__()
        first, second = widths
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
        """Logits of shape (B, 10)."""
        logits_BK: Tensor = self.layers((images_BCHW - _PIXEL_MEAN) / _PIXEL_STD)
        return logits_BK


@CLASSIFIERS("demo", describes="the embedded classifiers of the digits", order=1,
             forms=("demo:std", "demo:rob", "demo:rob_light", "demo:noisy"),
             target="std|rob|rob_light|noisy")  # fmt: skip
def load_demo(uri: ClassifierSource) -> DigitsNet:
    """The embedded classifier of that name."""
    return {"std": demo_std, "rob": demo_rob, "rob_light": demo_rob_light, "noisy": demo_noisy}[uri.target]()


def demo_std() -> DigitsNet:
    """The standard classifier (`demo:std`), frozen, in evaluation mode, on the CPU."""
    return _load_packaged("demo_std.safetensors", STD_WIDTHS)


def demo_rob() -> DigitsNet:
    """The robust classifier (`demo:rob`), frozen, in evaluation mode, on the CPU."""
    return _load_packaged("demo_rob.safetensors", ROB_WIDTHS)


def demo_rob_light() -> DigitsNet:
    """A second robust classifier, smaller and trained at a smaller radius, for studies that compare robust ones."""
    return _load_packaged("demo_rob_light.safetensors", ROB_LIGHT_WIDTHS)


def demo_noisy() -> DigitsNet:
    """A classifier trained with noise of standard deviation 0.25, for certificates by smoothing (`demo:noisy`)."""
    return _load_packaged("demo_noisy.safetensors", ROB_WIDTHS)


def _load_packaged(file_name: str, widths: tuple[int, int]) -> DigitsNet:
    classifier = DigitsNet(widths)
    try:
        blob = resources.files(__package__).joinpath("weights", file_name).read_bytes()
        classifier.load_state_dict(safetensors.torch.load(blob))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise BaseClassifierError(
            f"the packaged weights {file_name} cannot be loaded into widths={widths}: {error}. "
            "Reinstall the package, or make them again with `python -m tools.demo_training` in the repository"
        ) from error
    return classifier.eval().requires_grad_(False)
