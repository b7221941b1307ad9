"""A batch of one has the bits of a batch of many."""

import pytest
import torch

from mixednuts_dist.acceleration.batch_shape import SteadyRows
from mixednuts_dist.classifiers.base_classifiers import load_classifier
from mixednuts_dist.images.arrays import load_digits_split


@pytest.mark.parametrize("role", ["std", "rob"])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
def test_logits_and_gradients_of_few_images_are_those_in_company(role: str, n: int) -> None:
    model = SteadyRows(load_classifier(f"demo:{role}", role))
    images = load_digits_split("test")[0][:32]

    def passed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.clone().requires_grad_()
        logits = model(x)
        (grad,) = torch.autograd.grad(logits.logsumexp(dim=1).sum() - logits[:, 0].sum(), x)
        return logits.detach(), grad

    few, many = passed(images[:n]), passed(images)
    assert torch.equal(few[0], many[0][:n])
    assert torch.equal(few[1], many[1][:n])
    assert few[0].shape == (n, 10)
