"""Studies of mixed classifiers under attack: accuracy, cost, fewer images, temperature, transformation, trade-off."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from ..classifiers.base_classifiers import measure_uris
from ..config.register import STUDIES
from ..errors import InvalidInputError
from ..mixing.mixture import Mixture
from ..mixing.transforms import IdentityTransform, LayerNormTransform, LogitTransform
from ..reports.charts import accuracy_scatter, table_scatter
from ..reports.counts import Count, count, minus, points_text, share_text
from ..reports.table import Cell, Table
from .bench import Bench, at_clean_accuracy, clean_correct, robust_bound, select, subset, weighted
from .robust_classifiers import rob_name
from .searches import chosen_cells, data_sizes
from .study import Outcome, paper_tables, same_set_up, variants

TEMPERATURES = (0.0, 0.5, 1.0)
TRADE_OFF_BETAS = (1.0, 0.96, 0.93, 0.8, 0.0)
N_SEEN = 1000  # as in the paper
MIXED = (
    "Mixed is the paper's baseline (equation 1): no transformation, T = 1, and the alpha that Algorithm 1 finds for "
    "surrogate_beta."
)


@STUDIES("main", section="5.1, fig:nlmc, tab:efficiency", order=2)
def main_table(bench: Bench) -> Outcome:
    """Measure clean and robust accuracy of `std`, `rob`, `mixed`, and the baseline Mixed."""
    results, mixed = bench.results, bench.results.row("mixed")
    plain = bench.measured("classifier: Mixed", mixed_baseline(bench)).cells()
    rows = [*map(vars, results.accuracy), {"classifier": "Mixed", **plain, "attack": "the attack of mixed"}]
    table = Table.of(rows, bold="mixed")
    rob = results.row("rob")
    findings = (
        f"Against rob, mixed has {points_text(mixed.clean.percent - rob.clean.percent)} of clean accuracy and "
        f"{points_text(mixed.robust.percent - rob.robust.percent)} of robust accuracy.",
        f"Under the adaptive attack, mixed retains {share_text(results.kept or Count(0, 0))} of the images on which "
        "rob remains robust.",
        f"Mixed is correct on {share_text(plain['clean'])} clean images and on {share_text(plain['robust'])} under "
        "attack.",
    )
    remarks = (MIXED, *(f"Mixed: {sentence}" for sentence in bench.reduction))
    return Outcome(table, table_scatter(table), findings, remarks)


def mixed_baseline(bench: Bench) -> Mixture:
    """Return the paper's baseline Mixed (equation 1): T = 1, identity, and alpha for `surrogate_beta`."""
    alpha = bench.search.surrogate_alpha
    return Mixture(IdentityTransform(), alpha, 1 - alpha, temperature=1.0)


@STUDIES("error-rate", section="5.1, tab:err_rate", order=3)
def error_rates(bench: Bench) -> Outcome:
    """Compare the error rates of `mixed` with those of `rob`."""
    rows: list[dict[str, Cell]] = []
    findings = []
    for name in ("clean", "robust"):
        right = [getattr(bench.results.row(classifier), name) for classifier in ("rob", "mixed")]
        before, after = (Count(each.total - each.correct, each.total) for each in right)
        change = 100 * (after.correct / before.correct - 1) if before.correct else None
        rows.append({"images": name, "rob's errors": before, "mixed's errors": after, "relative change (%)": change})
        relative = "with nothing to compare to" if change is None else f"{minus(f'{change:+.2f}')}% relative"
        findings.append(
            f"On {name} images the errors go from {before.correct} to {after.correct} of {after.total}, {relative}."
        )
    return Outcome.with_bars(rows, "rob's errors", "mixed's errors", value="errors (%)", findings=findings)


@STUDIES("efficiency", section="C.2, tab:efficiency, fig:compare", order=11)
def efficiency(bench: Bench) -> Outcome:
    """Compare accuracy, parameters, and FLOPs with those of the paper's other models."""
    measured = measure_uris(bench.config.std, bench.config.rob, bench.run.inputs.image_shape)
    sizes = {name: size for name, size in measured.items() if size is not None}
    if len(sizes) < len(measured):
        raise InvalidInputError("a base classifier is a black box, so its parameters and operations cannot be counted")
    table = Table.of(
        {
            "classifier": row.classifier,
            "parameters (M)": sizes[row.classifier].parameters / 1e6,
            "GFLOPs": sizes[row.classifier].flops / 1e9,
            "clean": row.clean,
            "robust": row.robust,
        }
        for row in bench.results.accuracy
    )
    more = 100 * (sizes["mixed"].flops / sizes["rob"].flops - 1)
    findings = (
        f"One image costs mixed {sizes['mixed'].flops / 1e6:.4g} MFLOPs, {more:.2f}% more than rob alone. Mixing adds "
        "no parameters but s, p, c and alpha.",
    )
    marks: dict[str, list[tuple[str, Count | float, Count | float]]] = {
        row.classifier: [(row.classifier, row.clean, row.robust)] for row in bench.results.accuracy
    }
    printed = same_set_up(paper_tables("efficiency"), bench.config)
    for row in printed.table.dicts() if printed else ():
        label = f"paper: {row['classifier']}"
        marks[label] = [(label, float(str(row["clean"])), float(str(row["robust"])))]
    remarks = (
        "FLOPs count a multiplication and an addition as two, of convolutions and matrix products.",
        "The figure has the paper's other models if the run has the paper's set-up.",
    )
    return Outcome(table, accuracy_scatter(marks), findings, remarks)


