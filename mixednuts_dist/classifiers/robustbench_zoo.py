"""`robustbench:MODEL?dataset=cifar10&threat=Linf`: RobustBench's own classes with its own weights.

Nothing is fetched behind one's back, least of all by each of a hundred workers: where weights are missing, the error
has the command. Options: `model_dir` (RobustBench's layout below it: `<dataset>/<threat>/<MODEL>.pt`),
`weights=none&seed=0` (random weights), and, for Bai2024MixedNUTS alone, `part=std`: the standard base classifier of the
published mixture (its robust one is a model of the zoo by its own name).
"""

import difflib
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import BaseClassifierError
from ..uris import ResourceUri
from .checkpoints import read_state_dict, require_checkpoint, tensors_only
from .robustbench_package import import_robustbench, quietly

MODEL_DIR = "models"
MIXTURE = "Bai2024MixedNUTS"
_N_CLASSES = {"cifar10": 10, "cifar100": 100, "imagenet": 1000}
_ARCHITECTURES = "robustbench.model_zoo.architectures"
_UNUSED_BY_FORWARD = {"mean", "std", "mu", "sigma", "normalize.mean", "normalize.std"}


def load_zoo_model(uri: ResourceUri) -> nn.Module:
    """The model with its published weights.

    Raises:
        BaseClassifierError: for an unknown name (close ones are listed), or weights that are missing or no weights,
            with the file's place and the command that fetches it.
    """
    dataset, threat = _benchmark(uri)
    files = _weight_files(uri, _entry(uri)["gdrive_id"])
    is_part = uri.option("part") is not None
    for path, drive_id in files[:1] if is_part else files:
        _require(path, drive_id)
    if is_part:
        return _with_tensors(random_zoo_model(uri), files[0][0])
    load = import_robustbench("robustbench.utils").load_model
    folder = uri.option("model_dir", MODEL_DIR)
    with quietly(), tensors_only():
        model: nn.Module = load(uri.target, model_dir=folder, dataset=dataset, threat_model=threat)
    return model


def random_zoo_model(uri: ResourceUri) -> nn.Module:
    """The model's class as its constructor leaves it."""
    dataset, entry = _benchmark(uri)[0], _entry(uri)
    with quietly():
        if uri.option("part") is not None:
            return _published_std(dataset)
        registered = _registered_in_timm(uri)
        if registered:
            timm = importlib.import_module("timm")
            return timm.create_model(registered, num_classes=_N_CLASSES[dataset])  # type: ignore[no-any-return]
        return entry["model"]()  # type: ignore[no-any-return]


def _published_std(dataset: str) -> nn.Module:
    """The class of the published std: BiT ResNet-152x2 on CIFAR, ConvNeXt V2-L (without normalisation) on ImageNet."""
    if dataset == "imagenet":
        make: Callable[..., nn.Module] = import_robustbench(f"{_ARCHITECTURES}.convnext_v2").convnextv2_large
        return make(num_classes=_N_CLASSES[dataset])
    make = import_robustbench(f"{_ARCHITECTURES}.bit_rn_v2").KNOWN_MODELS["BiT-M-R152x2"]
    return make(head_size=_N_CLASSES[dataset], zero_head=False, return_features=False)


def _benchmark(uri: ResourceUri) -> tuple[str, str]:
    dataset, threat = uri.option("dataset", "cifar10"), uri.option("threat", "Linf")
    assert dataset is not None and threat is not None
    return dataset, threat


def _entry(uri: ResourceUri) -> dict[str, Any]:
    dataset, threat = _benchmark(uri)
    models = import_robustbench("robustbench.model_zoo").model_dicts
    known = {str(getattr(key, "value", key)): value for key, value in models.items()}[dataset]
    names: dict[str, dict[str, Any]] = {key.value: value for key, value in known.items()}.get(threat, {})
    if uri.target not in names:
        close = difflib.get_close_matches(uri.target, names, n=5, cutoff=0.3) or list(names)[:5]
        raise BaseClassifierError(
            f"RobustBench has no {dataset} model {uri.target!r} for threat={threat}; it has {len(names)}, "
            f"among them: {', '.join(close) or 'none'}"
        )
    if uri.option("part") is not None and uri.target != MIXTURE:
        raise BaseClassifierError(f"{uri.target} has no parts; only {MIXTURE} takes part=std")
    return names[uri.target]


def _weight_files(uri: ResourceUri, drive_ids: str | list[str] | None) -> list[tuple[Path, str]]:
    """Where RobustBench looks for the weights, and their Google Drive ids; none where another library fetches them."""
    folder = Path(uri.option("model_dir") or MODEL_DIR).joinpath(*_benchmark(uri))
    if isinstance(drive_ids, list):
        return [(folder / f"{uri.target}.pt_m{i}.pt", drive_id) for i, drive_id in enumerate(drive_ids)]
    return [(folder / f"{uri.target}.pt", drive_ids)] if drive_ids else []


def _require(path: Path, drive_id: str) -> None:
    fetch = f"gdown {drive_id} -O {path}"
    if not path.is_file():
        raise BaseClassifierError(
            f"the weights {path.absolute()} are missing. Put them there: mkdir -p {path.parent} && {fetch} "
            f"(or with a browser: https://drive.google.com/file/d/{drive_id})"
        )
    try:
        require_checkpoint(path)
    except BaseClassifierError as error:
        raise BaseClassifierError(f"{error}: {fetch}") from error


def _with_tensors(model: nn.Module, path: Path) -> nn.Module:
    """The published part's weights; only constants that its class already holds may be missing from the file."""
    missing, unexpected = model.load_state_dict(read_state_dict(path), strict=False)
    absent = set(missing) - _UNUSED_BY_FORWARD
    if absent or unexpected:
        raise BaseClassifierError(
            f"{path} does not fit {type(model).__name__}: missing {sorted(absent)[:5]}, unknown {unexpected[:5]}"
        )
    return model


def _registered_in_timm(uri: ResourceUri) -> str | None:
    dataset, threat = _benchmark(uri)
    name = f"{uri.target}_{dataset}_{threat}".lower().replace("-", "_")
    return name if importlib.import_module("timm").is_model(name) else None
