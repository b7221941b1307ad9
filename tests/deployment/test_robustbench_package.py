"""RobustBench's own evaluation of a mixed classifier, in this environment and without a network."""

from typing import Any

import pytest
import torch

from mixednuts_dist.classifiers.base_classifiers import load_classifier
from mixednuts_dist.classifiers.robustbench_zoo import import_robustbench
from mixednuts_dist.images.datasets import open_dataset
from mixednuts_dist.mixing.classifier import MixedClassifier
from mixednuts_dist.mixing.transforms import LogitTransform


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_robustbench_evaluates_the_bypass(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Run all of `benchmark` with all four attacks, on ten digits instead of CIFAR-10."""
    std, rob = load_classifier("demo:std", "std"), load_classifier("demo:rob", "rob")
    mixed = MixedClassifier(std, rob, LogitTransform(1.0, 2.5, -0.714), 0.9993)
    images, labels = open_dataset("digits").read(0, 10)
    data = import_robustbench("robustbench.data")
    evaluation = import_robustbench("robustbench.eval")
    enums = import_robustbench("robustbench.model_zoo.enums")

    def digits(n: int, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return images[:n], labels[:n]

    monkeypatch.setitem(data._clean_dataset_loaders, enums.BenchmarkDataset.cifar_10, digits)
    clean, robust = evaluation.benchmark(
        mixed.as_bypass(), n_examples=10, dataset="cifar10", threat_model="Linf", eps=0.15, batch_size=10
    )
    assert clean == pytest.approx(float((mixed.predict(images) == labels).float().mean()))
    assert 0 < robust < clean
    assert "Adversarial accuracy" in capsys.readouterr().out
