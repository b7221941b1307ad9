"""Two made-up logit vectors on the probability simplex, with and without M (fig:traj, fig:traj_bar)."""

import math
from collections.abc import Sequence
from typing import Any

import altair as alt
import torch
from torch import Tensor

from ..errors import InvalidInputError
from ..mixing.transforms import layer_norm_logits
from ..reports.chart_style import values
from .bench import Bench
from .outcome import Cell, Outcome, StudyTable, cell_text

# Classes A, B, C; the run's other classes lie below. A is clearly preferred, or B and C compete.
EXAMPLES = {"A preferred": (4.0, 1.0, 0.5), "B and C compete": (0.5, 3.0, 2.5)}
CLEAR, COMPETING = EXAMPLES
FORMS = ("h", "h-M")
BACKGROUND = -1.0
CLEAR_CONFIDENCES = (0.6, 0.9, 0.99)  # of the clear example: what h and h-M are compared at
_CORNERS = {"A": (0.5, math.sqrt(3) / 2), "B": (0.0, 0.0), "C": (1.0, 0.0)}
LAYER_NORM_EXAMPLES = ((0.9, 1.0, 1.1), (-2.0, 1.0, 1.1))  # appendix D.7


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
    table = StudyTable(("example", "tau", "A", "B", "C", "margin"), tuple(rows))
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
    return {"path": f"{example}, {name}", "x": x, "y": y, "tau": tau}


def _competition(table: StudyTable) -> tuple[str, ...]:
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


def _figure(paths: list[dict[str, Any]]) -> alt.TopLevelMixin:
    outline = [{"x": x, "y": y, "order": i} for i, (x, y) in enumerate([*_CORNERS.values(), _CORNERS["A"]])]
    corners = [{"x": x, "y": y, "name": name} for name, (x, y) in _CORNERS.items()]
    x = alt.X("x:Q", axis=None, scale=alt.Scale(domain=[-0.08, 1.08]))
    y = alt.Y("y:Q", axis=None, scale=alt.Scale(domain=[-0.08, 0.95]))
    names = list(dict.fromkeys(path["path"] for path in paths))
    colour = alt.Color(
        "path:N", sort=names, scale=alt.Scale(domain=names, range=["#2f7fc1", "#0f8f84", "#cb5a1d", "#8a5fb0"]),
        legend=alt.Legend(orient="right", title=None, labelLimit=220),
    )  # fmt: skip
    dash = alt.StrokeDash("path:N", sort=names, scale=alt.Scale(domain=names, range=[[1, 0], [5, 3]] * 2), legend=None)
    order = alt.Order("tau:Q")
    return alt.layer(
        alt.Chart(values(outline)).mark_line(color="#8b929b", strokeWidth=1).encode(x=x, y=y, order="order:Q"),
        alt.Chart(values(paths)).mark_line(strokeWidth=2).encode(x=x, y=y, color=colour, strokeDash=dash, order=order),
        alt.Chart(values(corners)).mark_text(dy=-10, fontSize=13, fontWeight="bold").encode(x=x, y=y, text="name:N"),
    ).properties(width=380, height=330)
