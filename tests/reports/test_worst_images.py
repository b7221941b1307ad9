"""Which images stand out, and their pictures."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from mixednuts_dist.reports.image_rows import read_batches
from mixednuts_dist.reports.worst_images import LARGEST_SIDE, perturbation_png, png, worst_images
from tests.helpers.made_up_run import in_batches, made_up_attack, made_up_evaluate, made_up_search


def pixels(content: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(content)))


@pytest.mark.parametrize(("channels", "shape"), [(1, (5, 7)), (3, (5, 7, 3))])
def test_small_images_keep_every_pixel(channels: int, shape: tuple[int, ...]) -> None:
    image_CHW = torch.rand(channels, 5, 7)
    found = pixels(png(image_CHW))
    assert found.shape == shape
    expected = image_CHW.permute(1, 2, 0).mul(255).round().numpy().reshape(shape)
    assert np.array_equal(found, expected)


def test_change_is_amplified_to_the_ends_of_the_range() -> None:
    clean_CHW = torch.full((3, 4, 4), 0.5)
    attacked_CHW = clean_CHW.clone()
    attacked_CHW[0, 0, 0] += 8 / 255
    attacked_CHW[1, 1, 1] -= 4 / 255
    content, factor = perturbation_png(clean_CHW, attacked_CHW)
    assert factor == pytest.approx(255 / 16, rel=1e-4)
    found = pixels(content)
    assert (found[0, 0, 0], found[1, 1, 1], found[2, 2, 2]) == (255, 64, 128)
    content, factor = perturbation_png(clean_CHW, clean_CHW)
    assert (factor, set(pixels(content).ravel())) == (1, {128})


def test_large_images_are_reduced_without_averaging_noise() -> None:
    clean_CHW = torch.full((3, 448, 224), 0.5)
    signs_CHW = torch.randint(2, clean_CHW.shape, generator=torch.Generator().manual_seed(1)) * 2 - 1
    content, _ = perturbation_png(clean_CHW, clean_CHW + signs_CHW * 4 / 255)
    assert pixels(content).shape == (LARGEST_SIDE, LARGEST_SIDE // 2, 3)
    assert set(pixels(content).ravel()) == {0, 255}
    assert pixels(png(clean_CHW)).shape == (LARGEST_SIDE, LARGEST_SIDE // 2, 3)


def test_narrow_images_are_robust_and_sorted_by_margin() -> None:
    attack = made_up_attack()
    evaluate, search = made_up_evaluate(attack, alpha=0.9), made_up_search(attack)
    chosen = worst_images(read_batches(in_batches(attack, evaluate), search)[0])
    narrow = [image for image in chosen if image.reason == "narrow"]
    margins = [image.predictions[-1].margin for image in narrow]
    assert margins == sorted(margins)
    assert all(evaluate.robust_N[image.sample_id] for image in narrow)
