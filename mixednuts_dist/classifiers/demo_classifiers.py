"""Embedded classifiers of the digits: `demo:std`, accurate and fragile, `demo:rob` and `demo:rob_light`, robust.

Each is three small convolutions and a linear layer, without batch normalisation: a CPU core takes tens of thousands
of forward and backward passes a second through them. `demo_training` made the weights in `weights/`.
"""

from importlib import resources

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ..errors import BaseClassifierError
from ..register import CLASSIFIERS
from ..uris import ResourceUri

DEMO_EPS = 0.15
"""Linf radius, in units of the pixel range, at which the pair's robust figures are stated and the demo attacks it."""

STD_WIDTHS = (16, 32)
ROB_WIDTHS = (16, 32)
ROB_LIGHT_WIDTHS = (12, 24)

_PIXEL_MEAN = 0.307  # of the training half
_PIXEL_STD = 0.377
_N_CLASSES = 10


class DigitsNet(nn.Module):
    """Images (B, 1, 8, 8) in [0, 1] to logits (B, 10); the normalisation is inside.

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
             forms=("demo:std", "demo:rob", "demo:rob_light"), target="std|rob|rob_light")  # fmt: skip
def load_demo(uri: ResourceUri) -> DigitsNet:
    """The embedded classifier of that name."""
    return {"std": demo_std, "rob": demo_rob, "rob_light": demo_rob_light}[uri.target]()


def demo_std() -> DigitsNet:
    """The standard classifier (`demo:std`), frozen, in evaluation mode, on the CPU."""
    return _load_packaged("demo_std.safetensors", STD_WIDTHS)


def demo_rob() -> DigitsNet:
    """The robust classifier (`demo:rob`), frozen, in evaluation mode, on the CPU."""
    return _load_packaged("demo_rob.safetensors", ROB_WIDTHS)


def demo_rob_light() -> DigitsNet:
    """A second robust classifier, smaller and trained at a smaller radius, for studies that compare robust ones."""
    return _load_packaged("demo_rob_light.safetensors", ROB_LIGHT_WIDTHS)


def _load_packaged(file_name: str, widths: tuple[int, int]) -> DigitsNet:
    classifier = DigitsNet(widths)
    try:
        blob = resources.files(__package__).joinpath("weights", file_name).read_bytes()
        classifier.load_state_dict(safetensors.torch.load(blob))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise BaseClassifierError(
            f"the packaged weights {file_name} cannot be loaded into widths={widths}: {error}. "
            "Reinstall the package, or make them again: python -m mixednuts_dist.tools.demo_training"
        ) from error
    return classifier.eval().requires_grad_(False)
