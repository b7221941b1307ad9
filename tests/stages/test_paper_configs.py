"""The paper's three experiments by name: everything but the weights, which cannot be fetched here."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mixednuts_dist.classifiers import robustbench_zoo
from mixednuts_dist.classifiers.base_classifiers import load_classifier, measure_uris
from mixednuts_dist.classifiers.checkpoints import quietly
from mixednuts_dist.classifiers.robustbench_zoo import import_robustbench
from mixednuts_dist.config.keys import grid_values
from mixednuts_dist.config.run_config import RunConfig, load_config
from mixednuts_dist.config.uris import ClassifierSource, DatasetSource
from mixednuts_dist.mixing.classifier import MixedClassifier
from mixednuts_dist.selection.choice import Choice, published_grid

CONFIGS = Path(__file__).parents[2] / "jobs" / "configs"
EXPERIMENTS = ("cifar10", "cifar100", "imagenet")
N_CLASSES = {"cifar10": 10, "cifar100": 100, "imagenet": 1000}
ZOO = "robustbench.model_zoo.architectures"

# Millions of parameters and GFLOPs of one image; the paper's efficiency table has the same parameters (ImageNet's two
# are swapped there) and 30.00, 121.02, 77.56, 68.79 and 68.12 GFLOPs from another counter.
SIZES = {
    "cifar10": {"std": (232.3, 29.9), "rob": (267.2, 120.9), "mixed": (499.5, 150.9)},
    "cifar100": {"std": (232.6, 29.9), "rob": (266.9, 77.5), "mixed": (499.5, 107.4)},
    "imagenet": {"std": (198.0, 68.7), "rob": (196.5, 69.0), "mixed": (394.5, 137.7)},
}


def config_of(name: str) -> RunConfig:
    return load_config(CONFIGS / f"{name}.yaml")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_settings_are_the_paper_s(name: str, tmp_path: Path) -> None:
    config, grid = config_of(name), published_grid(name)
    search = config.search
    assert grid_values(search.scales) == pytest.approx(grid.scales)
    assert grid_values(search.powers) == pytest.approx(grid.powers)
    assert grid_values(search.biases) == pytest.approx(grid.biases)
    assert (search.criterion, search.clamp) == ("paper-interpolated", "gelu")
    assert (search.beta, search.ln_k) == ((0.99, 250) if name == "imagenet" else (0.985, None))
    assert config.threat.eps == pytest.approx(float(Fraction(4 if name == "imagenet" else 8, 255)))
    assert search.first == 1000
    assert config.data.n == (5000 if name == "imagenet" else 10000)
    assert (config.attack.n_iter, config.attack.n_target_classes, config.evaluate.n_queries) == (100, 9, 5000)
    assert (config.evaluate.rd, config.evaluate.mode) == (0.9, "transfer")
    for role, uri in (("std", config.std), ("rob", config.rob)):
        ClassifierSource(uri).check(role)
    DatasetSource(config.data.uri.replace("data/imagenet", str(tmp_path))).check("data.uri")


def test_published_parameters_equal_robustbench() -> None:
    """robustbench's `optimal_spca.yaml` is the published classifiers' own file of settings."""
    import yaml

    folder = Path(import_robustbench(ZOO).__file__ or "").parent
    shipped = yaml.safe_load((folder / "optimal_spca.yaml").read_text())
    for name in EXPERIMENTS:
        config, published = config_of(name), Choice.published(name)
        ((model, entry),) = shipped[name].items()
        assert config.rob.startswith(f"robustbench:{model}?")
        plain = entry["none"]["default_beta"]
        assert config.search.surrogate_beta == pytest.approx(plain / 100)
        assert published.surrogate_alpha == pytest.approx(entry["none"][plain]["alpha"], abs=1e-7)
        chosen = entry["gelu"][100 * config.search.beta]
        assert [published.scale, published.power, published.bias] == pytest.approx([chosen[key] for key in "spc"])


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_describe_gives_the_efficiency_table_without_weights(name: str) -> None:
    config = config_of(name)
    assert config.data.uri.image_shape is not None
    sizes = measure_uris(config.std, config.rob, config.data.uri.image_shape)
    for role, (millions, gigaflops) in SIZES[name].items():
        size = sizes[role]
        assert size is not None
        assert round(size.parameters / 1e6, 1) == millions
        assert round(size.flops / 1e9, 1) == gigaflops


@pytest.mark.soak
@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("role", ["std", "rob"])
def test_the_classes_answer_one_image_with_random_weights(name: str, role: str) -> None:
    """The real size, about 1 GB and 10 s each; `describe` above sends an image through all six on the meta device."""
    uri: str = getattr(config_of(name), role)
    model = load_classifier(f"{uri}&weights=none", role)
    shape = config_of(name).data.uri.image_shape
    assert shape is not None
    with torch.no_grad():
        logits = model(torch.rand(1, *shape))
    assert logits.shape == (1, N_CLASSES[name])
    assert bool(torch.isfinite(logits).all())


@pytest.fixture
def small_zoo(monkeypatch: pytest.MonkeyPatch) -> None:
    """RobustBench's builder of the mixed classifier with smaller networks of the same families."""
    composite = import_robustbench(f"{ZOO}.comp_model")
    wide: Any = import_robustbench(f"{ZOO}.dm_wide_resnet").DMWideResNet
    zoo, swish = composite.bit_rn_v2.KNOWN_MODELS, nn.SiLU
    monkeypatch.setitem(zoo, "BiT-M-R152x2", zoo["BiT-M-R50x1"])
    monkeypatch.setattr(composite, "get_robustarch_model", lambda _: wide(10, depth=10, width=1, activation_fn=swish))
    monkeypatch.setattr(composite, "DMWideResNet", lambda **options: wide(**{**options, "depth": 10, "width": 1}))


