"""Studies of mixtures under attack: the run's own, its cost, fewer images, std's temperature, no map, the trade-off."""

from dataclasses import replace

import torch

from ..classifiers.base_classifiers import ModelSize, measure_uri
from ..config.register import STUDIES
from ..errors import InvalidInputError
from ..mixing.mixture import Mixture
from ..mixing.transforms import IdentityTransform, LayerNormTransform, LogitMap, LogitTransform
from ..reports.charts import accuracy_scatter, bars, count_bars
from ..reports.counts import Count, compared, count, minus, points_text, share_text
from ..reports.drawing import Figure
from ..reports.table import Cell, Table
from .bench import Bench, Measured, at_clean_accuracy, clean_correct, robust_bound, select, subset, weighted
from .robust_classifiers import rob_name
from .searches import data_sizes
from .study import Outcome

TEMPERATURES = (0.0, 0.5, 1.0)
TRADE_OFF_BETAS = (1.0, 0.96, 0.93, 0.8, 0.0)


@STUDIES(
    "main", describes="std, rob and the mixture, clean and attacked", section="5.1, fig:nlmc, tab:efficiency", order=2
)
def main_table(bench: Bench) -> Outcome:
    """std, rob and the mixture, clean and attacked (section 5.1)."""
    results = bench.results
    plain_name = "mixed, no transformation"  # the paper's "Mixed"
    plain = bench.measured(plain_name, weighted(bench.rows, IdentityTransform(), bench.beta))
    rows: list[tuple[str, Count, Count, str]] = [
        (row.classifier, row.clean, row.robust, row.attack) for row in results.accuracy
    ]
    n_plain = plain.clean_N.numel()
    plain_row = plain_name if n_plain == results.n_images else f"{plain_name}, first {n_plain}"
    rows.append((plain_row, count(plain.clean_N), count(plain.robust_N), "adaptive attack as below"))
    table = Table(("classifier", "clean", "robust", "attack"), rows, bold="mixed")
    rob, mixed = results.row("rob"), results.row("mixed")
    findings = (
        f"Against rob the mixture has {points_text(mixed.clean.percent - rob.clean.percent)} of clean and "
        f"{points_text(mixed.robust.percent - rob.robust.percent)} of robust accuracy.",
        f"It keeps {share_text(results.kept or Count(0, 0))} of rob's robust images under the adaptive attack.",
        f"Without a transformation the mixture of the same classifiers, at the same beta = {bench.beta:g}, is right "
        f"on {share_text(count(plain.clean_N))} clean images and on {share_text(count(plain.robust_N))} under attack.",
    )
    figure = accuracy_scatter({name: [(name, clean, robust)] for name, clean, robust, _ in rows})
    remarks = tuple(f"{plain_name}: {sentence}" for sentence in bench.reduction)
    return Outcome(table, figure, findings, remarks)


@STUDIES("error-rate", describes="The mixture's error rates relative to rob's", section="5.1, tab:err_rate", order=3)
def error_rates(bench: Bench) -> Outcome:
    """The mixture's error rates relative to rob's (section 5.1)."""
    rob, mixed = bench.results.row("rob"), bench.results.row("mixed")
    pairs = {"clean": (rob.clean, mixed.clean), "robust": (rob.robust, mixed.robust)}
    rows = tuple(
        (name, _errors(before), _errors(after), _relative_change(before, after))
        for name, (before, after) in pairs.items()
    )
    table = Table(("images", "rob's errors", "mixed's errors", "relative change (%)"), rows)
    findings = tuple(
        f"On {name} images the errors go from {before.total - before.correct} to {after.total - after.correct} of "
        f"{after.total}, {_change_text(_relative_change(before, after))}."
        for name, (before, after) in pairs.items()
    )
    columns_shown = [
        (name, own, _errors(c)) for name, pair in pairs.items() for own, c in zip(("rob", "mixed"), pair, strict=True)
    ]
    return Outcome(table, count_bars(columns_shown, value="errors (%)"), findings)


