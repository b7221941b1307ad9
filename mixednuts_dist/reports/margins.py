"""Confidence margins of `std`, `rob`, `rob+LN` and `rob+M`, grouped as in the paper (section 5.1, appendix C.3).

`rob+LN` and `rob+M` are the robust classifier after LayerNorm and after M. An image is right for a classifier if this
classifier predicts its label.

Shapes: B images of a batch, K classes.
"""

import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from ..mixing.margins import log_one_minus_top2_margin
from ..mixing.transforms import LogitTransform, layer_norm_logits
from ..storage.records import AttackRecords
from .charts import RIGHT_AND_WRONG, Histogram, histograms
from .counts import Count, percent_text
from .drawing import Figure
from .table import Cell, Table

_Numbers = np.ndarray[Any, np.dtype[np.float64]]
Images = Literal["clean", "attacked"]
IMAGES: tuple[Images, ...] = ("clean", "attacked")
CLASSIFIERS = ("std", "rob", "rob+LN", "rob+M")
FORMS = CLASSIFIERS[1:]  # forms of `rob`, on which a margin threshold can be set
KEPT, WRONG = "attacked, right", "clean, wrong"  # the two groups that a margin threshold should separate
_SPLIT: tuple[tuple[Images, bool], ...] = (("attacked", True), ("clean", False))
_BINS = 40
# Margins pile up near 0: 8 bins per decade from 1e-4; smaller ones count in the first bin.
EDGES: tuple[float, ...] = tuple(10 ** (n / 8 - 4) for n in range(33))


@dataclass(frozen=True)
class MarginGroup:
    """Top-2 margins in [0, 1] of one classifier on the clean or attacked images that it gets right, or wrong."""

    classifier: str
    images: Images
    correct: bool
    counts: Annotated[tuple[int, ...], Field(default=(), exclude=True)]  # images in each bin of EDGES
    n: int
    median: float | None  # None for an empty group
    distance: float | None = None  # median of 1 - margin, which has digits left if margins round to 1

    @property
    def side(self) -> str:
        return "right" if self.correct else "wrong"


@dataclass(frozen=True)
class MarginSplit:
    """The groups that a margin threshold on one form of `rob` separates.

    The robust classifier decides above the threshold and the standard classifier below it. Attacked images that are
    correct should have larger margins, and clean images that are wrong smaller ones. The threshold of each form keeps
    as many attacked and correct images as the deployed threshold keeps after M, so that the forms can be compared by
    the share of clean and wrong images that they leave to the standard classifier.
    """

    form: str  # one of FORMS
    log_cutoff: float  # log(1 - margin threshold)
    kept: Count  # attacked and correct images with a margin at or above the threshold
    left_to_std: Count  # clean and wrong images with a margin below it
    # Histogram bins over log10(margin / (1 - margin)), and images per bin: attacked and right, clean and wrong.
    edges: Annotated[tuple[float, ...], Field(default=(), exclude=True)]
    counts: Annotated[tuple[tuple[int, ...], tuple[int, ...]], Field(default=((), ()), exclude=True)]


class MarginTally:
    """A collector of the groups, batch by batch, which stores log(1 - margin) per image and group and no logits.

    Args:
        transform: M, as deployed.
    """

    def __init__(self, transform: LogitTransform, ln_k: int | None) -> None:
        self._maps: dict[str, Callable[[Tensor], Tensor]] = {
            "rob": lambda logits_BK: logits_BK,
            "rob+LN": lambda logits_BK: layer_norm_logits(logits_BK, ln_k=ln_k),
            "rob+M": transform,
        }
        # Growing arrays, because small tensors allocated between large temporary ones would fragment the memory.
        self._found: dict[tuple[str, Images, bool], array[float]] = defaultdict(lambda: array("f"))

    def add(self, rows: AttackRecords) -> None:
        """Add a batch of rows of the attack stage."""
        self.collect("std", "clean", rows.std_clean_NK, rows.labels_N)
        self.collect("std", "attacked", rows.std_attacked_NK, rows.labels_N)
        for classifier, logit_map in self._maps.items():
            self.collect(classifier, "clean", logit_map(rows.rob_clean_NK), rows.labels_N)
            self.collect(classifier, "attacked", logit_map(rows.rob_attacked_NK), rows.labels_N)

    def groups(self) -> tuple[MarginGroup, ...]:
        """Return every group: each classifier, clean and attacked, right and wrong."""
        kinds = [(name, images, right) for name in CLASSIFIERS for images in IMAGES for right in (True, False)]
        return tuple(_group(*kind, self._found[kind]) for kind in kinds)

    def splits(self, log_cutoff: float) -> tuple[MarginSplit, ...]:
        """Return the split of each form of `rob`; none if a group is empty or there is no threshold (alpha <= 1/2).

        Args:
            log_cutoff: log(1 - threshold) of the deployed mixed classifier, on the margins after M.
        """
        right, wrong = (
            {form: np.array(self._found[form, images, correct], dtype=np.float64) for form in FORMS}
            for images, correct in _SPLIT
        )
        if not math.isfinite(log_cutoff) or not all(group.size for group in (*right.values(), *wrong.values())):
            return ()
        behind_m = float(np.nextafter(np.float32(log_cutoff), np.float32(np.inf)))  # margins are kept in float32
        n_kept = max(1, int((right["rob+M"] <= behind_m).sum()))
        cutoffs = {form: float(np.sort(right[form])[min(n_kept, right[form].size) - 1]) for form in FORMS}
        cutoffs["rob+M"] = behind_m
        return tuple(_split(form, right[form], wrong[form], cutoffs[form]) for form in FORMS)

    def collect(self, classifier: str, images: Images, logits_BK: Tensor, labels_B: Tensor) -> None:
        """Add the margins of one classifier's logits."""
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


