"""Import RobustBench, and load `robustbench:MODEL?dataset=cifar10&threat=Linf`.

Workers never download weights. Options: `model_dir` (with `<dataset>/<threat>/<MODEL>.pt`), `weights=none&seed=0`
(random weights), and, for Bai2024MixedNUTS alone, `part=std`, the published standard classifier. The published robust
classifier is a separate model of the zoo.

robustbench 1.1.1 imports `autoattack` but depends on pyautoattack, the same code with another name and other arguments.
It also imports pkg_resources, which setuptools 81 removed (hence the pin), and its classes print messages.
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlencode

from torch import Tensor, nn

from ..config.register import CLASSIFIERS
from ..config.uris import ClassifierSource, Missing
from ..errors import BaseClassifierError
from ..mixing.classifier import MixedClassifier
from ..selection.choice import Choice
from .checkpoints import checkpoint_problem, import_quietly, load_weights, quietly, tensors_only
from .model_libraries import no_model

MODEL_DIR = "models"
MIXTURE = "Bai2024MixedNUTS"
_ROBUST_PARTS = {
    "cifar10": "Peng2023Robust",
    "cifar100": "Wang2023Better_WRN-70-16",
    "imagenet": "Liu2023Comprehensive_Swin-L",
}
# The standard classifiers' own addresses (README of Bai-YT/MixedNUTS), which do not have Google Drive's quota.
_STD_URLS = {
    "cifar10": "https://huggingface.co/Bai-YT/MixedNUTS/resolve/main/cifar10_std_rn152.pt",
    "cifar100": "https://huggingface.co/Bai-YT/MixedNUTS/resolve/main/cifar100_std_rn152.pt",
    "imagenet": "https://dl.fbaipublicfiles.com/convnext/convnextv2/im22k/convnextv2_large_22k_224_ema.pt",
}
_N_CLASSES = {"cifar10": 10, "cifar100": 100, "imagenet": 1000}
_ARCHITECTURES = "robustbench.model_zoo.architectures"
_UNUSED_BY_FORWARD = {"mean", "std", "mu", "sigma", "normalize.mean", "normalize.std"}


def import_robustbench(name: str = "robustbench") -> ModuleType:
    """Import robustbench or one of its modules, after which `import robustbench` works everywhere in this process."""
    try:
        importlib.import_module("autoattack")
    except ImportError:
        _alias_autoattack()
    return import_quietly(name)


def _alias_autoattack() -> None:
    """Add the modules `autoattack` and `autoattack.state`, which call pyautoattack with the original arguments."""
    published, state = import_quietly("pyautoattack"), import_quietly("pyautoattack.state")

    class AutoAttack(published.AutoAttack):  # type: ignore[misc,name-defined]
        def __init__(self, model: Any, *, log_path: str | None = None, **options: Any) -> None:
            if log_path is not None:
                raise BaseClassifierError("pyautoattack writes no log file. Leave out log_path")
            super().__init__(model, **options)

        def run_standard_evaluation(
            self, x_orig: Tensor, y_orig: Tensor, *, bs: int = 250, state_path: Path | None = None
        ) -> Tensor:
            if state_path is not None:
                raise BaseClassifierError("pyautoattack cannot resume from a saved state. Leave out aa_state_path")
            x_adv: Tensor = super().run_standard_evaluation(x_orig, y_orig, batch_size=bs)[0]
            return x_adv

    alias = ModuleType("autoattack")
    alias.AutoAttack, alias.state = AutoAttack, state  # type: ignore[attr-defined]
    sys.modules.update({"autoattack": alias, "autoattack.state": state})


def robustbench_file(relative: str) -> Path:
    """Return the path of a file of the package without importing the package."""
    spec = importlib.util.find_spec("robustbench")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / relative


def zoo_models(dataset: str, threat: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the models of the zoo by name: how each is built, and the Google Drive id, or ids, of its files."""
    zoo = import_robustbench("robustbench.model_zoo")
    models: Mapping[str, Mapping[str, Any]] = zoo.model_dicts[zoo.models.BenchmarkDataset(dataset)].get(
        zoo.models.ThreatModel(threat), {}
    )
    return models


def missing_weights(uri: ClassifierSource) -> Iterator[Missing]:
    """List the missing files of `robustbench:` URIs."""
    if uri.option("weights") == "none":
        return
    for part in _parts(uri) or (uri,):
        for path, drive_id in _weight_files(part):
            if checkpoint_problem(path):
                url = f"https://drive.usercontent.google.com/download?id={drive_id}&export=download&confirm=t"
                command = f"mkdir -p {path.parent} && gdown {drive_id} -O {path}"
                if part.option("part") is not None:
                    url = _STD_URLS[_benchmark(part)[0]]
                    command = f"curl -L --create-dirs -o {path} {url} (or {command})"
                yield Missing(f"the weights of {part.target}", str(path.absolute()), command, url)


