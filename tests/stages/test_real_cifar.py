"""MMAA on CIFAR-10 with a real robust classifier, if it is installed."""

from typing import Any

import pytest
from pyautoattack import AutoAttack

from mixednuts_dist import pipeline
from mixednuts_dist.attacks.adaptive import minimum_margin_attack
from mixednuts_dist.classifiers.base_classifiers import load_classifier
from mixednuts_dist.config.threat import ThreatModel
from mixednuts_dist.images.datasets import open_dataset
from mixednuts_dist.mixing.transforms import layer_norm_logits
from tests.helpers.real import CIFAR10, ZOO
from tests.helpers.runs import MakeConfig

EPS = 2 / 255

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420), pytest.mark.real]


def test_mmaa_is_as_strong_as_apgd_on_real_cifar() -> None:
    rob = load_classifier(f"py:{ZOO}:rob_c10_resnet4b", "rob")
    (x, y), threat = open_dataset(CIFAR10).read(200, 224), ThreatModel("Linf", EPS)
    ours = minimum_margin_attack(lambda x: layer_norm_logits(rob(x)), x, y, threat=threat, batch_size=24)
    published = AutoAttack(
        rob, norm="Linf", eps=EPS, attacks=["apgd-ce", "apgd-t"], version="custom", seed=0, device="cpu"
    )
    x_adv = published.run_standard_evaluation(x, y, batch_size=24)[0]
    theirs = int((rob(x_adv).argmax(dim=1) == y).sum())
    assert int((~ours.broken).sum()) <= theirs
    assert 0 < theirs < len(y)


def test_the_pipeline_runs_on_real_images_and_classifiers(tiny: MakeConfig, local_executor: Any) -> None:
    std_uri, rob_uri = f"py:{ZOO}:std_c10_resnet56", f"py:{ZOO}:rob_c10_resnet4b"
    config = tiny(data={"uri": CIFAR10, "n": 12}, std=std_uri, rob=rob_uri, threat={"eps": "2/255"})
    results = pipeline.run(config, executor=local_executor).to_json()
    rob, std, mixed = (results["accuracy"][name] for name in ("rob", "std", "mixed"))
    assert results["n_images"] == 12
    assert std["clean"]["correct"] >= rob["clean"]["correct"]
    assert std["robust"]["correct"] < rob["robust"]["correct"]
    assert rob["clean"]["correct"] <= mixed["clean"]["correct"]
    assert mixed["robust"]["correct"] <= mixed["clean"]["correct"]
