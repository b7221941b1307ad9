"""Studies of confidence: two made-up predictions on the simplex, margins of rob's forms, margins of several robs."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..config.register import STUDIES
from ..errors import InvalidInputError
from ..mixing.margins import log_one_minus_top2_margin
from ..mixing.transforms import layer_norm_logits
from ..reports.charts import bars
from ..reports.counts import count
from ..reports.drawing import Figure, colors, layer, number, panel
from ..reports.margins import margin_groups, margin_histograms, medians_table, ratio_sentence
from ..reports.table import Cell, Table, cell_text
from .bench import Bench
from .robust_classifiers import few_robs, rob_name
from .study import Outcome

TO_THE_END: dict[str, Any] = {"stop_when_broken": False}
STD_STOPS = (
    "rob is attacked to the end of MMAA; std's own attack (APGD-CE + APGD-T) stops at the first perturbation that "
    "breaks an image, so std's margins on attacked and wrong images are those just after breaking."
)
_GROUPS = ("clean, right", "clean, wrong", "attacked, right", "attacked, wrong")
# Classes A, B, C; the run's other classes lie below. A is clearly preferred, or B and C compete.
EXAMPLES = {"A preferred": (4.0, 1.0, 0.5), "B and C compete": (0.5, 3.0, 2.5)}
CLEAR, COMPETING = EXAMPLES
FORMS = ("h", "h-M")
BACKGROUND = -1.0
CLEAR_CONFIDENCES = (0.6, 0.9, 0.99)  # of the clear example: what h and h-M are compared at
_CORNERS = {"A": (0.5, math.sqrt(3) / 2), "B": (0.0, 0.0), "C": (1.0, 0.0)}
LAYER_NORM_EXAMPLES = ((0.9, 1.0, 1.1), (-2.0, 1.0, 1.1))  # appendix D.7


@STUDIES(
    "simplex",
    describes="What M does to a clear and to a competing prediction",
    section="4.4, fig:traj, fig:traj_bar",
    order=1,
)
def trajectories(bench: Bench) -> Outcome:
    """How temperature moves each example between the centroid and a vertex; no attack, no image."""
    mapped = example_logits(bench)
    rows: list[tuple[Cell, ...]] = []
    for name in FORMS:
        for confidence in CLEAR_CONFIDENCES:
            tau = temperature_for(mapped[CLEAR, name], confidence)
            for example in EXAMPLES:
                shares = three_probabilities(mapped[example, name], tau).tolist()
                rows.append((f"{example}, {name}, A at {confidence:g}", tau, *shares, top2_gap(shares)))
    paths = [
        _path_row(example, name, mapped_1K, tau)
        for (example, name), mapped_1K in mapped.items()
        for tau in (temperature_for(mapped[CLEAR, name], 0.9) * step for step in torch.logspace(-2, 2, 120).tolist())
    ]
    table = Table(("example", "tau", "A", "B", "C", "margin"), tuple(rows))
    n_others = bench.run.inputs.n_classes - 3
    remarks = (
        "The two logit vectors are ours: the paper prints only their picture. h is shown behind LayerNorm, and h and "
        "h-M are compared at the temperatures that make the clear example equally sure; the other "
        f"{n_others} classes lie at {BACKGROUND:g} and are left out of the picture.",
    )
    return Outcome(table, _figure(paths), (*_competition(table), *_layer_norm_findings()), remarks)


def example_logits(bench: Bench) -> dict[tuple[str, str], Tensor]:
    """Both examples behind LayerNorm ("h") and behind the run's M ("h-M"), each of shape (1, K)."""
    transform, n_classes = bench.deployed().transform, bench.run.inputs.n_classes
    if n_classes < 3:
        raise InvalidInputError(f"the probability simplex needs 3 classes, the run has {n_classes}")
    found = {}
    for example, three in EXAMPLES.items():
        logits_1K = torch.tensor([[*three, *[BACKGROUND] * (n_classes - 3)]], dtype=torch.float64)
        found[example, "h"] = layer_norm_logits(logits_1K, bench.search.ln_k)
        found[example, "h-M"] = transform(logits_1K)
    return found


def temperature_for(logits_1K: Tensor, confidence: float) -> float:
    """The tau at which class A has this share of the three, by bisection; A must be the largest logit."""
    low, high = -30.0, 30.0  # of log(tau): from the vertex to the centroid
    for _ in range(100):
        middle = (low + high) / 2
        surer = float(three_probabilities(logits_1K, math.exp(middle))[0]) > confidence
        low, high = (middle, high) if surer else (low, middle)
    return math.exp(low)


def three_probabilities(logits_1K: Tensor, tau: float) -> Tensor:
    """softmax(logits / tau) of the first three classes, scaled to sum 1, shape (3,)."""
    return (logits_1K[0, :3] / tau).softmax(dim=0)


def top2_gap(probabilities_3: Sequence[float]) -> float:
    """The largest minus the second largest."""
    first, second, *_ = sorted(probabilities_3, reverse=True)
    return first - second


def _path_row(example: str, name: str, mapped_1K: Tensor, tau: float) -> dict[str, Any]:
    weights = three_probabilities(mapped_1K, tau).tolist()
    x, y = (sum(w * corner[i] for w, corner in zip(weights, _CORNERS.values(), strict=True)) for i in (0, 1))
    return {"series": f"{example}, {name}", "x": x, "y": y, "tau": tau}


