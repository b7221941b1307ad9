"""Images as PNG: the clean one, the attacked one, and their difference made visible.

Shapes: C in {1, 3} channels, H x W pixels, values in [0, 1].
"""

import io
from collections.abc import Sequence

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

LARGEST_SIDE = 112  # a larger picture is made smaller: the page stays one file of a few megabytes


def png(image_CHW: Tensor) -> bytes:
    """The image as PNG; larger ones are reduced to `LARGEST_SIDE` pixels, smaller ones keep theirs."""
    return _encoded(image_CHW, Image.Resampling.BOX)


def perturbation_png(clean_CHW: Tensor, attacked_CHW: Tensor) -> tuple[bytes, float]:
    """The perturbation around mid-grey as PNG, and the factor that brings its largest change to black or white.

    A larger one is thinned out, not averaged: neighbouring changes would cancel.
    """
    change_CHW = attacked_CHW - clean_CHW
    largest = float(change_CHW.abs().max())
    factor = 0.5 / largest if largest > 0 else 1.0
    return _encoded(0.5 + factor * change_CHW, Image.Resampling.NEAREST), factor


def contact_sheet(rows: Sequence[tuple[Tensor, Tensor, str]]) -> bytes:
    """Clean image, perturbation and attacked image side by side, a caption above, one row each, as one PNG."""
    side, gap, text = LARGEST_SIDE, 8, 20
    sheet = Image.new("RGB", (3 * side + 4 * gap, len(rows) * (side + text + gap) + gap), "white")
    pen = ImageDraw.Draw(sheet)
    for i, (clean_CHW, attacked_CHW, caption) in enumerate(rows):
        top = gap + i * (side + text + gap)
        perturbation, factor = perturbation_png(clean_CHW, attacked_CHW)
        pen.text((gap, top), f"{caption}; change x {factor:.3g}", fill="black", font=ImageFont.load_default(12))
        for j, content in enumerate((png(clean_CHW), perturbation, png(attacked_CHW))):
            picture = Image.open(io.BytesIO(content))
            scale = side / max(picture.size)
            size = (round(picture.width * scale), round(picture.height * scale))
            sheet.paste(picture.resize(size, Image.Resampling.NEAREST), (gap + j * (side + gap), top + text))
    return _png(sheet)


def _encoded(image_CHW: Tensor, resampling: Image.Resampling) -> bytes:
    pixels_HWC = image_CHW.detach().cpu().clamp(0, 1).mul(255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    picture = Image.fromarray(pixels_HWC[:, :, 0] if pixels_HWC.shape[2] == 1 else pixels_HWC)
    if max(picture.size) > LARGEST_SIDE:
        scale = LARGEST_SIDE / max(picture.size)
        picture = picture.resize((round(picture.width * scale), round(picture.height * scale)), resampling)
    return _png(picture)


def _png(picture: Image.Image) -> bytes:
    sink = io.BytesIO()
    picture.save(sink, format="PNG", optimize=True)
    return sink.getvalue()
