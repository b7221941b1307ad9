"""The laws of every norm, and one from a user's file in a whole run."""

from pathlib import Path

import pytest
import torch
from pyautoattack.autopgd_base import L1_projection

from mixednuts_dist.attacks.adaptive import autoattack, minimum_margin_attack
from mixednuts_dist.attacks.budget import AttackBudget
from mixednuts_dist.config.register import NORMS, load_extensions
from mixednuts_dist.config.run_config import parse_config
from mixednuts_dist.config.threat import ThreatModel
from mixednuts_dist.errors import ConfigError, ThreatModelError
from mixednuts_dist.norms.ball import ball_of
from mixednuts_dist.norms.l1 import L1, sparse_signs
from tests.helpers.runs import tiny_content
from tests.helpers.small_nets import images, mixture, small_net
from tests.helpers.stepping import start_keys

SHAPES = [(1, 8, 8), (3, 5, 7)]
RADII = {"Linf": (8 / 255, 1.0), "L2": (0.5, 3.0), "L1": (2.0, 12.0)}
THREATS = [ThreatModel(norm, eps) for norm in NORMS.names() for eps in RADII[norm]]
every_threat = pytest.mark.parametrize("threat", THREATS, ids=str)


@pytest.mark.parametrize("levels", [0.5, 1, 2, 4, 8])
def test_rounding_leaves_no_point_outside_small_balls(levels: float) -> None:
    """8-bit images moved by the whole radius in float32, as every attack moves them, and a point that is too far."""
    x = torch.arange(256).div(255).view(1, 1, 16, 16).repeat(2, 3, 1, 1)
    ball = ball_of(ThreatModel("Linf", levels / 255))
    sign = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).sign()
    for moved in ((x + ball.eps * sign).clamp(0, 1), ball.project(x + sign, x)):
        assert bool(ball.contains(moved, x).all())
    assert not bool(ball.contains((x + 1.001 * ball.eps * sign).clamp(0, 1), x).any())


@pytest.mark.parametrize("shape", SHAPES)
@every_threat
def test_projections_land_in_the_ball_and_keep_its_points(shape: tuple[int, ...], threat: ThreatModel) -> None:
    generator, ball = torch.Generator().manual_seed(0), ball_of(threat)
    x = torch.rand(20, *shape, generator=generator)
    far = x + 3 * torch.randn(20, *shape, generator=generator)
    assert not bool(ball.contains(far, x).any())
    inside = ball.project(far, x)
    assert bool(ball.contains(inside, x).all())
    assert float(inside.min()) >= 0
    assert float(inside.max()) <= 1
    assert torch.allclose(ball.project(inside, x), inside, atol=1e-6)


@pytest.mark.parametrize("threat", [threat for threat in THREATS if threat.norm != "L1"], ids=str)
def test_the_steepest_direction_has_length_1_and_gains_most(threat: ThreatModel) -> None:
    """No random direction of length 1 has a larger product with the gradient."""
    generator, ball = torch.Generator().manual_seed(0), ball_of(threat)
    grad = torch.randn(20, 3, 4, 4, generator=generator)
    best = ball.steepest(grad)
    assert torch.allclose(ball.length(best), torch.ones(20), atol=1e-5)
    others = torch.randn(500, 3, 4, 4, generator=generator)
    others = others / ball.length(others).view(-1, 1, 1, 1)
    gains = (grad.flatten(1) @ others.flatten(1).T).amax(dim=1)
    assert bool(((grad * best).sum((1, 2, 3)) > gains).all())
    assert not bool(ball.steepest(torch.zeros(1, 3, 4, 4)).any())


def test_sparse_signs_moves_the_largest_gradients_equally() -> None:
    grad = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    for share, n_moved in ((0.05, 10), (0.5, 96), (1.0, 192)):
        step = sparse_signs(grad, torch.full((5,), share)).flatten(1)
        least = grad.flatten(1).abs().sort(dim=1, descending=True).values[:, n_moved - 1 : n_moved]
        assert torch.equal(step != 0, grad.flatten(1).abs() >= least)
        assert torch.allclose(step.abs().sum(dim=1), torch.ones(5))
        assert bool((step * grad.flatten(1) >= 0).all())


@pytest.mark.parametrize("eps", [0.5, 3.0, 40.0])
def test_l1_projections_are_the_nearest_points_of_ball_and_box(eps: float) -> None:
    """Compare with the published projection and with the condition of optimality."""
    generator, ball = torch.Generator().manual_seed(0), L1(eps)
    x = torch.rand(16, 3, 8, 8, generator=generator)
    x[0, 0], x[1, 0] = 0, 1
    y = torch.randn(16, 3, 8, 8, generator=generator) * 0.5
    y[2] = 0.9 * eps / 192 * y[2].sign()
    found = ball.project(x + y, x)
    assert torch.allclose(found, x + y + L1_projection(x, y, eps), atol=2e-5)
    feasible = ball.project(torch.rand(500, 16, 3, 8, 8, generator=generator).flatten(0, 1), x.repeat(500, 1, 1, 1))
    away = (x + y - found)[None] * (feasible.view(500, 16, 3, 8, 8) - found)
    assert float(away.sum((2, 3, 4)).max()) < 1e-3


