"""Functions as base classifiers, and the checks that every classifier passes."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mixednuts_dist.classifiers.base_classifiers import Normalized, check_classifier, load_classifier
from mixednuts_dist.errors import BaseClassifierError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FACTORY = """
import torch
from torch import Tensor, nn

def linear(bias=0.0):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 5))
    net[1].bias.data += bias
    return net

def broken():
    raise FileNotFoundError("weights.pt is not here")

def number():
    return 3
"""


@pytest.fixture
def factory_file(tmp_path: Path) -> Path:
    path = tmp_path / "zoo.py"
    path.write_text(FACTORY)
    return path


@pytest.mark.parametrize("form", ["file", "module"])
def test_factory_takes_options_and_comes_frozen(factory_file: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(factory_file.parent))
    place = {"file": factory_file, "module": "zoo"}[form]
    plain, biased = (load_classifier(f"py:{place}:linear{query}", "rob") for query in ("", "?bias=2.5"))
    x = torch.rand(2, 3, 4, 4)
    assert torch.allclose(plain(x) + 2.5, biased(x))
    assert not any(parameter.requires_grad for parameter in plain.parameters())
    assert not plain.training


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("py:nowhere_at_all:f", "cannot import 'nowhere_at_all'"),
        ("py:FILE:linaer", "no factory 'linaer'; it has: linear, broken, number"),
        ("py:FILE:broken", "FileNotFoundError: weights.pt is not here; relative paths in it start at /"),
        ("py:FILE:number", "returned int"),
        ("py:FILE:linear?bais=1", "bais"),
    ],
)
def test_a_factory_that_fails_is_explained(factory_file: Path, uri: str, message: str) -> None:
    with pytest.raises(BaseClassifierError, match=message):
        load_classifier(uri.replace("FILE", str(factory_file)), "rob")


class Answer(nn.Module):
    """A classifier whose output is a function of four logits per image."""

    def __init__(self, answer: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, x: Tensor) -> Tensor:
        return self.answer(x.flatten(1)[:, :4] * 5)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda logits: logits.softmax(dim=1), "sums to 1"),
        (lambda logits: logits + torch.rand_like(logits), "random"),
        (lambda logits: logits * torch.nan, "NaN"),
        (lambda logits: logits[:, :1], r"\(8, 1\) for 8 images"),
        (nn.BatchNorm1d(4).train(), "they depend on the other images"),
        (lambda logits: logits - logits.mean(dim=0), "they depend on the other images"),
        (lambda logits: logits + 0.01 * len(logits), "they depend on the other images"),
    ],
    ids=["probabilities", "noise", "NaN", "one class", "batch norm", "centered", "batch size"],
)
def test_outputs_that_are_not_logits_per_image_raise(answer: Callable[[Tensor], Tensor], message: str) -> None:
    with pytest.raises(BaseClassifierError, match=message):
        check_classifier(Answer(answer), torch.rand(8, 1, 4, 4), "rob")


@pytest.mark.parametrize("where", ["import", "factory", "forward"])
def test_code_that_ends_the_process_does_not_end_ours(tmp_path: Path, where: str) -> None:
    (tmp_path / "quits.py").write_text(
        "import sys, torch\n"
        + ("sys.exit(0)\n" if where == "import" else "")
        + "class Net(torch.nn.Module):\n    def forward(self, x):\n        sys.exit(0)\n"
        + f"def make():\n    {'sys.exit(0)' if where == 'factory' else 'return Net()'}\n"
    )
    with pytest.raises(BaseClassifierError, match="SystemExit: 0"):
        model = load_classifier(f"py:{tmp_path / 'quits.py'}:make", "rob")
        check_classifier(model, torch.rand(2, 1, 4, 4), "rob")


class Head(nn.Module):
    """A small classifier; `normalizes` decides whether the mean that it holds is used."""

    def __init__(self, *, normalizes: bool) -> None:
        super().__init__()
        self.mu, self.sigma = torch.full((1, 3, 1, 1), 0.5), torch.full((1, 3, 1, 1), 0.25)
        self.normalizes, self.linear = normalizes, nn.Linear(48, 5)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(((x - self.mu) / self.sigma if self.normalizes else x).flatten(1))
        return logits


@pytest.mark.parametrize(
    ("model", "twice"),
    [
        (Normalized(Head(normalizes=True), MEAN, STD), True),
        (Normalized(Head(normalizes=False), MEAN, STD), False),
        (Normalized(nn.Flatten(), MEAN, STD), False),
        (Head(normalizes=True), False),
    ],
    ids=["twice", "once, outside", "no mean inside", "once, inside"],
)
def test_only_two_normalizations_raise(model: nn.Module, twice: bool) -> None:
    message = r"rob: the images are normalized twice: its part 'net' \(Head\)"
    with pytest.raises(BaseClassifierError, match=message) if twice else contextlib.nullcontext():
        check_classifier(model.eval(), torch.rand(8, 3, 4, 4), "rob")
