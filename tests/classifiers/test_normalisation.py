"""Double normalization warns; a class that holds an unused mean does not."""

import pytest
import torch
from torch import Tensor, nn

from mixednuts_dist.classifiers.base_classifiers import Normalized, check_classifier
from mixednuts_dist.errors import BaseClassifierError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Head(nn.Module):
    """A small classifier; `normalises` decides whether the mean that it holds is used."""

    def __init__(self, *, normalises: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mu, self.sigma = torch.full((1, 3, 1, 1), 0.5), torch.full((1, 3, 1, 1), 0.25)
        self.normalises, self.linear = normalises, nn.Linear(48, 5)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(((x - self.mu) / self.sigma if self.normalises else x).flatten(1))
        return logits


def images() -> Tensor:
    return torch.rand(8, 3, 4, 4, generator=torch.Generator().manual_seed(1))


def test_two_normalisations_are_told_with_the_inner_one_s_name() -> None:
    model = Normalized(Head(normalises=True), MEAN, STD).eval()
    with pytest.raises(BaseClassifierError, match=r"rob: the images are normalized twice: its part 'net' \(Head\)"):
        check_classifier(model, images(), "rob")


@pytest.mark.parametrize(
    "model",
    [Head(normalises=True), Normalized(Head(normalises=False), MEAN, STD), Normalized(nn.Flatten(), MEAN, STD)],
    ids=["once, inside", "once, outside", "no mean inside"],
)
def test_one_normalisation_is_none_of_our_business(model: nn.Module) -> None:
    check_classifier(model.eval(), images(), "rob")
