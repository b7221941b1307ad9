"""RobustBench's PyPI package: importable, its weights where it looks for them, its classes with random ones."""

import sys
from pathlib import Path

import pyautoattack
import pytest
import torch

from mixednuts_dist.classifiers.base_classifiers import check_classifier, classifier_checksum, load_classifier
from mixednuts_dist.classifiers.robustbench_zoo import import_robustbench
from mixednuts_dist.errors import BaseClassifierError

SMALL = "Sehwag2021Proxy_R18"  # a ResNet-18: the smallest of the CIFAR-10 zoo


def test_the_package_is_importable_and_brings_its_own_attack() -> None:
    """As it is declared, `import robustbench` fails on `import autoattack`, and warns (an error in this suite)."""
    assert issubclass(import_robustbench("robustbench.eval").AutoAttack, pyautoattack.AutoAttack)
    assert sys.modules["autoattack.state"] is pyautoattack.state


def test_a_zoo_model_equals_robustbench_s_own_loader(tmp_path: Path) -> None:
    uri = f"robustbench:{SMALL}?dataset=cifar10&threat=Linf&model_dir={tmp_path}"
    random = load_classifier(f"robustbench:{SMALL}?weights=none&seed=3", "rob")
    folder = tmp_path / "cifar10" / "Linf"
    folder.mkdir(parents=True)
    torch.save({f"module.{name}": value for name, value in random.state_dict().items()}, folder / f"{SMALL}.pt")
    ours = load_classifier(uri, "rob")
    theirs = import_robustbench("robustbench.utils").load_model(SMALL, model_dir=tmp_path, dataset="cifar10")
    x = torch.rand(2, 3, 32, 32)
    assert torch.equal(ours(x), theirs(x))
    assert torch.equal(ours(x), random(x))
    assert check_classifier(ours, x, "rob") == 10
    before = classifier_checksum(ours, uri)
    state = torch.load(folder / f"{SMALL}.pt", weights_only=True)
    next(iter(state.values())).view(torch.int32).view(-1)[0] ^= 1
    torch.save(state, folder / f"{SMALL}.pt")
    assert classifier_checksum(load_classifier(uri, "rob"), uri) != before


def test_zoo_model_that_timm_builds_has_the_classes_of_its_dataset() -> None:
    model = load_classifier("robustbench:Debenedetti2022Light_XCiT-S12?dataset=cifar100&weights=none")
    assert model(torch.rand(1, 3, 32, 32)).shape == (1, 100)


def test_missing_weights_name_path_and_command(tmp_path: Path) -> None:
    with pytest.raises(BaseClassifierError) as caught:
        load_classifier(f"robustbench:{SMALL}?model_dir={tmp_path}", "rob")
    place, message = tmp_path / "cifar10" / "Linf" / f"{SMALL}.pt", str(caught.value)
    cifar10_linf = next(iter(next(iter(import_robustbench("robustbench.model_zoo").model_dicts.values())).values()))
    assert f"there is no checkpoint {place}" in message
    assert f"mkdir -p {place.parent} && gdown {cifar10_linf[SMALL]['gdrive_id']} -O {place}" in message
    assert list(tmp_path.iterdir()) == [], "nothing was fetched or made"
    place.parent.mkdir(parents=True)
    place.write_text("<!DOCTYPE html><title>Google Drive - Virus scan warning</title>")
    with pytest.raises(BaseClassifierError, match=r"is a web page, not a checkpoint.*gdown \S+ -O"):
        load_classifier(f"robustbench:{SMALL}?model_dir={tmp_path}", "rob")


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("robustbench:Sehwag2021", f"dataset=cifar10&threat=Linf has no model 'Sehwag2021'; close ones: .*{SMALL}"),
        (f"robustbench:{SMALL}?dataset=imagenet", f"dataset=imagenet&threat=Linf has no model '{SMALL}'"),
        (f"robustbench:{SMALL}?part=std", "has no parts; only Bai2024MixedNUTS"),
        ("robustbench:Standard_R50?threat=L2&dataset=imagenet", "close ones: none"),
    ],
)
def test_an_unknown_model_is_told_with_close_names(uri: str, message: str) -> None:
    with pytest.raises(BaseClassifierError, match=message):
        load_classifier(uri, "rob")


def test_published_std_loads_as_in_its_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """BiT with the depth of 50 layers instead of 152: the class and the file are RobustBench's, the size is not."""
    zoo = import_robustbench("robustbench.model_zoo.architectures.bit_rn_v2").KNOWN_MODELS
    monkeypatch.setitem(zoo, "BiT-M-R152x2", zoo["BiT-M-R50x1"])
    random = load_classifier("robustbench:Bai2024MixedNUTS?part=std&weights=none&seed=4", "std")
    folder = tmp_path / "cifar10" / "Linf"
    folder.mkdir(parents=True)
    learned = {name: value for name, value in random.state_dict().items() if name not in ("mean", "std")}
    path = folder / "Bai2024MixedNUTS.pt_m0.pt"
    torch.save({"model": {f"module.{name}": value for name, value in learned.items()}}, path)
    uri = f"robustbench:Bai2024MixedNUTS?part=std&model_dir={tmp_path}"
    x = torch.rand(1, 3, 32, 32)
    assert torch.equal(load_classifier(uri, "std")(x), random(x))
    learned.pop("root.conv.weight")
    torch.save(learned, path)
    with pytest.raises(BaseClassifierError, match=r"Missing key.*root\.conv\.weight"):
        load_classifier(uri, "std")
