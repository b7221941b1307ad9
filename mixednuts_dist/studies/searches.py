"""Studies of Algorithm 1 on the stored rows: no attack is run."""

import math
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from ..config.keys import RangeConfig
from ..config.register import STUDIES
from ..mixing.clamps import Clamp
from ..mixing.transforms import LogitTransform
from ..reports.charts import accuracy_scatter, lines, maps
from ..reports.counts import compared, count
from ..reports.results import predicted
from ..reports.table import Cell, Table
from ..reports.tables import search_table
from ..selection.choice import Choice
from ..selection.criteria import PaperCriterion
from ..selection.selection import search_grid
from ..storage.records import AttackRecords
from .bench import Bench, clean_correct, robust_bound, select
from .study import Outcome

CLAMPS: tuple[Clamp, ...] = ("linear", "relu", "gelu", "elu", "softplus")
LINEAR_SCALES = RangeConfig(min=1e-6, max=5, count=24, spacing="log")
LINEAR_POWERS = RangeConfig(min=1, max=12, count=23)
CLOSE = 0.02  # relative distance from the best objective that counts as similar


@STUDIES("parameters", section="C.1, tab:spc_candidate", order=9)
def parameters(bench: Bench) -> Outcome:
    """List s, p, c, and alpha for every beta, with their predicted accuracies."""
    search, chosen = bench.search, bench.search.deployed()
    at_edge = sum(bool(entry.on_grid_edge) for entry in search.entries)
    findings = (
        f"Deployed at beta = {chosen.beta:g}: s = {chosen.scale:.4g}, p = {chosen.power:.4g}, c = {chosen.bias:.4g}, "
        f"1 - alpha = {chosen.one_minus_alpha:.4g}; {search.n_candidates} candidates, criterion {search.criterion}.",
        f"{at_edge or 'None'} of {len(search.entries)} optima {'lies' if at_edge == 1 else 'lie'} on the grid's edge.",
    )
    curve = [(clean.percent, kept.percent) for clean, kept in map(predicted, search.entries)]
    points = [(f"deployed, beta = {chosen.beta:g}", *predicted(chosen))]
    figure = accuracy_scatter({"predicted": points}, curves={"predicted": curve})
    return Outcome(search_table(search), figure, findings)


def chosen_cells(best: Choice) -> dict[str, Cell]:
    """Return s, c, p and alpha of a choice, as cells of a row."""
    return {"s": best.scale, "c": best.bias, "p": best.power, "alpha": best.alpha}


@STUDIES("clamp", section="D.2, tab:clamp_abla", order=14)
def clamps(bench: Bench) -> Outcome:
    """Run Algorithm 1 with each clamping function."""
    configured = bench.grid()
    linear = replace(configured, biases=(0.0,), scales=LINEAR_SCALES.values(), powers=LINEAR_POWERS.values())
    rows: list[dict[str, Cell]] = []
    right, objectives = {}, []
    for clamp in CLAMPS:
        grid = replace(linear if clamp == "linear" else configured, clamp=clamp)
        best = select(bench.rows, grid, "paper").for_beta(bench.beta)
        right[clamp] = clean_correct(best.mixture(), bench.rows)
        objectives.append(best.objective)
        cells = chosen_cells(best) | ({"c": None} if clamp == "linear" else {})
        measured: dict[str, Cell] = {"objective": best.objective, "clean, exact": count(right[clamp])}
        rows.append({"clamp": clamp, **cells, "beta": best.beta, **measured})
    n_wrong = int((~bench.rows.rob_correct).sum())
    findings = (
        f"The optimal objective lies between {min(objectives):.3f} and {max(objectives):.3f} of the "
        f"{n_wrong} clean images on which rob is wrong: one image is {1 / max(1, n_wrong):.3f}.",
        compared("Clean accuracy of mixed", ("GELU", right["gelu"]), ("linear", right["linear"])),
        compared("Clean accuracy of mixed", ("GELU", right["gelu"]), ("ReLU", right["relu"])),
    )
    remarks = (
        "The objective is the paper's (criterion paper), whatever criterion the run has.",
        f"For the linear clamp c is 0 and, as in the paper, p may be larger: {LINEAR_POWERS.min:g} to "
        f"{LINEAR_POWERS.max:g}, s from {LINEAR_SCALES.min:g}. The other clamps search the run's grid.",
    )
    value = "objective, smaller is better"
    return Outcome.with_bars(rows, "objective", value=value, findings=findings, remarks=remarks)