@pytest.mark.usefixtures("small_zoo")
def test_mixed_classifier_equals_bai2024mixednuts() -> None:
    with quietly(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = import_robustbench("robustbench.model_zoo").model_dicts
        benchmark = next(key for key in theirs if key.value == "cifar100")
        mixture = next(iter(theirs[benchmark].values()))["Bai2024MixedNUTS"]["model"]().eval()
        x = torch.rand(12, 3, 32, 32)
    ours = MixedClassifier.from_mixture(mixture.std_model, mixture.rob_model, Choice.published("cifar100").mixture())
    with torch.no_grad(), quietly():
        expected, surrogate, _ = mixture(x, return_all=True)
        std_classes, rob_classes = mixture.std_model(x).argmax(dim=1), mixture.rob_model(x).argmax(dim=1)
        found = ours(x)
        assert torch.allclose(found.softmax(dim=1), expected.softmax(dim=1), atol=1e-6)
        visible = torch.isfinite(expected) & (expected > -80)  # theirs mixes in float32: log(0) below
        assert torch.allclose(found[visible], expected[visible], rtol=1e-4, atol=1e-4)
        assert torch.allclose(ours.surrogate_logits(x), surrogate, rtol=1e-4, atol=1e-4)
    assert torch.equal(found.argmax(dim=1), expected.argmax(dim=1))
    assert bool((std_classes != rob_classes).any()), "the two base classifiers never disagree: nothing was mixed"


@pytest.mark.usefixtures("small_zoo")
def test_the_published_mixture_loads_as_a_mixed_classifier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(robustbench_zoo, "_ROBUST_PARTS", {"cifar10": "Sehwag2021Proxy_R18"})
    uri = "robustbench:Bai2024MixedNUTS?dataset=cifar10"
    mixed = load_classifier(f"{uri}&weights=none&seed=5", "rob")
    std = load_classifier(f"{uri}&part=std&weights=none&seed=5", "std")
    rob = load_classifier("robustbench:Sehwag2021Proxy_R18?dataset=cifar10&weights=none", "rob")
    assert isinstance(mixed, MixedClassifier)
    x = torch.rand(4, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(mixed.std(x), std(x))
    assert type(mixed.rob) is type(rob)
    ours, published = mixed.mixture, Choice.published("cifar10").mixture()
    assert ours.settings() == published.settings()
    assert (ours.alpha, ours.surrogate_alpha) == (published.alpha, published.surrogate_alpha)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_missing_input_names_both_weights_of_a_mixture(name: str, tmp_path: Path) -> None:
    config = config_of(f"published-{name}")
    missing = list(ClassifierSource(f"{config.rob}&model_dir={tmp_path}").missing("rob"))
    rob = robustbench_zoo._ROBUST_PARTS[name]
    assert [Path(item.path).name for item in missing] == ["Bai2024MixedNUTS.pt_m0.pt", f"{rob}.pt"]
    assert config.std is None
    assert config.threat.eps == config_of(name).threat.eps
    assert config.data == config_of(name).data
