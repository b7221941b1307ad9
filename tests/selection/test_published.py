"""The paper's parameters: points of its grids, with the printed digits."""

import pytest

from mixednuts_dist.errors import InvalidInputError
from mixednuts_dist.selection.choice import Choice, published_grid

PRINTED = {
    "cifar10": (5.00, 4.00, -1.10, 0.999, 0.9570535),
    "cifar100": (0.612, 3.57, -2.14, 0.986, 0.9706995),
    "imagenet": (0.0235, 2.71, -0.286, 0.997, 0.9068379),
}


@pytest.mark.parametrize("dataset", PRINTED)
def test_published_values_are_printed_and_lie_on_the_grid(dataset: str) -> None:
    found, printed, grid = Choice.published(dataset), PRINTED[dataset], published_grid(dataset)
    assert found.scale == pytest.approx(printed[0], rel=2e-3)
    assert found.power == pytest.approx(printed[1], abs=6e-3)
    assert found.bias == pytest.approx(printed[2], abs=3e-3)
    assert found.alpha == pytest.approx(printed[3], abs=5e-4)
    assert found.alpha + found.one_minus_alpha == 1
    assert found.surrogate_alpha == printed[4]
    assert found.settings() == found.mixture().settings()
    assert found.ln_k == (250 if dataset == "imagenet" else None)
    assert len(grid.scales) == len(grid.powers) == len(grid.biases) == 8
    assert min(abs(found.scale / scale - 1) for scale in grid.scales) < 1e-12
    assert found.power in grid.powers
    assert found.bias in grid.biases


def test_an_unknown_dataset_lists_the_valid_ones() -> None:
    with pytest.raises(InvalidInputError, match="dataset='mnist'; valid names: cifar10, cifar100, imagenet"):
        Choice.published("mnist")
