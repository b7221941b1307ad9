"""Import RobustBench, and load `robustbench:MODEL?dataset=cifar10&threat=Linf`.

The models are RobustBench's classes with its weights. Workers never download weights: if some are missing, the error
has the command. Options: `model_dir` (with `<dataset>/<threat>/<MODEL>.pt`), `weights=none&seed=0` (random weights),
and, for Bai2024MixedNUTS alone, `part=std`, the published standard classifier. Its robust classifier is a model of the
zoo.

robustbench 1.1.1 imports `autoattack` but depends on pyautoattack, the same code with another name and other arguments.
It also imports pkg_resources, which setuptools 81 removed (hence the pin), and its classes print messages.
"""

import ast
import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from ..config.register import CLASSIFIERS
from ..config.uris import ClassifierSource, Missing
from ..errors import BaseClassifierError
from .checkpoints import import_quietly, quietly, read_state_dict, require_checkpoint, tensors_only

if TYPE_CHECKING:
    from torch import Tensor, nn

MODEL_DIR = "models"
MIXTURE = "Bai2024MixedNUTS"
_ROBUST_PARTS = {
    "cifar10": "Peng2023Robust",
    "cifar100": "Wang2023Better_WRN-70-16",
    "imagenet": "Liu2023Comprehensive_Swin-L",
}
# The standard classifiers' own addresses (README of Bai-YT/MixedNUTS), which do not have Google Drive's quota.
_STD_MIRRORS = {
    "cifar10": "https://huggingface.co/Bai-YT/MixedNUTS/resolve/main/cifar10_std_rn152.pt",
    "cifar100": "https://huggingface.co/Bai-YT/MixedNUTS/resolve/main/cifar100_std_rn152.pt",
    "imagenet": "https://dl.fbaipublicfiles.com/convnext/convnextv2/im22k/convnextv2_large_22k_224_ema.pt",
}
_N_CLASSES = {"cifar10": 10, "cifar100": 100, "imagenet": 1000}
_ARCHITECTURES = "robustbench.model_zoo.architectures"
_UNUSED_BY_FORWARD = {"mean", "std", "mu", "sigma", "normalize.mean", "normalize.std"}
_SOURCE_NAMES = {"Linf": "linf", "L2": "l2", "corruptions": "common_corruptions"}  # names in the zoo's source


def import_robustbench(name: str = "robustbench") -> ModuleType:
    """Import robustbench or one of its modules. Then `import robustbench` works everywhere in this process.

    `robustbench.eval.benchmark(model, eps=8 / 255, ...)` works too: the `autoattack` that it finds takes the arguments
    that it passes.

    Raises:
        BaseClassifierError: if its dependencies are broken, with what to install.
    """
    try:
        importlib.import_module("autoattack")
    except ImportError:
        _alias_autoattack()
    try:
        return import_quietly(name)
    except ImportError as error:
        raise BaseClassifierError(
            f"{name} cannot be imported: {error}; it needs pkg_resources: pip install 'setuptools<81' pyautoattack"
        ) from error


def _alias_autoattack() -> None:
    """Add the modules `autoattack` and `autoattack.state`, which call pyautoattack with the original arguments."""
    published, state = import_quietly("pyautoattack"), import_quietly("pyautoattack.state")

    class AutoAttack(published.AutoAttack):  # type: ignore[misc,name-defined]
        """pyautoattack's attack with the arguments of the original."""

        def __init__(
            self, model: Any, norm: str = "Linf", eps: float = 0.3, *, log_path: str | None = None, **others: Any
        ) -> None:
            if log_path is not None:
                raise BaseClassifierError("pyautoattack writes no log file: leave log_path out")
            super().__init__(model, norm=norm, eps=eps, **others)

        def run_standard_evaluation(
            self, x_orig: "Tensor", y_orig: "Tensor", bs: int = 250, *, return_labels: bool = False,
            state_path: Path | None = None,
        ) -> Any:  # fmt: skip
            if state_path is not None:
                raise BaseClassifierError("pyautoattack cannot resume from a saved state: leave aa_state_path out")
            x_adv, y_adv = super().run_standard_evaluation(x_orig, y_orig, batch_size=bs)
            return (x_adv, y_adv) if return_labels else x_adv

    alias = ModuleType("autoattack")
    alias.AutoAttack, alias.state = AutoAttack, state  # type: ignore[attr-defined]
    sys.modules.update({"autoattack": alias, "autoattack.state": state})


def robustbench_file(relative: str) -> Path:
    """Return the path of a file of the package without importing the package."""
    spec = importlib.util.find_spec("robustbench")
    if spec is None or not spec.submodule_search_locations:
        raise BaseClassifierError("robustbench is not installed: pip install robustbench")
    return Path(spec.submodule_search_locations[0]) / relative


