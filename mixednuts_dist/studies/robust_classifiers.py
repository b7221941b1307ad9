"""Studies of robust classifiers: accuracy after each map, several of them, and one without gradients."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..config.register import STUDIES
from ..config.uris import ClassifierSource
from ..errors import InvalidInputError
from ..mixing.transforms import IdentityTransform, LayerNormTransform, LogitMap
from ..reports.charts import lines
from ..reports.counts import compared, count, share_text
from ..reports.drawing import Row
from ..reports.table import Cell, Table
from ..selection.choice import Choice
from ..storage.records import AttackRecords
from .bench import Bench, clean_correct, only, robust_bound, select
from .searches import chosen_cells
from .study import Outcome, variants

MARGINS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5)
SQUARE_QUERIES = 1000  # without --full


@STUDIES("parameter-transfer", section="D.5, tab:param_trans", order=20)
def parameter_transfer(bench: Bench) -> Outcome:
    """List s, p, and c that the search selects for several robust classifiers (--rob).

    The study also applies each choice to the run's own robust classifier.
    """
    own, ours = bench.first_rows, rob_name(bench.config.rob)
    columns = ("s", "c", "p", "alpha there", f"clean with them on {ours}", f"robust with them on {ours}, predicted")
    rows: list[dict[str, Cell]] = []
    right: dict[str, Tensor] = {}
    findings: list[str] = []
    for rob in bench.robs:
        name, best = rob_name(rob), _selected(bench, bench.other_rows(rob))
        if best is None:
            rows.append({"rob": name, **dict.fromkeys(columns)})
            findings.append(f"{name}: no image remains robust or no candidate is left, so Algorithm 1 has no result.")
            continue
        moved = select(own, only(bench.grid(), best), bench.config.search.criterion).for_beta(bench.beta).mixture()
        right[name] = clean_correct(moved, own)
        reached = count(right[name]), count(robust_bound(moved, own))
        cells = dict(zip(columns, (*chosen_cells(best).values(), *reached), strict=True))
        rows.append({"rob": name, **cells})
    findings += [
        compared(f"Clean accuracy of mixed with {ours}", ("its own s, p, c", right[ours]), (f"those of {name}", hits_N))
        for name, hits_N in right.items()
        if name != ours and ours in right
    ]
    reused = "s, p and c are reused, and alpha is found again on the run's own rows."
    remarks, value = (*bench.mmaa_reduction, reused, *few_robs(bench)), f"clean accuracy of mixed with {ours} (%)"
    return Outcome.with_bars(rows, columns[4], value=value, findings=findings, remarks=remarks)


@STUDIES("base-choice", section="D.6", order=21)
def base_choice(bench: Bench) -> Outcome:
    """Compare the accuracy of robust classifiers at a minimum margin under attack (--rob)."""
    found = {rob_name(rob): bench.other_rows(rob) for rob in bench.robs}
    rows: dict[str, dict[str, Cell]] = {
        name: {"rob": name, "clean": count(each.rob_correct)} for name, each in found.items()
    }
    findings, shown = list[str](), list[Row]()
    for margin in MARGINS:
        kept = {
            name: count(~each.rob_broken_N & (-torch.expm1(each.log_one_minus_margin_N) >= margin))
            for name, each in found.items()
        }
        best = max(kept, key=lambda name: kept[name].correct)
        counts = ", ".join(f"{name} {robust.correct} of {robust.total}" for name, robust in kept.items())
        findings.append(f"Robust with a margin of at least {margin:g}: {best} leads, {counts}.")
        for name, robust in kept.items():
            rows[name][f"margin {margin:g}"] = robust
            shown.append({"x": margin, "y": robust.percent, "series": name})
    figure = lines(shown, x="margin of LayerNormed rob under MMAA", y="images robust with that margin (%)")
    return Outcome(Table.of(rows.values()), figure, tuple(findings), (*bench.mmaa_reduction, *few_robs(bench)))


@STUDIES("black-box", section="D.5", order=19)
def black_box(bench: Bench) -> Outcome:
    """Choose parameters for a robust classifier without gradients, by Square, transfer, or a guess."""
    n_queries = bench.config.attack.n_queries if bench.full else min(bench.config.attack.n_queries, SQUARE_QUERIES)
    blind = bench.attacked("Square as MMAA", method="square", n_queries=n_queries)
    choices = {
        "MMAA with gradients": _selected(bench, bench.first_rows),
        "Square as MMAA": _selected(bench, blind),
        **{f"transfer from {rob_name(rob)}": _selected(bench, bench.other_rows(rob)) for rob in bench.robs[1:]},
        "educated guess": Choice.published("cifar10"),
    }
    tried = {name: best for name, best in choices.items() if best is not None}
    remarks = (
        "The guess is the paper's s = 5, p = 4, c = -1.1, alpha = 0.99875 of CIFAR-10. A transfer reuses alpha too.",
        f"Square as MMAA has {n_queries} queries and leaves {share_text(count(~blind.rob_broken_N))} right, MMAA with "
        f"gradients {share_text(count(~bench.first_rows.rob_broken_N))}.",
        *few_robs(bench),
    )
    mixtures = {name: best.mixture() for name, best in tried.items()}
    cells = {name: chosen_cells(best) for name, best in tried.items()}
    return variants(bench, "source", mixtures, cells, reference="MMAA with gradients", remarks=remarks)


@STUDIES("base-accuracy", section="C.1, tab:base_acc", order=10)
def base_accuracy(bench: Bench) -> Outcome:
    """Measure the accuracy of h, h-LN, and h-M alone."""
    transform, plain, stored = bench.deployed().transform, IdentityTransform(), bench.rows
    attacked = {
        "h": ~bench.attacked("MMAA on h", plain).rob_broken_N,
        "h-LN": ~bench.first_rows.rob_broken_N,
        "h-M": ~bench.attacked("MMAA on h-M", transform).rob_broken_N,
    }
    maps: dict[str, LogitMap] = {"h": plain, "h-LN": LayerNormTransform(bench.search.ln_k), "h-M": transform}
    clean = {name: each(stored.rob_clean_NK).argmax(dim=1) == stored.labels_N for name, each in maps.items()}
    rows: list[dict[str, Cell]] = [
        {"classifier": name, "clean": count(clean[name]), "attacked": count(attacked[name])} for name in maps
    ]
    findings = (
        compared("Clean", ("h", clean["h"]), ("h-M", clean["h-M"])),
        compared("Attacked", ("h", attacked["h"]), ("h-M", attacked["h-M"])),
        compared("Attacked", ("h-LN", attacked["h-LN"]), ("h-M", attacked["h-M"])),
    )
    return Outcome.with_bars(rows, "clean", "attacked", findings=findings, remarks=bench.mmaa_reduction)


def rob_name(uri: str) -> str:
    """Return the short name of a classifier's URI, which follows the last `:` or `/`."""
    return ClassifierSource(uri).target.rpartition(":")[2].rpartition("/")[2] or uri


def _selected(bench: Bench, rows: AttackRecords) -> Choice | None:
    """Return the choice of Algorithm 1; None if no image remains robust or no candidate is left."""
    try:
        return select(rows, bench.grid(), bench.config.search.criterion).for_beta(bench.beta)
    except InvalidInputError:
        return None


def few_robs(bench: Bench) -> Sequence[str]:
    """Return a remark if only one robust classifier is compared."""
    return () if len(bench.robs) > 1 else ("Only the run's own rob is compared; name others with --rob URI.",)