def _competition(table: Table) -> tuple[str, ...]:
    """What M does to the competing example where the clear one is as sure as before."""
    sentences = []
    for confidence in CLEAR_CONFIDENCES:
        h, h_m = (table.row(f"{COMPETING}, {name}, A at {confidence:g}") for name in FORMS)
        sentences.append(
            f"Where the clear example has {confidence:g} at A, the competing one has {cell_text(h['B'])} at B without "
            f"M and {cell_text(h_m['B'])} with it (margins {cell_text(h['margin'])} and {cell_text(h_m['margin'])})."
        )
    return tuple(sentences)


def _layer_norm_findings() -> tuple[str, ...]:
    """Appendix D.7: LayerNorm scales the unconfident vector up and the competing one down."""
    sentences = []
    for vector in LAYER_NORM_EXAMPLES:
        logits_1K = torch.tensor([vector], dtype=torch.float64)
        before, after = (top2_gap(z.softmax(dim=1)[0].tolist()) for z in (logits_1K, layer_norm_logits(logits_1K)))
        sentences.append(f"LayerNorm takes the margin of {vector} from {before:.3f} to {after:.3f}.")
    return tuple(sentences)


def _figure(paths: list[dict[str, Any]]) -> Figure:
    ends = [*_CORNERS.values(), _CORNERS["A"]]
    outline = [{"x": x, "y": y, "order": i} for i, (x, y) in enumerate(ends)]
    corners = [{"x": x, "y": y, "name": name} for name, (x, y) in _CORNERS.items()]
    names = list(dict.fromkeys(path["series"] for path in paths))
    x = {**number("x", domain=[-0.08, 1.08]), "axis": None}
    y = {**number("y", domain=[-0.08, 0.95]), "axis": None}
    dashes = {"domain": names, "range": [[1, 0], [5, 3]] * 2}
    path = {
        "x": x, "y": y, "color": colors(names, symbolType="stroke"), "order": {"field": "tau", "type": "quantitative"},
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


@STUDIES(
    "margins", describes="Confidence margins of std, rob, rob+LN and rob+M", section="5.1, fig:conf, tab:margin_hist",
    order=4,
)  # fmt: skip
def margin_study(bench: Bench) -> Outcome:
    """Medians and their ratios in the table, histograms in the figure; rob is attacked to the end."""
    chosen = bench.search.deployed()
    groups = margin_groups([bench.attacked("MMAA to the end", **TO_THE_END)], chosen.transform(), bench.search.ln_k)
    remarks = (STD_STOPS, *bench.mmaa_reduction)
    return Outcome(medians_table(groups), margin_histograms(groups), (ratio_sentence(groups),), remarks)


@STUDIES(
    "confidence",
    describes="Are robust classifiers surer where they are right? Compares --rob",
    section="5.2, fig:conf_sota",
    order=5,
)
def confidence(bench: Bench) -> Outcome:
    """Median margins of many robust classifiers behind LayerNorm, right against wrong (fig:conf_sota)."""
    rows: list[tuple[Cell, ...]] = []
    columns_shown = []
    for rob in bench.robs:
        own = rob == bench.config.rob
        found = bench.attacked("MMAA to the end", **TO_THE_END) if own else bench.other_rows(rob)
        medians = _medians(found.rob_clean_NK, found.rob_attacked_NK, found.labels_N, bench.search.ln_k)
        clean = count(found.rob_clean_NK.argmax(dim=1) == found.labels_N)
        rows.append((rob_name(rob), clean, count(~found.rob_broken_N), *medians))
    std = bench.first_rows
    medians = _medians(std.std_clean_NK, std.std_attacked_NK, std.labels_N, bench.search.ln_k)
    clean = count(std.std_clean_NK.argmax(dim=1) == std.labels_N)
    rows.append((f"std ({rob_name(bench.config.required_std)})", clean, count(~std.std_broken_N), *medians))
    for row in rows:
        columns_shown += [{"name": row[0], "group": group, "value": row[3 + i]} for i, group in enumerate(_GROUPS)]
    findings = tuple(_benign(str(row[0]), row[4], row[5]) for row in rows)
    columns = ("classifier", "clean accuracy", "robust accuracy", *_GROUPS)
    figure = bars(columns_shown, value="median margin behind LayerNorm")
    others = ("The other robust classifiers' attacks stop at the first perturbation that breaks an image.",)
    remarks = (STD_STOPS, *(others if len(bench.robs) > 1 else ()), *bench.mmaa_reduction, *few_robs(bench))
    return Outcome(Table(columns, rows), figure, findings, remarks)


def _medians(clean_NK: Tensor, attacked_NK: Tensor, labels_N: Tensor, ln_k: int | None) -> list[float | None]:
    medians: list[float | None] = []
    for logits_NK in (clean_NK, attacked_NK):
        margins_N = -torch.expm1(log_one_minus_top2_margin(layer_norm_logits(logits_NK, ln_k)))
        right_N = logits_NK.argmax(dim=1) == labels_N
        medians += [float(margins_N[mask].median()) if bool(mask.any()) else None for mask in (right_N, ~right_N)]
    return medians


def _benign(name: str, clean_wrong: Cell, attacked_right: Cell) -> str:
    if not isinstance(clean_wrong, float) or not isinstance(attacked_right, float):
        missing = "clean and wrong" if not isinstance(clean_wrong, float) else "right under attack"
        return f"{name}: no image is {missing}, so there are no margins to compare."
    kind = "benign" if attacked_right > clean_wrong else "not benign"
    return (
        f"{name}: median margin {attacked_right:.3f} on attacked and right images, {clean_wrong:.3f} on clean and "
        f"wrong ones: {kind}."
    )