def _split(form: str, right: _Numbers, wrong: _Numbers, log_cutoff: float) -> MarginSplit:
    """Split one form, from log(1 - margin) of its two groups."""
    both, cutoff = _log_odds(np.concatenate([right, wrong])), _log_odds(np.array([log_cutoff]))[0]
    low, high = np.quantile(both, (0.01, 0.99))  # smaller and larger values count in the first and last bin
    ends = np.array([min(low, cutoff) - 0.2, max(high, cutoff) + 0.2])
    first, last = np.sign(ends) * np.log1p(abs(ends))  # the scale of the drawn axis, on which all bins are equally wide
    drawn = np.linspace(first, last, _BINS + 1)
    edges = np.sign(drawn) * np.expm1(abs(drawn))
    inside = (_log_odds(group).clip(edges[0], edges[-1]) for group in (right, wrong))
    n_right, n_wrong = (np.histogram(group, bins=edges)[0].tolist() for group in inside)
    return MarginSplit(
        form,
        log_cutoff,
        Count(int((right <= log_cutoff).sum()), right.size),
        Count(int((wrong > log_cutoff).sum()), wrong.size),
        tuple(edges.tolist()),
        (tuple(n_right), tuple(n_wrong)),
    )


def _log_odds(log_distances: _Numbers) -> _Numbers:
    """Return log10(m / (1 - m)) from log(1 - m), finite even for margins that are close to 0 or to 1."""
    margins = np.maximum(-np.expm1(log_distances), 1e-30)
    odds: _Numbers = (np.log(margins) - log_distances) / math.log(10)
    return odds


def margin_ratio(groups: Iterable[MarginGroup], classifier: str) -> float | None:
    """Return the median margin on attacked and correct images over that on clean and wrong ones.

    Mixing depends on this ratio, because scaling all margins scales the margin threshold too. None if a group is empty.
    """
    attacked_right, clean_wrong = _two_groups(groups, classifier, "median")
    return attacked_right / clean_wrong if attacked_right is not None and clean_wrong else None


def margin_gap(groups: Iterable[MarginGroup], classifier: str) -> float | None:
    """Return the difference of the same two medians, which the paper reports."""
    attacked_right, clean_wrong = _two_groups(groups, classifier, "median")
    return None if attacked_right is None or clean_wrong is None else attacked_right - clean_wrong


def distance_ratio(groups: Iterable[MarginGroup], classifier: str) -> float | None:
    """Return the median of 1 - margin on clean and wrong images over that on attacked and correct ones.

    If M takes all margins close to 1, this ratio shows how well a threshold separates the groups. None if a group is
    empty or the median on attacked and correct images is 0.
    """
    attacked_right, clean_wrong = _two_groups(groups, classifier, "distance")
    return clean_wrong / attacked_right if clean_wrong is not None and attacked_right else None


def _two_groups(groups: Iterable[MarginGroup], classifier: str, value: str) -> list[float | None]:
    """Return a value of the groups "attacked and correct" and "clean and wrong" of a classifier."""
    found = {(group.images, group.correct): getattr(group, value) for group in groups if group.classifier == classifier}
    return [found.get(kind) for kind in _SPLIT]


