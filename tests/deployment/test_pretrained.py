"""A mixed classifier as files: weights, references or both; files that do not fit raise."""

from pathlib import Path

import pytest
import torch

from mixednuts_dist import load_pretrained, save_pretrained
from mixednuts_dist.classifiers.base_classifiers import load_classifier
from mixednuts_dist.deployment.loading import StoredBase, write_folder
from mixednuts_dist.errors import ContentHashMismatch, InvalidInputError
from mixednuts_dist.mixing.classifier import MixedClassifier
from mixednuts_dist.mixing.transforms import (
    IdentityTransform,
    LayerNormTransform,
    LogitMap,
    LogitTransform,
)
from mixednuts_dist.storage.store import Store
from tests.helpers.small_nets import TinyNet, tiny_images, tiny_mixture


def test_saved_weights_come_back(tmp_path: Path) -> None:
    model = tiny_mixture(0.97, temperature=0.2, surrogate_alpha=0.8, rd=0.5)
    save_pretrained(model, tmp_path)
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1, "safetensors alone leaves 0600"
    loaded = load_pretrained(tmp_path, std=TinyNet(10, 8), rob=TinyNet(10, 9))
    assert torch.equal(loaded(tiny_images()), model(tiny_images()))
    assert loaded.mixture.weights() == model.mixture.weights()
    assert repr(loaded.transform) == repr(model.transform)
    with pytest.raises(InvalidInputError, match="std is saved as weights: pass std="):
        load_pretrained(tmp_path, rob=TinyNet(10, 9))
    with pytest.raises(InvalidInputError, match=r"rob\.safetensors does not fit rob, a TinyNet"):
        load_pretrained(tmp_path, std=TinyNet(10, 8), rob=TinyNet(7, 9))


@pytest.mark.parametrize("transform", [IdentityTransform(), LayerNormTransform(5)])
def test_base_classifiers_can_stay_references(tmp_path: Path, transform: LogitMap) -> None:
    model = MixedClassifier(load_classifier("demo:std", "std"), load_classifier("demo:rob", "rob"), transform, 0.99)
    save_pretrained(model, tmp_path, std_uri="demo:std", rob_uri="demo:rob")
    assert [path.name for path in tmp_path.iterdir()] == ["mixed_classifier.json"]
    digits = torch.rand(4, 1, 8, 8)
    assert torch.equal(load_pretrained(str(tmp_path))(digits), model(digits))


def test_saved_weights_load_into_the_architecture_of_the_uri(tmp_path: Path) -> None:
    """Without the checkpoint that the URI names: it may not exist where the folder is loaded."""
    weights = tmp_path / "resnet.pt"
    net = load_classifier("torchvision:resnet18?weights=none&num_classes=10&seed=3", "std")
    torch.save(net.net.state_dict(), weights)  # type: ignore[union-attr]
    uri = f"torchvision:resnet18?checkpoint={weights}&num_classes=10"
    model = MixedClassifier(load_classifier(uri, "std"), load_classifier(uri, "rob"), LogitTransform(1, 2, 0), 0.9)
    folder = tmp_path / "saved"
    write_folder(model, folder, {role: StoredBase(uri, f"{role}.safetensors") for role in ("std", "rob")})
    weights.unlink()
    x = torch.rand(2, 3, 32, 32)
    assert torch.equal(load_pretrained(folder)(x), model(x))


def test_other_weights_than_were_saved_are_refused(tmp_path: Path) -> None:
    std, rob = load_classifier("demo:std", "std"), load_classifier("demo:rob", "rob")
    model = MixedClassifier(std, rob, LogitTransform(5, 4, -1.1), 0.99)
    write_folder(model, tmp_path, {"std": StoredBase("demo:std"), "rob": StoredBase("demo:rob", sha256=64 * "b")})
    with pytest.raises(ContentHashMismatch, match=r"rob='demo:rob': its weights are not those that were saved"):
        load_pretrained(tmp_path)
    assert load_pretrained(tmp_path, rob=rob).rob is rob


@pytest.mark.parametrize("weights", [None, "std.safetensors"])
@pytest.mark.parametrize("uri", ["py:os:mkdir?path=CANARY", "py:FILE:std", "http://127.0.0.1:9/x"])
def test_code_of_an_untrusted_folder_is_not_run(tmp_path: Path, uri: str, weights: str | None) -> None:
    canary, file = tmp_path / "canary", tmp_path / "nets.py"
    file.write_text(f"open({str(canary)!r}, 'w')\n")
    uri = uri.replace("CANARY", str(canary)).replace("FILE", str(file))
    model = MixedClassifier(load_classifier("demo:std"), load_classifier("demo:rob"), LogitTransform(5, 4, -1.1), 0.99)
    write_folder(model, tmp_path / "saved", {"std": StoredBase(uri, weights), "rob": StoredBase("demo:rob")})
    with pytest.raises(InvalidInputError, match=r"which is run only if you ask .*trust_code=True"):
        load_pretrained(tmp_path / "saved")
    assert not canary.exists()
    assert load_pretrained(tmp_path / "saved", std=load_classifier("demo:std")).alpha == model.alpha


def test_a_folder_in_a_bucket_loads(tmp_path: Path, object_store: object) -> None:
    model = tiny_mixture()
    save_pretrained(model, tmp_path)
    uri = object_store.uri("pretrained")  # type: ignore[attr-defined]
    for path in tmp_path.iterdir():
        Store(uri).write(path.name, path.read_bytes())
    loaded = load_pretrained(uri, std=TinyNet(10, 8), rob=TinyNet(10, 9))
    assert torch.equal(loaded(tiny_images()), model(tiny_images()))


def test_files_that_hold_no_mixture_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"mixed_classifier\.json does not exist"):
        load_pretrained(tmp_path)
    (tmp_path / "mixed_classifier.json").write_text('{"version": 99}')
    with pytest.raises(InvalidInputError, match="has version 99, this package reads version 2"):
        load_pretrained(tmp_path)
    (tmp_path / "mixed_classifier.json").write_text("{")
    with pytest.raises(InvalidInputError, match=r"mixed_classifier\.json is damaged"):
        load_pretrained(tmp_path)
    own = tiny_mixture(transform=type("Mine", (LogitMap,), {})())
    with pytest.raises(InvalidInputError, match="a transform of type Mine cannot be saved"):
        save_pretrained(own, tmp_path)


def test_a_model_of_the_hub_that_is_not_at_hand_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(InvalidInputError, match=r"hf:org/no-such-model is not in the local cache and cannot"):
        load_pretrained("hf:org/no-such-model")