@STUDIES("relaxed", section="D.8.3", order=23)
def relaxed_objective(bench: Bench) -> Outcome:
    """Compare the relaxed objective, the paper's objective, and the exact criterion."""
    stored, grid = bench.rows, bench.grid()
    attacked_NK = stored.rob_attacked_NK[stored.rob_attacked_correct]
    counted_NK = stored.rob_clean_NK[~stored.rob_correct & stored.std_correct]
    relaxed = PaperCriterion.of(attacked_NK, counted_NK, clamp=grid.clamp, ln_k=grid.ln_k)
    choices = {
        "paper": select(stored, grid, "paper"),
        "relaxed": search_grid(relaxed, grid),
        "exact": select(stored, grid, "exact"),
    }
    best = {name: selection.for_beta(bench.beta) for name, selection in choices.items()}
    right = {name: clean_correct(choice.mixture(), stored) for name, choice in best.items()}
    rows: list[dict[str, Cell]] = [
        {
            "objective": name,
            **chosen_cells(best[name]),
            "value": best[name].objective,
            "images it counts": selection.criterion.n_objective,
            "clean, exact": count(right[name]),
            "robust_predicted": count(robust_bound(best[name].mixture(), stored)),
        }
        for name, selection in choices.items()
    ]
    findings = (
        compared("Clean accuracy of mixed", ("relaxed", right["relaxed"]), ("paper", right["paper"])),
        compared("Clean accuracy of mixed", ("exact", right["exact"]), ("relaxed", right["relaxed"])),
    )
    remarks = (
        "The objectives paper and relaxed are shares of clean and wrong images at or above the margin threshold, and "
        "are minimized. The objective exact is the share of clean images that mixed has right, and is maximized.",
    )
    return Outcome.with_bars(rows, "clean, exact", "robust_predicted", findings=findings, remarks=remarks)


@STUDIES("assumptions", section="D.8", order=22)
def assumptions(bench: Bench) -> Outcome:
    """Count how often assumptions 4.1 and 4.2 fail."""
    stored, total = bench.rows, len(bench.rows.labels_N)
    by_beta = {entry.beta: _violations(entry.transform(), stored) for entry in bench.search.entries}
    deployed = by_beta[bench.beta]
    shown = [
        {"x": beta, "y": row[name], "series": name}
        for beta, row in by_beta.items()
        for name in ("4.1, clean", "4.2, clean", "4.2, attacked")
    ]
    findings = (
        f"Assumption 4.1 fails on {deployed['4.1, clean']} of {total} clean images at the deployed beta, on which rob "
        "after M is right and std is wrong.",
        f"Assumption 4.2 fails on {deployed['4.2, clean']} clean and {deployed['4.2, attacked']} attacked images of "
        f"{total}: M changes the class ({deployed['corrected, clean']} and {deployed['corrected, attacked']} become "
        f"right, {deployed['contaminated, clean']} and {deployed['contaminated, attacked']} become wrong).",
    )
    table = Table.of({"beta": f"{beta:g}", **row} for beta, row in by_beta.items())
    return Outcome(table, lines(shown, x="beta", y="images that violate it"), findings)


def _violations(transform: LogitTransform, rows: AttackRecords) -> dict[str, int]:
    """Count the images that violate each assumption; for 4.2, also those that M makes right, and wrong."""
    found: dict[str, Tensor] = {}
    for images, logits_NK in (("clean", rows.rob_clean_NK), ("attacked", rows.rob_attacked_NK)):
        before_N, after_N = logits_NK.argmax(dim=1), transform(logits_NK.double()).argmax(dim=1)
        right_before_N, right_N = before_N == rows.labels_N, after_N == rows.labels_N
        if images == "clean":
            found["4.1, clean"] = right_N & ~rows.std_correct
        found[f"4.2, {images}"] = before_N != after_N
        found[f"corrected, {images}"] = right_N & ~right_before_N
        found[f"contaminated, {images}"] = right_before_N & ~right_N
    return {name: int(hits_N.sum()) for name, hits_N in found.items()}


@STUDIES("sensitivity", section="D.1, fig:sensitivity", order=12)
def sensitivity(bench: Bench) -> Outcome:
    """Map the paper's objective over s and c at every p."""
    selection = select(bench.rows, bench.grid(), "paper")
    usable = ~(selection.infeasible[0] | selection.undeployable[0])
    objectives = torch.where(usable, selection.objectives[0], torch.nan)
    best = float(objectives.nan_to_num(math.inf).min())
    column = f"candidates within {CLOSE:g} of the best"
    rows: list[dict[str, Cell]] = []
    for index, power in enumerate(selection.grid.powers):
        layer, n_usable = objectives[:, index, :], int(usable[:, index, :].sum())
        least = float(layer.nan_to_num(math.inf).min()) if n_usable else None
        n_close = int((layer <= best + CLOSE).sum())
        rows.append({"p": f"{power:.4g}", "best objective": least, column: n_close, "usable candidates": n_usable})
    n_close = int((objectives <= best + CLOSE).sum())
    powers = ", ".join(f"{row[column]} at {row['p']}" for row in rows if row[column])
    findings = (
        f"The best objective is {best:.3f}. Of {int(usable.sum())} usable candidates, {n_close} come within {CLOSE:g} "
        "of it.",
        f"Their powers p: {powers}.",
    )
    values = [None if math.isnan(value) else value for value in objectives.flatten().tolist()]
    candidates = product(selection.grid.scales, selection.grid.powers, selection.grid.biases)
    figure = maps(
        dict(zip(candidates, values, strict=True)),
        chosen=selection.for_beta(bench.beta).at,
        meaning="clean and wrong images above the threshold",
        maximized=False,
    )
    return Outcome(Table.of(rows), figure, findings)


def data_sizes(total: int) -> tuple[int, int, int]:
    """Return the paper's 1000, 300 and 100 images, or the same shares of fewer."""
    return (1000, 300, 100) if total >= 1000 else (total, max(2, round(0.3 * total)), max(2, round(0.1 * total)))
