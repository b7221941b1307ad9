"""Every attack on a GPU: in each arithmetic, compiled or not, with no round that waits for the device."""

import pytest
import torch

from mixednuts_dist.acceleration.arithmetic import Arithmetic
from mixednuts_dist.acceleration.batch_shape import BatchShape
from mixednuts_dist.attacks.adaptive import adaptive_autoattack, ensemble_engine
from mixednuts_dist.attacks.engine import Group
from mixednuts_dist.register import ATTACKS

from .test_engine import ShortOfMemory
from .test_laws import LINF, QUICK, SHAPE, images, mixture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
    pytest.mark.filterwarnings("ignore"),  # of the compiler's own imports
]


@pytest.mark.parametrize("attack", ATTACKS.names())
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("compile", [False, True])
def test_verdicts_are_those_of_float32(attack: str, precision, compile: bool) -> None:
    mixed, x = mixture().cuda(), images(40, SHAPE).cuda()
    with torch.no_grad():
        y = mixed(x).argmax(dim=1)
    options = {"threat": LINF, "attacks": (attack,), "budget": QUICK, "batch_size": 16}
    found = adaptive_autoattack(mixed, x, y, arithmetic=Arithmetic(precision, compile=compile), **options)
    plain = adaptive_autoattack(mixed, x, y, precision="fp32", **options)
    with torch.no_grad():
        assert torch.equal(found.robust, mixed(found.x_adv).argmax(dim=1) == y)
    assert abs(int(found.robust.sum()) - int(plain.robust.sum())) <= 2, "beyond images at the border"
    again = adaptive_autoattack(mixed, x[7:20], y[7:20], sample_ids=range(7, 20), precision="fp32", **options)
    assert torch.equal(again.x_adv, plain.x_adv[7:20])


@pytest.mark.parametrize("attack", ATTACKS.names())
def test_no_round_waits_for_the_device(attack: str) -> None:
    mixed, x = mixture().cuda(), images(16, SHAPE).cuda()
    with torch.no_grad():
        y = mixed(x).argmax(dim=1)
    engine = ensemble_engine(
        mixed, x, threat=LINF, attacks=(attack,), budget=QUICK, shape=BatchShape(16, fixed=True),
        arithmetic=Arithmetic("fp32"),
    )  # fmt: skip
    engine._admit(Group(x, y, range(16)))
    (lane,) = engine._lanes.values()
    lane.step()  # fills the slots
    lane._flags()
    torch.cuda.set_sync_debug_mode("error")
    try:
        lane.step()
        lane._flags()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_memory_that_ends_loses_nothing() -> None:
    mixed, x = mixture().cuda(), images(24, SHAPE).cuda()
    with torch.no_grad():
        y = mixed(x).argmax(dim=1)
    options = {"threat": LINF, "attacks": ("apgd-ce",), "budget": QUICK, "precision": "fp32", "batch_size": 16}
    expected = adaptive_autoattack(mixed, x, y, **options)
    short = mixture().cuda()
    short.rob = ShortOfMemory(short.rob, 5)
    found = adaptive_autoattack(short, x, y, **options)
    assert short.rob.refused > 0
    assert torch.equal(found.robust, expected.robust)
