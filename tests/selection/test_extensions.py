"""A clamp from a user's file works in the whole search; a clamp that breaks the rules raises."""

from pathlib import Path

import pytest
import torch

from mixednuts_dist.config.register import load_extensions
from mixednuts_dist.errors import InvalidInputError
from mixednuts_dist.mixing.margins import log_one_minus_signed_margin
from mixednuts_dist.mixing.transforms import LogitTransform
from tests.helpers.random_logits import exact, random_rows

CLAMP = """
import torch
from mixednuts_dist.config.register import CLAMPS

@CLAMPS("swish_twice", describes="u sigmoid(2 u)", turns_at=-0.639232)
def swish_twice(u):
    return u * torch.sigmoid(2 * u)

@CLAMPS("wavy", describes="rises and falls for ever")
def wavy(u):
    return torch.sin(u)
"""


@pytest.fixture(autouse=True)
def loaded(tmp_path_factory: pytest.TempPathFactory) -> None:
    path: Path = tmp_path_factory.getbasetemp() / "my_clamp.py"
    path.write_text(CLAMP)
    load_extensions([str(path)])


def test_a_clamp_of_a_users_is_transformed_and_searched() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0]], dtype=torch.float64)
    expected = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64)
    expected = expected * torch.sigmoid(2 * expected)
    torch.testing.assert_close(LogitTransform(1, 1, 0, "swish_twice")(logits)[0], expected, rtol=0, atol=1e-7)
    cached = random_rows(n_classes=60)
    chosen = exact(cached, clamp="swish_twice").for_beta(0.9)
    assert chosen.clamp == "swish_twice"
    gaps = log_one_minus_signed_margin(chosen.transform()(cached.rob_attacked_BK.double()), cached.labels_B)
    robust = cached.rob_attacked_BK.argmax(dim=1) == cached.labels_B
    assert int((gaps[robust] <= chosen.log_one_minus_cutoff * (1 - 1e-12)).sum()) == chosen.kept_predicted


def test_a_clamp_that_is_not_what_it_says_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"clamp 'wavy' near u = .* is not finite or not monotone"):
        exact(random_rows(), clamp="wavy")