def drive_ids(dataset: str, threat: str) -> Mapping[str, Any]:
    """Model -> Google Drive id or list of ids of its files, read from the zoo's source: importing it takes seconds.

    The source contains `linf = OrderedDict([("Carmon2019Unlabeled", {"model": ..., "gdrive_id": "..."}), ...])`; models
    without an id are another library's.
    """
    tree = ast.parse(robustbench_file(f"model_zoo/{dataset}.py").read_text(encoding="utf-8"))
    found: dict[str, Any] = {}
    for assignment in tree.body:
        targets = assignment.targets if isinstance(assignment, ast.Assign) else []
        if not any(isinstance(target, ast.Name) and target.id == _SOURCE_NAMES[threat] for target in targets):
            continue
        for node in ast.walk(assignment):
            if isinstance(node, ast.Tuple) and len(node.elts) == 2 and isinstance(node.elts[1], ast.Dict):
                pairs = zip(node.elts[1].keys, node.elts[1].values, strict=True)
                ids = next((v for k, v in pairs if isinstance(k, ast.Constant) and k.value == "gdrive_id"), None)
                found[ast.literal_eval(node.elts[0])] = None if ids is None else ast.literal_eval(ids)
    return found


def missing_weights(uri: ClassifierSource) -> Iterator[Missing]:
    """List the missing files of `robustbench:` URIs."""
    if uri.option("weights") == "none":
        return
    if _is_whole_mixture(uri):
        for part in _parts(uri):
            yield from missing_weights(part)
        return
    ids = drive_ids(*_benchmark(uri))
    if uri.target not in ids:
        raise _no_such_model(uri, list(ids))
    files = _weight_files(uri, ids[uri.target])
    for path, drive_id in files[:1] if uri.option("part") is not None else files:
        try:
            require_checkpoint(path)
        except BaseClassifierError:
            url = f"https://drive.usercontent.google.com/download?id={drive_id}&export=download&confirm=t"
            command = f"mkdir -p {path.parent} && gdown {drive_id} -O {path}"
            missing = Missing(f"the weights of {uri.target}", str(path.absolute()), command, url)
            if uri.option("part") is not None:
                mirror = _STD_MIRRORS[_benchmark(uri)[0]]
                command = f"curl -L --create-dirs -o {path} {mirror} (or {command})"
                missing = replace(missing, command=command, url=mirror, mirrors=(url,))
            yield missing


@CLASSIFIERS("robustbench", describes="a model of RobustBench's zoo", order=2,
             forms=("robustbench:MODEL?dataset=cifar10&threat=Linf",), target="text",
             options={"dataset": ("cifar10|cifar100|imagenet", "cifar10 by default"),
                      "threat": ("Linf|L2|corruptions", "Linf by default"),
                      "part": ("std", "of Bai2024MixedNUTS"), "model_dir": ("text", "folder of weights"),
                      "weights": ("none", "random ones"), "seed": ("number", "of weights=none")},
             random_weights=True, missing="missing_weights")  # fmt: skip
def load_zoo_model(uri: ClassifierSource) -> "nn.Module":
    """Build the model with its published weights, or for `weights=none` with random ones.

    Raises:
        BaseClassifierError: for an unknown name (close ones are listed), or weights that are missing or no weights,
            with the file's place and the command that fetches it.
    """
    if _is_whole_mixture(uri):
        return _published_mixture(uri)
    if uri.option("weights") == "none":
        return random_zoo_model(uri)
    dataset, threat = _benchmark(uri)
    files = _weight_files(uri, _entry(uri)["gdrive_id"])
    for item in missing_weights(uri):
        try:
            require_checkpoint(Path(item.path))
        except BaseClassifierError as error:
            if Path(item.path).is_file():
                raise BaseClassifierError(f"{error}: {item.command}") from error
        raise BaseClassifierError(f"the weights {item.path} are missing. Put them there: {item.command}")
    if uri.option("part") is not None:
        return _with_tensors(random_zoo_model(uri), files[0][0])
    load = import_robustbench("robustbench.utils").load_model
    folder = uri.option("model_dir", MODEL_DIR)
    with quietly(), tensors_only():
        model: nn.Module = load(uri.target, model_dir=folder, dataset=dataset, threat_model=threat)
    return model


def _is_whole_mixture(uri: ClassifierSource) -> bool:
    return uri.target == MIXTURE and uri.option("part") is None


