"""Write the adversarial images for RobustBench, and fill in its forms (`mixednuts export --robustbench`).

RobustBench accepts an external evaluation as one `.pt` tensor in the order of the test set and a form, and a model as
another form (the templates ".github/ISSUE_TEMPLATE/new-external-evaluations.md" and "new-model.md" of its repository).
The user replaces the placeholders in angle brackets, such as the authors and the addresses of the files.

Shapes: N images of the run, C x H x W each.
"""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidInputError
from ..images.datasets import open_dataset
from ..images.image_files import ImageFiles, evaluation_names
from ..images.parquet_images import ParquetImages, read_part
from ..norms.ball import ball_of
from ..reports.attack_words import is_autoattack, spent_words
from ..reports.counts import Count
from ..reports.templates import rendered
from ..stages.runs import Run
from ..stages.search_result import evaluate_content_hash, read_search_result
from ..storage.partitions import Partition
from ..storage.records import SearchResult
from ..storage.tables import read_columns
from .loading import open_stored

TENSOR = "x_adv.pt"
EVALUATION, NEW_MODEL = "new_evaluation.md", "new_model.md"
_TEST_SETS = {"cifar10": 10_000, "cifar100": 10_000, "imagenet": 5_000}
_ROUNDING = 1e-6  # for float32 pixels in [0, 1], x + eps - x is eps to 6e-8


def export_submission(
    uri: str, folder: Path, *, beta: float | None = None, trust_code: bool = False
) -> tuple[list[str], int]:
    """Write the tensor and both forms of a run, with or without `std`.

    Args:
        beta: must be the beta that the run attacked, which is the default.
        trust_code: as in `load_run`.

    Returns:
        The files' names, and the number of images of RobustBench's test set that the run left out.

    Raises:
        MissingArtifact: if the evaluate stage has not finished.
        InvalidInputError: if beta was not attacked, if the images' order in the test set is not known, or if a stored
            image violates the threat model.
    """
    run, _ = open_stored(uri, trust_code)
    searched = read_search_result(run) if run.config.std else None
    if searched and beta not in (None, searched.deployed_beta):
        raise InvalidInputError(
            f"beta={beta:g} of run {run.config.run_id()} was not attacked; the deployed one, "
            f"beta={searched.deployed_beta:g}, was"
        )
    dataset = open_dataset(run.config.data.uri)
    source = dataset.manifest.source if isinstance(dataset, ParquetImages) else run.config.data.uri.written
    leaderboard = source.partition(":")[0]
    x_adv_NCHW, counts = _evaluated(run, dataset, searched)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(x_adv_NCHW, folder / TENSOR)
    std, rob = (run.config.model_dump(mode="json")[role] for role in ("std", "rob"))
    content = {
        "model": f"MixedNUTS of {std} and {rob}" if std else rob, "threat": run.config.threat.threat_model(),
        "tensor": TENSOR, "leaderboard": leaderboard, "attacks": _attacks(run),
        **{name: f"{of.percent:.2f} % ({of.correct} of {of.total} images)" for name, of in counts.items()},
    }  # fmt: skip
    for form in (EVALUATION, NEW_MODEL):
        (folder / form).write_text(rendered("deployment", form, **content), encoding="utf-8")
    left_out = max(0, _TEST_SETS.get(leaderboard, 0) - run.inputs.n_images)
    return [TENSOR, EVALUATION, NEW_MODEL], left_out