@STUDIES("data-size", section="D.3, tab:datasize_abla", order=15)
def data_size(bench: Bench) -> Outcome:
    """Measure mixed classifiers that were selected on fewer images."""
    tried: dict[str, Mixture] = {}
    cells: dict[str, dict[str, Cell]] = {}
    for size in data_sizes(len(bench.rows.labels_N)):
        first_N = torch.arange(len(bench.rows.labels_N)) < size
        best = select(subset(bench.rows, first_N), bench.grid(), bench.config.search.criterion).for_beta(bench.beta)
        tried[str(size)] = best.mixture()
        on_all = count(clean_correct(best.mixture(), bench.rows))
        cells[str(size)] = {**chosen_cells(best), "clean on all images, exact": on_all}
    return variants(bench, "images searched", tried, cells, reference=next(iter(tried)))


@STUDIES("seen-unseen", section="D.3, tab:overfit", order=17)
def seen_unseen(bench: Bench) -> Outcome:
    """Compare images that the search used with other images."""
    if seen := [row for row in bench.results.stages if row.classifier in ("mixed, seen", "mixed, unseen")]:
        return _by_seen({row.classifier.removeprefix("mixed, "): (row.clean, row.robust) for row in seen})
    n_images = bench.n_images
    n_seen = N_SEEN if n_images > N_SEEN else n_images // 2
    seen_N = torch.arange(n_images) < n_seen
    best = select(subset(bench.first_rows, seen_N), bench.grid(), bench.config.search.criterion).for_beta(bench.beta)
    found = bench.measured(f"search on the first {n_seen} images", best.mixture())
    masks = {"seen": seen_N, "unseen": ~seen_N}
    counts = {name: (count(found.clean_N[mask_N]), count(found.robust_N[mask_N])) for name, mask_N in masks.items()}
    differs = ""
    if n_seen != N_SEEN:
        differs = (
            f"The search saw {n_seen} of {n_images} measured images. In the paper, the search saw 1,000 images, and "
            "the rest of the data set was measured too."
        )
    return replace(_by_seen(counts), remarks=bench.reduction, differs=differs)


def _by_seen(counts: Mapping[str, tuple[Count, Count]]) -> Outcome:
    """Return the table of the clean and robust counts on seen and on unseen images."""
    table = Table.of({"images": name, "clean": clean, "robust": robust} for name, (clean, robust) in counts.items())
    pairs = dict(zip(("Clean", "Robust"), zip(*counts.values(), strict=True), strict=True))
    findings = tuple(
        f"{what}: {seen.percent:.1f}% on seen and {unseen.percent:.1f}% on unseen images; the 95% intervals "
        f"{'overlap' if seen.low <= unseen.high and unseen.low <= seen.high else 'do not overlap'}."
        for what, (seen, unseen) in pairs.items()
    )
    return Outcome(table, table_scatter(table), findings)


@STUDIES("temperature", section="D.4, tab:ts_abla", order=18)
def temperature(bench: Bench) -> Outcome:
    """Compare temperatures T = 0, 0.5, and 1 of `std` at the same clean accuracy.

    For each temperature, alpha is chosen so that the clean accuracy stays the same.
    """
    base = bench.deployed()
    n_correct = int(clean_correct(base, bench.rows).sum())
    tried = {
        f"T = {value:g}": at_clean_accuracy(bench.rows, replace(base, temperature=value), n_correct)
        for value in TEMPERATURES
    }
    cells: dict[str, dict[str, Cell]] = {
        name: {"alpha": mixture.alpha, "clean on all images, exact": count(clean_correct(mixture, bench.rows))}
        for name, mixture in tried.items()
    }
    remark = f"Each has the largest alpha at which it is correct on {n_correct} clean images, as the deployed one is."
    return variants(bench, "std", tried, cells, reference="T = 0", remarks=[remark])


