"""Corrupted copies of images in the published layouts, made with simple operations; a test needs no download."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageFilter

Pixels = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


def _noise(pixels: Pixels, severity: int) -> Pixels:
    rng = np.random.default_rng(severity)
    return _bytes(pixels + rng.normal(0, 8 * severity, pixels.shape))


def _brightness(pixels: Pixels, severity: int) -> Pixels:
    return _bytes(pixels + 15.0 * severity)


def _contrast(pixels: Pixels, severity: int) -> Pixels:
    mean = pixels.mean(axis=(1, 2), keepdims=True)
    return _bytes((pixels - mean) * (1 - 0.17 * severity) + mean)


def _blur(pixels: Pixels, severity: int) -> Pixels:
    blur = ImageFilter.GaussianBlur(0.3 * severity)
    return np.stack([np.asarray(Image.fromarray(each).filter(blur)) for each in pixels])


def _pixelate(pixels: Pixels, severity: int) -> Pixels:
    side = pixels.shape[1]
    small = max(2, round(side * (1 - 0.13 * severity)))

    def of(each: Pixels) -> Pixels:
        return np.asarray(Image.fromarray(each).resize((small, small), Image.Resampling.BOX).resize((side, side)))

    return np.stack([of(each) for each in pixels])


OPERATIONS: dict[str, Callable[[Pixels, int], Pixels]] = {
    "gaussian_noise": _noise,
    "brightness": _brightness,
    "contrast": _contrast,
    "gaussian_blur": _blur,
    "pixelate": _pixelate,
}


def write_arrays(root: Path, pixels: Pixels, labels: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Path:
    """As CIFAR-10-C: a file a corruption with all images at severity 1, then 2, ...; pixels (N, H, W[, C])."""
    root.mkdir(parents=True)
    for name, operation in OPERATIONS.items():
        np.save(root / f"{name}.npy", np.concatenate([operation(pixels, severity) for severity in range(1, 6)]))
    np.save(root / "labels.npy", np.tile(labels, 5))
    return root


def _bytes(values: Any) -> Pixels:
    pixels: Pixels = np.asarray(values).round().clip(0, 255).astype(np.uint8)
    return pixels
