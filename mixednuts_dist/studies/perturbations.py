"""Studies of perturbations: the surrogate, transfer compared with the direct gradient bypass, attacks on h-M."""

from typing import Any

from ..config.register import STUDIES
from ..reports.counts import compared, count, images_text
from ..reports.table import Cell
from .bench import Bench, only, robust_bound, select
from .study import Outcome

# The joint attack on both classifiers is ours; the paper compares without it.
AS_PUBLISHED: dict[str, Any] = {"joint_starts": 0}
WITHOUT_JOINT = "As in the paper, neither attack includes the joint attack on std and rob (joint_starts: 0)."


@STUDIES("surrogate", section="B.2.1", order=7)
def surrogate(bench: Bench) -> Outcome:
    """Compare r_d = 0 with r_d = 0.9, and count the images that Square still breaks."""
    white_box = [attack for attack in bench.budget.attacks if attack != "square"]
    found = {
        f"r_d = {rd:g}": bench.measured(f"r_d = {rd:g}", attacks=(*white_box, "square"), rd=rd, **AS_PUBLISHED)
        for rd in (0.9, 0.0)
    }
    before = {name: one.survived[white_box[-1]] for name, one in found.items()}
    extra = {name: int((before[name] & ~one.survived["square"]).sum()) for name, one in found.items()}
    rows: list[dict[str, Cell]] = [
        {
            "surrogate": name,
            "robust": count(one.robust_N),
            "Square's extra finds": extra[name],
            "after the white-box attacks": count(before[name]),
        }
        for name, one in found.items()
    ]
    findings = (
        compared("Robust", ("r_d = 0", found["r_d = 0"].robust_N), ("r_d = 0.9", found["r_d = 0.9"].robust_N)),
        f"Square breaks {images_text(extra['r_d = 0.9'])} that the white-box attacks left at r_d = 0.9, and "
        f"{extra['r_d = 0']} at r_d = 0.",
    )
    remarks = (*bench.reduction, f"Square has {bench.budget.n_queries} queries.", WITHOUT_JOINT)
    return Outcome.with_bars(rows, "after the white-box attacks", "robust", findings=findings, remarks=remarks)


@STUDIES("bypass", section="B.2.2", order=8)
def bypass(bench: Bench) -> Outcome:
    """Compare transfer from f_aux with the direct gradient bypass."""
    found = {mode: bench.measured(f"mode {mode}", mode=mode, **AS_PUBLISHED) for mode in ("transfer", "bypass")}
    rows: list[dict[str, Cell]] = [
        {"mode": mode, "robust": count(one.robust_N), "clean": count(one.clean_N)} for mode, one in found.items()
    ]
    both_N = found["transfer"].robust_N & found["bypass"].robust_N
    findings = (
        compared("Robust", ("transfer", found["transfer"].robust_N), ("bypass", found["bypass"].robust_N)),
        f"Under both modes together, {int(both_N.sum())} of {both_N.numel()} images remain robust.",
    )
    remarks, value = (*bench.reduction, WITHOUT_JOINT), "images right under attack (%)"
    return Outcome.with_bars(rows, "robust", value=value, findings=findings, remarks=remarks)


@STUDIES("approximation", section="D.9", order=24)
def approximation(bench: Bench) -> Outcome:
    """Compare the objective with perturbations against h-M and against h-LN."""
    mixture, chosen = bench.deployed(), bench.search.deployed()
    sources = {"h-LN": bench.first_rows, "h-M": bench.attacked("MMAA on h-M", mixture.transform)}
    rows: list[dict[str, Cell]] = []
    kept, objectives = {}, {}
    for name, found in sources.items():
        best = select(found, only(bench.grid(), chosen), "paper").for_beta(bench.beta)
        kept[name], objectives[name] = robust_bound(mixture, found), 100 * best.objective
        rows.append(
            {
                "perturbations against": name,
                "objective (%)": objectives[name],
                "alpha": best.alpha,
                "retained with the run's alpha": count(kept[name]),
                "rob right": count(found.rob_attacked_correct),
            }
        )
    n_wrong = int((~sources["h-LN"].rob_correct).sum())
    findings = (
        f"The objective goes from {objectives['h-LN']:.1f}% to {objectives['h-M']:.1f}% of {n_wrong} clean and "
        "wrong images if the perturbations are those against h-M itself.",
        compared(
            "Retained under the stored perturbations with the run's alpha",
            ("against h-LN", kept["h-LN"]),
            ("against h-M", kept["h-M"]),
        ),
    )
    remarks = ("The objective is the paper's, at the run's own s, p and c.", *bench.mmaa_reduction)
    value = "objective (%), smaller is better"
    return Outcome.with_bars(rows, "objective (%)", value=value, findings=findings, remarks=remarks)