@STUDIES(
    "efficiency",
    describes="Parameters and FLOPs beside the accuracy",
    section="C.2, tab:efficiency, fig:compare",
    order=11,
)
def efficiency(bench: Bench) -> Outcome:
    """Parameters and FLOPs of std, rob and the mixture, beside their accuracy (appendix C.2)."""
    shape = bench.run.inputs.image_shape
    std, rob = (
        measure_uri(uri, role, shape) for uri, role in ((bench.config.required_std, "std"), (bench.config.rob, "rob"))
    )
    if std is None or rob is None:
        raise InvalidInputError("std or rob is a black box: its parameters and operations cannot be counted")
    sizes = {"std": std, "rob": rob, "mixed": ModelSize(std.parameters + rob.parameters, std.flops + rob.flops)}
    rows = tuple(
        (
            row.classifier,
            sizes[row.classifier].parameters / 1e6,
            sizes[row.classifier].flops / 1e9,
            row.clean,
            row.robust,
        )
        for row in bench.results.accuracy
    )
    columns = ("classifier", "parameters (M)", "GFLOPs", "clean", "robust")
    more = 100 * (sizes["mixed"].flops / rob.flops - 1)
    findings = (
        f"One image costs the mixture {sizes['mixed'].flops / 1e6:.4g} MFLOPs, {more:.2f}% more than rob alone; the "
        "mixing itself adds no parameters beside s, p, c and alpha.",
    )
    remarks = ("FLOPs count a multiplication and an addition as two, of convolutions and matrix products.",)
    columns_shown = [{"name": name, "value": size.flops / 1e9} for name, size in sizes.items()]
    return Outcome(Table(columns, rows), bars(columns_shown, value="GFLOPs per image"), findings, remarks)


@STUDIES("data-size", describes="The mixture found on fewer images", section="D.3, tab:datasize_abla", order=15)
def data_size(bench: Bench) -> Outcome:
    """The mixture when s, p, c and alpha come from fewer images (tab:datasize_abla)."""
    rows: list[tuple[Cell, ...]] = []
    found: dict[str, Measured] = {}
    for size in data_sizes(len(bench.rows.labels_N)):
        mask_N = torch.arange(len(bench.rows.labels_N)) < size
        best = select(subset(bench.rows, mask_N), bench.grid(), bench.criterion).for_beta(bench.beta)
        name = str(size)
        found[name] = bench.measured(f"search on {size} images", best.mixture())
        clean_N = clean_correct(best.mixture(), bench.rows)
        rows.append(
            (name, count(found[name].clean_N), count(found[name].robust_N), best.scale, best.bias, best.power,
             best.alpha, count(clean_N))
        )  # fmt: skip
    columns = ("images searched", "clean", "robust", "s", "c", "p", "alpha", "clean on all images, exact")
    (all_name, most), *fewer = found.items()
    findings = tuple(
        sentence
        for name, few in fewer
        for sentence in (
            compared("Robust", (f"{name} images", few.robust_N), (f"{all_name} images", most.robust_N)),
            compared("Clean", (f"{name} images", few.clean_N), (f"{all_name} images", most.clean_N)),
        )
    )
    figure = _accuracies({f"{name} images": one for name, one in found.items()})
    return Outcome(Table(columns, rows), figure, findings, bench.reduction)


@STUDIES("seen-unseen", describes="Images that the search saw against others", section="D.3, tab:overfit", order=17)
def seen_unseen(bench: Bench) -> Outcome:
    """Images that the search saw against images that it did not (tab:overfit)."""
    n_images = bench.n_images
    seen_N = torch.arange(n_images) < n_images // 2
    best = select(subset(bench.first_rows, seen_N), bench.grid(), bench.criterion).for_beta(bench.beta)
    found = bench.measured("search on half the images", best.mixture())
    groups = {"seen": seen_N, "unseen": ~seen_N}
    rows = tuple((name, count(found.clean_N[mask]), count(found.robust_N[mask])) for name, mask in groups.items())
    (_, clean, robust), (_, clean_unseen, robust_unseen) = rows
    findings = (
        f"Clean: {clean.percent:.1f}% on seen and {clean_unseen.percent:.1f}% on unseen images; robust: "
        f"{robust.percent:.1f}% and {robust_unseen.percent:.1f}%.",
        *(
            f"The 95% intervals of the {name} accuracies {'overlap' if _overlap(a, b) else 'do not overlap'}."
            for name, a, b in (("clean", clean, clean_unseen), ("robust", robust, robust_unseen))
        ),
    )
    points = {name: [(name, clean, robust)] for name, clean, robust in rows}
    return Outcome(Table(("images", "clean", "robust"), rows), accuracy_scatter(points), findings, bench.reduction)


