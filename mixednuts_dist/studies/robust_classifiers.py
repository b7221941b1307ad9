"""Studies that hold several robust classifiers against each other, and options for one without gradients."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import InvalidInputError
from ..mixing.margins import log_one_minus_top2_margin
from ..mixing.mixture import Mixture
from ..mixing.transforms import layer_norm_logits
from ..reports.wording import share_text
from ..selection.choice import Choice
from ..selection.published_values import MixedNUTSParameters
from ..storage.records import AttackRecords
from ..uris import parse_uri
from .bench import Bench
from .charts import accuracy_chart, bar_chart, line_chart
from .counting import compared, count
from .outcome import Cell, Outcome, StudyTable
from .parameters import Question, clean_correct, robust_bound, select

MARGINS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5)
SQUARE_QUERIES = 1000  # of the reduced study
_GROUPS = ("clean, right", "clean, wrong", "attacked, right", "attacked, wrong")


def parameter_transfer(bench: Bench) -> Outcome:
    """s, p and c of several robust classifiers, and what each would do on the run's own (tab:param_trans)."""
    question = Question.of(bench.config.search, bench.search)
    own = bench.first(bench.rows)
    rows: list[tuple[Cell, ...]] = []
    right: dict[str, Tensor] = {}
    for rob in bench.robs:
        name, best = rob_name(rob), _selected(bench.other_rows(rob), question, bench.beta)
        if best is None:
            rows.append((name, None, None, None, None, None, None))
            continue
        moved = select(own, question.only(best.scale, best.power, best.bias)).for_beta(bench.beta).mixture()
        right[name] = clean_correct(moved, own)
        reached = count(right[name]), count(robust_bound(moved, own))
        rows.append((name, best.scale, best.bias, best.power, best.alpha, *reached))
    ours = rob_name(bench.config.rob)
    columns = ("rob", "s", "c", "p", "alpha there", f"clean with them on {ours}", f"robust bound with them on {ours}")
    findings = [
        compared(f"Clean mixture of {ours}", ("its own s, p, c", right[ours]), (f"those of {name}", hits_N))
        for name, hits_N in right.items()
        if name != ours and ours in right
    ]
    findings += [
        f"{row[0]}: no image survives its attack, so Algorithm 1 has no answer." for row in rows if row[1] is None
    ]
    bars = [{"name": name, "group": "clean", "value": count(hits_N).percent} for name, hits_N in right.items()]
    figure = bar_chart(bars, value=f"clean accuracy of the mixture with {ours} (%)")
    remarks = (*bench.mmaa_reduction, "alpha is found again on the run's own rows; s, p and c are taken over.")
    return Outcome(StudyTable(columns, tuple(rows)), figure, tuple(findings), (*remarks, *_few_robs(bench)))


def base_choice(bench: Bench) -> Outcome:
    """Which robust classifier to choose: robust accuracy with a margin (appendix D.6)."""
    found = {rob_name(rob): bench.other_rows(rob) for rob in bench.robs}
    kept = {
        name: [-torch.expm1(rows.log_one_minus_margin_N) >= margin for margin in MARGINS]
        for name, rows in found.items()
    }
    kept = {name: [~found[name].rob_broken_N & mask for mask in masks] for name, masks in kept.items()}
    columns = ("rob", "clean", *(f"margin {margin:g}" for margin in MARGINS))
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (name, count(found[name].rob_clean_NK.argmax(dim=1) == found[name].labels_N), *map(count, masks))
        for name, masks in kept.items()
    )
    findings = []
    for index, margin in enumerate(MARGINS):
        best = max(kept, key=lambda name: int(kept[name][index].sum()))
        findings.append(f"Robust with a margin of at least {margin:g}: {best} leads, {_counts(kept, index)}.")
    lines = [
        {"x": margin, "y": count(mask).percent, "series": name}
        for name, masks in kept.items()
        for margin, mask in zip(MARGINS, masks, strict=True)
    ]
    figure = line_chart(lines, x="margin of LayerNormed rob under MMAA", y="images robust with that margin (%)")
    return Outcome(StudyTable(columns, rows), figure, tuple(findings), (*bench.mmaa_reduction, *_few_robs(bench)))


