"""Confidence margins of std, rob, rob+LN and rob+M, grouped as the paper groups them (section 5.1, appendix C.3).

Shapes: B images of a batch, K classes. "Right" is each classifier's own prediction against the label.
"""

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

from ..mixing.margins import log_one_minus_top2_margin
from ..mixing.transforms import LogitTransform, layer_norm_logits
from ..storage.records import AttackRecords
from .charts import Chart, Row, histograms
from .table import Cell, Table

Images = Literal["clean", "attacked"]
IMAGES: tuple[Images, ...] = ("clean", "attacked")
CLASSIFIERS = ("std", "rob", "rob+LN", "rob+M")
SATURATED = 0.99  # medians above this no longer tell by their ratio
# Margins pile up near 0: 8 bins a decade from 1e-4; smaller ones count in the first bin.
EDGES: tuple[float, ...] = tuple(10 ** (n / 8 - 4) for n in range(33))


@dataclass(frozen=True)
class MarginGroup:
    """Top-2 margins in [0, 1] of one classifier on the clean or attacked images that it gets right, or wrong."""

    classifier: str
    images: Images
    correct: bool
    counts: tuple[int, ...]  # images in each bin of EDGES
    n: int
    median: float | None  # None where no image falls into the group
    distance: float | None = None  # median of 1 - margin, told where margins themselves round to 1

    @property
    def side(self) -> str:
        return "right" if self.correct else "wrong"


class MarginTally:
    """Collects the groups batch by batch; keeps one number an image and group, log(1 - margin), and no logits.

    Args:
        transform: M, as deployed.
    """

    def __init__(self, transform: LogitTransform, ln_k: int | None) -> None:
        self._maps: dict[str, Callable[[Tensor], Tensor]] = {
            "rob": lambda logits_BK: logits_BK,
            "rob+LN": lambda logits_BK: layer_norm_logits(logits_BK, ln_k=ln_k),
            "rob+M": transform,
        }
        # Arrays that grow, since small tensors kept between large ones that come and go would hold all their memory.
        self._found: dict[tuple[str, Images, bool], array[float]] = defaultdict(lambda: array("f"))

    def add(self, rows: AttackRecords) -> None:
        """One more batch of the attack stage's rows."""
        self._split("std", "clean", rows.std_clean_NK, rows.labels_N)
        self._split("std", "attacked", rows.std_attacked_NK, rows.labels_N)
        for classifier, logit_map in self._maps.items():
            self._split(classifier, "clean", logit_map(rows.rob_clean_NK), rows.labels_N)
            self._split(classifier, "attacked", logit_map(rows.rob_attacked_NK), rows.labels_N)

    def groups(self) -> tuple[MarginGroup, ...]:
        """Every group: each classifier on clean images and on those of its own attack, right and wrong."""
        kinds = [(name, images, right) for name in CLASSIFIERS for images in IMAGES for right in (True, False)]
        return tuple(_group(*kind, self._found[kind]) for kind in kinds)

    def _split(self, classifier: str, images: Images, logits_BK: Tensor, labels_B: Tensor) -> None:
        log_distances_B = log_one_minus_top2_margin(logits_BK.double()).float()
        right_B = logits_BK.argmax(dim=1) == labels_B
        for side, mask_B in ((True, right_B), (False, ~right_B)):
            self._found[classifier, images, side].frombytes(log_distances_B[mask_B].numpy().tobytes())


def _group(classifier: str, images: Images, correct: bool, found: "array[float]") -> MarginGroup:
    log_distances = np.array(found, dtype=np.float64)
    margins = -np.expm1(log_distances)
    counts, _ = np.histogram(margins.clip(EDGES[0], EDGES[-1]), bins=EDGES)
    median, distance = None, None
    if margins.size:
        median, distance = float(np.median(margins)), float(np.exp(np.median(log_distances)))
    return MarginGroup(classifier, images, correct, tuple(counts.tolist()), margins.size, median, distance)


def margin_groups(
    batches: Iterable[AttackRecords], transform: LogitTransform, ln_k: int | None
) -> tuple[MarginGroup, ...]:
    """The groups of all batches together."""
    tally = MarginTally(transform, ln_k)
    for rows in batches:
        tally.add(rows)
    return tally.groups()


