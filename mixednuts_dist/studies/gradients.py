"""Studies of the attacks: the surrogate's share of raw logits, transfer against bypass, perturbations against h-M."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from ..register import STUDIES
from ..reports.charts import bars, count_bars
from ..reports.counts import compared, count
from ..reports.table import Table
from ..storage.records import AttackRecords
from . import paper_numbers as paper
from .bench import Bench
from .parameters import Question, robust_bound, select
from .study import Outcome

# The joint attack on both classifiers is ours; the paper compares without it.
AS_PUBLISHED: dict[str, Any] = {"border_restarts": 0}
WITHOUT_JOINT = "As in the paper, both without the joint attack on std and rob (border_restarts: 0)."


@STUDIES("surrogate", describes="r_d = 0 against 0.9, and what Square then still finds", section="B.2.1", order=7)
def surrogate(bench: Bench) -> Outcome:
    """r_d = 0.9 against 0: what gradients through M alone miss, and what Square then finds (appendix B.2)."""
    white_box = [attack for attack in bench.budget.attacks if attack != "square"]
    found = {
        f"r_d = {rd:g}": bench.measured(f"r_d = {rd:g}", attacks=(*white_box, "square"), rd=rd, **AS_PUBLISHED)
        for rd in (0.9, 0.0)
    }
    rows, columns_shown = [], []
    for name, one in found.items():
        before_N = one.survived[white_box[-1]]
        extra = int((before_N & ~one.survived["square"]).sum())
        rows.append((name, count(one.robust_N), extra, count(before_N)))
        columns_shown += [
            (name, "after the white-box attacks", count(before_N)),
            (name, "after Square", count(one.robust_N)),
        ]
    columns = ("surrogate", "robust", "Square's extra finds", "after the white-box attacks")
    (_, _, extra, _), (_, _, extra_zero, _) = rows
    findings = (
        compared("Robust", ("r_d = 0", found["r_d = 0"].robust_N), ("r_d = 0.9", found["r_d = 0.9"].robust_N)),
        f"Square breaks {extra} images that the white-box attacks had left at r_d = 0.9, and {extra_zero} at r_d = 0.",
    )
    square = (f"Square has {bench.budget.n_queries} queries.", WITHOUT_JOINT)
    return Outcome(
        Table(columns, tuple(rows)),
        count_bars(columns_shown),
        findings,
        (*bench.reduction, *square),
        paper=paper.SURROGATE,
    )


@STUDIES("bypass", describes="Transfer from f_aux against the gradient bypass", section="B.2.2", order=8)
def bypass(bench: Bench) -> Outcome:
    """Two ways around the one-hot std: transfer from f_aux, or f_mix's value with f_aux's gradient (appendix B.2)."""
    found = {mode: bench.measured(f"mode {mode}", mode=mode, **AS_PUBLISHED) for mode in ("transfer", "bypass")}
    rows = tuple((mode, count(one.robust_N), count(one.clean_N)) for mode, one in found.items())
    both_N = found["transfer"].robust_N & found["bypass"].robust_N
    findings = (
        compared("Robust", ("transfer", found["transfer"].robust_N), ("bypass", found["bypass"].robust_N)),
        f"Taken together the two leave {int(both_N.sum())} of {both_N.numel()} images standing.",
    )
    columns_shown = [(mode, "robust", robust) for mode, robust, _ in rows]
    return Outcome(
        Table(("mode", "robust", "clean"), rows),
        count_bars(columns_shown),
        findings,
        (*bench.reduction, WITHOUT_JOINT),
        paper=paper.BYPASS,
    )


@STUDIES("approximation", describes="The objective recomputed with perturbations against h-M", section="D.9", order=24)
def approximation(bench: Bench) -> Outcome:
    """The objective at s*, p*, c* with perturbations against h-LN, and with those against h-M (appendix D.9)."""
    mixture, chosen = bench.deployed(), bench.search.deployed()
    asked = Question.of(bench.config.search, bench.search).only(chosen.scale, chosen.power, chosen.bias)
    question = replace(asked, criterion="paper")
    sources = {"h-LN": bench.first(bench.rows), "h-M": bench.attacked("MMAA on h-M", mixture.transform)}
    rows, kept = [], {}
    for name, found in sources.items():
        best = select(found, question).for_beta(bench.beta)
        kept[name] = robust_bound(mixture, found)
        rows.append((name, 100 * best.objective, best.alpha, count(kept[name]), count(_right(found))))
    columns = ("perturbations against", "objective (%)", "alpha", "kept with the run's alpha", "rob right")
    (_, before, *_), (_, after, *_) = rows
    n_wrong = int((sources["h-LN"].rob_clean_NK.argmax(dim=1) != sources["h-LN"].labels_N).sum())
    findings = (
        f"The objective goes from {before:.1f} % to {after:.1f} % of {n_wrong} clean and wrong images when the "
        "perturbations are those against h-M itself.",
        compared(
            "Kept under the stored perturbations by the run's alpha",
            ("against h-LN", kept["h-LN"]),
            ("against h-M", kept["h-M"]),
        ),
    )
    columns_shown = [{"name": row[0], "group": "objective", "value": row[1]} for row in rows]
    figure = bars(columns_shown, value="objective (%), smaller is better")
    remarks = ("The objective is the paper's, at the run's own s, p and c.", *bench.mmaa_reduction)
    return Outcome(Table(columns, tuple(rows)), figure, findings, remarks, paper=paper.APPROXIMATION)


def _right(rows: AttackRecords) -> Tensor:
    return rows.rob_attacked_NK.argmax(dim=1) == rows.labels_N
