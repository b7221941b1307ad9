"""Graphs of the mixture and of its lazy halves: any number of images, 1e-5 of the classifier, loaded without it."""

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mixednuts_dist.classifiers.base_classifiers import load_classifier
from mixednuts_dist.config.register import CLAMPS
from mixednuts_dist.deployment.graphs import TOLERANCE, erfc_by_polynomial, export_graphs
from mixednuts_dist.errors import InvalidInputError
from mixednuts_dist.mixing.classifier import MixedClassifier
from mixednuts_dist.mixing.transforms import LogitTransform

SHAPE = (1, 8, 8)


def mixture(transform: LogitTransform | None = None, alpha: float = 0.999) -> MixedClassifier:
    std, rob = (load_classifier(f"demo:{role}", role) for role in ("std", "rob"))
    return MixedClassifier(std, rob, transform or LogitTransform(5, 4, -1.1), alpha)


def images(n: int) -> Tensor:
    return torch.rand(n, *SHAPE, generator=torch.Generator().manual_seed(n))


@pytest.mark.parametrize("kind", ["torch", pytest.param("onnx", marks=pytest.mark.slow)])
def test_the_lazy_pair_answers_as_the_classifier_does(kind: str, tmp_path: Path) -> None:
    """As another program would run it: rob's graph on everything, std's on what is open."""
    mixed = mixture()
    differences = export_graphs(mixed, SHAPE, tmp_path, (kind,))
    assert sorted(differences) == sorted(path.name for path in tmp_path.iterdir())
    assert max(differences.values()) <= TOLERANCE
    x = images(100)
    program = """
import sys
import numpy as np
kind, folder = sys.argv[1:]
x = np.load(f"{folder}/x.npy")
def graph(name):
    if kind == "torch":
        import torch
        loaded = torch.export.load(f"{folder}/{name}.pt2").module()
        def run(*values):
            found = loaded(*map(torch.from_numpy, values))
            return [value.detach().numpy() for value in (found if isinstance(found, tuple) else (found,))]
        return run
    import onnxruntime
    session = onnxruntime.InferenceSession(f"{folder}/{name}.onnx")
    return lambda *values: session.run(None, dict(zip([node.name for node in session.get_inputs()], values)))
logits, classes, decided = graph("rob")(x)
classes = classes.copy()
if not decided.all():
    classes[~decided] = graph("std")(x[~decided], logits[~decided])[0].argmax(1)
np.savez(f"{folder}/found.npz", classes=classes, decided=decided, mixed=graph("mixed")(x)[0])
assert "mixednuts_dist" not in sys.modules
"""
    np.save(tmp_path / "x.npy", x.numpy())
    subprocess.run([sys.executable, "-W", "ignore", "-c", program, kind, str(tmp_path)], check=True, cwd=tmp_path)
    found = np.load(tmp_path / "found.npz")
    assert found["classes"].tolist() == mixed.predict(x).tolist()
    assert 0 < found["decided"].sum() < 100
    assert int(found["decided"].sum()) == mixed.std_use.skipped
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found["mixed"]), mixed(x), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(
    "clamp",
    [
        pytest.param(clamp, marks=() if clamp == "gelu" else pytest.mark.slow)
        for clamp in CLAMPS.names() or ("gelu", "relu", "elu", "softplus", "linear")
    ],
)
def test_every_clamp_exports_to_onnx(clamp: str, tmp_path: Path) -> None:
    transform = LogitTransform(2.0, 2.5, -0.7, clamp=clamp, ln_k=5)  # type: ignore[arg-type]
    assert max(export_graphs(mixture(transform), SHAPE, tmp_path, ("onnx",)).values()) <= TOLERANCE


def test_a_library_network_with_batch_norm_exports(tmp_path: Path) -> None:
    uri = "torchvision:resnet18?weights=none&num_classes=10&seed=1"
    net = load_classifier(uri, "std")
    mixed = MixedClassifier(net, net, LogitTransform(1.0, 2.0, -0.5), 0.99)
    assert max(export_graphs(mixed, (3, 32, 32), tmp_path, ("torch",)).values()) <= TOLERANCE


class BranchesOnPixels(nn.Module):
    """What no graph can hold."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, :10] if x.sum() > 0 else x.flatten(1)[:, 10:20]


def test_a_classifier_that_cannot_be_traced_is_told(tmp_path: Path) -> None:
    rob = load_classifier("demo:rob", "rob")
    mixed = MixedClassifier(BranchesOnPixels(), rob, LogitTransform(5, 4, -1.1), 0.9)
    with pytest.raises(InvalidInputError, match=r"torch\.export cannot trace mixed with a dynamic number of images"):
        export_graphs(mixed, SHAPE, tmp_path, ("torch",))


def test_without_the_onnx_packages_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(InvalidInputError, match="needs onnxruntime: pip install onnx onnxruntime onnxscript"):
        export_graphs(mixture(), SHAPE, tmp_path, ("onnx",))


def test_the_polynomial_is_erfc_to_the_last_digits() -> None:
    x = torch.cat([torch.linspace(-8, 25, 20_001, dtype=torch.float64), torch.tensor([0.0, 1e-300, -1e-9, 300.0])])
    expected = torch.special.erfc(x)
    torch.testing.assert_close(erfc_by_polynomial(x), expected, rtol=2e-13, atol=math.ulp(0.0))
