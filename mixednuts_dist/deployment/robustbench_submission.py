"""`mixednuts export --robustbench`: write the adversarial images for RobustBench, and fill in its forms.

RobustBench accepts external evaluations as one `.pt` tensor in the order of the test set, with a form, and models with
a second form (the templates ".github/ISSUE_TEMPLATE/new-external-evaluations.md" and "new-model.md" of its
repository). Placeholders in angle brackets remain for the authors and the addresses of the files.

Shapes: N images of the run, C x H x W each.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..attacks.budget import is_autoattack, spent_words
from ..config.threat import ThreatModel
from ..config.uris import placed
from ..config.versions import fast_notes
from ..errors import InvalidInputError
from ..images.datasets import open_dataset
from ..images.parquet_images import ParquetImages, read_part
from ..norms.ball import ball_of
from ..reports.templates import rendered
from ..stages.runs import evaluate_fingerprint, stored_run
from ..storage.partitions import Partition, partition_size_of, split_images
from ..storage.tables import read_columns
from .loading import DeployedRun

TENSOR = "x_adv.pt"
EVALUATION, NEW_MODEL = "new_evaluation.md", "new_model.md"
_TEST_SETS = {"cifar10": 10_000, "cifar100": 10_000, "imagenet": 5_000}
_ROUNDING = 1e-6  # for float32 pixels in [0, 1], x + eps - x is eps to 6e-8


@dataclass(frozen=True)
class Evaluated:
    """The rows of the evaluate stage that a submission contains."""

    x_adv_NCHW: Tensor  # float32, in the order of the source
    n_clean: int  # right on the clean image
    n_robust: int

    @property
    def total(self) -> int:
        return len(self.x_adv_NCHW)


def export_submission(run: DeployedRun, folder: Path) -> list[str]:
    """Write the tensor and both forms; returns the files' names.

    Raises:
        MissingArtifact: if the evaluate stage has not finished.
        InvalidInputError: if the images' order in the test set is not known, or a stored image violates the threat
            model.
    """
    if not run.is_deployed:
        raise InvalidInputError(
            f"beta={run.chosen.beta:g} of run {run.run_id} was not attacked; the deployed one, "
            f"beta={run.searched.deployed_beta:g}, was"
        )
    found = _evaluated(run)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(found.x_adv_NCHW, folder / TENSOR)
    content = {
        "run": run, "tensor": TENSOR, "leaderboard": _source(run).partition(":")[0], "attacks": _attacks(run),
        "clean": _percent(found.n_clean, found.total), "robust": _percent(found.n_robust, found.total),
    }  # fmt: skip
    for form in (EVALUATION, NEW_MODEL):
        (folder / form).write_text(rendered("deployment", form, **content), encoding="utf-8")
    return [TENSOR, EVALUATION, NEW_MODEL]


def missing_images(run: DeployedRun) -> int:
    """Count the images of RobustBench's test set that the run left out; 0 for other datasets."""
    scheme = _source(run).partition(":")[0]
    return max(0, _TEST_SETS.get(scheme, 0) - run.n_images)


def _evaluated(run: DeployedRun) -> Evaluated:
    dataset = open_dataset(placed(run.config["data"]["uri"], run.find))
    order_N = _order(dataset, run.n_images)
    x_adv_NCHW = torch.empty(len(order_N), *run.image_shape)
    n_clean = n_robust = 0
    for part in split_images(len(order_N), partition_size_of(len(order_N), run.config["partition_size"])):
        rows = _rows(run, part)
        clean_BCHW, labels_B = dataset.read(part.start, part.stop)
        _check_threat(run, rows["x_adv"], clean_BCHW, part)
        x_adv_NCHW[order_N[part.start : part.stop]] = rows["x_adv"].float()
        n_clean += int((rows["mixed_clean"].argmax(dim=1) == labels_B).sum())
        # The submission claims only what the stored logits show, whatever the stored flag is.
        right_B = (rows["mixed_clean"].argmax(dim=1) == labels_B) & (rows["mixed_attacked"].argmax(dim=1) == labels_B)
        if not torch.equal(right_B, rows["robust"]):
            raise InvalidInputError(f"{part}: the stored adversarial images do not reproduce the stored results")
        n_robust += int(right_B.sum())
    return Evaluated(x_adv_NCHW, n_clean, n_robust)


def _rows(run: DeployedRun, part: Partition) -> dict[str, Tensor]:
    opened = stored_run(run.store, trusted=True)
    columns = ["sample_id", "x_adv", "mixed_clean", "mixed_attacked", "robust"]
    return read_columns(opened.rows, "evaluate", [part], evaluate_fingerprint(opened, run.searched), columns)


def _check_threat(run: DeployedRun, x_adv_BCHW: Tensor, clean_BCHW: Tensor, part: Partition) -> None:
    eps, norm = run.config["threat"]["eps"], run.config["threat"]["norm"]
    ball, delta_BCHW = ball_of(ThreatModel(norm, eps)), x_adv_BCHW - clean_BCHW
    rounding = float(ball.length(torch.full_like(delta_BCHW[:1], _ROUNDING)))  # in every pixel
    worst = float(ball.length(delta_BCHW).max())
    if worst > eps + rounding or float(x_adv_BCHW.min()) < 0 or float(x_adv_BCHW.max()) > 1:
        raise InvalidInputError(
            f"{part}: a stored image is {worst:.6g} away from the clean one ({norm}; eps is {eps:g}) or outside "
            "[0, 1]; are the images of the data set still the same?"
        )


def _order(dataset: Any, n_images: int) -> Tensor:
    """Return the place of each image in the source's order; only prepared datasets have another order."""
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


def _source(run: DeployedRun) -> str:
    uri: str = run.config["data"]["uri"]
    dataset = open_dataset(placed(uri, run.find))
    return dataset.manifest.source if isinstance(dataset, ParquetImages) else uri


def _attacks(run: DeployedRun) -> str:
    """Name the attacks that ran, with the budgets that they used."""
    evaluate = run.config["evaluate"]
    evaluate = {**evaluate, "n_target_classes": min(evaluate["n_target_classes"], run.n_classes - 1)}
    notes = "".join(f". {note}" for note in fast_notes(evaluate))
    name = "AutoAttack" if is_autoattack(run.config["evaluate"], run.config["threat"]["norm"]) else "attack"
    starts, attacks = evaluate.get("joint_starts", 0), evaluate["attacks"]
    joint = f"a joint attack ({starts} start{'s' * (starts > 1)}) on images that stand by a hair, " if starts and (
        {"joint", "apgd-t"} & {*attacks}) else ""  # fmt: skip
    return (
        f"adaptive {name} of MixedNUTS: the minimum-margin images of the robust base classifier, then "
        f"{spent_words(evaluate)}, {joint}gradients of the differentiable surrogate "
        f"(mode {evaluate['mode']}), every verdict that of the mixture itself in float32; run {run.run_id} of "
        f"mixednuts-dist, seed {run.config['seed']}{notes}"
    )


def _percent(count: int, total: int) -> str:
    return f"{100 * count / total:.2f} % ({count} of {total} images)"