def margin_ratio(groups: Iterable[MarginGroup], classifier: str) -> float | None:
    """Median margin on attacked images that are right, over that on clean images that are wrong.

    This is what mixing uses: std is overruled where rob's margin is above a cutoff, and scaling all margins moves the
    cutoff with them. None where one of the groups is empty.
    """
    attacked_right, clean_wrong = _two_medians(groups, classifier)
    return attacked_right / clean_wrong if attacked_right is not None and clean_wrong else None


def margin_gap(groups: Iterable[MarginGroup], classifier: str) -> float | None:
    """The paper's margin gap: the difference of the same two medians."""
    attacked_right, clean_wrong = _two_medians(groups, classifier)
    return None if attacked_right is None or clean_wrong is None else attacked_right - clean_wrong


def _two_medians(groups: Iterable[MarginGroup], classifier: str) -> tuple[float | None, float | None]:
    medians = {(group.images, group.correct): group.median for group in groups if group.classifier == classifier}
    return medians.get(("attacked", True)), medians.get(("clean", False))


def distance_ratio(groups: Iterable[MarginGroup], classifier: str) -> float | None:
    """Median of 1 - margin on clean images that are wrong, over that on attacked images that are right.

    Where M takes all margins close to 1, this is what a cutoff tells apart. None where a group is empty, or the latter
    is 0 even in float64.
    """
    found = {(group.images, group.correct): group.distance for group in groups if group.classifier == classifier}
    clean_wrong, attacked_right = found.get(("clean", False)), found.get(("attacked", True))
    return clean_wrong / attacked_right if clean_wrong is not None and attacked_right else None


def medians_table(groups: Sequence[MarginGroup]) -> Table:
    """Each classifier's four medians, the ratios of the two that count, and the paper's gap."""
    rows: list[list[Cell]] = [
        [name, *(group.median for group in groups if group.classifier == name), margin_ratio(groups, name),
         distance_ratio(groups, name), margin_gap(groups, name)]
        for name in CLASSIFIERS
    ]  # fmt: skip
    kinds = [f"{images}, {side}" for images in IMAGES for side in ("right", "wrong")]
    columns = ["classifier", *kinds, "ratio", "ratio to 1", "gap"]
    printed = ["classifier", "clean, wrong", "attacked, right", "ratio", "ratio to 1"]
    return Table(columns, rows, bold="rob+M", printed=printed)


def ratio_sentence(groups: Sequence[MarginGroup]) -> str:
    """What to see in the margins, in one sentence, or why there is nothing to see."""
    raw, mapped = margin_ratio(groups, "rob"), margin_ratio(groups, "rob+M")
    if raw is None or mapped is None:
        return "rob is right on no attacked image or wrong on no clean one, so there are no margins to compare."
    better, worse = "M raises that, and std can be trusted more often", "M does not raise that here"
    near, far = distance_ratio(groups, "rob+M"), distance_ratio(groups, "rob")
    if min(median for median in _two_medians(groups, "rob+M") if median is not None) > SATURATED and near and far:
        return (
            "Behind M both medians are close to 1, and a cutoff tells margins apart by their distance to 1: that is "
            f"{_factor(near)} times as large on the clean and wrong images as on the attacked and right ones, against "
            f"{_factor(far)} times for rob itself. {better if near > far else worse}."
        )
    return (
        f"rob's median margin is {raw:.2g} times as large on attacked images that it gets right as on clean images "
        f"that it gets wrong; behind M it is {mapped:.2g} times as large. {better if mapped > raw else worse}."
    )


def _factor(value: float) -> str:
    if value >= 1e6:
        return "more than a million"
    return f"{value:.2g}" if value < 99.5 else f"{value:,.0f}"  # from there on .2g writes an exponent


def margin_histograms(groups: Sequence[MarginGroup]) -> Chart:
    """One panel a classifier, clean images above attacked ones."""
    panels: Mapping[str, list[Row]] = {
        f"{name}, {images}": [
            {"series": group.side, "counts": group.counts, "n": group.n, "median": group.median}
            for group in groups
            if (group.classifier, group.images) == (name, images)
        ]
        for images in IMAGES
        for name in CLASSIFIERS
    }
    return histograms(panels, EDGES, x="margin", columns=len(CLASSIFIERS), empty="no images")
