"""A run's tables: which there are, as files for scripts and papers, and the report as the terminal shows it."""

from collections.abc import Callable, Mapping

from rich.console import Console, Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from ..storage.records import SearchResult
from .counts import Seconds, layer_norm_text, seconds_text, weight_text
from .margins import EDGES, medians_table, split_table
from .results import (
    RunResults,
    candidates_sentence,
    parameter_values,
    predicted,
    rounds_sentence,
    rounds_table,
    summary_sentence,
)
from .table import Cell, Table

_PARAMETERS = ("beta", "s", "p", "c", "alpha", "one_minus_alpha")


def accuracy_table(results: RunResults) -> Table:
    """std, rob and mixed, clean and attacked; then what stages of a key of their own have left of them."""
    shown = (*results.accuracy, *results.stages)
    rows: list[list[Cell]] = []
    for row in shown:
        classifier, comma, rest = row.classifier.partition(", ")  # of a stage: `std, corrupted`
        rows.append([f"{results.called(classifier)}{comma}{rest}", row.clean, row.robust, row.attack])
    return Table(["classifier", "clean", "robust", "attack"], rows, bold=results.called("mixed"), below="attack")


def search_table(search: SearchResult) -> Table:
    """The choice of every beta and what is predicted of it; the deployed one stands out."""
    several = len({(entry.clamp, entry.ln_k) for entry in search.entries}) > 1
    rows: list[list[Cell]] = [
        [
            *parameter_values(entry).values(),
            *((entry.clamp, str(entry.ln_k or "all logits")) if several else ()),
            *predicted(entry),
        ]
        for entry in search.entries
    ]
    columns = [*_PARAMETERS, *(("clamp", "ln_k") if several else ()), "clean", "robust_predicted"]
    return Table(
        [*columns], [[f"{row[0]:g}", *row[1:]] for row in rows], bold=f"{search.deployed_beta:g}",
        printed=["beta", "s", "p", "c", "clean", "robust_predicted"],
    )  # fmt: skip


def survival_table(results: RunResults) -> Table:
    """What each step of the attack left standing."""
    return Table(["after", "standing", "lost"], [[step.step, step.standing, step.lost] for step in results.survival])


def _histograms(results: RunResults) -> Table:
    rows: list[list[Cell]] = [
        [group.classifier, group.images, group.side, left, right, n]
        for group in results.margins
        for left, right, n in zip(EDGES, EDGES[1:], group.counts, strict=False)
    ]
    return Table(["classifier", "images", "prediction", "margin_from", "margin_to", "n"], rows)


def sensitivity_rows(results: RunResults) -> list[dict[str, object]]:
    """Every candidate at the deployed beta: s, p, c, the objective in percent (None: it cannot be used), selected."""
    chosen = results.parameters
    return [
        {
            "s": row["scale"],
            "p": row["power"],
            "c": row["bias"],
            "objective": 100 * row["objective"] if row["feasible"] and row["deployable"] else None,
            "selected": (row["scale"], row["power"], row["bias"]) == (chosen.scale, chosen.power, chosen.bias),
        }
        for row in results.candidates
    ]


def _sensitivity(results: RunResults) -> Table:
    columns = ["s", "p", "c", "objective", "selected"]
    rows: list[list[Cell]] = [[row[name] for name in columns] for row in sensitivity_rows(results)]  # type: ignore[misc]
    return Table([*columns[:3], "objective_percent", "selected"], rows)


def cost_table(results: RunResults) -> Table:
    """The bill of each stage with receipts."""
    rows: list[list[Cell]] = [
        [
            cost.stage, cost.images, cost.partitions, cost.nodes, ", ".join(cost.devices),
            Seconds(3600 * cost.gpu_hours), Seconds(3600 * cost.core_hours),
            None if cost.wall_seconds is None else Seconds(cost.wall_seconds),
            cost.images_per_second, cost.n_forward, cost.n_backward,
            cost.passes_per_image,
        ]
        for cost in results.costs
    ]  # fmt: skip
    columns = [
        "stage", "images", "partitions", "nodes", "computed on", "gpu_seconds", "core_seconds", "seconds",
        "images/s", "passes forward", "passes backward", "passes an image",
    ]  # fmt: skip
    held = ("gpu_seconds", "core_seconds")
    empty = {i for i, name in enumerate(columns) if name in held and not any(row[i] for row in rows)}
    kept = [name for i, name in enumerate(columns) if i not in empty]
    printed = [name for name in kept if name in ("stage", "images", *held, "passes an image")]
    return Table(kept, [[cell for i, cell in enumerate(row) if i not in empty] for row in rows], printed=printed)