def medians_table(groups: Sequence[MarginGroup]) -> Table:
    """List the four medians of each classifier, the two ratios, and the difference that the paper reports."""
    rows: list[list[Cell]] = [
        [name, *(group.median for group in groups if group.classifier == name), margin_ratio(groups, name),
         distance_ratio(groups, name), margin_gap(groups, name)]
        for name in CLASSIFIERS
    ]  # fmt: skip
    kinds = [f"{images}, {side}" for images in IMAGES for side in ("right", "wrong")]
    columns = ["classifier", *kinds, "ratio", "ratio to 1", "gap"]
    printed = ["classifier", "clean, wrong", "attacked, right", "ratio", "ratio to 1"]
    return Table(columns, rows, bold="rob+M", printed=printed)


def split_table(splits: Sequence[MarginSplit]) -> Table:
    """List the images that the margin threshold keeps and leaves to the standard classifier, for each form of `rob`."""
    rows: list[list[Cell]] = [
        [split.form, split.kept, split.left_to_std, math.exp(split.log_cutoff)] for split in splits
    ]
    return Table(
        ["margins of", "attacked_right_kept", "clean_wrong_left_to_std", "one_minus_cutoff"], rows, bold="rob+M"
    )


def split_sentence(splits: Sequence[MarginSplit]) -> str:
    """Summarize the splits in two sentences, or explain why there are none."""
    if not splits:
        return (
            "There is no threshold to draw: the robust classifier is right on no attacked image or wrong on no clean "
            "image, or alpha is at most 1/2, so that the standard classifier decides everywhere."
        )
    raw, normed, mapped = (split.left_to_std for split in splits)
    kept = splits[-1].kept
    found = (
        f"A threshold that keeps {kept.correct} of the {kept.total} attacked and correct images "
        f"({percent_text(kept)}%) leaves {raw.correct} of {raw.total} clean mistakes to the standard classifier, "
        f"{normed.correct} after LayerNorm, and {mapped.correct} after M."
    )
    if mapped.correct <= raw.correct:
        return f"{found} Here M separates the two groups no better than the margins as they are."
    return f"{found} On these images the mixed classifier can be more accurate than the robust one."


def ratio_sentence(groups: Sequence[MarginGroup]) -> str:
    """Compare two medians in one sentence, as in the paper, or explain why that is impossible."""
    raw, mapped = margin_ratio(groups, "rob"), margin_ratio(groups, "rob+M")
    if raw is None or mapped is None:
        return "rob is right on no attacked image or wrong on no clean one, so there are no margins to compare."
    rob = (
        f"rob's median margin is {raw:.2g} times as large on attacked images that it gets right as on clean images "
        "that it gets wrong; "
    )
    if mapped > raw:
        return f"{rob}after M it is {mapped:.2g} times as large."
    farther, before = distance_ratio(groups, "rob+M"), distance_ratio(groups, "rob")
    if farther is None or before is None or farther <= before:
        return f"{rob}M separates the two medians no further."
    return (
        f"{rob}M takes both close to 1, where the mistakes lie {farther:.2g} times as far from 1 ({before:.2g} times "
        "without M)."
    )


def margin_histograms(groups: Sequence[MarginGroup]) -> Figure:
    """Draw one histogram per classifier, clean images above attacked ones."""
    shown = []
    for images in IMAGES:
        for name in CLASSIFIERS:
            sides = {each.side: each for each in groups if (each.classifier, each.images) == (name, images)}
            counts, medians = ({side: getattr(sides[side], each) for side in sides} for each in ("counts", "median"))
            shown.append(Histogram(f"{name}, {images}", counts, EDGES, medians))
    return histograms(shown, x="margin", columns=len(CLASSIFIERS))


def split_histograms(splits: Sequence[MarginSplit]) -> Figure:
    """Draw one histogram per form of `rob`: the two groups over the margin, and the threshold between them."""
    colored = dict(zip((KEPT, WRONG), RIGHT_AND_WRONG.values(), strict=True))
    shown = [
        Histogram(
            f"{split.form}: {split.left_to_std.correct} of {split.left_to_std.total} wrong left to std",
            dict(zip(colored, split.counts, strict=True)),
            split.edges,
            medians={},
            rule=float(_log_odds(np.array([split.log_cutoff]))[0]),
        )
        for split in splits
    ]
    return histograms(shown, x="margin", columns=len(FORMS), series=colored, odds=True)