def _evaluated(run: Run, dataset: Any, searched: SearchResult | None) -> tuple[Tensor, dict[str, Count]]:
    """Return the adversarial images in the order of the source, float32, and the clean and robust counts."""
    name, content_hash = "mixed" if searched else "rob", evaluate_content_hash(run, searched)
    order_N = _order(dataset, run.inputs.n_images)
    x_adv_NCHW = torch.empty(len(order_N), *run.inputs.image_shape)
    n_clean = n_robust = 0
    columns = ["sample_id", "x_adv", f"{name}_clean", f"{name}_attacked", "robust"]
    for part in run.partitions:
        rows = read_columns(run.rows, "evaluate", [part], content_hash, columns)
        clean_BCHW, labels_B = dataset.read(part.start, part.stop)
        _check_threat(run, rows["x_adv"], clean_BCHW, part)
        x_adv_NCHW[order_N[part.start : part.stop]] = rows["x_adv"].float()
        clean_right_B = rows[f"{name}_clean"].argmax(dim=1) == labels_B
        n_clean += int(clean_right_B.sum())
        # The submission counts what the stored logits show, and the stored column `robust` must agree.
        right_B = clean_right_B & (rows[f"{name}_attacked"].argmax(dim=1) == labels_B)
        if not torch.equal(right_B, rows["robust"]):
            raise InvalidInputError(f"{part}: the stored adversarial images do not reproduce the stored results")
        n_robust += int(right_B.sum())
    return x_adv_NCHW, {"clean": Count(n_clean, len(x_adv_NCHW)), "robust": Count(n_robust, len(x_adv_NCHW))}


def _check_threat(run: Run, x_adv_BCHW: Tensor, clean_BCHW: Tensor, part: Partition) -> None:
    threat = run.config.threat.threat_model()
    ball, delta_BCHW = ball_of(threat), x_adv_BCHW - clean_BCHW
    rounding = float(ball.length(torch.full_like(delta_BCHW[:1], _ROUNDING)))  # in every pixel
    worst = float(ball.length(delta_BCHW).max())
    if worst > threat.eps + rounding or float(x_adv_BCHW.min()) < 0 or float(x_adv_BCHW.max()) > 1:
        raise InvalidInputError(
            f"{part}: a stored image is {worst:.6g} away from the clean one ({threat}) or outside [0, 1]. "
            "Check that the images of the data set have not changed"
        )


def _order(dataset: Any, n_images: int) -> Tensor:
    """Return the place of each image in the order of the test set."""
    if isinstance(dataset, ImageFiles) and dataset.uri.startswith("imagenet:"):  # its option `order` changes the order
        place_of = {name: place for place, name in enumerate(evaluation_names())}
        return torch.tensor([place_of[name] for name in dataset.names[:n_images]]).argsort().argsort()
    if not isinstance(dataset, ParquetImages):
        return torch.arange(n_images)
    names = [name for part in dataset.manifest.parts for name in read_part(dataset.store, part).names][:n_images]
    matches = [re.fullmatch(r"[a-z0-9]+/(\d+)", name) for name in names]
    if not all(matches):
        raise InvalidInputError(
            f"{dataset.uri} holds its images in a balanced order, and their names ({names[0]!r}) do not identify them "
            f"in the test set; run on {dataset.manifest.source!r} itself"
        )
    indices = torch.tensor([int(match[1]) for match in matches if match])
    return indices.argsort().argsort()  # the rank among the images of the run


def _attacks(run: Run) -> str:
    """Name the attacks that ran, with the budgets that they used."""
    config, evaluate = run.config, run.config.evaluate.model_dump(mode="json")
    evaluate["n_target_classes"] = min(evaluate["n_target_classes"], run.inputs.n_classes - 1)
    steps, notes = [spent_words(evaluate)], "".join(f". {note}" for note in config.evaluate.notes)
    name = "AutoAttack" if is_autoattack(config.evaluate.model_dump(), config.threat.norm) else "attack"
    end = f"run {config.run_id()} of mixednuts-dist, seed {config.seed}{notes}"
    if not config.std and not run.inputs.mixed:
        return f"{name}: {steps[0]}, each broken image verified in float32; {end}"
    if config.std and config.evaluate.warm_start:
        steps.insert(0, "the minimum-margin images of the robust base classifier")
    if (starts := config.evaluate.joint_starts) and {"joint", "apgd-t"} & {*config.evaluate.attacks}:
        steps[-1] += f", a joint attack ({starts} start{'s' * (starts > 1)}) on borderline images"
    return (
        f"adaptive {name} of MixedNUTS: {', then '.join(steps)}, gradients of the differentiable surrogate (mode "
        f"{config.evaluate.mode}), each broken image verified in float32 on the mixed classifier itself; {end}"
    )