@every_threat
def test_random_starts_follow_the_image_and_not_the_batch(threat: ThreatModel) -> None:
    x, ball = images(6, (1, 8, 8)), ball_of(threat)
    keys = start_keys("apgd-ce", 6)
    start = ball.random_start(x, keys)
    order = torch.tensor([4, 0, 5])
    assert torch.equal(ball.random_start(x[order], keys[order]), start[order])
    assert not torch.equal(ball.random_start(x, start_keys("apgd-ce", 6, seed=1)), start)
    assert bool(ball.contains(start, x).all())


L4 = """
from mixednuts_dist.config.register import NORMS
from mixednuts_dist.norms.ball import TINY, Ball, per_image


@NORMS("L4", describes="fourth root of the sum of fourth powers", usual="0.1", largest=4.0)
class L4(Ball):
    def length(self, delta_BCHW):
        return delta_BCHW.flatten(1).pow(4).sum(dim=1).pow(0.25)

    def steepest(self, grad_BCHW):
        step_BCHW = grad_BCHW.sign() * grad_BCHW.abs().pow(1 / 3)
        return step_BCHW / (per_image(self.length(step_BCHW), step_BCHW) + TINY)
"""


@pytest.fixture
def l4(tmp_path: Path) -> str:
    """The file of a norm that the package does not have; loaded."""
    file = tmp_path / "l4.py"
    file.write_text(L4)
    load_extensions([str(file)])
    return str(file)


@pytest.mark.usefixtures("l4")
def test_user_norm_works_in_gradient_attacks() -> None:
    threat, budget = ThreatModel("L4", 0.15), AttackBudget(n_iter=15, n_target_classes=2)
    net, x = small_net(10, (3, 8, 8)), images(20, (3, 8, 8))
    y = net(x).argmax(dim=1)
    options = {"threat": threat, "budget": budget, "precision": "fp32"}
    found = autoattack(net, x, y, attacks=["apgd-ce", "apgd-t"], **options)
    assert 0 < int(found.robust.sum()) < 20
    margins = minimum_margin_attack(net, x, y, threat=threat, n_iter=15, n_target_classes=2, precision="fp32")
    assert int(margins.broken.sum()) >= int((~found.robust).sum())
    mixed = mixture()
    y_mixed = mixed(x).argmax(dim=1)
    joint = autoattack(mixed, x, y_mixed, attacks=["apgd-t"], **options)
    for x_adv in (found.x_adv, margins.x_adv, joint.x_adv):  # by torch's own norm
        assert float((x_adv - x).flatten(1).norm(p=4, dim=1).max()) <= 0.15 * (1 + 1e-5)
        assert 0 <= float(x_adv.min()) <= float(x_adv.max()) <= 1


@pytest.mark.usefixtures("l4")
def test_attack_that_lacks_a_norm_raises_before_any_pass() -> None:
    x, y, threat = images(1, (1, 6, 6)), torch.zeros(1).long(), ThreatModel("L4", 0.1)
    message = r"attack 'fab-t' supports the norms Linf, L2.*, not 'L4'\. Attacks in 'L4': apgd-ce, apgd-t, .*joint"
    with pytest.raises(ThreatModelError, match=message):
        autoattack(lambda _: pytest.fail("a pass"), x, y, threat=threat)
    with pytest.raises(ThreatModelError, match="attack 'square-margin' supports the norms Linf, L2"):
        autoattack(lambda _: pytest.fail("a pass"), x, y, threat=threat, attacks=["square-margin"])
    with pytest.raises(
        ThreatModelError, match=r"eps=0.03137 is too small for norm 'L1': its radii begin at 0.1, .*12 on"
    ):
        ThreatModel("L1", 8 / 255)
    with pytest.raises(ThreatModelError, match=r"eps=8.* exceeds .* for norm 'L4'"):
        ThreatModel("L4", 8)


def test_user_norm_is_checked_with_the_configuration(tmp_path: Path, l4: str) -> None:
    content = tiny_content(tmp_path / "runs", extensions=[l4], threat={"norm": "L4", "eps": 0.3})
    evaluate = content.pop("evaluate")
    content["evaluate"] = {**evaluate, "attacks": ["apgd-ce"]}
    with pytest.raises(ConfigError, match="attack 'square' supports the norms Linf, L2"):
        parse_config({**content, "evaluate": {**evaluate, "attacks": ["apgd-ce", "square"]}})
    with pytest.raises(ConfigError, match="attack 'square-margin' supports"):
        parse_config({**content, "attack": {"method": "square"}})
    with pytest.raises(ConfigError, match=r"threat\.norm: norm 'L5' is not known.* Valid names: Linf, L2"):
        parse_config({**content, "threat": {"norm": "L5", "eps": 0.3}})
