"""`SmoothedMixture` as a classifier: its certificates, abstention and errors."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mixednuts_dist as mn
from mixednuts_dist.certification.smoothing import ABSTAINS, ROB_ALONE, SmoothedAnswers, SmoothingPlan, Votes
from mixednuts_dist.config.run_config import parse_config
from mixednuts_dist.deployment.loading import load_smoothed
from mixednuts_dist.distributed.debug import DebugExecutor
from mixednuts_dist.errors import InvalidInputError
from mixednuts_dist.mixing.transforms import IdentityTransform
from mixednuts_dist.stages import attack, search
from mixednuts_dist.stages.certify import Certify, CertifyKeys
from mixednuts_dist.stages.stage import stage_of
from tests.helpers.runs import certified_content

N_IMAGES = 24


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    return mn.open_dataset("digits").read(0, N_IMAGES)


def searched(config: mn.RunConfig) -> None:
    attack.run(config, executor=DebugExecutor())
    search.run(config, executor=DebugExecutor())


def smoothed(alpha: float = 0.8, **changes: object) -> mn.SmoothedMixture:
    std, rob = mn.load_classifier("demo:std", "std"), mn.load_classifier("demo:noisy", "rob")
    return mn.SmoothedMixture(mn.MixedClassifier(std, rob, IdentityTransform(), alpha), **changes)  # type: ignore[arg-type]


def toy(std_class: int, alpha: float, n_classes: int = 2, **changes: float) -> mn.SmoothedMixture:
    """`rob` answers the largest of the first pixels, and `std` always answers one class."""
    std, rob = (nn.Sequential(nn.Flatten(), nn.Linear(4, n_classes)).requires_grad_(False) for _ in range(2))
    for network, weight, bias in (
        (std, torch.zeros(n_classes, 4), torch.eye(n_classes)[std_class]),
        (rob, torch.eye(n_classes, 4), torch.zeros(n_classes)),
    ):
        network[1].weight.copy_(weight), network[1].bias.copy_(bias)
    return mn.SmoothedMixture(mn.MixedClassifier(std, rob, IdentityTransform(), alpha), sigma=0.5, **changes)  # type: ignore[arg-type]


def test_a_runs_smoothed_mixture_has_the_stages_certificates(
    tmp_path: Path, digits: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_of = CertifyKeys.plan  # with every draw, as `certify` takes them
    monkeypatch.setattr(CertifyKeys, "plan", lambda keys: replace(plan_of(keys), stop_when_decided=False))
    config = parse_config(certified_content(tmp_path))
    searched(config)
    (folder,) = tmp_path.glob("*/runs/certified-*")
    loaded = load_smoothed(str(folder), beta=1.0)
    x, y = digits
    found = loaded.certify(x, n=400, seed=config.seed, sample_ids=range(N_IMAGES))
    stage = stage_of(config, "certify")
    assert isinstance(stage, Certify)
    opened = stage.run(config, executor=DebugExecutor())
    answers = stage.answers(opened)
    for radius in (0.05, 0.1, 0.25):
        expected = answers.certified(loaded.mixed.mixture, radius)
        assert torch.equal((found.classes == y) & (found.radii > radius), expected)
    assert int((found.radii > 0.1).sum()) > 0
    predicted = loaded.predict(x, n=400, seed=config.seed)
    assert torch.equal(predicted == y, answers.predicted(loaded.mixed.mixture))
    assert int((predicted == ABSTAINS).sum()) > 0
    with pytest.raises(InvalidInputError, match="these were"):
        load_smoothed(str(folder), beta=0.7)


def test_a_run_without_smoothing_is_asked_for_the_noise(tmp_path: Path) -> None:
    searched(parse_config(certified_content(tmp_path, certify=None)))
    (folder,) = tmp_path.glob("*/runs/certified-*")
    with pytest.raises(InvalidInputError, match=r"sigma=0\.25"):
        load_smoothed(str(folder))
    assert load_smoothed(str(folder), sigma=0.1).plan.sigma == 0.1


def test_certificate_depends_on_seed_and_sample_id(digits: tuple[Tensor, Tensor]) -> None:
    model, (x, _) = smoothed(), digits
    together = model.certify(x, n=200, seed=0)
    alone = model.certify(x[5:6], n=200, seed=0, sample_ids=[5])
    assert together.radii[5] == alone.radii[0]
    assert together.classes[5] == alone.classes[0]
    assert not torch.equal(model.certify(x, n=200, seed=1).radii, together.radii)
    assert not torch.equal(model.certify(x, n=200).radii, model.certify(x, n=200).radii)  # secret seeds


def test_a_known_seed_is_exploited_and_a_secret_one_is_not() -> None:
    """The adversary tries images near a tie until the known noise misleads; the same images meet other noise later."""
    model = toy(0, 1.0, confidence=0.9, n_choose=20)
    tried = torch.tensor([0.505, 0.5, 0.0, 0.0]).view(1, 1, 2, 2).expand(1000, -1, -1, -1)  # class 0 has 0.503
    found = (model.predict(tried, n=200, seed=0) == 1).nonzero().squeeze(1)
    assert len(found) > 0
    again = model.predict(tried, n=200, seed=0)
    assert bool((again[found] == 1).all())  # wrong whenever this seed is used
    repeats = torch.cat([model.predict(tried[found], n=200) for _ in range(300 // len(found) + 1)])
    assert float((repeats == 1).double().mean()) <= 0.1


def test_a_certified_std_is_used_up_to_its_own_radius() -> None:
    """Class 0 has 0.58 of the votes; alpha 0.8 certifies only with a `std` that keeps class 0."""
    model = toy(0, 0.8)
    x = torch.tensor([0.64, 0.5, 0.0, 0.0]).view(1, 1, 2, 2).expand(3, -1, -1, -1)
    assert model.certify(x, n=2000, seed=0).classes.tolist() == [ABSTAINS] * 3
    found = model.certify(x, n=2000, seed=0, std_radius_B=torch.tensor([0.0, 0.02, 5.0]))
    assert found.classes.tolist() == [ABSTAINS, 0, 0]
    assert float(found.radii[1]) == pytest.approx(0.02)
    assert 0.1 < float(found.radii[2]) < 5.0


def test_predicted_counts_abstentions_as_errors() -> None:
    counts = torch.tensor([[990, 10], [520, 480], [480, 520], [10, 990]], dtype=torch.int32)
    plan = SmoothingPlan(0.25, 1000, 0.999, 100, (1.0,), (0.1,), stop_when_decided=False)
    answers = SmoothedAnswers(plan, torch.zeros(4, dtype=torch.int64), None, Votes(counts // 10, counts))
    assert answers.clean(ROB_ALONE).tolist() == [True, True, False, False]
    assert answers.predicted(ROB_ALONE).tolist() == [True, False, False, False]


def test_predict_follows_the_votes_or_abstains(digits: tuple[Tensor, Tensor]) -> None:
    x, y = digits
    model = smoothed()
    classes = model.predict(x, n=1000)
    settled = classes != ABSTAINS
    assert int((classes == y).sum()) >= N_IMAGES - 2
    certified = model.certify(x, n=1000)
    both = settled & (certified.classes != ABSTAINS)
    assert torch.equal(classes[both], certified.classes[both])
    assert (model.predict(x, n=10) == ABSTAINS).any()


def test_std_decides_where_its_share_outweighs_the_votes() -> None:
    """The votes are halves, so the 0.4 of `std` decides at the image, and nothing is certified around it."""
    model = toy(1, 0.6, n_classes=3)
    x = torch.tensor([0.5, 0.5, 0.0, 0.0]).view(1, 1, 2, 2)
    assert model.predict(x, n=1000).tolist() == [1]
    assert model.certify(x, n=1000).classes.tolist() == [ABSTAINS]


@pytest.mark.parametrize(
    ("settings", "keys", "message"),
    [
        ({"alpha": 0.5}, {}, "standard classifier alone decides"),
        ({"sigma": 0}, {}, "sigma=0"),
        ({"confidence": 1}, {}, "confidence=1"),
        ({}, {"n": 0}, "n=0"),
        ({}, {"x_BCHW": torch.full((1, 1, 8, 8), 255.0)}, r"in \[0, 1\]"),
        ({}, {"sample_ids": [1]}, "sample_ids"),
        ({}, {"n": 20, "std_radius_B": torch.tensor([0.1])}, "Give one per image"),
    ],
)
def test_bad_arguments_are_errors(settings: dict[str, float], keys: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        smoothed(**settings).certify(**{"x_BCHW": torch.zeros(2, 1, 8, 8), **keys})
