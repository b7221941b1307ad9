"""A clamp and a criterion from a user's file work in the whole search; a clamp that breaks the rules raises."""

from pathlib import Path

import pytest
import torch

from mixednuts_dist.config.register import CRITERIA, load_extensions
from mixednuts_dist.errors import InvalidInputError
from mixednuts_dist.mixing.margins import log_one_minus_signed_margin
from mixednuts_dist.mixing.transforms import LogitTransform
from mixednuts_dist.selection.selection import search_grid
from tests.helpers.random_logits import GRID, exact, random_rows

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
CRITERION = """
from dataclasses import dataclass
from typing import ClassVar
from mixednuts_dist.config.register import CRITERIA
from mixednuts_dist.selection.criteria import PaperCriterion

@CRITERIA("relaxed", describes="the paper's objective over images that std gets right")
@dataclass(frozen=True)
class Relaxed(PaperCriterion):
    name: ClassVar[str] = "relaxed"

    @classmethod
    def from_rows(cls, rows, *, clamp, ln_k):
        kept = rows.rob_attacked_BK.argmax(1) == rows.labels_B
        counted = (rows.rob_clean_BK.argmax(1) != rows.labels_B) & (rows.std_pred_B == rows.labels_B)
        return cls.of(rows.rob_attacked_BK[kept], rows.rob_clean_BK[counted], clamp=clamp, ln_k=ln_k)
"""


@pytest.fixture(autouse=True)
def loaded(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder: Path = tmp_path_factory.getbasetemp()
    for name, text in (("my_clamp.py", CLAMP), ("my_criterion.py", CRITERION)):
        (folder / name).write_text(text)
    load_extensions([str(folder / "my_clamp.py"), str(folder / "my_criterion.py")])


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


def test_a_criterion_of_a_users_is_searched_and_widened() -> None:
    criterion = CRITERIA.get("relaxed").from_rows(random_rows(), clamp="gelu", ln_k=None)
    found = search_grid(criterion, GRID, n_widen=2)
    assert (found.criterion.name, found.grid.widenings) == ("relaxed", 2)
    usable = ~found.infeasible[2] & ~found.undeployable[2]
    assert found.for_beta(0.9).objective == float(found.objectives[2][usable].min())
