"""Confidence margins of `std`, `rob`, `rob+LN` and `rob+M`, grouped as in the paper (section 5.1, appendix C.3).

`rob+LN` and `rob+M` are the robust classifier after LayerNorm and after M. An image is right for a classifier if this
classifier predicts its label. Margins are kept as log(1 - margin), which has digits left if margins round to 1.

Shapes: N images of a batch, K classes.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from torch import Tensor

from ..mixing.margins import log_one_minus_top2_margin
from ..mixing.transforms import IdentityTransform, LayerNormTransform, LogitTransform
from ..storage.records import AttackRecords
from .charts import histograms
from .counts import Count, count, percent_text
from .drawing import Figure
from .table import Cell, Table

Images = Literal["clean", "attacked"]
# (classifier, images, right or wrong) -> float32 log(1 - top-2 margin) of each image in this group
Margins = Mapping[tuple[str, Images, bool], Tensor]
IMAGES: tuple[Images, ...] = ("clean", "attacked")
CLASSIFIERS = ("std", "rob", "rob+LN", "rob+M")
FORMS = CLASSIFIERS[1:]  # forms of `rob`, on which a margin threshold can be set
_SPLIT: tuple[tuple[Images, bool], ...] = (("attacked", True), ("clean", False))  # what a threshold should separate


@dataclass(frozen=True)
class MarginGroup:
    """Top-2 margins in [0, 1] of one classifier on the clean or attacked images that it gets right, or wrong."""

    classifier: str
    images: Images
    correct: bool
    n: int
    median: float | None  # None for an empty group
    distance: float | None = None  # median of 1 - margin


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


def grouped_margins(classifier: str, images: Images, logits_NK: Tensor, labels_N: Tensor) -> Margins:
    """Return the margins of one classifier's logits on the images that it gets right, and on the others."""
    log_distances_N = log_one_minus_top2_margin(logits_NK).float()
    right_N = logits_NK.argmax(dim=1) == labels_N
    return {(classifier, images, right): log_distances_N[right_N == right] for right in (True, False)}


def stored_margins(rows: AttackRecords, transform: LogitTransform, ln_k: int | None) -> Margins:
    """Return the margins of each classifier on rows of the attack stage; `transform` is M, as deployed."""
    maps = {"rob": IdentityTransform(), "rob+LN": LayerNormTransform(ln_k), "rob+M": transform}
    found = dict[tuple[str, Images, bool], Tensor]()
    for images in IMAGES:
        std_NK, rob_NK = (getattr(rows, f"{name}_{images}_NK") for name in ("std", "rob"))
        logits = {"std": std_NK, **{form: logit_map(rob_NK) for form, logit_map in maps.items()}}
        for classifier, logits_NK in logits.items():
            found |= grouped_margins(classifier, images, logits_NK, rows.labels_N)
    return found


def margin_groups(margins: Margins) -> tuple[MarginGroup, ...]:
    """Return every group: each classifier, clean and attacked, right and wrong."""
    found = []
    for classifier, images, right in ((c, i, r) for c in CLASSIFIERS for i in IMAGES for r in (True, False)):
        log_distances = margins[classifier, images, right].double().numpy()
        medians: tuple[float | None, float | None] = None, None
        if log_distances.size:
            medians = float(np.median(-np.expm1(log_distances))), float(np.exp(np.median(log_distances)))
        found.append(MarginGroup(classifier, images, right, log_distances.size, *medians))
    return tuple(found)


def margin_splits(margins: Margins, log_cutoff: float) -> tuple[MarginSplit, ...]:
    """Return the split of each form of `rob`; none if a group is empty or there is no threshold (alpha <= 1/2).

    Args:
        log_cutoff: log(1 - threshold) of the deployed mixed classifier, on the margins after M.
    """
    right, wrong = ({form: margins[form, images, side] for form in FORMS} for images, side in _SPLIT)
    if not math.isfinite(log_cutoff) or not all(len(group) for group in (*right.values(), *wrong.values())):
        return ()
    behind_m = float(np.nextafter(np.float32(log_cutoff), np.float32(np.inf)))  # margins are kept in float32
    n_kept = max(1, int((right["rob+M"] <= behind_m).sum()))
    cutoffs = {form: float(right[form].sort().values[min(n_kept, len(right[form])) - 1]) for form in FORMS}
    cutoffs["rob+M"] = behind_m
    return tuple(
        MarginSplit(form, cutoff, count(right[form] <= cutoff), count(wrong[form] > cutoff))
        for form, cutoff in cutoffs.items()
    )


