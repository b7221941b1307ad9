"""Studies of confidence: predictions on the simplex, and margins of classifiers and of the forms of `rob`."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config.register import STUDIES
from ..mixing.margins import log_one_minus_top2_margin
from ..mixing.transforms import IdentityTransform, LayerNormTransform, LogitMap, LogitTransform, layer_norm_logits
from ..reports.charts import histograms
from ..reports.counts import count
from ..reports.drawing import PALETTE, Figure, Row, colors, layer, number, panel
from ..reports.margins import GROUPS, SPLIT, Margins, grouped_margins
from ..reports.table import Cell, Table, cell_text
from .bench import Bench
from .robust_classifiers import few_robs, rob_name
from .study import Outcome

TO_THE_END: dict[str, Any] = {"stop_when_broken": False}
# The paper's two predictions of classes A, B and C (section 4.4), and its s, p and c.
EXAMPLES = {"A preferred": (1.0, -1.1, -1.0), "B and C compete": (-1.0, 1.1, 1.0)}
CLEAR, COMPETING = EXAMPLES
TRANSFORM = LogitTransform(3.0, 2.0, -0.5)
FORMS = ("h", "h-M")
CLEAR_CONFIDENCES = (0.6, 0.9, 0.99)  # confidences in the clear example at which h and h-M are compared
_CORNERS = {"A": (0.5, math.sqrt(3) / 2), "B": (0.0, 0.0), "C": (1.0, 0.0)}
LAYER_NORM_EXAMPLES = ((0.9, 1.0, 1.1), (-2.0, 1.0, 1.1))  # appendix D.7


@STUDIES("simplex", section="4.4, fig:traj, fig:traj_bar", order=1)
def trajectories(bench: Bench) -> Outcome:  # noqa: ARG001
    """Show how M changes a confident and an uncertain prediction.

    The temperature varies, which moves a prediction from the centroid of the simplex to a vertex. The study needs no
    attack and no images.
    """
    mapped = {}
    for example, vector in EXAMPLES.items():
        logits_1K = torch.tensor([vector], dtype=torch.float64)
        mapped[example, "h"], mapped[example, "h-M"] = layer_norm_logits(logits_1K)[0], TRANSFORM(logits_1K)[0]
    rows: list[dict[str, Cell]] = []
    paths, findings = list[Row](), []
    for name in FORMS:
        for confidence in CLEAR_CONFIDENCES:
            tau = temperature_for(mapped[CLEAR, name], confidence)
            for example in EXAMPLES:
                shares = (mapped[example, name] / tau).softmax(dim=0).tolist()
                cells: dict[str, Cell] = dict(zip("ABC", shares, strict=True))
                words = f"{example}, {name}, A at {confidence:g}"
                rows.append({"example": words, "tau": tau, **cells, "margin": top2_gap(shares)})
    table = Table.of(rows)
    for (example, name), logits_3 in mapped.items():
        middle = temperature_for(mapped[CLEAR, name], 0.9)
        for tau in (middle * step for step in torch.logspace(-2, 2, 120).tolist()):
            shares = (logits_3 / tau).softmax(dim=0).tolist()
            x, y = (sum(w * at[i] for w, at in zip(shares, _CORNERS.values(), strict=True)) for i in (0, 1))
            paths.append({"series": f"{example}, {name}", "x": x, "y": y, "tau": tau})
    for confidence in CLEAR_CONFIDENCES:
        h, h_m = (table.row(f"{COMPETING}, {name}, A at {confidence:g}") for name in FORMS)
        findings.append(
            f"If the clear example has {confidence:g} at A, the competing one has {cell_text(h['B'])} at B without M "
            f"and {cell_text(h_m['B'])} with M (margins {cell_text(h['margin'])} and {cell_text(h_m['margin'])})."
        )
    for vector in LAYER_NORM_EXAMPLES:
        logits_1K = torch.tensor([vector], dtype=torch.float64)
        before, after = (top2_gap(z.softmax(dim=1)[0].tolist()) for z in (logits_1K, layer_norm_logits(logits_1K)))
        findings.append(f"LayerNorm takes the margin of {vector} from {before:.3f} to {after:.3f}.")
    remarks = (
        "The two predictions and s = 3, p = 2, c = -0.5 are the paper's. h is shown after LayerNorm, and h and h-M "
        "are compared at the temperatures at which the clear example has the same confidence.",
    )
    return Outcome(table, _figure(paths), tuple(findings), remarks)


def temperature_for(logits_3: Tensor, confidence: float) -> float:
    """Return the tau at which class A has this share, by bisection; A must have the largest logit."""
    low, high = -30.0, 30.0  # log(tau), from the vertex to the centroid
    for _ in range(100):
        middle = (low + high) / 2
        surer = float((logits_3 / math.exp(middle)).softmax(dim=0)[0]) > confidence
        low, high = (middle, high) if surer else (low, middle)
    return math.exp(low)


def top2_gap(probabilities_3: Sequence[float]) -> float:
    """Return the largest probability minus the second largest."""
    first, second, *_ = sorted(probabilities_3, reverse=True)
    return first - second


def _figure(paths: Sequence[Row]) -> Figure:
    ends = [*_CORNERS.values(), _CORNERS["A"]]
    outline = [{"x": x, "y": y, "order": i} for i, (x, y) in enumerate(ends)]
    corners = [{"x": x, "y": y, "name": name} for name, (x, y) in _CORNERS.items()]
    names = list(dict.fromkeys(path["series"] for path in paths))
    x = {**number("x", domain=[-0.08, 1.08]), "axis": None}
    y = {**number("y", domain=[-0.08, 0.95]), "axis": None}
    dashes = {"domain": names, "range": [[1, 0], [5, 3]] * 2}
    path = {
        "x": x, "y": y, "color": colors(names, PALETTE, symbolType="stroke"),
        "order": {"field": "tau", "type": "quantitative"},
        "strokeDash": {"field": "series", "type": "nominal", "scale": dashes, "legend": None},
    }  # fmt: skip
    along = {"x": x, "y": y, "order": {"field": "order", "type": "quantitative"}}
    named = {"x": x, "y": y, "text": {"field": "name"}}
    return Figure(
        [
            panel(
                layer("line", outline, along, color="#8b929b", strokeWidth=1),
                layer("line", paths, path, strokeWidth=2),
                layer("text", corners, named, dy=-10, fontWeight="bold"),
                width=400, height=350,
            )
        ]
    )  # fmt: skip


@STUDIES("margins", section="5.1, fig:conf, tab:margin_hist", order=4)
def margin_study(bench: Bench) -> Outcome:
    """Compare the confidence margins of `std`, `rob`, `rob` with LN, and `rob` with M.

    Each form of `rob` is attacked by its own MMAA.
    """
    transform, ln_k = bench.search.deployed().transform(), bench.search.ln_k
    plain, layer_norm = IdentityTransform(), LayerNormTransform(ln_k)
    forms: dict[str, LogitMap] = {"std": plain, "rob": plain, "rob+LN": layer_norm, "rob+M": transform}
    margins = dict[tuple[str, str], Tensor]()
    for name, logit_map in forms.items():
        uri = bench.config.required_std if name == "std" else bench.config.rob
        attack_map = None if name == "rob+LN" else logit_map  # LayerNorm is the map of the attack stage
        attacked = bench.attacked(f"MMAA on {name}", attack_map, rob=uri, **TO_THE_END)
        margins |= grouped_margins(name, logit_map, attacked)
    shown = {
        f"{name}, {images}": {side: margins[name, f"{images}, {side}"] for side in ("right", "wrong")}
        for images in ("clean", "attacked")
        for name in forms
    }
    printed = ["classifier", "clean, wrong", "attacked, right", "ratio", "ratio to 1"]
    table = replace(Table.of([_medians_row(name, margins) for name in forms], bold="rob+M"), printed=printed)
    remarks = ("Each form is attacked by its own MMAA, which minimizes its margin.", *bench.mmaa_reduction)
    return Outcome(table, histograms(shown, columns=len(forms)), (_ratio_sentence(table),), remarks)


def _medians_row(name: str, margins: Margins) -> dict[str, Cell]:
    """Return the four medians of a classifier, and how those compare that a margin threshold should separate.

    Mixing depends on the ratio, because scaling all margins scales the threshold too. If M takes all margins close to
    1, the ratio of their distances to 1 shows how well a threshold separates them. The paper reports the difference.
    """
    groups = {group: margins[name, group].double().numpy() for group in GROUPS}
    medians = {group: float(np.median(-np.expm1(found))) if found.size else None for group, found in groups.items()}
    row: dict[str, Cell] = {"classifier": name, **medians, **dict.fromkeys(("ratio", "ratio to 1", "gap"))}
    above, below = (medians[group] for group in SPLIT)
    if above is not None and below is not None:
        nearer, farther = (float(np.exp(np.median(groups[group]))) for group in SPLIT)
        row["ratio"] = above / below if below else None
        row["ratio to 1"] = farther / nearer if nearer else None
        row["gap"] = above - below
    return row


def _ratio_sentence(table: Table) -> str:
    raw, mapped = (table.row(name)["ratio"] for name in ("rob", "rob+M"))
    if not isinstance(raw, float) or not isinstance(mapped, float):
        return "rob is right on no attacked image or wrong on no clean one, so there are no margins to compare."
    return (
        f"rob's median margin is {raw:.2g} times as large on attacked images that it gets right as on clean images "
        f"that it gets wrong; after M it is {mapped:.2g} times as large."
    )


@STUDIES("confidence", section="5.2, fig:conf_sota", order=5)
def confidence(bench: Bench) -> Outcome:
    """Compare the confidence of robust classifiers in correct and in wrong predictions (--rob)."""
    ln_k, std = bench.search.ln_k, bench.config.required_std
    rows: list[dict[str, Cell]] = []
    for uri in (*bench.robs, std):
        name = f"std ({rob_name(uri)})" if uri == std else rob_name(uri)
        found = bench.attacked(f"MMAA on {name}", rob=uri, **TO_THE_END)
        clean, robust = count(found.rob_correct), count(~found.rob_broken_N)
        medians = _medians(found.rob_clean_NK, found.rob_attacked_NK, found.labels_N, ln_k)
        rows.append({"classifier": name, "clean accuracy": clean, "robust accuracy": robust, **medians})
    findings = [_benign(str(row["classifier"]), row["clean, wrong"], row["attacked, right"]) for row in rows]
    attack = "MMAA attacks all of them, and minimizes their margins after LayerNorm."
    remarks, value = (attack, *bench.mmaa_reduction, *few_robs(bench)), "median margin after LayerNorm"
    return Outcome.with_bars(rows, *GROUPS, value=value, findings=findings, remarks=remarks)


def _medians(clean_NK: Tensor, attacked_NK: Tensor, labels_N: Tensor, ln_k: int | None) -> dict[str, Cell]:
    medians: list[float | None] = []
    for logits_NK in (clean_NK, attacked_NK):
        margins_N = -torch.expm1(log_one_minus_top2_margin(layer_norm_logits(logits_NK, ln_k)))
        right_N = logits_NK.argmax(dim=1) == labels_N
        medians += [float(margins_N[mask].median()) if bool(mask.any()) else None for mask in (right_N, ~right_N)]
    return dict(zip(GROUPS, medians, strict=True))


def _benign(name: str, clean_wrong: Cell, attacked_right: Cell) -> str:
    if not isinstance(clean_wrong, float) or not isinstance(attacked_right, float):
        missing = "clean and wrong" if not isinstance(clean_wrong, float) else "right under attack"
        return f"{name}: no image is {missing}, so there are no margins to compare."
    kind = "benign" if attacked_right > clean_wrong else "not benign"
    return (
        f"{name}: median margin {attacked_right:.3f} on attacked and right images, {clean_wrong:.3f} on clean and "
        f"wrong ones, so the confidence property is {kind}."
    )
