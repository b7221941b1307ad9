"""Tables for the terminal (and for a log file that was one), as CSV and as LaTeX."""

import csv
import io
import re

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from .results import MIXED_ATTACK, AccuracyRow, RunResults
from .single import SingleResults, render_single
from .wording import (
    interval_text,
    layer_norm_text,
    percent_text,
    seconds_text,
    summary_sentence,
    threat_text,
    weight_text,
)


def render_tables(results: RunResults) -> Group:
    """The whole report for a terminal, in 80 columns: summary, accuracy, parameters, survival, seconds, notes."""
    title = f"{results.name}  ({results.run_id})"
    setting = f"{results.dataset}, {results.n_images} images, {threat_text(results.threat)}"
    parts: list[RenderableType] = [
        Text(title, style="bold"),
        Text(setting),
        Text(f"std = {results.std}\nrob = {results.rob}"),
        Text(),
        Text(summary_sentence(results)),
        Text(),
        accuracy_table(results),
        Text(_attack_line(results), style="dim"),
        Text(),
        Text(parameter_lines(results)),
        Text(),
        survival_table(results),
        Text(),
        Text(f"Time: {_seconds_line(results)}"),
        *_note_lines(results),
    ]
    return Group(*parts)


def print_results(results: RunResults | SingleResults, console: Console | None = None) -> None:
    """Print the report to `console`, by default to the standard output."""
    report = render_single(results) if isinstance(results, SingleResults) else render_tables(results)
    (console or Console(highlight=False)).print(report)


def accuracy_table(results: RunResults) -> Table:
    """std, rob and mixed: counts, percentages and 95 % intervals, clean and robust."""
    table = _table("")
    for heading in ("clean", "%", "95 % interval", "robust", "%", "95 % interval"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in results.accuracy:
        table.add_row(*_accuracy_cells(row), style="bold" if row.classifier == "mixed" else "")
    return table


def survival_table(results: RunResults) -> Table:
    """What each step of the adaptive attack left standing."""
    table = _table("mixed, after")
    for heading in ("right", "lost", "%", "95 % interval"):
        table.add_column(heading, justify="right", no_wrap=True)
    for step in results.survival:
        table.add_row(
            Text(step.step),
            f"{step.standing.correct}/{step.standing.total}",
            str(step.lost),
            percent_text(step.standing),
            interval_text(step.standing),
        )
    return table


def parameter_lines(results: RunResults) -> str:
    """beta and what the search chose for it, in three lines."""
    chosen, search = results.parameters, results.search
    return (
        f"beta = {chosen.beta:g}: s = {chosen.scale:.5g}, p = {chosen.power:.5g}, c = {chosen.bias:.5g}, "
        f"alpha = {weight_text(chosen.alpha, chosen.one_minus_alpha)} "
        f"(1 - alpha = {chosen.one_minus_alpha:.4g})\n"
        f"criterion {search.criterion}, clamp {search.clamp}, {layer_norm_text(search.ln_k)}\n"
        f"{search.n_candidates} candidates tried; float32 could not deploy {search.n_undeployable} of them"
    )


def csv_table(results: RunResults) -> str:
    """The accuracy table with one line a figure; percentages unrounded."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["classifier", "images", "attack", "correct", "total", "percent", "low", "high"])
    for row in results.accuracy:
        for images, attack, count in (("clean", "", row.clean), ("robust", row.attack, row.robust)):
            writer.writerow(
                [row.classifier, images, attack, count.correct, count.total, count.percent, *count.interval]
            )
    return file.getvalue()


def latex_table(results: RunResults) -> str:
    """The accuracy table for `\\input`; needs the booktabs package."""
    lines = [
        r"\begin{tabular}{lrlrl}",
        r"  \toprule",
        r"  & \multicolumn{2}{c}{Clean (\%)} & \multicolumn{2}{c}{Robust (\%)} \\",
        r"  \cmidrule(lr){2-3} \cmidrule(lr){4-5}",
    ]
    for row in results.accuracy:
        cells = [
            row.classifier,
            *(cell(count) for count in (row.clean, row.robust) for cell in (percent_text, interval_text)),
        ]
        lines.append(f"  {' & '.join(cells)} " + r"\\")
    lines += [r"  \bottomrule", r"\end{tabular}"]
    caption = f"{results.name}: {results.n_images} images, {threat_text(results.threat)}; run {results.run_id}"
    return "\n".join([f"% {_one_line(caption)}", *lines, ""])


def _table(first_heading: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    table.add_column(first_heading, no_wrap=True)
    return table


def _accuracy_cells(row: AccuracyRow) -> list[str]:
    cells = [row.classifier]
    for count in (row.clean, row.robust):
        cells += [f"{count.correct}/{count.total}", percent_text(count), interval_text(count)]
    return cells


def _attack_line(results: RunResults) -> str:
    names = {row.classifier: row.attack for row in results.accuracy}
    return f"robust = right under: {names['std']} for std, {names['rob']} for rob, {MIXED_ATTACK} for mixed"


def _seconds_line(results: RunResults) -> str:
    stages = [f"{stage} {seconds_text(seconds)}" for stage, seconds in results.seconds.items()]
    return ", ".join([*stages, f"in all {seconds_text(sum(results.seconds.values()))}"])


def _note_lines(results: RunResults) -> list[RenderableType]:
    if not results.notes:
        return []
    notes = Table.grid(padding=(0, 1))
    for note in results.notes:
        notes.add_row("-", Text(note))
    return [Text(), Text("Notes", style="bold"), notes]


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text)