class Contrast(NamedTuple):
    """The medians of two groups of a classifier compared: attacked and correct images, and clean and wrong ones.

    Mixing depends on the ratio, because scaling all margins scales the margin threshold too. If M takes all margins
    close to 1, `ratio_to_1` shows how well a threshold separates the groups. All are None if a group is empty.
    """

    ratio: float | None  # median margin on attacked and correct images over that on clean and wrong ones
    ratio_to_1: float | None  # median of 1 - margin on clean and wrong images over that on attacked and correct ones
    gap: float | None  # difference of the median margins, which the paper reports


def contrast(groups: Iterable[MarginGroup], classifier: str) -> Contrast:
    """Compare the two groups that a margin threshold on this classifier should separate."""
    found = {(group.images, group.correct): group for group in groups if group.classifier == classifier}
    right, wrong = found["attacked", True], found["clean", False]

    def ratio(above: float | None, below: float | None) -> float | None:
        return above / below if above is not None and below else None

    gap = None if right.median is None or wrong.median is None else right.median - wrong.median
    return Contrast(ratio(right.median, wrong.median), ratio(wrong.distance, right.distance), gap)


def medians_table(groups: Sequence[MarginGroup]) -> Table:
    """List the four medians of each classifier, the two ratios, and the difference that the paper reports."""
    rows: list[list[Cell]] = [
        [name, *(group.median for group in groups if group.classifier == name), *contrast(groups, name)]
        for name in CLASSIFIERS
    ]
    kinds = [f"{images}, {side}" for images in IMAGES for side in ("right", "wrong")]
    columns = ["classifier", *kinds, "ratio", "ratio to 1", "gap"]
    printed = ["classifier", "clean, wrong", "attacked, right", "ratio", "ratio to 1"]
    return Table(columns, rows, bold="rob+M", printed=printed)


def split_table(splits: Sequence[MarginSplit]) -> Table:
    """List the images that the margin threshold keeps and leaves to the standard classifier, for each form of `rob`."""
    columns = ["margins of", "attacked, correct: at or above the threshold", "clean, wrong: below it, left to std"]
    rows: list[list[Cell]] = [
        [split.form, split.kept, split.left_to_std, math.exp(split.log_cutoff)] for split in splits
    ]
    return Table([*columns, "1 − threshold"], rows, bold="rob+M")


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
    raw, mapped = contrast(groups, "rob"), contrast(groups, "rob+M")
    if raw.ratio is None or mapped.ratio is None:
        return "rob is right on no attacked image or wrong on no clean one, so there are no margins to compare."
    return (
        f"rob's median margin is {raw.ratio:.2g} times as large on attacked images that it gets right as on clean "
        f"images that it gets wrong; after M it is {mapped.ratio:.2g} times as large."
    )


def margin_histograms(margins: Margins) -> Figure:
    """Draw one histogram per classifier, clean images above attacked ones, with a line at each median."""
    shown = {
        f"{name}, {images}": {"right": margins[name, images, True], "wrong": margins[name, images, False]}
        for images in IMAGES
        for name in CLASSIFIERS
    }
    return histograms(shown, columns=len(CLASSIFIERS))


def split_histograms(splits: Sequence[MarginSplit], margins: Margins) -> Figure:
    """Draw one histogram per form of `rob`: the two groups over the margin, and the threshold between them."""
    shown = {}
    for split in splits:
        left = split.left_to_std
        shown[f"{split.form}: {left.correct} of {left.total} wrong left to std"] = {
            "attacked, right": margins[split.form, "attacked", True],
            "clean, wrong": margins[split.form, "clean", False],
        }
    return histograms(shown, columns=len(FORMS), rules=[split.log_cutoff for split in splits])
