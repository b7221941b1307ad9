"""Confidence margins of `rob`, `rob+LN` and `rob+M`, and what a threshold on them separates (paper, section 5.1).

`rob+LN` and `rob+M` are the robust classifier after LayerNorm and after M. An image is right for a classifier if this
classifier predicts its label. Margins are kept as log(1 - margin), which has digits left if margins round to 1.

Shapes: N images of a batch, K classes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ..mixing.margins import log_one_minus_top2_margin
from ..mixing.transforms import IdentityTransform, LayerNormTransform, LogitMap, LogitTransform
from ..storage.records import AttackRecords
from .charts import histograms
from .counts import Count, count, percent_text
from .drawing import Figure
from .table import Cell, Table

# (classifier, group) -> float32 log(1 - top-2 margin) of each image in this group
Margins = Mapping[tuple[str, str], Tensor]
GROUPS = ("clean, right", "clean, wrong", "attacked, right", "attacked, wrong")
FORMS = ("rob", "rob+LN", "rob+M")  # on which a margin threshold can be set
SPLIT = ("attacked, right", "clean, wrong")  # the groups that a threshold should separate


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


def grouped_margins(classifier: str, logit_map: LogitMap, rows: AttackRecords) -> Margins:
    """Return the margins of the logits in the columns of `rob` after a map, by group, under this classifier's name."""
    found = dict[tuple[str, str], Tensor]()
    for images, logits_NK in (("clean", rows.rob_clean_NK), ("attacked", rows.rob_attacked_NK)):
        mapped_NK = logit_map(logits_NK)
        log_distances_N = log_one_minus_top2_margin(mapped_NK).float()
        right_N = mapped_NK.argmax(dim=1) == rows.labels_N
        found[classifier, f"{images}, right"] = log_distances_N[right_N]
        found[classifier, f"{images}, wrong"] = log_distances_N[~right_N]
    return found


def stored_margins(rows: AttackRecords, transform: LogitTransform, ln_k: int | None) -> Margins:
    """Return the margins of each form of `rob` on rows of the attack stage; `transform` is M, as deployed."""
    maps: tuple[LogitMap, ...] = IdentityTransform(), LayerNormTransform(ln_k), transform
    found = dict[tuple[str, str], Tensor]()
    for form, logit_map in zip(FORMS, maps, strict=True):
        found |= grouped_margins(form, logit_map, rows)
    return found


def margin_splits(margins: Margins, log_cutoff: float) -> tuple[MarginSplit, ...]:
    """Return the split of each form of `rob`; none if a group is empty or there is no threshold (alpha <= 1/2).

    Args:
        log_cutoff: log(1 - threshold) of the deployed mixed classifier, on the margins after M.
    """
    right, wrong = ({form: margins[form, group] for form in FORMS} for group in SPLIT)
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


def split_histograms(splits: Sequence[MarginSplit], margins: Margins) -> Figure:
    """Draw one histogram per form of `rob`: the two groups over the margin, and the threshold between them."""
    shown = {}
    for split in splits:
        title = f"{split.form}: {split.left_to_std.correct} of {split.left_to_std.total} wrong left to std"
        shown[title] = {group: margins[split.form, group] for group in SPLIT}
    return histograms(shown, columns=len(FORMS), rules=[split.log_cutoff for split in splits])