@STUDIES(
    "temperature", describes="std at T = 0, 0.5 and 1 at the same clean accuracy", section="D.4, tab:ts_abla", order=18
)
def temperature(bench: Bench) -> Outcome:
    """std's temperature, with alpha such that the clean accuracy stays the same (tab:ts_abla)."""
    base = bench.deployed()
    n_correct = int(clean_correct(base, bench.rows).sum())
    rows: list[tuple[Cell, ...]] = []
    found = {}
    for value in TEMPERATURES:
        name = f"T = {value:g}"
        mixture = at_clean_accuracy(bench.rows, replace(base, temperature=value), n_correct)
        found[name] = bench.measured(f"std at {name}", mixture)
        on_all = count(clean_correct(mixture, bench.rows))
        rows.append((name, count(found[name].clean_N), count(found[name].robust_N), mixture.alpha, on_all))
    findings = tuple(
        compared("Robust", ("T = 0", found["T = 0"].robust_N), (name, found[name].robust_N))
        for name in found
        if name != "T = 0"
    )
    columns = ("std", "clean", "robust", "alpha", "clean on all images, exact")
    remarks = (
        f"Each has the largest alpha that gets as many clean images right as the deployed mixture, {n_correct}.",
        *bench.reduction,
    )
    return Outcome(Table(columns, rows), _accuracies(found), findings, remarks)


@STUDIES("no-transform", describes="No transformation (Mixed), LayerNorm or GELU only, and M", section="D.1", order=13)
def no_transformation(bench: Bench) -> Outcome:
    """Rob as it is (Mixed), behind LayerNorm, behind a mere GELU, and behind M(s, p, c) (appendix D.1)."""
    ln_k = bench.search.ln_k
    maps: dict[str, LogitMap | None] = {
        "none (Mixed)": IdentityTransform(),
        "LayerNorm only": LayerNormTransform(ln_k),
        "GELU only": LogitTransform(1, 1, 0, clamp="gelu", ln_k=ln_k),
        "M(s, p, c)": None,
    }
    rows: list[tuple[Cell, ...]] = []
    found = {}
    for name, logit_map in maps.items():
        mixture = bench.deployed() if logit_map is None else weighted(bench.rows, logit_map, bench.beta)
        found[name] = bench.measured(f"rob's map: {name}", mixture)
        on_all = count(clean_correct(mixture, bench.rows)), count(robust_bound(mixture, bench.rows))
        rows.append((name, count(found[name].clean_N), count(found[name].robust_N), mixture.alpha, *on_all))
    columns = (
        "transformation of rob", "clean", "robust", "alpha", "clean on all images, exact", "robust on all, predicted"
    )  # fmt: skip
    ours = found["M(s, p, c)"]
    findings = tuple(
        compared(what, ("M(s, p, c)", our_N), (name, their_N))
        for name, other in found.items()
        if name != "M(s, p, c)"
        for what, our_N, their_N in (("Clean", ours.clean_N, other.clean_N), ("Robust", ours.robust_N, other.robust_N))
    )
    remarks = (
        f"Each has the alpha that keeps beta = {bench.beta:g} of rob's attacked images under the stored perturbations.",
        *bench.reduction,
    )
    return Outcome(Table(columns, rows), _accuracies(found), findings, remarks)


