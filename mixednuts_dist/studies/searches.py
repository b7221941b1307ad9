"""Studies of Algorithm 1 on the stored rows: no attack is run."""

import math
from dataclasses import replace

import torch

from ..config.register import STUDIES
from ..config.search_config import RangeConfig
from ..mixing.clamps import Clamp
from ..mixing.transforms import LogitTransform
from ..reports.charts import accuracy_scatter, bars, count_bars, maps
from ..reports.charts import lines as line_chart
from ..reports.counts import compared, count
from ..reports.drawing import Figure
from ..reports.results import predicted
from ..reports.table import Cell, Table
from ..reports.tables import search_table
from ..selection.criteria import PaperCriterion
from ..selection.exploration import Selection
from ..selection.selection import search_grid
from ..storage.records import AttackRecords
from .bench import Bench, clean_correct, robust_bound, select
from .study import Outcome

CLAMPS: tuple[Clamp, ...] = ("linear", "relu", "gelu", "elu", "softplus")
LINEAR_SCALES = RangeConfig(min=1e-6, max=5, count=24, spacing="log")
LINEAR_POWERS = RangeConfig(min=1, max=12, count=23)
CLOSE = 0.02  # of the best objective: what "similar" means in the sensitivity study


@STUDIES(
    "parameters",
    describes="s, p, c and alpha of every beta, and what they predict",
    section="C.1, tab:spc_candidate",
    order=9,
)
def parameters(bench: Bench) -> Outcome:
    """s, p, c and alpha of every beta, with what they will reach (tab:spc_candidate)."""
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


@STUDIES("clamp", describes="Algorithm 1 with each clamping function", section="D.2, tab:clamp_abla", order=14)
def clamps(bench: Bench) -> Outcome:
    """Algorithm 1 to the letter with each clamping function (tab:clamp_abla)."""
    asked = bench.grid()
    linear = replace(asked, biases=(0.0,), scales=LINEAR_SCALES.values(), powers=LINEAR_POWERS.values())
    rows: list[tuple[Cell, ...]] = []
    found = {}
    for clamp in CLAMPS:
        grid = replace(linear if clamp == "linear" else asked, clamp=clamp)
        best = select(bench.rows, grid, "paper").for_beta(bench.beta)
        found[clamp] = clean_correct(best.mixture(), bench.rows)
        bias = None if clamp == "linear" else best.bias
        rows.append((clamp, best.scale, bias, best.power, best.alpha, best.beta, best.objective, count(found[clamp])))
    columns = ("clamp", "s", "c", "p", "alpha", "beta", "objective", "mixture clean, exact")
    objectives = {str(row[0]): float(str(row[6])) for row in rows}
    n_wrong = int((bench.rows.rob_clean_NK.argmax(dim=1) != bench.rows.labels_N).sum())
    findings = (
        f"The optimal objective lies between {min(objectives.values()):.3f} and {max(objectives.values()):.3f} of the "
        f"{n_wrong} clean images that rob gets wrong: one image is {1 / max(1, n_wrong):.3f}.",
        compared("Clean mixture", ("GELU", found["gelu"]), ("linear", found["linear"])),
        compared("Clean mixture", ("GELU", found["gelu"]), ("ReLU", found["relu"])),
    )
    remarks = (
        "The objective is the paper's (criterion paper), whatever the run's own criterion is.",
        f"For the linear clamp c is 0 and, as in the paper, p may be larger: {LINEAR_POWERS.min:g} to "
        f"{LINEAR_POWERS.max:g}, s from {LINEAR_SCALES.min:g}; the others search the run's grid.",
    )
    columns_shown = [{"name": name, "value": value} for name, value in objectives.items()]
    return Outcome(Table(columns, rows), bars(columns_shown, value="objective, smaller is better"), findings, remarks)


@STUDIES("relaxed", describes="The relaxed objective beside the paper's and the exact one", section="D.8.3", order=23)
def relaxed_objective(bench: Bench) -> Outcome:
    """The paper's objective, the relaxed one over images that std gets right, and the exact criterion (appendix D)."""
    stored, grid = bench.rows, bench.grid()
    survived_N = stored.rob_attacked_NK.argmax(dim=1) == stored.labels_N
    wrong_N = stored.rob_clean_NK.argmax(dim=1) != stored.labels_N
    std_right_N = stored.std_clean_NK.argmax(dim=1) == stored.labels_N
    relaxed = PaperCriterion.of(
        stored.rob_attacked_NK[survived_N], stored.rob_clean_NK[wrong_N], clamp=grid.clamp, ln_k=grid.ln_k,
        std_correct_B=std_right_N[wrong_N],
    )  # fmt: skip
    choices = {
        "paper": select(stored, grid, "paper"),
        "relaxed": search_grid(relaxed, grid),
        "exact": select(stored, grid, "exact"),
    }
    rows, right = [], {}
    for name, selection in choices.items():
        best = selection.for_beta(bench.beta)
        mixture = best.mixture()
        right[name] = clean_correct(mixture, bench.rows)
        kept = count(robust_bound(mixture, bench.rows))
        rows.append(
            (name, best.scale, best.bias, best.power, best.alpha, best.objective, selection.n_objective,
             count(right[name]), kept)
        )  # fmt: skip
    columns = ("objective", "s", "c", "p", "alpha", "value", "images it counts", "clean, exact", "robust_predicted")
    findings = (
        compared("Clean mixture", ("relaxed", right["relaxed"]), ("paper", right["paper"])),
        compared("Clean mixture", ("exact", right["exact"]), ("relaxed", right["relaxed"])),
    )
    remarks = (
        "paper and relaxed are shares of clean-and-wrong images at or above the cutoff, to be small; exact is the "
        "share of clean images that the mixture gets right, to be large.",
    )
    columns_shown = [
        (str(row[0]), group, cell) for row in rows for group, cell in (("clean", row[7]), ("robust, predicted", row[8]))
    ]
    return Outcome(Table(columns, rows), count_bars(columns_shown), findings, remarks)


