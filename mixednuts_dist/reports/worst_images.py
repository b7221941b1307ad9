"""Choose the images that a person should look at, broken by mixing or robust by a small margin, and draw them.

Shapes: N images of the run, C in {1, 3} channels, H x W pixels with values in [0, 1].
"""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor

from .counts import minus

Reason = Literal["lost", "narrow"]
N_EACH = 4
LARGEST_SIDE = 112  # in pixels; a larger picture is made smaller


@dataclass(frozen=True)
class Prediction:
    """The class that a classifier predicts for an image, and the signed margin of the true class."""

    classifier: str
    images: str
    predicted: int
    margin: float


@dataclass(frozen=True)
class WorstImage:
    """One image before and after the adaptive attack on the mixed classifier; `pixels` are read once it is chosen."""

    sample_id: int
    label: int
    reason: Reason
    rob_survives: bool  # whether `rob` remains robust under its own MMAA
    predictions: tuple[Prediction, ...]  # `std`, `rob`, `mixed` on the clean image; `mixed` on the attacked one
    pixels: tuple[Any, ...] = ()  # the clean and the attacked image, C x H x W

    def to_json(self) -> dict[str, Any]:
        """Return the fields without the pixels."""
        return {name: value for name, value in vars(self).items() if name != "pixels"}


def margin_text(margin: float) -> str:
    """Write a margin, as in `−0.058`, or `+3e−05` if three decimals would hide its sign."""
    return minus(f"{margin:+.3f}" if abs(margin) >= 0.0005 else f"{margin:+.0e}")


def worst_images(rows: Mapping[str, Tensor]) -> tuple[WorstImage, ...]:
    """Choose a few images with the reason "lost", then some with the reason "narrow"; `rows` as in `image_rows`.

    "lost": both base classifiers are correct on the clean image and the mixed classifier is broken; images on which
    `rob` remains robust come first, then the smallest margins. "narrow": the smallest positive margins.
    """
    labels_N, robust_N, margins_N = rows["label"], rows["robust"], rows["margin: mixed, attacked"]
    right_N = (rows["std, clean"] == labels_N) & (rows["rob, clean"] == labels_N)
    order_N = margins_N.argsort(stable=True)
    lost_N = order_N[rows["rob broken"][order_N].int().argsort(stable=True)]
    chosen: dict[Reason, Tensor] = {"lost": lost_N[(right_N & ~robust_N)[lost_N]], "narrow": order_N[robust_N[order_N]]}
    return tuple(_image(rows, i, reason) for reason, order in chosen.items() for i in order[:N_EACH].tolist())


def _image(rows: Mapping[str, Tensor], i: int, reason: Reason) -> WorstImage:
    kinds = ("std", "clean"), ("rob", "clean"), ("mixed", "clean"), ("mixed", "attacked")
    predictions = tuple(
        Prediction(name, images, int(rows[f"{name}, {images}"][i]), float(rows[f"margin: {name}, {images}"][i]))
        for name, images in kinds
    )
    return WorstImage(
        int(rows["sample_id"][i]), int(rows["label"][i]), reason, not bool(rows["rob broken"][i]), predictions
    )


# --- pictures --------------------------------------------------------------------------------------------------------


def png(image_CHW: Tensor) -> bytes:
    """Encode an image as PNG, reduced to `LARGEST_SIDE` pixels if it is larger."""
    return _encoded(image_CHW, Image.Resampling.BOX)


def perturbation_png(clean_CHW: Tensor, attacked_CHW: Tensor) -> tuple[bytes, float]:
    """Return the perturbation around mid-gray as PNG, and the factor that makes its largest change black or white.

    A larger image is subsampled, because averaging would cancel neighboring changes.
    """
    change_CHW = attacked_CHW - clean_CHW
    largest = float(change_CHW.abs().max())
    factor = 0.5 / largest if largest > 0 else 1.0
    return _encoded(0.5 + factor * change_CHW, Image.Resampling.NEAREST), factor


def _encoded(image_CHW: Tensor, resampling: Image.Resampling) -> bytes:
    pixels_HWC = image_CHW.detach().cpu().clamp(0, 1).mul(255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    picture = Image.fromarray(pixels_HWC[:, :, 0] if pixels_HWC.shape[2] == 1 else pixels_HWC)
    if max(picture.size) > LARGEST_SIDE:
        scale = LARGEST_SIDE / max(picture.size)
        picture = picture.resize((round(picture.width * scale), round(picture.height * scale)), resampling)
    sink = io.BytesIO()
    picture.save(sink, format="PNG", optimize=True)
    return sink.getvalue()
