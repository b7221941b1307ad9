"""URIs: each invalid form raises at once, without torch, and lists the valid ones."""

import pickle

import pytest

from mixednuts_dist.config.run_config import parse_config
from mixednuts_dist.config.uris import ClassifierSource, DatasetSource
from mixednuts_dist.errors import BaseClassifierError, ConfigError, DatasetError


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("mnist", "valid forms: digits, cifar10.*npz:FILE, parquet:URI"),
        ("cifr10", r"valid forms: digits.*; did you mean 'cifar10'\?"),
        ("npz", "valid forms: npz:FILE"),
        ("images.npz", r"did you mean 'npz:images.npz'\?"),
        ("s3://bucket/part.parquet", r"did you mean 'parquet:s3://bucket/part.parquet'\?"),
        ("digits:train", "'train' is too much; valid forms: digits"),
        ("npz:nowhere.npz", "no file .*nowhere.npz"),
        ("folder:nowhere", "no folder .*nowhere"),
        ("imagenet:", "valid forms: imagenet:ROOT"),
        ("parquet:", "valid forms: parquet:URI"),
        ("cifar10?size=3", "unknown option 'size'; this form takes none"),
        ("folder:.?resize=3", "unknown option 'resize'; valid options: preprocess"),
        ("folder:.?preprocess=Resize256", "preprocess='Resize256'.*Res256Crop224"),
        ("folder:.?preprocess=Bicubic", "preprocess='Bicubic'"),
        ("folder:.?preprocess=Res0", "preprocess='Res0'"),
    ],
)
def test_a_wrong_dataset_is_refused_with_the_valid_forms(uri: str, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        DatasetSource(uri).check("data.uri")


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("resnet18", "robustbench:MODEL.*torchvision:NAME.*timm:NAME.*hf:ORG/NAME.*py:"),
        ("tim:resnet18", r"did you mean 'timm'\?"),
        ("demo:best", "demo:std, demo:rob, demo:rob_light, demo:noisy"),
        ("demo:std?seed=1", "unknown option 'seed'; this form takes none"),
        ("robustbench:", "valid forms: robustbench:MODEL"),
        ("robustbench:X?dataset=mnist", "dataset='mnist' is not one of cifar10, cifar100, imagenet"),
        ("robustbench:X?threat=linf", "threat='linf' is not one of Linf, L2"),
        ("robustbench:X?treat=Linf", r"unknown option 'treat'; valid options: dataset.*; did you mean 'threat'\?"),
        ("timm:x?checkpoint=nowhere.pt", "no file .*nowhere.pt"),
        ("timm:x?weights=none&seed=first", "seed='first' is not a whole number"),
        ("torchvision:x?num_classes=-1", "num_classes='-1'"),
        ("hf:resnet18", "valid forms: hf:ORG/NAME"),
        ("py:zoo.py", "valid forms: py:package.module:factory"),
        ("py:nowhere.py:f", "no file .*nowhere.py"),
        ("callable:f", "valid forms: callable:"),
        ("http:", "valid forms: http://HOST/PATH"),
        ("https://user:word@host/x", "user name or password"),
    ],
)
def test_a_wrong_classifier_is_refused_with_the_valid_forms(uri: str, message: str) -> None:
    with pytest.raises(BaseClassifierError, match=message) as caught:
        ClassifierSource(uri).check("std")
    assert "user:word" not in str(caught.value)


@pytest.mark.parametrize("uri", ["callable:os:getcwd", "http://localhost/x", "https://host/x#classes=10"])
def test_black_box_rob_needs_the_method_square(uri: str) -> None:
    content = {"name": "x", "data": {"uri": "digits"}, "std": uri, "rob": uri, "threat": {"eps": 0.1}}
    with pytest.raises(ConfigError, match=r"black box without gradients.*attack\.method: square"):
        parse_config(content)
    config = parse_config({**content, "attack": {"method": "square"}})
    assert config.evaluate.attacks == ("square",)
    with pytest.raises(ConfigError, match="'fab-t' needs the gradients"):
        parse_config({**content, "attack": {"method": "square"}, "evaluate": {"attacks": ["square", "fab-t"]}})


def test_a_black_box_keeps_its_query_and_its_fragment_apart() -> None:
    parsed = ClassifierSource("http://host:80/classify?model=a#classes=10")
    assert (parsed.target, parsed.option("model"), parsed.fragment) == ("//host:80/classify", "a", "classes=10")
    assert ClassifierSource("py:a#b.py:f").target == "a#b.py:f"


def test_a_source_travels_with_its_object_and_as_it_was_written() -> None:
    placed = ClassifierSource("py:nets.py:rob?depth=3").located(lambda path: f"/job/{path}")
    held = ClassifierSource.holding({"any": "module"}, 64 * "0")
    for source in (placed, held):
        there = pickle.loads(pickle.dumps(source))
        assert vars(there) == vars(source) and there == source
    assert (placed.written, placed.code_file) == ("py:nets.py:rob?depth=3", "/job/nets.py")
    assert held.open("rob") == {"any": "module"}