@STUDIES("assumptions", describes="How often assumptions 4.1 and 4.2 fail", section="D.8", order=22)
def assumptions(bench: Bench) -> Outcome:
    """How often assumptions 4.1 and 4.2 fail, for the parameters of every beta."""
    rows, columns_shown = [], []
    std_right_N = bench.rows.std_clean_NK.argmax(dim=1) == bench.rows.labels_N
    for entry in bench.search.entries:
        transform = entry.transform()
        clean, attacked = (
            _class_changes(transform, bench.rows, logits)
            for logits in (bench.rows.rob_clean_NK, bench.rows.rob_attacked_NK)
        )
        right_N = transform(bench.rows.rob_clean_NK.double()).argmax(dim=1) == bench.rows.labels_N
        only_rob = int((right_N & ~std_right_N).sum())
        rows.append((f"{entry.beta:g}", only_rob, *clean, *attacked))
        shown = {"4.1, clean": only_rob, "4.2, clean": clean[0], "4.2, attacked": attacked[0]}
        columns_shown += [{"x": entry.beta, "y": value, "series": name} for name, value in shown.items()]
    columns = (
        "beta", "4.1, clean", "4.2, clean", "corrected", "contaminated",
        "4.2, attacked", "corrected, attacked", "contaminated, attacked",
    )  # fmt: skip
    total = len(bench.rows.labels_N)
    deployed = next(row for row in rows if row[0] == f"{bench.beta:g}")
    findings = (
        f"Assumption 4.1 fails on {deployed[1]} of {total} clean images at the deployed beta: "
        "there rob behind M is right and std is wrong.",
        f"Assumption 4.2 fails on {deployed[2]} clean and {deployed[5]} attacked images of "
        f"{total}: M changes the class ({deployed[3]} and {deployed[6]} corrected, {deployed[4]} and "
        f"{deployed[7]} contaminated).",
    )
    return Outcome(Table(columns, rows), line_chart(columns_shown, x="beta", y="images that violate it"), findings)


@STUDIES("sensitivity", describes="The objective over s and c at every p", section="D.1, fig:sensitivity", order=12)
def sensitivity(bench: Bench) -> Outcome:
    """The objective over s and c at every p (fig:sensitivity)."""
    selection = select(bench.rows, bench.grid(), "paper")
    usable = ~(selection.infeasible[0] | selection.undeployable[0])
    objectives = torch.where(usable, selection.objectives[0], torch.nan)
    best = float(objectives.nan_to_num(math.inf).min())
    rows: list[tuple[Cell, ...]] = []
    for index, power in enumerate(selection.grid.powers):
        layer = objectives[:, index, :]
        close = int((layer <= best + CLOSE).sum())
        least = float(layer.nan_to_num(math.inf).min())
        rows.append((f"{power:.4g}", least if math.isfinite(least) else None, close, int(usable[:, index, :].sum())))
    columns = ("p", "best objective", f"candidates within {CLOSE:g} of the best", "usable candidates")
    n_close = int((objectives <= best + CLOSE).sum())
    findings = (
        f"The best objective is {best:.3f}; {n_close} of {int(usable.sum())} usable candidates come within {CLOSE:g} "
        "of it.",
        f"How many of them have which p: {', '.join(f'{row[2]} at {row[0]}' for row in rows if row[2])}.",
    )
    return Outcome(Table(columns, rows), _maps(selection, usable, selection.for_beta(bench.beta).at), findings)


def data_sizes(total: int) -> tuple[int, int, int]:
    """The paper's 1000, 300 and 100 images, or the same shares of fewer."""
    return (1000, 300, 100) if total >= 1000 else (total, max(2, round(0.3 * total)), max(2, round(0.1 * total)))


def _class_changes(transform: LogitTransform, rows: AttackRecords, logits_NK: torch.Tensor) -> tuple[int, int, int]:
    """Images whose class M changes; how many of them it makes right, and how many wrong."""
    before_N, after_N = logits_NK.argmax(dim=1), transform(logits_NK.double()).argmax(dim=1)
    changed_N = before_N != after_N
    corrected, contaminated = (changed_N & (side_N == rows.labels_N) for side_N in (after_N, before_N))
    return int(changed_N.sum()), int(corrected.sum()), int(contaminated.sum())


def _maps(selection: Selection, usable: torch.Tensor, chosen: tuple[float, float, float]) -> Figure:
    grid = selection.grid
    objectives = selection.objectives[0]
    return maps(
        [
            {"s": s, "p": p, "c": c, "selected": (s, p, c) == chosen,
             "objective": 100 * float(objectives[i, j, k]) if bool(usable[i, j, k]) else None}
            for i, s in enumerate(grid.scales)
            for j, p in enumerate(grid.powers)
            for k, c in enumerate(grid.biases)
        ],
        meaning="clean and wrong images above the cutoff (%)",
        maximised=False,
    )  # fmt: skip