def _worst_images(results: RunResults) -> Table:
    rows: list[list[Cell]] = [
        [image.sample_id, image.label, image.reason, verdict.classifier, verdict.images, verdict.predicted,
         verdict.margin]
        for image in results.worst
        for verdict in image.verdicts
    ]  # fmt: skip
    return Table(["sample_id", "label", "reason", "classifier", "images", "predicted", "margin"], rows)


TABLES: Mapping[str, Callable[[RunResults], Table]] = {
    "table": accuracy_table,
    "tradeoff": lambda results: search_table(results.search),
    "rounds": rounds_table,
    "margins": _histograms,
    "splits": lambda results: split_table(results.splits),
    "medians": lambda results: medians_table(results.margins),
    "sensitivity": _sensitivity,
    "survival": survival_table,
    "costs": cost_table,
    "worst_images": _worst_images,
}
DATA_ONLY = ("margins", "sensitivity", "worst_images")  # the numbers behind a figure: CSV only
WITHOUT_SEARCH = ("table", "survival", "costs")


def table_files(results: RunResults) -> dict[str, str]:
    """File name -> content, as CSV and LaTeX; `table.*` is the accuracy table."""
    files = {}
    tables = {name: TABLES[name](results) for name in (TABLES if results.found else WITHOUT_SEARCH)}
    for name, table in {**tables, **{file_name(title): table for title, table in results.tables.items()}}.items():
        if table.rows:
            files[f"{name}.csv"] = table.as_csv()
            if name not in DATA_ONLY:
                comment = f"{results.name}, {name}: {results.n_images} images, {results.threat}"
                files[f"{name}.tex"] = table.as_latex(f"{comment}; run {results.run_id}")
    return files


def file_name(title: str) -> str:
    """Of a stage's table: its title's first word.

    >>> file_name("certified, by beta")
    'certified'
    """
    return title.split(maxsplit=1)[0].strip(",").lower()


def print_results(results: RunResults, console: Console | None = None) -> None:
    """The whole report in 80 columns, by default on the standard output."""
    console = console or Console()
    console.print(_report(results), highlight=False)


def _report(results: RunResults) -> Group:
    setting = f"{results.dataset}, {results.n_images} images, {results.threat}"
    std = f"std = {results.std}\n" if results.std else ""
    accuracy = accuracy_table(results).only(["classifier", "clean", "robust"])
    attacks = "; ".join(f"{row.attack} for {row.classifier}" for row in results.accuracy)
    for attack in dict.fromkeys(row.attack for row in results.stages):
        attacks += f"; {' / '.join(row.classifier for row in results.stages if row.attack == attack)}: {attack}"
    parts: list[RenderableType] = [
        Text(f"{results.name}  ({results.run_id})", style="bold"),
        Text(setting),
        Text(f"{std}rob = {results.rob}"),
        Text(),
        Text(summary_sentence(results)),
        Text(),
        accuracy.terminal(),
        Text(f"robust: under {attacks}; percent and 95 % interval behind each count", style="dim"),
        Text(),
    ]
    if results.found:
        parts += [Text(parameter_lines(results)), Text()]
        rounds = rounds_table(results)
        parts += [rounds.terminal(), Text()] if rounds.rows else []
    for title, table in results.tables.items():
        parts += [table.terminal(title), Text()]
    times = [f"{stage} {seconds_text(seconds)}" for stage, seconds in results.seconds.items()]
    time = ", ".join([*times, f"in all {seconds_text(sum(results.seconds.values()))}"])
    return Group(*parts, survival_table(results).terminal(), Text(), Text(f"Time: {time}"), *_notes(results))


def parameter_lines(results: RunResults) -> str:
    """beta and what the search chose for it, in a few lines."""
    chosen, search = results.parameters, results.search
    return (
        f"beta = {chosen.beta:g}: s = {chosen.scale:.5g}, p = {chosen.power:.5g}, c = {chosen.bias:.5g}, "
        f"alpha = {weight_text(chosen.alpha, chosen.one_minus_alpha)} "
        f"(1 - alpha = {chosen.one_minus_alpha:.4g})\n"
        f"criterion {search.criterion}, clamp {search.clamp}, {layer_norm_text(search.ln_k)}\n"
        f"{candidates_sentence(search)} {rounds_sentence(results)}"
    )


def _notes(results: RunResults) -> list[RenderableType]:
    if not results.notes:
        return []
    notes = Grid.grid(padding=(0, 1))
    for note in results.notes:
        notes.add_row("-", Text(note))
    return [Text(), Text("Notes", style="bold"), notes]
