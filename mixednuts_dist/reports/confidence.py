"""Confidence margins of std, rob, rob+LN and rob+M, grouped as the paper groups them (section 5.1, appendix C.3).

Shapes: B images, K classes. "Correct" is each classifier's own prediction against the label.
"""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..mixing.margins import log_one_minus_top2_margin
from ..mixing.transforms import layer_norm_logits
from ..storage.records import AttackRecords, SearchResult

Images = Literal["clean", "attacked"]
GROUPS: tuple[tuple[Images, bool], ...] = (("clean", True), ("clean", False), ("attacked", True), ("attacked", False))
CLASSIFIERS = ("std", "rob", "rob+LN", "rob+M")


@dataclass(frozen=True)
class MarginGroup:
    """Top-2 margins in [0, 1] of one classifier on its correct, or on its incorrect, clean or attacked images."""

    classifier: str
    images: Images
    correct: bool
    margins: tuple[float, ...]

    @property
    def median(self) -> float | None:
        """None where no image falls into the group."""
        return statistics.median(self.margins) if self.margins else None


def margin_groups(attack: AttackRecords, search: SearchResult) -> tuple[MarginGroup, ...]:
    """Every group: std and three forms of rob, each on clean images and on those of its own attack, right and wrong."""
    logit_maps: dict[str, Callable[[Tensor], Tensor]] = {
        "rob": lambda logits_BK: logits_BK,
        "rob+LN": lambda logits_BK: layer_norm_logits(logits_BK, ln_k=search.ln_k),
        "rob+M": search.deployed().transform(),
    }
    groups = _split("std", "clean", attack.std_clean_NK, attack.labels_N)
    groups += _split("std", "attacked", attack.std_attacked_NK, attack.labels_N)
    for classifier, logit_map in logit_maps.items():
        groups += _split(classifier, "clean", logit_map(attack.rob_clean_NK), attack.labels_N)
        groups += _split(classifier, "attacked", logit_map(attack.rob_attacked_NK), attack.labels_N)
    return tuple(groups)


def margin_gap(groups: Iterable[MarginGroup], classifier: str) -> float | None:
    """The paper's margin gap: median on attacked and correct images minus median on clean and incorrect ones.

    The larger, the better the mixture can tell when to trust rob. None where either group is empty or not stored.
    """
    medians = {(group.images, group.correct): group.median for group in groups if group.classifier == classifier}
    attacked_correct, clean_wrong = medians.get(("attacked", True)), medians.get(("clean", False))
    if attacked_correct is None or clean_wrong is None:
        return None
    return attacked_correct - clean_wrong


def medians_table(
    groups: Iterable[MarginGroup],
) -> list[tuple[str, list[MarginGroup | None], float | None]]:
    """Each classifier with its groups in the order of `GROUPS` (None: not stored) and its margin gap."""
    found = {(group.classifier, group.images, group.correct): group for group in groups}
    return [
        (classifier, [found.get((classifier, *kind)) for kind in GROUPS], margin_gap(found.values(), classifier))
        for classifier in CLASSIFIERS
    ]


def _split(classifier: str, images: Images, logits_BK: Tensor, labels_B: Tensor) -> list[MarginGroup]:
    margins_B = -torch.expm1(log_one_minus_top2_margin(logits_BK.double()))
    correct_B = logits_BK.argmax(dim=1) == labels_B
    return [
        MarginGroup(classifier, images, True, tuple(margins_B[correct_B].tolist())),
        MarginGroup(classifier, images, False, tuple(margins_B[~correct_B].tolist())),
    ]
