"""torchvision, timm and the Hugging Face hub: real models that normalize their inputs, and errors for missing ones."""

from pathlib import Path

import pytest
import torch
from torch import nn

from mixednuts_dist.classifiers.base_classifiers import (
    Normalized,
    check_classifier,
    classifier_checksum,
    load_classifier,
)
from mixednuts_dist.classifiers.checkpoints import import_quietly
from mixednuts_dist.errors import BaseClassifierError

TINY = "test_byobnet"  # half a million parameters


def built(uri: str) -> Normalized:
    model = load_classifier(uri, "rob")
    assert isinstance(model, Normalized)
    return model


@pytest.mark.parametrize(
    ("uri", "mean"),
    [
        (f"timm:{TINY}?weights=none", 0.485),
        ("timm:test_vit?weights=none", 0.5),
        ("torchvision:shufflenet_v2_x0_5?weights=none", 0.485),
    ],
)
def test_a_library_model_is_normalised_inside_frozen_and_honest(uri: str, mean: float) -> None:
    model, x = built(uri), torch.rand(2, 3, 160, 160)
    assert float(model.mean.flatten()[0]) == pytest.approx(mean)
    assert torch.allclose(model(x), model.net((x - model.mean) / model.std))
    assert check_classifier(model, x, "rob") == 1000
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_random_weights_follow_their_seed() -> None:
    sums = {
        query: classifier_checksum(load_classifier(f"timm:{TINY}?weights=none{query}", "std"), f"timm:{TINY}")
        for query in ("", "&seed=0", "&seed=1")
    }
    assert sums[""] == sums["&seed=0"] != sums["&seed=1"]


@pytest.mark.parametrize("name", [f"timm:{TINY}", "torchvision:shufflenet_v2_x0_5"])
def test_a_local_checkpoint_is_loaded_into_the_library_s_class(tmp_path: Path, name: str) -> None:
    random = built(f"{name}?weights=none&seed=5&num_classes=7")
    torch.save({"state_dict": random.net.state_dict()}, tmp_path / "w.pt")
    loaded = built(f"{name}?checkpoint={tmp_path / 'w.pt'}&num_classes=7")
    x = torch.rand(2, 3, 64, 64)
    assert torch.equal(loaded(x), random(x))
    assert loaded(x).shape == (2, 7)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache as a download leaves it, in a separate folder and without a network."""
    constants = import_quietly("huggingface_hub").constants
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def test_hub_model_has_its_own_normalization(hub: Path) -> None:
    timm = import_quietly("timm")
    net = timm.create_model(TINY, num_classes=5).eval()
    revision = "0123456789abcdef0123456789abcdef01234567"
    repository = hub / "models--lab--net"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    net.pretrained_cfg = {**net.pretrained_cfg, "mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}
    timm.models._hub.save_for_hf(net, repository / "snapshots" / revision)
    model, x = built("hf:lab/net"), torch.rand(2, 3, 64, 64)
    assert model.mean.flatten().tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert torch.allclose(model(x), net((x - model.mean) / model.std), atol=1e-6)


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("uri", ["hf:lab/other", "timm:resnet18.a1_in1k"])
def test_without_a_network_the_cache_is_named(uri: str) -> None:
    with pytest.raises(BaseClassifierError, match=r"std=.*not in the local cache.*HF_HOME"):
        load_classifier(uri, "std")


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("timm:resnt18", "timm has no model 'resnt18'; close ones: resnet18"),
        ("torchvision:resnt18", "torchvision has no model 'resnt18'; close ones: resnet18"),
        ("torchvision:resnet18?weights=BEST", "no weights 'BEST'; valid: IMAGENET1K_V1, DEFAULT, none"),
        (f"timm:{TINY}?num_classes=3&checkpoint={{path}}", "does not fit ByobNet"),
    ],
)
def test_what_a_library_does_not_have_is_told_with_what_it_has(tmp_path: Path, uri: str, message: str) -> None:
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "w.pt")
    with pytest.raises(BaseClassifierError, match=message):
        load_classifier(uri.format(path=tmp_path / "w.pt"), "std")