def _parts(uri: ClassifierSource) -> tuple[ClassifierSource, ClassifierSource]:
    """Return the base classifiers "std" and "rob" of the published mixed classifier.

    Raises:
        BaseClassifierError: if nothing is published for the threat model.
    """
    dataset, threat = _benchmark(uri)
    if threat != "Linf":
        raise BaseClassifierError(f"{MIXTURE} is published for threat=Linf, not {threat}. Leave out threat={threat}")
    options = urlencode(uri.options)
    rob, std = f"{uri.scheme}:{_ROBUST_PARTS[dataset]}", f"{uri.scheme}:{uri.target}"
    return ClassifierSource(f"{std}?{options}&part=std"), ClassifierSource(f"{rob}?{options}")


def _published_mixture(uri: ClassifierSource) -> "nn.Module":
    """Build the mixed classifier of the paper from its two parts and the published parameters."""
    from ..mixing.classifier import MixedClassifier
    from ..selection.choice import Choice

    std, rob = (load_zoo_model(part) for part in _parts(uri))
    published = Choice.published(_benchmark(uri)[0])
    return MixedClassifier.from_mixture(std, rob, published.mixture()).eval()


def random_zoo_model(uri: ClassifierSource) -> "nn.Module":
    """Build the model with random weights."""
    dataset, entry = _benchmark(uri)[0], _entry(uri)
    with quietly():
        if uri.option("part") is not None:
            return _published_std(dataset)
        registered = _registered_in_timm(uri)
        if registered:
            timm = importlib.import_module("timm")
            return timm.create_model(registered, num_classes=_N_CLASSES[dataset])  # type: ignore[no-any-return]
        return entry["model"]()  # type: ignore[no-any-return]


def _published_std(dataset: str) -> "nn.Module":
    """Build the published std: BiT ResNet-152x2 on CIFAR, ConvNeXt V2-L (without normalization) on ImageNet."""
    if dataset == "imagenet":
        make: Callable[..., nn.Module] = import_robustbench(f"{_ARCHITECTURES}.convnext_v2").convnextv2_large
        return make(num_classes=_N_CLASSES[dataset])
    make = import_robustbench(f"{_ARCHITECTURES}.bit_rn_v2").KNOWN_MODELS["BiT-M-R152x2"]
    return make(head_size=_N_CLASSES[dataset], zero_head=False, return_features=False)


def _benchmark(uri: ClassifierSource) -> tuple[str, str]:
    return uri.option("dataset") or "cifar10", uri.option("threat") or "Linf"


def _entry(uri: ClassifierSource) -> dict[str, Any]:
    dataset, threat = _benchmark(uri)
    models = import_robustbench("robustbench.model_zoo").model_dicts
    known = {str(getattr(key, "value", key)): value for key, value in models.items()}[dataset]
    names: dict[str, dict[str, Any]] = {key.value: value for key, value in known.items()}.get(threat, {})
    if uri.target not in names:
        raise _no_such_model(uri, list(names))
    if uri.option("part") is not None and uri.target != MIXTURE:
        raise BaseClassifierError(f"{uri.target} has no parts; only {MIXTURE} takes part=std")
    return names[uri.target]


def _no_such_model(uri: ClassifierSource, names: list[str]) -> BaseClassifierError:
    close = difflib.get_close_matches(uri.target, names, n=5, cutoff=0.3) or names[:5]
    dataset, threat = _benchmark(uri)
    return BaseClassifierError(
        f"RobustBench has no {dataset} model {uri.target!r} for threat={threat}; it has {len(names)}, "
        f"among them: {', '.join(close) or 'none'}"
    )


def _weight_files(uri: ClassifierSource, drive_ids: str | list[str] | None) -> list[tuple[Path, str]]:
    """Where RobustBench looks for the weights, and their Google Drive ids; none if another library fetches them."""
    folder = Path(uri.option("model_dir") or MODEL_DIR).joinpath(*_benchmark(uri))
    if isinstance(drive_ids, list):
        return [(folder / f"{uri.target}.pt_m{i}.pt", drive_id) for i, drive_id in enumerate(drive_ids)]
    return [(folder / f"{uri.target}.pt", drive_ids)] if drive_ids else []


def _with_tensors(model: "nn.Module", path: Path) -> "nn.Module":
    """Load the weights of the published `std`. Only constants that its class sets may be missing from the file."""
    missing, unexpected = model.load_state_dict(read_state_dict(path), strict=False)
    absent = set(missing) - _UNUSED_BY_FORWARD
    if absent or unexpected:
        raise BaseClassifierError(
            f"{path} does not fit {type(model).__name__}: missing {sorted(absent)[:5]}, unknown {unexpected[:5]}"
        )
    return model


def _registered_in_timm(uri: ClassifierSource) -> str | None:
    dataset, threat = _benchmark(uri)
    name = f"{uri.target}_{dataset}_{threat}".lower().replace("-", "_")
    return name if importlib.import_module("timm").is_model(name) else None
