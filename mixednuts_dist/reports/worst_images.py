"""Choose the images that a person should look at, broken by mixing or robust by a small margin, and draw them.

Shapes: B images of a batch, K classes, C in {1, 3} channels, H x W pixels with values in [0, 1].
"""

import io
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from PIL import Image
from pydantic import Field
from torch import Tensor

from ..mixing.margins import log_one_minus_signed_margin
from ..storage.records import AttackRecords, EvaluateRecords
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
    pixels: Annotated[tuple[Any, ...], Field(exclude=True)] = ()  # the clean and the attacked image, C x H x W


def margin_text(margin: float) -> str:
    """Write a margin, as in `−0.058`, or `+3e−05` if three decimals would hide its sign."""
    return minus(f"{margin:+.3f}" if abs(margin) >= 0.0005 else f"{margin:+.0e}")


class WorstTally:
    """A selection of a few images, updated batch by batch."""

    def __init__(self) -> None:
        self._found: dict[Reason, list[tuple[tuple[bool, float], WorstImage]]] = {"lost": [], "narrow": []}

    def add(self, attack: AttackRecords, evaluate: EvaluateRecords) -> None:
        """Add a batch; both arguments describe the same images in the same order.

        "lost": both base classifiers are correct on the clean image and the mixed classifier is broken; images on
        which `rob` remains robust come first, then the smallest margins. "narrow": the smallest positive margins.
        """
        labels_B = attack.labels_N
        right_B = (attack.std_clean_NK.argmax(dim=1) == labels_B) & (attack.rob_clean_NK.argmax(dim=1) == labels_B)
        margins_B = _margins(evaluate.mixed_attacked_NK, labels_B)
        masks: dict[Reason, Tensor] = {"lost": right_B & ~evaluate.robust_N, "narrow": evaluate.robust_N}
        for reason, mask_B in masks.items():
            rows = mask_B.nonzero().squeeze(1).tolist()
            keys = {row: (reason == "lost" and bool(attack.rob_broken_N[row]), float(margins_B[row])) for row in rows}
            best = sorted(rows, key=keys.__getitem__)[:N_EACH]
            self._found[reason] += [(keys[row], _image(attack, evaluate, row, reason)) for row in best]
            self._found[reason] = sorted(self._found[reason], key=lambda found: found[0])[:N_EACH]

    def chosen(self) -> tuple[WorstImage, ...]:
        """Return the images with the reason "lost", then those with the reason "narrow"."""
        return tuple(image for found in self._found.values() for _, image in found)


def _image(attack: AttackRecords, evaluate: EvaluateRecords, row: int, reason: Reason) -> WorstImage:
    label_1 = attack.labels_N[row : row + 1]

    def prediction(classifier: str, images: str, logits_NK: Tensor) -> Prediction:
        logits_1K = logits_NK[row : row + 1]
        return Prediction(classifier, images, int(logits_1K.argmax()), float(_margins(logits_1K, label_1)))

    predictions = (
        prediction("std", "clean", attack.std_clean_NK),
        prediction("rob", "clean", attack.rob_clean_NK),
        prediction("mixed", "clean", evaluate.mixed_clean_NK),
        prediction("mixed", "attacked", evaluate.mixed_attacked_NK),
    )
    survives = not bool(attack.rob_broken_N[row])
    return WorstImage(int(attack.sample_ids_N[row]), int(label_1), reason, survives, predictions)


def _margins(logits_BK: Tensor, labels_B: Tensor) -> Tensor:
    return -torch.expm1(log_one_minus_signed_margin(logits_BK, labels_B))


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
