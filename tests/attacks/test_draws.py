"""EOT: averaged gradients, fresh draws that decide, and equal bits if the noise has seeds."""

import pytest
import torch
from pyautoattack import AutoAttack
from torch import Tensor, nn

from mixednuts_dist.attacks.adaptive import autoattack
from mixednuts_dist.attacks.budget import AttackBudget
from mixednuts_dist.attacks.draws import DECISION, GRADIENT, N_DECISION, Draws, misclassified_share
from mixednuts_dist.classifiers.base_classifiers import load_classifier
from mixednuts_dist.config.threat import ThreatModel
from mixednuts_dist.errors import InvalidInputError
from mixednuts_dist.images.datasets import open_dataset
from mixednuts_dist.mixing.classifier import MixedClassifier
from mixednuts_dist.mixing.transforms import LogitTransform
from tests.helpers.small_nets import images, small_net

SHAPE, THREAT, QUICK = (3, 8, 8), ThreatModel("Linf", 0.03), AttackBudget(n_iter=8, n_target_classes=2)
OPTIONS = {"threat": THREAT, "attacks": ("apgd-ce",), "budget": QUICK}


class Noisy(nn.Module):
    """Noise on the input, from torch's generator or from seeds."""

    def __init__(self, net: nn.Module | None = None, scale: float = 0.15) -> None:
        super().__init__()
        self.net, self.scale = net or small_net(10, SHAPE), scale

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x + self.scale * torch.randn_like(x))


class Seeded(Noisy):
    """The same noise from seeds that the caller passes."""

    def forward_with_seeds(self, x: Tensor, seeds: Tensor) -> Tensor:
        noise = [torch.randn(x.shape[1:], generator=torch.Generator().manual_seed(int(seed))) for seed in seeds]
        return self.net(x + self.scale * torch.stack(noise))


@pytest.fixture
def noisy() -> tuple[Seeded, Tensor, Tensor]:
    model, x = Seeded().eval(), images(16, SHAPE)
    return model, x, model.net(x).argmax(dim=1)


def test_seeded_draws_do_not_depend_on_partition_and_order(noisy) -> None:
    model, x, y = noisy
    options = {**OPTIONS, "eot": 4, "batch_size": 16}
    whole = autoattack(model, x, y, **options)
    for order in ([*range(15, -1, -1)], [3, 9, 1]):
        part = autoattack(model, x[order], y[order], sample_ids=order, **options)
        assert torch.equal(part.x_adv, whole.x_adv[order])
        assert torch.equal(part.robust, whole.robust[order])
    assert torch.equal(autoattack(model, x, y, **options).x_adv, whole.x_adv)


def test_no_draw_serves_twice(noisy, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, _ = noisy
    draws, seeds = Draws(model, 3, seed=0), []
    monkeypatch.setattr(model, "forward_with_seeds", lambda x, drawn: seeds.append(drawn) or model.net(x))
    for use, first in ((GRADIENT, 0), (DECISION, 0), (DECISION, 3)):
        draws.outputs(x, use, first)
    assert len(set(torch.cat(seeds).tolist())) == 3 * 3 * len(x)
    assert int(torch.cat(seeds).min()) >= 0


def test_fresh_draws_decide_and_confirm(noisy) -> None:
    model, x, y = noisy
    found = autoattack(model, x, y, **OPTIONS, eot=5)
    assert 0 < int(found.robust.sum()) < len(x)
    assert torch.equal(found.survived["apgd-ce"], found.robust)
    share = misclassified_share(Draws(model, 5, seed=0), found.x_adv, y, rows=8)
    assert torch.equal(found.robust, share < 0.5)
    with torch.no_grad():
        many = torch.stack([model(found.x_adv).argmax(dim=1) != y for _ in range(400)]).double().mean(dim=0)
    assert int(((many - share).abs() < 4 * 0.5 / N_DECISION**0.5).sum()) >= len(x) - 1


@pytest.mark.parametrize("kind", [Noisy, Seeded])
def test_fresh_draws_decide_about_clean_images(noisy, kind: type[Noisy]) -> None:
    net, x, y = noisy[0].net, *noisy[1:]
    model = kind(net, 0.6).eval()
    found = autoattack(model, x, y, **OPTIONS, eot=1)
    assert 0 < int(found.robust.sum()) <= int(found.clean.sum()) < len(x)
    assert not (found.robust & ~found.clean).any()
    if kind is Seeded:
        share = misclassified_share(Draws(model, 1, seed=0), x, y, rows=16)
        assert torch.equal(found.clean, share < 0.5)
        assert not found.unconfirmed.any(), "attacks do not end at a point that only few draws misclassify"
        each = [autoattack(model, x[i : i + 1], y[i : i + 1], sample_ids=[i], **OPTIONS, eot=1) for i in range(len(x))]
        assert [one.n_backward > 0 for one in each] == found.clean.tolist(), "each correct image is attacked, no other"


def test_rand_is_as_strong_as_the_published_one() -> None:
    """Images of which the final points fool fresh draws more often than not: ours, and those of the package."""
    rob, (x, y) = load_classifier("demo:rob", "rob"), open_dataset("digits").read(0, 40)
    model, threat = Noisy(rob, 0.2).eval(), ThreatModel("Linf", 0.1)
    torch.manual_seed(0)
    ours = autoattack(model, x, y, threat=threat, version="rand", budget=AttackBudget(n_iter=20))
    assert list(ours.survived) == ["apgd-ce", "apgd-dlr"]
    package = AutoAttack(model, norm="Linf", eps=threat.eps, version="rand", seed=0, device="cpu")
    package.apgd.n_iter, package.apgd.n_iter_2, package.apgd.n_iter_min, package.apgd.size_decr = 20, 4, 1, 1
    theirs = package.run_standard_evaluation(x, y, batch_size=40)[0]
    shares = [misclassified_share(Draws(model, 20, 0), points, y, rows=4) for points in (ours.x_adv, theirs)]
    broken = [int((share > 0.5).sum()) for share in shares]
    assert broken[0] >= broken[1] - 1
    assert 5 < broken[0] < 40


def test_a_mixture_with_a_random_rob_is_attacked(noisy) -> None:
    _, x, y = noisy
    mixed = MixedClassifier(
        small_net(10, SHAPE, 0, 8), Seeded(), LogitTransform(2.0, 1.0, 0.0), 0.7, surrogate_alpha=0.8
    )
    found = autoattack(mixed, x, y, threat=THREAT, attacks=("apgd-ce", "apgd-t"), budget=QUICK, eot=3)
    assert int(found.broken.sum()) > 0
    assert float((found.x_adv - x).abs().max()) <= THREAT.eps * (1 + 1e-5)
    assert bool(torch.isfinite(found.logits).all())


def test_dropout_may_be_on_where_draws_are_asked_for() -> None:
    net, x = nn.Sequential(nn.Dropout(0.5), small_net(10, SHAPE)), images(4, SHAPE)
    y = net.eval()(x).argmax(dim=1)
    net[0].train()
    with pytest.raises(InvalidInputError, match="training mode"):
        autoattack(net, x, y, **OPTIONS)
    found = autoattack(net, x, y, **OPTIONS, eot=2)
    assert found.broken.shape == (4,)
    assert net[0].training


def test_eot_of_a_deterministic_classifier_changes_nothing(noisy) -> None:
    model, x, y = noisy
    plain, drawn = (autoattack(model.net, x, y, **OPTIONS, eot=eot, precision="fp32") for eot in (None, 3))
    assert torch.equal(drawn.robust, plain.robust)
