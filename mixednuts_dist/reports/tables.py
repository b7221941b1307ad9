"""Write the tables of a run as files for scripts and papers, and print the report in the terminal."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from rich.console import Console, Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from ..storage.records import SearchResult
from .counts import Seconds, seconds_text
from .results import (
    RunResults,
    attack_sentence,
    parameter_lines,
    prediction,
    rounds_table,
    summary_sentences,
)
from .table import Cell, Table


def accuracy_table(results: RunResults) -> Table:
    """Return clean and robust accuracy per classifier, then those of added stages."""
    rows: list[list[Cell]] = []
    for row in (*results.accuracy, *results.stages):
        classifier, comma, rest = row.classifier.partition(", ")  # an added stage has `std, corrupted`
        rows.append([f"{results.called(classifier)}{comma}{rest}", row.clean, row.robust, row.attack])
    return Table(
        ["classifier", "clean", "robust", "attack"],
        rows,
        bold=results.called("mixed"),
        printed=["classifier", "clean", "robust"],
    )


def search_table(search: SearchResult) -> Table:
    """Return the choice for every beta with its predictions; the deployed one is bold."""
    rows = [{**prediction(entry), "beta": f"{entry.beta:g}"} for entry in search.entries]
    printed = ["beta", "s", "p", "c", "clean", "robust_predicted"]
    return replace(Table.of(rows, bold=f"{search.deployed_beta:g}"), printed=printed)


def survival_table(results: RunResults) -> Table:
    """Return the images that are correct after each step of the attack, and those that the step broke."""
    return Table(["after", "correct", "broken"], [[step.step, step, step.lost] for step in results.survival])


def cost_table(results: RunResults) -> Table:
    """Return the cost of each stage that has finished partitions."""
    rows: list[list[Cell]] = [
        [
            cost.stage, cost.images, cost.partitions, cost.nodes,
            Seconds(3600 * cost.core_hours), Seconds(3600 * cost.gpu_hours),
            None if cost.wall_seconds is None else Seconds(cost.wall_seconds), cost.n_forward, cost.n_backward,
        ]
        for cost in results.costs
    ]  # fmt: skip
    columns = [
        "stage", "images", "partitions", "nodes", "core time", "GPU time", "time", "passes forward",
        "passes backward",
    ]  # fmt: skip
    return Table(columns, rows)


TABLES: Mapping[str, Callable[[RunResults], Table]] = {
    "table": accuracy_table,
    "tradeoff": lambda results: search_table(results.search),
    "survival": survival_table,
    "warm_start": lambda results: Table(["sample_id", "label", "predicted"], results.warm_start),
}


def table_files(results: RunResults) -> dict[str, str]:
    """Return file name -> content: every table as CSV, and the accuracy table as LaTeX; `results.json` has the rest."""
    names = [name for name in TABLES if results.found or name != "tradeoff"]
    tables = {name: TABLES[name](results) for name in names}
    tables |= {file_name(title): table for title, table in results.tables.items()}
    files = {f"{name}.csv": table.as_csv() for name, table in tables.items() if table.rows}
    about = f"{results.name}: {results.n_images} images, {results.threat}; run {results.run_id}"
    return {**files, "table.tex": tables["table"].as_latex(f"{about}; robust: {attack_sentence(results)}")}


def file_name(title: str) -> str:
    """Return the file name of a stage's table, the first word of its title.

    >>> file_name("certified, by beta")
    'certified'
    """
    return title.split(maxsplit=1)[0].strip(",").lower()


def print_results(results: RunResults, console: Console | None = None) -> None:
    """Print the whole report, by default on the standard output."""
    console = console or Console()
    width, std = console.width, f"std = {results.std}\n" if results.std else ""
    parts: list[RenderableType] = [
        Text(f"{results.name}  ({results.run_id})", style="bold"),
        Text(f"{results.dataset}, {results.n_images} images, {results.threat}\n{std}rob = {results.rob}\n"),
        *map(Text, summary_sentences(results)),
        Text(),
        accuracy_table(results).only(["classifier", "clean", "robust"]).terminal(width),
        Text(f"robust: under {attack_sentence(results)}; counts with 95% intervals\n", style="dim"),
    ]
    if results.found:
        parts.append(Text(f"{parameter_lines(results)}\n"))
        rounds = rounds_table(results)
        parts += [rounds.terminal(width), Text()] if rounds.rows else []
    for title, table in results.tables.items():
        parts += [table.terminal(width, title), Text()]
    times = [f"{stage} {seconds_text(seconds)}" for stage, seconds in results.seconds.items()]
    time = ", ".join([*times, f"in all {seconds_text(sum(results.seconds.values()))}"])
    parts += [survival_table(results).terminal(width), Text(), Text(f"Time: {time}")]
    if results.notes:
        notes = Grid.grid(padding=(0, 1))
        for note in results.notes:
            notes.add_row("-", Text(note))
        parts += [Text(), Text("Notes", style="bold"), notes]
    console.print(Group(*parts), highlight=False)