@STUDIES(
    "trade-off",
    describes="Measured accuracies for five betas, with and without M (and --rob)",
    section="5.3, fig:tradeoff_curve",
    order=6,
)
def trade_off(bench: Bench) -> Outcome:
    """Robust against clean accuracy for five betas, with and without the transformation (fig:tradeoff_curve)."""
    betas = tuple(sorted({*bench.config.search.betas, *TRADE_OFF_BETAS}, reverse=True))
    families = {
        "MixedNUTS": _searched(bench, betas),
        "Mixed": {beta: weighted(bench.rows, IdentityTransform(), beta) for beta in betas},
    }
    rows: list[tuple[Cell, ...]] = []
    points: dict[str, list[tuple[str, Count, Count]]] = {}
    for family, mixtures in families.items():
        points[family] = []
        for beta in (beta for beta in TRADE_OFF_BETAS if beta in mixtures):
            mixture = mixtures[beta]
            found = bench.measured(f"{family}, beta {beta:g}", mixture)
            clean, robust = count(found.clean_N), count(found.robust_N)
            points[family].append((f"{beta:g}", clean, robust))
            on_all = count(clean_correct(mixture, bench.rows)), count(robust_bound(mixture, bench.rows))
            rows.append((f"{family}, beta = {beta:g}", clean, robust, mixture.alpha, *on_all))
    for point in _base_classifiers(bench):
        points[point[0]] = [point]
        rows.append((*point, None, None, None))
    curves = {family: _predicted(bench, mixtures) for family, mixtures in families.items()}
    columns = ("mixture", "clean", "robust", "alpha", "clean on all images, exact", "robust on all, predicted")
    remarks = ("Lines: predicted on the measured images for every beta of the configuration.", *bench.reduction)
    return Outcome(Table(columns, rows), accuracy_scatter(points, curves=curves), _crossing(points), remarks)


def _base_classifiers(bench: Bench) -> list[tuple[str, Count, Count]]:
    """std, rob and the other robust classifiers alone, under APGD-CE + APGD-T."""
    first = bench.first_rows
    robs = {"rob" if rob == bench.config.rob else rob_name(rob): bench.other_rows(rob) for rob in bench.robs}
    return [
        ("std", count(first.std_clean_NK.argmax(dim=1) == first.labels_N), count(~first.std_broken_N)),
        *(
            (name, count(rows.rob_clean_NK.argmax(dim=1) == rows.labels_N), count(~rows.rob_broken_N))
            for name, rows in robs.items()
        ),
    ]


def _searched(bench: Bench, betas: tuple[float, ...]) -> dict[float, Mixture]:
    """The mixture of every beta at which a candidate is left."""
    selection = select(bench.rows, bench.grid(*betas), bench.criterion)
    found = {}
    for beta in betas:
        try:
            found[beta] = selection.for_beta(beta).mixture()
        except InvalidInputError:
            continue
    return found


def _predicted(bench: Bench, mixtures: dict[float, Mixture]) -> list[tuple[float, float]]:
    """Exact clean and predicted robust accuracy, in percent, on the images that are measured."""
    rows = bench.first_rows
    return [
        (count(clean_correct(mixture, rows)).percent, count(robust_bound(mixture, rows)).percent)
        for mixture in mixtures.values()
    ]


def _crossing(points: dict[str, list[tuple[str, Count, Count]]]) -> tuple[str, ...]:
    """For each measured Mixed, whether some MixedNUTS is at least as good in both accuracies."""
    ours, theirs = points.get("MixedNUTS", []), points.get("Mixed", [])
    beaten = [
        name
        for name, clean, robust in theirs
        if any(c.correct >= clean.correct and r.correct >= robust.correct for _, c, r in ours)
    ]
    return (
        f"Of {len(theirs)} measured mixtures without transformation, those that one of {len(ours)} with it matches or "
        f"beats in both accuracies: {len(beaten)}.",
        *(f"MixedNUTS at beta = {name}: {c.percent:.1f}% clean, {r.percent:.1f}% robust." for name, c, r in ours),
    )


def _accuracies(found: dict[str, Measured]) -> Figure:
    return accuracy_scatter({name: [(name, count(one.clean_N), count(one.robust_N))] for name, one in found.items()})


def _overlap(first: Count, second: Count) -> bool:
    (low, high), (other_low, other_high) = first.interval, second.interval
    return bool(low <= other_high and other_low <= high)


def _errors(correct: Count) -> Count:
    return Count(correct.total - correct.correct, correct.total)


def _relative_change(before: Count, after: Count) -> float | None:
    """Of the error rate, in percent; None where there was no error."""
    wrong = before.total - before.correct
    return None if not wrong else 100 * ((after.total - after.correct) / wrong - 1)


def _change_text(change: float | None) -> str:
    return "with nothing to compare to" if change is None else f"{minus(f'{change:+.2f}')}% relative"