def confidence(bench: Bench) -> Outcome:
    """Median margins of many robust classifiers behind LayerNorm, right against wrong (fig:conf_sota)."""
    rows: list[tuple[Cell, ...]] = []
    bars = []
    for rob in bench.robs:
        found = bench.other_rows(rob)
        medians = _medians(found.rob_clean_NK, found.rob_attacked_NK, found.labels_N, bench.search.ln_k)
        clean = count(found.rob_clean_NK.argmax(dim=1) == found.labels_N)
        rows.append((rob_name(rob), clean, count(~found.rob_broken_N), *medians))
    std = bench.first(bench.rows)
    medians = _medians(std.std_clean_NK, std.std_attacked_NK, std.labels_N, bench.search.ln_k)
    clean = count(std.std_clean_NK.argmax(dim=1) == std.labels_N)
    rows.append((f"std ({rob_name(bench.config.required_std)})", clean, count(~std.std_broken_N), *medians))
    for row in rows:
        bars += [{"name": row[0], "group": group, "value": row[3 + i]} for i, group in enumerate(_GROUPS)]
    findings = tuple(_benign(str(row[0]), row[4], row[5]) for row in rows)
    columns = ("classifier", "clean accuracy", "robust accuracy", *_GROUPS)
    figure = bar_chart(bars, value="median margin behind LayerNorm")
    remarks = ("std's attacked images are those of its own APGD-CE + APGD-T.", *bench.mmaa_reduction, *_few_robs(bench))
    return Outcome(StudyTable(columns, tuple(rows)), figure, findings, remarks)


def black_box(bench: Bench) -> Outcome:
    """Parameters for a rob without gradients: Square as MMAA, another model's, or a guess (appendix D.5)."""
    question = Question.of(bench.config.search, bench.search)
    white = _selected(bench.first(bench.rows), question, bench.beta)
    n_queries = bench.config.attack.n_queries if bench.full else min(bench.config.attack.n_queries, SQUARE_QUERIES)
    blind = bench.attacked("Square as MMAA", method="square", n_queries=n_queries)
    square = _selected(blind, question, bench.beta)
    guess = MixedNUTSParameters.published("cifar10")
    mixtures: dict[str, Mixture | None] = {
        "MMAA with gradients": None if white is None else white.mixture(),
        "Square as MMAA": None if square is None else square.mixture(),
        **{f"transfer from {rob_name(rob)}": _transferred(bench, rob, question) for rob in bench.robs[1:]},
        "educated guess": guess.mixture(),
    }
    rows: list[tuple[Cell, ...]] = []
    found = {}
    for name, mixture in mixtures.items():
        if mixture is None:
            continue
        found[name] = bench.measured(name, mixture)
        values = mixture.transform.settings()
        clean, robust = count(found[name].clean_N), count(found[name].robust_N)
        rows.append((name, values["scale"], values["bias"], values["power"], mixture.alpha, clean, robust))
    columns = ("source", "s", "c", "p", "alpha", "clean", "robust")
    reference = found["MMAA with gradients"]
    findings = tuple(
        compared(what, (name, hits_N), ("MMAA with gradients", reference_N))
        for name, one in found.items()
        if name != "MMAA with gradients"
        for what, hits_N, reference_N in (
            ("Clean", one.clean_N, reference.clean_N),
            ("Robust", one.robust_N, reference.robust_N),
        )
    )
    points = {name: [(name, count(one.clean_N), count(one.robust_N))] for name, one in found.items()}
    remarks = (
        "The guess is the paper's s = 5, p = 4, c = -1.1, alpha = 0.99875 of CIFAR-10; a transfer takes alpha over.",
        f"Square as MMAA has {n_queries} queries and leaves {share_text(count(~blind.rob_broken_N))} right, MMAA with "
        f"gradients {share_text(count(~bench.first(bench.rows).rob_broken_N))}.",
        *bench.reduction, *_few_robs(bench),
    )  # fmt: skip
    return Outcome(StudyTable(columns, tuple(rows)), accuracy_chart(points), findings, remarks)


def rob_name(uri: str) -> str:
    """The short name of a classifier's URI: what follows the last `:` or `/`."""
    return parse_uri(uri).target.rpartition(":")[2].rpartition("/")[2] or uri


def _selected(rows: AttackRecords, question: Question, beta: float) -> Choice | None:
    """Algorithm 1's choice, None where no image survives or no candidate is left."""
    try:
        return select(rows, question).for_beta(beta)
    except InvalidInputError:
        return None


def _transferred(bench: Bench, rob: str, question: Question) -> Mixture | None:
    best = _selected(bench.other_rows(rob), question, bench.beta)
    return None if best is None else best.mixture()


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
        return f"{name}: no image is {missing}, so there is no margin gap."
    gap = attacked_right - clean_wrong
    kind = "benign" if gap > 0 else "not benign"
    return f"{name}: margin gap {gap:+.3f} (attacked and right minus clean and wrong, medians): {kind}."


def _counts(kept: dict[str, list[Tensor]], index: int) -> str:
    return ", ".join(f"{name} {int(masks[index].sum())} of {masks[index].numel()}" for name, masks in kept.items())


def _few_robs(bench: Bench) -> Sequence[str]:
    return () if len(bench.robs) > 1 else ("Only the run's own rob is compared; name others with --rob URI.",)
