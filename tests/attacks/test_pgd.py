"""PGD-20 against a plain loop, and as an attack of the ensemble."""

import torch
import torch.nn.functional as F

from mixednuts_dist.attacks.adaptive import AttackBudget, autoattack
from mixednuts_dist.attacks.pgd import pgd_attack
from mixednuts_dist.attacks.projections import random_start
from mixednuts_dist.attacks.victim import Victim
from mixednuts_dist.threat import ThreatModel

LINF = ThreatModel("Linf", 0.03)


def test_iterates_equal_those_of_a_plain_loop(victim) -> None:
    model, x, y = victim(n=6)
    keys = [(0, "pgd-20", 0, i) for i in range(6)]
    seen: list[torch.Tensor] = []
    pgd_attack(Victim.of(model), x, y, LINF, n_iter=20, keys=keys, watch=lambda x_adv, _: seen.append(x_adv))
    expected = random_start(x, keys, LINF)
    for step, mine in enumerate(seen):
        assert torch.allclose(mine, expected, atol=1e-7), step
        leaf = expected.clone().requires_grad_()
        (grad,) = torch.autograd.grad(F.cross_entropy(model(leaf), y, reduction="sum"), leaf)
        moved = expected + 0.03 / 4 * grad.sign()
        expected = moved.clamp(x - 0.03, x + 0.03).clamp(0, 1)
    assert len(seen) == 21


def test_it_keeps_the_best_point_and_follows_the_image(victim) -> None:
    model, x, y = victim()
    found = autoattack(model, x, y, threat=LINF, attacks=("pgd-20",))
    assert 0 < int(found.robust.sum()) < len(x)
    assert torch.equal(found.robust, model(found.x_adv).argmax(dim=1) == y)
    order = torch.tensor([8, 1, 4])
    part = autoattack(
        model, x[order], y[order], threat=LINF, attacks=("pgd-20",), sample_ids=order.tolist(),
        budget=AttackBudget(batch_size=2),
    )  # fmt: skip
    assert torch.allclose(part.x_adv, found.x_adv[order], atol=1e-5)
    assert torch.equal(part.robust, found.robust[order])
    stronger = autoattack(model, x, y, threat=LINF, attacks=("apgd-ce", "apgd-t"))
    assert int(stronger.robust.sum()) <= int(found.robust.sum())