@CLASSIFIERS("robustbench", describes="a model of RobustBench's zoo", order=2,
             forms=("robustbench:MODEL?dataset=cifar10&threat=Linf",), target="text",
             options={"dataset": "cifar10|cifar100|imagenet", "threat": "Linf|L2|corruptions", "part": "std",
                      "model_dir": "text", "weights": "none", "seed": "number"},
             random_weights=True, missing="missing_weights")  # fmt: skip
def load_zoo_model(uri: ClassifierSource) -> nn.Module:
    """Build the model with its published weights, or for `weights=none` with random ones.

    Raises:
        BaseClassifierError: for an unknown name, or missing or damaged weights (with the command that downloads them).
    """
    dataset, threat = _benchmark(uri)
    if parts := _parts(uri):
        std, rob = (load_zoo_model(part) for part in parts)
        return MixedClassifier.from_mixture(std, rob, Choice.published(dataset).mixture()).eval()
    files = _weight_files(uri)
    if uri.option("weights") == "none":
        return _random_model(uri)
    for item in missing_weights(uri):
        raise BaseClassifierError(f"{checkpoint_problem(Path(item.path))}: {item.command}")
    if uri.option("part") is not None:
        return load_weights(_random_model(uri), files[0][0], may_lack=_UNUSED_BY_FORWARD)
    load = import_robustbench("robustbench.utils").load_model
    folder = uri.option("model_dir", MODEL_DIR)
    with quietly(), tensors_only():
        model: nn.Module = load(uri.target, model_dir=folder, dataset=dataset, threat_model=threat)
    return model


def _benchmark(uri: ClassifierSource) -> tuple[str, str]:
    return uri.option("dataset") or "cifar10", uri.option("threat") or "Linf"


def _parts(uri: ClassifierSource) -> tuple[ClassifierSource, ...]:
    """Return the base classifiers "std" and "rob" if `uri` is the published mixed classifier, otherwise ()."""
    if uri.target != MIXTURE or uri.option("part") is not None:
        return ()
    dataset, threat = _benchmark(uri)
    if threat != "Linf":
        raise BaseClassifierError(f"{MIXTURE} is published for threat=Linf, not {threat}. Leave out threat={threat}")
    std = f"{uri.scheme}:{MIXTURE}?{urlencode([*uri.options, ('part', 'std')])}"
    return ClassifierSource(std), ClassifierSource(f"{uri.scheme}:{_ROBUST_PARTS[dataset]}?{urlencode(uri.options)}")


def _weight_files(uri: ClassifierSource) -> list[tuple[Path, str]]:
    """Return RobustBench's files of the weights, and their Google Drive ids; [] if another library fetches them."""
    dataset, threat = _benchmark(uri)
    names, part = zoo_models(dataset, threat), uri.option("part")
    if uri.target not in names:
        raise no_model(f"RobustBench's zoo for dataset={dataset}&threat={threat}", uri.target, names)
    if part is not None and uri.target != MIXTURE:
        raise BaseClassifierError(f"{uri.target} has no parts; only {MIXTURE} takes part=std")
    ids = names[uri.target].get("gdrive_id")
    path = Path(uri.option("model_dir") or MODEL_DIR, dataset, threat, f"{uri.target}.pt")
    if isinstance(ids, list):
        files = [(path.with_name(f"{path.name}_m{i}.pt"), drive_id) for i, drive_id in enumerate(ids)]
        return files if part is None else files[:1]
    return [(path, ids)] if ids else []


def _random_model(uri: ClassifierSource) -> nn.Module:
    """Build a model of the zoo, or the published `std`, with random weights.

    The published `std` is a BiT ResNet-152x2 on CIFAR, and ConvNeXt V2-L without normalization on ImageNet.
    """
    dataset, threat = _benchmark(uri)
    n_classes = _N_CLASSES[dataset]
    with quietly():
        if uri.option("part") is None:
            entry = zoo_models(dataset, threat)[uri.target]  # the zoo registers some of its models in timm
            timm, registered = import_quietly("timm"), f"{uri.target}_{dataset}_{threat}".lower().replace("-", "_")
            if timm.is_model(registered):
                return timm.create_model(registered, num_classes=n_classes)  # type: ignore[no-any-return]
            return entry["model"]()  # type: ignore[no-any-return]
        if dataset == "imagenet":
            return import_robustbench(f"{_ARCHITECTURES}.convnext_v2").convnextv2_large(num_classes=n_classes)  # type: ignore[no-any-return]
        make = import_robustbench(f"{_ARCHITECTURES}.bit_rn_v2").KNOWN_MODELS["BiT-M-R152x2"]
        return make(head_size=n_classes, zero_head=False, return_features=False)  # type: ignore[no-any-return]
