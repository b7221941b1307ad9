"""Studies of a run's own results: the main table, the error rates, the parameters, three forms of rob."""

from ..classifiers.base_classifiers import ModelSize, measure_uri
from ..errors import InvalidInputError
from ..mixing.transforms import LogitMap, LogitTransform
from ..register import STUDIES
from ..reports.charts import accuracy_scatter, bars, count_bars
from ..reports.counts import Count, compared, count, minus, points_text, share_text
from ..reports.table import Table
from . import paper_numbers as paper
from .bench import Bench
from .parameters import weighted
from .study import Outcome


@STUDIES(
    "main", describes="std, rob and the mixture, clean and attacked", section="5.1, fig:nlmc, tab:efficiency", order=2
)
def main_table(bench: Bench) -> Outcome:
    """std, rob and the mixture, clean and attacked (section 5.1)."""
    results = bench.results
    plain = bench.measured("Mixed, no transformation", weighted(bench.rows, LogitTransform.identity(), bench.beta))
    rows: list[tuple[str, Count, Count, str]] = [
        (row.classifier, row.clean, row.robust, row.attack) for row in results.accuracy
    ]
    rows.append(("Mixed", count(plain.clean_N), count(plain.robust_N), "adaptive attack as below"))
    table = Table(("classifier", "clean", "robust", "attack"), rows, bold="mixed")
    rob, mixed = results.row("rob"), results.row("mixed")
    findings = (
        f"Against rob the mixture has {points_text(mixed.clean.percent - rob.clean.percent)} of clean and "
        f"{points_text(mixed.robust.percent - rob.robust.percent)} of robust accuracy.",
        f"It keeps {share_text(results.kept or Count(0, 0))} of rob's robust images under the adaptive attack.",
        f"Mixed, which mixes the same classifiers without a transformation at the same beta = {bench.beta:g}, is right "
        f"on {share_text(count(plain.clean_N))} clean images and on {share_text(count(plain.robust_N))} under attack.",
    )
    figure = accuracy_scatter({name: [(name, clean, robust)] for name, clean, robust, _ in rows})
    remarks = tuple(f"Mixed: {sentence}" for sentence in bench.reduction)
    return Outcome(table, figure, findings, remarks, paper=paper.MAIN)


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
        (name, who, _errors(c)) for name, pair in pairs.items() for who, c in zip(("rob", "mixed"), pair, strict=True)
    ]
    return Outcome(table, count_bars(columns_shown, value="errors (%)"), findings, paper=paper.ERROR_RATE)


@STUDIES(
    "parameters",
    describes="s, p, c and alpha of every beta, and what they predict",
    section="C.1, tab:spc_candidate",
    order=9,
)
def parameters(bench: Bench) -> Outcome:
    """s, p, c and alpha of every beta, with what they will reach (tab:spc_candidate)."""
    search = bench.search
    rows = tuple(
        (
            f"{entry.beta:g}", entry.scale, entry.bias, entry.power, entry.alpha, entry.one_minus_alpha,
            Count(entry.clean_correct, entry.total), Count(entry.kept_predicted, entry.total),
            ", ".join(entry.on_grid_edge) or "no",
        )
        for entry in search.entries
    )  # fmt: skip
    columns = ("beta", "s", "c", "p", "alpha", "1 - alpha", "clean, exact", "kept_predicted", "on the grid's edge")
    chosen = search.deployed()
    findings = (
        f"Deployed at beta = {chosen.beta:g}: s = {chosen.scale:.4g}, p = {chosen.power:.4g}, c = {chosen.bias:.4g}, "
        f"1 - alpha = {chosen.one_minus_alpha:.4g}; {search.n_candidates} candidates, criterion {search.criterion}.",
        f"{sum(bool(entry.on_grid_edge) for entry in search.entries)} of {len(rows)} optima lie on the grid's edge.",
    )
    curve = [(100 * e.clean_correct / e.total, 100 * e.kept_predicted / e.total) for e in search.entries]
    points = [
        (
            f"{chosen.beta:g}",
            Count(chosen.clean_correct, chosen.total),
            Count(chosen.kept_predicted, chosen.total),
        )
    ]
    return Outcome(
        Table(columns, rows),
        accuracy_scatter({"predicted": points}, curves={"predicted": curve}),
        findings,
        paper=paper.PARAMETERS,
    )


@STUDIES(
    "base-accuracy", describes="h, h-LN and h-M alone: does M cost accuracy?", section="C.1, tab:base_acc", order=10
)
def base_accuracy(bench: Bench) -> Outcome:
    """h, h-LN and h-M alone: clean on all images, attacked by MMAA on each form (tab:base_acc)."""
    transform = bench.deployed().transform
    rows = bench.rows
    attacked = {
        "h": ~bench.attacked("MMAA on h", LogitTransform.identity()).rob_broken_N,
        "h-LN": ~bench.first(rows).rob_broken_N,
        "h-M": ~bench.attacked("MMAA on h-M", transform).rob_broken_N,
    }
    maps: dict[str, LogitMap] = {
        "h": LogitTransform.identity(),
        "h-LN": LogitTransform.layer_norm(bench.search.ln_k),
        "h-M": transform,
    }
    clean = {name: each(rows.rob_clean_NK).argmax(dim=1) == rows.labels_N for name, each in maps.items()}
    table = Table(
        ("classifier", "clean", "attacked"),
        tuple((name, count(clean[name]), count(attacked[name])) for name in maps),
    )
    findings = (
        compared("Clean", ("h", clean["h"]), ("h-M", clean["h-M"])),
        compared("Attacked", ("h", attacked["h"]), ("h-M", attacked["h-M"])),
        compared("Attacked", ("h-LN", attacked["h-LN"]), ("h-M", attacked["h-M"])),
    )
    columns_shown = [
        (name, group, count(hits[name])) for name in maps for group, hits in (("clean", clean), ("attacked", attacked))
    ]
    return Outcome(table, count_bars(columns_shown), findings, bench.mmaa_reduction, paper=paper.BASE_ACCURACY)


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
        f"One image costs the mixture {sizes['mixed'].flops / 1e6:.4g} MFLOPs, {more:.2f} % more than rob alone; the "
        "mixing itself adds no parameters beside s, p, c and alpha.",
    )
    remarks = ("FLOPs count a multiplication and an addition as two, of convolutions and matrix products.",)
    columns_shown = [{"name": name, "group": "GFLOPs", "value": size.flops / 1e9} for name, size in sizes.items()]
    return Outcome(
        Table(columns, rows), bars(columns_shown, value="GFLOPs per image"), findings, remarks, paper=paper.EFFICIENCY
    )


def _errors(correct: Count) -> Count:
    return Count(correct.total - correct.correct, correct.total)


def _relative_change(before: Count, after: Count) -> float | None:
    """Of the error rate, in percent; None where there was no error."""
    wrong = before.total - before.correct
    return None if not wrong else 100 * ((after.total - after.correct) / wrong - 1)


def _change_text(change: float | None) -> str:
    return "with nothing to compare to" if change is None else f"{minus(f'{change:+.2f}')} % relative"
