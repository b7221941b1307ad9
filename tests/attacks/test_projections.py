"""Balls: everything that an attack may try lies in them."""

import pytest
import torch

from mixednuts_dist.attacks.projections import keyed_generator, project, random_start
from mixednuts_dist.threat import Norm, ThreatModel

SHAPES = [(1, 8, 8), (3, 5, 7)]


def length(delta: torch.Tensor, norm: Norm) -> torch.Tensor:
    flat = delta.flatten(1)
    return flat.abs().amax(dim=1) if norm == "Linf" else flat.norm(dim=1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("norm", "eps"), [("Linf", 8 / 255), ("Linf", 1.0), ("L2", 0.5), ("L2", 3.0)])
def test_projections_land_in_the_ball_and_keep_its_points(shape: tuple[int, ...], norm: Norm, eps: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(20, *shape, generator=generator)
    far = x + 3 * torch.randn(20, *shape, generator=generator)
    threat = ThreatModel(norm, eps)
    inside = project(far, x, threat)
    assert float(length(inside - x, norm).max()) <= eps * (1 + 1e-5)
    assert float(inside.min()) >= 0
    assert float(inside.max()) <= 1
    assert torch.allclose(project(inside, x, threat), inside, atol=1e-6)


@pytest.mark.parametrize("norm", ["Linf", "L2"])
def test_random_starts_follow_the_image_and_not_the_batch(norm: Norm) -> None:
    x = torch.rand(6, 1, 8, 8)
    threat = ThreatModel(norm, 0.3)
    keys = [(0, "apgd-ce", 0, i) for i in range(6)]
    start = random_start(x, keys, threat)
    order = torch.tensor([4, 0, 5])
    assert torch.equal(random_start(x[order], [keys[i] for i in order.tolist()], threat), start[order])
    assert not torch.equal(random_start(x, [(1, "apgd-ce", 0, i) for i in range(6)], threat), start)
    assert float(length(start - x, norm).max()) <= 0.3 * (1 + 1e-5)


def test_keys_do_not_touch_the_global_generator() -> None:
    state = torch.random.get_rng_state()
    torch.rand(5, generator=keyed_generator(0, "a"))
    assert torch.equal(torch.random.get_rng_state(), state)
