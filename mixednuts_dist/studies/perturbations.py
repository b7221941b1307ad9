"""Studies of perturbations: the surrogate, transfer against bypass, perturbations against h-M."""

from typing import Any

from torch import Tensor

from ..config.register import STUDIES
from ..errors import InvalidInputError
from ..reports.charts import bars, count_bars
from ..reports.counts import compared, count, images_text
from ..reports.table import Cell, Table
from ..selection.choice import Choice
from ..storage.records import AttackRecords
from .bench import Bench, only, robust_bound, select
from .study import Outcome

# The joint attack on both classifiers is ours; the paper compares without it.
AS_PUBLISHED: dict[str, Any] = {"joint_starts": 0}
WITHOUT_JOINT = "As in the paper, both without the joint attack on std and rob (joint_starts: 0)."


@STUDIES(
    "surrogate",
    describes="r_d = 0 compared with r_d = 0.9, and the images that Square still breaks",
    section="B.2.1",
    order=7,
)
def surrogate(bench: Bench) -> Outcome:
    """r_d = 0.9 against 0: what gradients through M alone miss, and what Square then finds (appendix B.2)."""
    white_box = [attack for attack in bench.budget.attacks if attack != "square"]
    found = {
        f"r_d = {rd:g}": bench.measured(f"r_d = {rd:g}", attacks=(*white_box, "square"), rd=rd, **AS_PUBLISHED)
        for rd in (0.9, 0.0)
    }
    rows: list[dict[str, Cell]] = []
    shown, extra = [], []
    for name, one in found.items():
        before_N = one.survived[white_box[-1]]
        extra.append(int((before_N & ~one.survived["square"]).sum()))
        robust, before = count(one.robust_N), count(before_N)
        rows.append(
            {
                "surrogate": name,
                "robust": robust,
                "Square's extra finds": extra[-1],
                "after the white-box attacks": before,
            }
        )
        shown += [(name, "after the white-box attacks", before), (name, "after Square", robust)]
    findings = (
        compared("Robust", ("r_d = 0", found["r_d = 0"].robust_N), ("r_d = 0.9", found["r_d = 0.9"].robust_N)),
        f"Square breaks {images_text(extra[0])} that the white-box attacks left at r_d = 0.9, and {extra[1]} "
        "at r_d = 0.",
    )
    square = (f"Square has {bench.budget.n_queries} queries.", WITHOUT_JOINT)
    return Outcome(Table.of(rows), count_bars(shown), findings, (*bench.reduction, *square))


@STUDIES("bypass", describes="Transfer from f_aux compared with the direct gradient bypass", section="B.2.2", order=8)
def bypass(bench: Bench) -> Outcome:
    """Two ways around the one-hot std: transfer from f_aux, or f_mix's value with f_aux's gradient (appendix B.2)."""
    found = {mode: bench.measured(f"mode {mode}", mode=mode, **AS_PUBLISHED) for mode in ("transfer", "bypass")}
    rows: list[dict[str, Cell]] = [
        {"mode": mode, "robust": count(one.robust_N), "clean": count(one.clean_N)} for mode, one in found.items()
    ]
    both_N = found["transfer"].robust_N & found["bypass"].robust_N
    findings = (
        compared("Robust", ("transfer", found["transfer"].robust_N), ("bypass", found["bypass"].robust_N)),
        f"Under both modes together, {int(both_N.sum())} of {both_N.numel()} images remain robust.",
    )
    shown = [(mode, "robust", count(one.robust_N)) for mode, one in found.items()]
    figure = count_bars(shown, value="images right under attack (%)")
    return Outcome(Table.of(rows), figure, findings, (*bench.reduction, WITHOUT_JOINT))


@STUDIES(
    "approximation", describes="The objective with perturbations against h-M instead of h-LN", section="D.9", order=24
)
def approximation(bench: Bench) -> Outcome:
    """The objective at s*, p*, c* with perturbations against h-LN, and with those against h-M (appendix D.9)."""
    mixture, chosen = bench.deployed(), bench.search.deployed()
    sources = {"h-LN": bench.first_rows, "h-M": bench.attacked("MMAA on h-M", mixture.transform)}
    rows: list[dict[str, Cell]] = []
    kept, objectives = {}, {}
    for name, found in sources.items():
        best = _by_the_paper(found, bench, chosen)
        kept[name], objectives[name] = robust_bound(mixture, found), 100 * best.objective
        rows.append(
            {
                "perturbations against": name,
                "objective (%)": objectives[name],
                "alpha": best.alpha,
                "kept with the run's alpha": count(kept[name]),
                "rob right": count(_right(found)),
            }
        )
    n_wrong = int((sources["h-LN"].rob_clean_NK.argmax(dim=1) != sources["h-LN"].labels_N).sum())
    findings = (
        f"The objective goes from {objectives['h-LN']:.1f}% to {objectives['h-M']:.1f}% of {n_wrong} clean and "
        "wrong images when the perturbations are those against h-M itself.",
        compared(
            "Kept under the stored perturbations by the run's alpha",
            ("against h-LN", kept["h-LN"]),
            ("against h-M", kept["h-M"]),
        ),
    )
    shown = [{"name": name, "value": value} for name, value in objectives.items()]
    figure = bars(shown, value="objective (%), smaller is better")
    remarks = ("The objective is the paper's, at the run's own s, p and c.", *bench.mmaa_reduction)
    return Outcome(Table.of(rows), figure, findings, remarks)


def _by_the_paper(found: AttackRecords, bench: Bench, chosen: Choice) -> Choice:
    """Rate the run's s, p and c by the paper's criterion.

    Raises:
        InvalidInputError: if that criterion rules out the candidate, which another criterion chose.
    """
    try:
        return select(found, only(bench.grid(), chosen), "paper").for_beta(bench.beta)
    except InvalidInputError as error:
        raise InvalidInputError(
            f"the paper's criterion has no value for s = {chosen.scale:.4g}, p = {chosen.power:.4g}, c = "
            f"{chosen.bias:.4g} at beta = {bench.beta:g}: its threshold there is below 0, or so close to 1 that "
            "float32 carries no weight for `std`. A run with search.criterion = paper has one"
        ) from error


def _right(rows: AttackRecords) -> Tensor:
    return rows.rob_attacked_NK.argmax(dim=1) == rows.labels_N
