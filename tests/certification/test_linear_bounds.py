"""Bounds of networks hold for every image of the ball, and are those of a linear network exactly."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mixednuts_dist.certification.linear_bounds import logit_bounds
from mixednuts_dist.errors import InvalidInputError

REAL = Path(__file__).parents[3] / "shared" / "real"


class Residual(nn.Module):
    """Normalisation, convolutions, batch norm, a skip that is added, pooling by `mean`, functional ReLUs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.4, 0.5, 0.6]).view(1, 3, 1, 1))
        self.first, self.second = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.norm, self.last = nn.BatchNorm2d(6), nn.Linear(6, 4)
        self.pool = nn.AvgPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first((x - self.mean) / 0.25))
        x = nn.functional.relu(self.norm(self.second(x)) + x)
        logits: Tensor = self.last(self.pool(x).mean((2, 3)).view(x.size(0), -1))
        return logits


def _network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = Residual().eval().requires_grad_(False)
        made.norm.running_mean.normal_(0, 0.3)
        made.norm.running_var.uniform_(0.5, 2)
        made.norm.weight.normal_()  # of both signs
    return made


def _images(n: int = 5) -> Tensor:
    return torch.rand(n, 3, 6, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("tighten", [False, True])
@pytest.mark.parametrize("eps", [0.005, 0.1])
def test_no_image_of_the_ball_leaves_the_bounds(eps: float, tighten: bool) -> None:
    network, x = _network(), _images()
    labels = network(x).argmax(dim=1)
    box = logit_bounds(network, x, labels, eps, tighten=tighten).box
    generator = torch.Generator().manual_seed(2)
    for step in range(200):
        noise = 2 * torch.rand(x.shape, generator=generator) - 1
        logits = network((x + eps * (noise.sign() if step % 2 else noise)).clamp(0, 1)).double()
        centred = logits - logits.mean(dim=1, keepdim=True)
        leads = logits.gather(1, labels[:, None]) - logits
        assert bool(
            (centred >= box.lower_BK).all() and (centred <= box.upper_BK).all() and (leads >= box.leads_BK).all()
        )


def test_tightening_never_loosens_and_helps() -> None:
    network, x = _network(), _images()
    labels = torch.zeros(len(x), dtype=torch.int64)
    loose, tight = (logit_bounds(network, x, labels, 0.05, tighten=tighten).box for tighten in (False, True))
    assert float((tight.upper_BK - tight.lower_BK).mean()) < float((loose.upper_BK - loose.lower_BK).mean())


def test_a_linear_networks_bounds_are_exact() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        network = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).requires_grad_(False)
    x, eps = 0.5 * torch.ones(1, 3, 2, 2), 0.1
    box = logit_bounds(network, x, torch.tensor([2]), eps).box
    weights = network[1].weight.double()
    logits = network(x).double()
    expected = (logits[:, 2:] - logits) - eps * (weights[2] - weights).abs().sum(dim=1)
    torch.testing.assert_close(box.leads_BK, expected, atol=1e-4, rtol=0)


def test_a_detached_value_still_depends_on_the_image() -> None:
    class Detaches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = 10 * x.detach().flatten(1)
            return logits

    x = torch.full((1, 1, 1, 3), 0.5)
    box = logit_bounds(Detaches(), x, torch.tensor([0]), 0.1).box
    torch.testing.assert_close(box.leads_BK[0, 1], torch.tensor(-2.0).double(), atol=1e-3, rtol=0)


def test_an_images_bounds_do_not_depend_on_its_company() -> None:
    network, x = _network(), _images()
    labels = network(x).argmax(dim=1)
    together = logit_bounds(network, x, labels, 0.05).box
    alone = logit_bounds(network, x[2:3], labels[2:3], 0.05).box
    torch.testing.assert_close(together.lower_BK[2:3], alone.lower_BK, atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("layer", "name"), [(nn.Sigmoid(), "sigmoid"), (nn.MaxPool2d(2), "max_pool2d"), (nn.GELU(), "gelu")]
)
def test_what_bounds_do_not_follow_is_refused_by_name(layer: nn.Module, name: str) -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), layer, nn.Flatten(), nn.LazyLinear(3))
    network(_images())
    with pytest.raises(InvalidInputError, match=f"{name}.*by smoothing"):
        logit_bounds(network, _images(), torch.zeros(5, dtype=torch.int64), 0.1)


@pytest.mark.skipif(not REAL.is_dir(), reason="needs the real networks")
def test_most_images_of_a_certifiably_trained_network_are_certified() -> None:
    spec = importlib.util.spec_from_file_location("real_zoo", REAL / "zoo.py")  # another test has a module `zoo`
    assert spec is not None
    assert spec.loader is not None
    zoo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(zoo)
    network = zoo.rob_c10_cnn_wide_kw()
    x, y = zoo.images(n=10)
    leads = logit_bounds(network, x, y, 1 / 255).box.leads_BK.scatter(1, y[:, None], torch.inf)
    right = network(x).argmax(dim=1) == y
    certified = leads.amin(dim=1) > 0
    assert int(certified.sum()) >= int(right.sum()) - 2
    assert not bool((certified & ~right).any())
