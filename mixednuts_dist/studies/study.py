"""A study: a question of the paper that is answered on a run; its register, its outcome, its files, the command.

An entry of `STUDIES` is a function from a bench to an outcome. The register knows its name, the section of the paper
and what it shows without importing it.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from ..config import RunConfig
from ..distributed.cluster import RaySession
from ..errors import InvalidInputError
from ..register import STUDIES
from ..reports.charts import Chart, chart_files
from ..reports.table import Table, print_table
from ..stages.partitioned import Progress
from .bench import Bench
from .paper_numbers import PaperTable

FORMAT = "mixednuts-study/1"
_LOG_WIDTH = 160  # of tables in a file


@dataclass(frozen=True)
class Outcome:
    """One finished study."""

    table: Table  # the first column names the row
    figure: Chart
    findings: tuple[str, ...]  # plain sentences with counts and intervals
    remarks: tuple[str, ...] = ()  # what was reduced or differs from the paper's procedure
    paper: tuple[PaperTable, ...] = ()  # what the paper prints for it


def run(
    config: RunConfig,
    name: str,
    *,
    full: bool = False,
    robs: Sequence[str] = (),
    session: RaySession | None = None,
    progress: Progress | None = None,
    console: Console | None = None,
) -> dict[str, Outcome]:
    """The study of that name, or "all" of them, printed on the console; every outcome by name.

    Raises:
        InvalidInputError: for an unknown name, before anything runs; and after all others are done, naming the studies
            that this run's rows do not allow. Errors of the attacks and of the storage are raised at once.
    """
    names = STUDIES.names() if name == "all" else (STUDIES.check(name),)
    bench = Bench(config, session=session, progress=progress, full=full, robs=robs)
    console = console or result_console()
    done, refused = {}, []
    for each in names:
        try:
            done[each] = STUDIES.get(each)(bench)
        except InvalidInputError as error:
            refused.append(f"{each}: {error}")
            continue
        for file_name, content in study_files(each, done[each], config).items():
            bench.run.store.write(f"studies/{each}/{file_name}", content)
        print_study(each, done[each], config, bench.run.store.address(f"studies/{each}"), console)
    if refused:
        raise InvalidInputError("this run does not allow these studies: " + "; ".join(refused))
    return done


def result_console() -> Console:
    """Standard output as it is now, with lines that are long enough for the tables where it is a file."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else _LOG_WIDTH, highlight=False)


def study_files(name: str, outcome: Outcome, config: RunConfig) -> dict[str, bytes]:
    """The table as CSV, LaTeX and Markdown, all of it as JSON, and the figure in every form of `chart_files`."""
    table, about = _shown(outcome, config), STUDIES.entries()[name]
    same = same_set_up(outcome.paper, config)
    content = {
        "format": FORMAT,
        "study": name,
        "section": about.facts.get("section", ""),
        "title": about.describes,
        "run_id": config.run_id(),
        "columns": list(table.columns),
        "rows": table.to_json(),
        "findings": list(outcome.findings),
        "remarks": list(outcome.remarks),
        "same_set_up_as_the_paper": same is not None,
        "paper": [
            {"label": printed.label, "set_up": printed.set_up.words, "columns": list(printed.columns),
             "rows": [list(row) for row in printed.rows], "note": printed.note}
            for printed in outcome.paper
        ],
    }  # fmt: skip
    comment = f"{about.describes}; {about.facts.get('section', '')}; run {config.run_id()}"
    return {
        "table.csv": table.as_csv().encode(),
        "table.tex": table.as_latex(comment).encode(),
        "table.md": _markdown(name, outcome, config).encode(),
        "study.json": json.dumps(content, indent=1, allow_nan=False).encode(),
        **chart_files("figure", outcome.figure),
    }


def _markdown(name: str, outcome: Outcome, config: RunConfig) -> str:
    """The whole study to read: table, findings, remarks, the paper's numbers."""
    about = STUDIES.entries()[name]
    section = about.facts.get("section", "no section of the paper")
    parts = [
        f"# {about.describes}",
        f"{name}: {section}. Run {config.run_id()}.",
        _shown(outcome, config).as_markdown(),
    ]
    parts.append("\n".join(f"- {sentence}" for sentence in (*outcome.findings, *outcome.remarks)))
    parts.append(comparison_sentence(outcome.paper, config))
    for printed in _apart(outcome, config):
        note = f" {printed.note}" if printed.note else ""
        parts += [f"The paper's {printed.label}, {printed.set_up.words}.{note}", printed.table().as_markdown()]
    return "\n\n".join([*parts, ""])


def print_study(name: str, outcome: Outcome, config: RunConfig, address: str, console: Console) -> None:
    """Title, table, findings, remarks, the paper's numbers, and where the files are."""
    about = STUDIES.entries()[name]
    section = f", section {about.facts['section']}" if "section" in about.facts else ""
    console.print(Text(f"\n{about.describes}  ({name}{section})", style="bold"))
    print_table(_shown(outcome, config), console)
    for sentence in (*outcome.findings, *outcome.remarks, comparison_sentence(outcome.paper, config)):
        console.print(Text(f"- {sentence}"))
    for printed in _apart(outcome, config):
        console.print(Text(f"  the paper, {printed.label}: {printed.set_up.words}. {printed.note}", style="dim"))
        print_table(printed.table(), console)
    console.print(Text(f"  {address}", style="dim"))


# --- beside the paper ------------------------------------------------------------------------------------------------


def same_set_up(printed: Sequence[PaperTable], config: RunConfig) -> PaperTable | None:
    """The paper's table for this run's data, threat and base classifiers."""
    return next((table for table in printed if table.set_up.is_of(config)), None)


def comparison_sentence(printed: Sequence[PaperTable], config: RunConfig) -> str:
    """Whether our numbers may be held against the paper's."""
    if not printed:
        return "The paper shows this as a figure or in words, or not at all: there are no numbers to stand beside ours."
    same = same_set_up(printed, config)
    if same is not None:
        note = f" {same.note}" if same.note else ""
        return f"The set-up is that of {same.label} ({same.set_up.words}): the paper's numbers stand beside ours.{note}"
    ours = f"{config.data.uri}, rob {config.rob}, std {config.std}, {config.threat.norm} {config.threat.eps:.4g}"
    return (
        f"The set-up differs from the paper's: here {ours}. The paper's numbers below show what to look for; they are "
        "not to be compared one by one."
    )


def _shown(outcome: Outcome, config: RunConfig) -> Table:
    """The table, with the paper's numbers beside ours where the set-up is the same."""
    same = same_set_up(outcome.paper, config)
    return outcome.table if same is None else _beside(outcome.table, same)


def _apart(outcome: Outcome, config: RunConfig) -> tuple[PaperTable, ...]:
    return () if same_set_up(outcome.paper, config) else outcome.paper


def _beside(table: Table, printed: PaperTable) -> Table:
    """Our table with a column `paper: ...` for every column that the paper's table shares with it, by row name.

    Rows that only the paper has come last, without numbers of ours.
    """
    shared = [column for column in printed.columns[1:] if column in table.columns]
    columns = (*table.columns, *(f"paper: {column}" for column in shared))
    ours: dict[str, tuple[Any, ...]] = {str(row[0]): tuple(row) for row in table.rows}
    nothing = (None,) * (len(table.columns) - 1)
    names = dict.fromkeys([*ours, *(str(row[0]) for row in printed.rows)])
    return Table(
        columns,
        [(*ours.get(name, (name, *nothing)), *(printed.value(name, column) for column in shared)) for name in names],
    )
