"""Studies of the attacks: the surrogate's share of raw logits, transfer against bypass, perturbations against h-M."""

from dataclasses import replace

from torch import Tensor

from ..storage.records import AttackRecords
from .bench import Bench
from .charts import bar_chart, count_bars
from .counting import compared, count
from .outcome import Outcome, StudyTable
from .parameters import Question, robust_bound, select


def surrogate(bench: Bench) -> Outcome:
    """r_d = 0.9 against 0: what gradients through M alone miss, and what Square then finds (appendix B.2)."""
    white_box = [attack for attack in bench.budget.attacks if attack != "square"]
    found = {
        f"r_d = {rd:g}": bench.measured(f"r_d = {rd:g}", attacks=(*white_box, "square"), rd=rd) for rd in (0.9, 0.0)
    }
    rows, bars = [], []
    for name, one in found.items():
        before_N = one.survived[white_box[-1]]
        extra = int((before_N & ~one.survived["square"]).sum())
        rows.append((name, count(one.robust_N), extra, count(before_N)))
        bars += [(name, "after the white-box attacks", count(before_N)), (name, "after Square", count(one.robust_N))]
    columns = ("surrogate", "robust", "Square's extra finds", "after the white-box attacks")
    (_, _, extra, _), (_, _, extra_zero, _) = rows
    findings = (
        compared("Robust", ("r_d = 0", found["r_d = 0"].robust_N), ("r_d = 0.9", found["r_d = 0.9"].robust_N)),
        f"Square breaks {extra} images that the white-box attacks had left at r_d = 0.9, and {extra_zero} at r_d = 0.",
    )
    square = (f"Square has {bench.budget.n_queries} queries.",)
    return Outcome(StudyTable(columns, tuple(rows)), count_bars(bars), findings, (*bench.reduction, *square))


def bypass(bench: Bench) -> Outcome:
    """Two ways around the one-hot std: transfer from f_aux, or f_mix's value with f_aux's gradient (appendix B.2)."""
    found = {mode: bench.measured(f"mode {mode}", mode=mode) for mode in ("transfer", "bypass")}
    rows = tuple((mode, count(one.robust_N), count(one.clean_N)) for mode, one in found.items())
    both_N = found["transfer"].robust_N & found["bypass"].robust_N
    findings = (
        compared("Robust", ("transfer", found["transfer"].robust_N), ("bypass", found["bypass"].robust_N)),
        f"Taken together the two leave {int(both_N.sum())} of {both_N.numel()} images standing.",
    )
    bars = [(mode, "robust", robust) for mode, robust, _ in rows]
    return Outcome(StudyTable(("mode", "robust", "clean"), rows), count_bars(bars), findings, bench.reduction)


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
    columns = ("perturbations against", "objective (%)", "alpha", "robust bound of the run's alpha", "rob right")
    (_, before, *_), (_, after, *_) = rows
    n_wrong = int((sources["h-LN"].rob_clean_NK.argmax(dim=1) != sources["h-LN"].labels_N).sum())
    findings = (
        f"The objective goes from {before:.1f} % to {after:.1f} % of {n_wrong} clean and wrong images when the "
        "perturbations are those against h-M itself.",
        compared("Guaranteed by the run's alpha", ("against h-LN", kept["h-LN"]), ("against h-M", kept["h-M"])),
    )
    bars = [{"name": row[0], "group": "objective", "value": row[1]} for row in rows]
    figure = bar_chart(bars, value="objective (%), smaller is better")
    remarks = ("The objective is the paper's, at the run's own s, p and c.", *bench.mmaa_reduction)
    return Outcome(StudyTable(columns, tuple(rows)), figure, findings, remarks)


def _right(rows: AttackRecords) -> Tensor:
    return rows.rob_attacked_NK.argmax(dim=1) == rows.labels_N
