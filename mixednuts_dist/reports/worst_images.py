"""The images that a person should look at: lost although nothing had to be, and held by a hair.

Shapes: N images of the run, K classes, C x H x W pixels.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..images.datasets import open_dataset
from ..mixing.margins import log_one_minus_signed_margin
from ..stages.runs import Run
from ..storage.records import AttackRecords, EvaluateRecords
from ..storage.tables import read_rows

Reason = Literal["lost", "narrow"]
N_EACH = 4


@dataclass(frozen=True)
class Verdict:
    """What a classifier says of one image: its class, and the signed margin of the right class."""

    classifier: str
    images: str
    predicted: int
    margin: float


@dataclass(frozen=True)
class WorstImage:
    """One image before and after the adaptive attack on the mixture."""

    sample_id: int
    label: int
    reason: Reason
    verdicts: tuple[Verdict, ...]  # std, rob, mixed on the clean image; rob on its own minimum-margin image; mixed last
    clean_CHW: Tensor
    attacked_CHW: Tensor

    def caption(self) -> str:
        """`lost: 526, class 9, mixed 3 (-0.058)`."""
        after = self.verdicts[-1]
        says = f"mixed {after.predicted} ({after.margin:+.3f})"
        return f"{self.reason}: {self.sample_id}, class {self.label}, {says}"

    def to_json(self) -> dict[str, Any]:
        """Everything but the pixels."""
        return {
            "sample_id": self.sample_id,
            "label": self.label,
            "reason": self.reason,
            "verdicts": [vars(verdict) for verdict in self.verdicts],
        }


def worst_images(
    opened: Run, attack: AttackRecords, evaluate: EvaluateRecords, evaluate_fingerprint: str
) -> tuple[WorstImage, ...]:
    """A handful of images, read one by one from the data set and from the evaluate stage's rows.

    Raises:
        DatasetError: where the data set cannot be opened from here.
    """
    dataset, found = open_dataset(opened.config.data.uri), []
    for row, reason in choose(attack, evaluate):
        sample_id = int(attack.sample_ids_N[row])
        partition = next(part for part in opened.partitions if part.start <= sample_id < part.stop)
        attacked = read_rows(opened.store, "evaluate", partition, evaluate_fingerprint, "x_adv", [sample_id])
        clean, _ = dataset.read(sample_id, sample_id + 1)
        verdicts = _verdicts(attack, evaluate, row)
        found.append(WorstImage(sample_id, int(attack.labels_N[row]), reason, verdicts, clean[0], attacked[0]))
    return tuple(found)


def choose(attack: AttackRecords, evaluate: EvaluateRecords) -> list[tuple[int, Reason]]:
    """Rows (of both, which are about the same images in the same order) and why each was chosen.

    "lost": std and rob are right on the clean image, the mixture is not once it is attacked; those that rob alone
    holds first, then the most clearly lost. "narrow": the smallest margins that the attack left positive.
    """
    labels_N = attack.labels_N
    both_right_N = (attack.std_clean_NK.argmax(dim=1) == labels_N) & (attack.rob_clean_NK.argmax(dim=1) == labels_N)
    margins_N = _margins(evaluate.mixed_attacked_NK, labels_N)
    lost_N, narrow_N = both_right_N & ~evaluate.robust_N, evaluate.robust_N
    lost = sorted(_rows(lost_N), key=lambda row: (bool(attack.rob_broken_N[row]), float(margins_N[row])))
    narrow = sorted(_rows(narrow_N), key=lambda row: float(margins_N[row]))
    return [*((row, "lost") for row in lost[:N_EACH]), *((row, "narrow") for row in narrow[:N_EACH])]


def _rows(mask_N: Tensor) -> list[int]:
    rows: list[int] = mask_N.nonzero().squeeze(1).tolist()
    return rows


def _margins(logits_NK: Tensor, labels_N: Tensor) -> Tensor:
    return -torch.expm1(log_one_minus_signed_margin(logits_NK, labels_N))


def _verdicts(attack: AttackRecords, evaluate: EvaluateRecords, row: int) -> tuple[Verdict, ...]:
    label_1 = attack.labels_N[row : row + 1]

    def verdict(classifier: str, images: str, logits_NK: Tensor) -> Verdict:
        logits_1K = logits_NK[row : row + 1]
        return Verdict(classifier, images, int(logits_1K.argmax()), float(_margins(logits_1K, label_1)))

    return (
        verdict("std", "clean", attack.std_clean_NK),
        verdict("rob", "clean", attack.rob_clean_NK),
        verdict("mixed", "clean", evaluate.mixed_clean_NK),
        verdict("rob", "its own attack", attack.rob_attacked_NK),
        verdict("mixed", "attacked", evaluate.mixed_attacked_NK),
    )