@STUDIES("no-transform", section="D.1", order=13)
def no_transformation(bench: Bench) -> Outcome:
    """Compare no transformation (Mixed), LayerNorm only, GELU only, and M."""
    ln_k, deployed = bench.search.ln_k, "M(s, p, c)"
    gelu = LogitTransform(1, 1, 0, clamp="gelu", ln_k=ln_k)
    tried = {
        "none (Mixed)": mixed_baseline(bench),
        "LayerNorm only": weighted(bench.rows, LayerNormTransform(ln_k), bench.beta),
        "GELU only": weighted(bench.rows, gelu, bench.beta),
        deployed: bench.deployed(),
    }
    cells = {name: {"alpha": mixture.alpha, **on_all(bench, mixture)} for name, mixture in tried.items()}
    remarks = (
        MIXED,
        f"The other rows have T = 0 and the alpha that retains beta = {bench.beta:g} of rob's attacked images under "
        "the stored adversarial examples.",
    )
    return variants(bench, "transformation of rob", tried, cells, reference=deployed, remarks=remarks)


@STUDIES("trade-off", section="5.3, fig:tradeoff_curve", order=6)
def trade_off(bench: Bench) -> Outcome:
    """Measure `mixed` and Mixed at five betas, next to the base classifiers (and --rob)."""
    betas = tuple(sorted({*bench.config.search.betas, *TRADE_OFF_BETAS}, reverse=True))
    plain = {beta: weighted(bench.rows, IdentityTransform(), beta) for beta in betas}
    families: Mapping[str, dict[float, Mixture]] = {
        "MixedNUTS": _searched(bench, betas),
        "Mixed": {beta: replace(mixture, temperature=1.0) for beta, mixture in plain.items()},
    }
    rows, marks = list[dict[str, Cell]](), dict[str, list[tuple[str, Count, Count]]]()
    for family, mixtures in families.items():
        for beta in (beta for beta in TRADE_OFF_BETAS if beta in mixtures):
            name, mixture = f"{family}, beta = {beta:g}", mixtures[beta]
            one = bench.measured(f"mixed classifier: {name}", mixture).cells()
            rows.append({"classifier": name, **one, "alpha": mixture.alpha, **on_all(bench, mixture)})
            marks.setdefault(family, []).append((f"{beta:g}", one["clean"], one["robust"]))
    bases = _base_classifiers(bench)
    curves = {family: _predicted(bench, mixtures) for family, mixtures in families.items()}
    figure = accuracy_scatter({**marks, **{base[0]: [base] for base in bases}}, curves=curves)
    nothing = dict.fromkeys(rows[0])
    rows += [{**nothing, "classifier": name, "clean": clean, "robust": robust} for name, clean, robust in bases]
    remarks = (
        "Mixed is equation 1 of the paper at each beta: no transformation and T = 1.",
        "Lines: predicted on the measured images for every beta of the configuration.",
        *bench.reduction,
    )
    return Outcome(Table.of(rows), figure, _crossing(marks), remarks)


def on_all(bench: Bench, mixture: Mixture) -> dict[str, Cell]:
    """Return exact clean and predicted robust accuracy on all images, without an attack."""
    clean, robust = clean_correct(mixture, bench.rows), robust_bound(mixture, bench.rows)
    return {"clean on all images, exact": count(clean), "robust on all, predicted": count(robust)}


def _base_classifiers(bench: Bench) -> list[tuple[str, Count, Count]]:
    """Return the base classifiers and the other robust classifiers, under the attack stage's attacks."""
    first = bench.first_rows
    robs = {"rob" if rob == bench.config.rob else rob_name(rob): bench.other_rows(rob) for rob in bench.robs}
    return [
        ("std", count(first.std_correct), count(~first.std_broken_N)),
        *((name, count(rows.rob_correct), count(~rows.rob_broken_N)) for name, rows in robs.items()),
    ]


def _searched(bench: Bench, betas: tuple[float, ...]) -> dict[float, Mixture]:
    """Return the mixed classifier for every beta at which a candidate is left."""
    selection = select(bench.rows, bench.grid(*betas), bench.config.search.criterion)
    return {choice.beta: choice.mixture() for choice in selection.chosen if choice is not None}


def _predicted(bench: Bench, mixtures: dict[float, Mixture]) -> list[tuple[float, float]]:
    """Return exact clean and predicted robust accuracy, in percent, on the images that are measured."""
    rows = bench.first_rows
    return [
        (count(clean_correct(mixture, rows)).percent, count(robust_bound(mixture, rows)).percent)
        for mixture in mixtures.values()
    ]


def _crossing(marks: Mapping[str, list[tuple[str, Count, Count]]]) -> tuple[str, ...]:
    """Count the measured Mixed classifiers that a MixedNUTS classifier matches or beats in both accuracies."""
    ours, theirs = marks.get("MixedNUTS", []), marks.get("Mixed", [])
    beaten = sum(
        any(c.correct >= clean.correct and r.correct >= robust.correct for _, c, r in ours)
        for _, clean, robust in theirs
    )
    return (
        f"For {beaten} of {len(theirs)} measured Mixed classifiers, one of {len(ours)} measured MixedNUTS classifiers "
        "is at least as good in both accuracies.",
        *(f"MixedNUTS at beta = {name}: {c.percent:.1f}% clean, {r.percent:.1f}% robust." for name, c, r in ours),
    )
