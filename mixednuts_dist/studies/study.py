"""Run studies, each of which repeats an experiment of the paper on a run, and write their files.

An entry of `STUDIES` is a function that receives a `Bench` and returns an `Outcome`. The register knows its name, the
section of the paper and a description without importing its module. `paper_numbers.yaml` has the paper's numbers for
each study, under its name.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from markupsafe import Markup
from rich.console import Console
from rich.text import Text

from ..config.register import STUDIES
from ..config.run_config import RunConfig
from ..config.uris import ClassifierSource
from ..distributed.executor import Executor
from ..errors import InvalidInputError, MissingArtifact
from ..mixing.mixture import Mixture
from ..reports.charts import table_bars, table_scatter
from ..reports.counts import compared
from ..reports.drawing import Figure
from ..reports.table import Cell, Table, print_table
from ..reports.templates import rendered
from ..stages.progress import RunProgress
from ..storage.store import Store
from .bench import Bench

FORMAT = "mixednuts-study/1"
FILES = ("table.csv", "table.tex", "study.json", "figure.svg", "figure.pdf")
_LOG_WIDTH = 160  # columns of tables in a file


@dataclass(frozen=True)
class Outcome:
    """One finished study."""

    table: Table  # the first column names the row
    figure: Figure
    findings: tuple[str, ...]  # plain sentences with counts and intervals
    remarks: tuple[str, ...] = ()  # sentences about the method, for example about reduced budgets
    differs: str = ""  # how the experiment differs from the paper's, whose numbers are then not shown

    @classmethod
    def with_bars(
        cls,
        rows: Iterable[Mapping[str, Cell]],
        *columns: str,
        findings: Iterable[str],
        remarks: Iterable[str] = (),
        value: str = "correct images (%)",
    ) -> "Outcome":
        """Return the table of these rows, with a bar for each row and each of these columns; `value` is the axis."""
        table = Table.of(rows)
        return cls(table, table_bars(table, *columns, value=value), tuple(findings), tuple(remarks))


def run(
    config: RunConfig,
    name: str,
    *,
    full: bool = False,
    robs: Sequence[str] = (),
    executor: Executor | None = None,
    progress: RunProgress | None = None,
    console: Console | None = None,
) -> dict[str, Outcome]:
    """Run the study of that name, or all studies for "all", print the outcomes, and return them by name.

    With "all", studies that are impossible on the rows of this run are listed at the end with the reason.

    Raises:
        InvalidInputError: for an unknown name, before anything runs, or if the requested study is impossible on the
            rows of this run.
    """
    names = STUDIES.names() if name == "all" else (STUDIES.check(name),)
    bench = Bench(config, executor=executor, progress=progress, full=full, robs=rob_uris(robs, config))
    console = console or result_console()
    done, refused = {}, {}
    for each in names:
        try:
            outcome = STUDIES.get(each)(bench)
            done[each] = replace(outcome, remarks=(*outcome.remarks, *bench.sampling))
        except InvalidInputError as error:
            if name != "all":
                raise
            refused[each] = str(error)
            continue
        for file_name, content in study_files(each, done[each], config).items():
            bench.store.write(f"studies/{each}/{file_name}", content)
        print_study(each, done[each], config, bench.store.address(f"studies/{each}"), console)
    for each, reason in refused.items():
        console.print(Text(f"\n{each} is left out: {reason}"))
    left_out = f"; {len(refused)} left out" if refused else ""
    address = write_overview(bench.store, config)
    console.print(
        Text(f"\n{len(done)} {'study' if len(done) == 1 else 'studies'} done{left_out}: {address}", style="dim")
    )
    return done


def rob_uris(given: Sequence[str], config: RunConfig) -> list[str]:
    """Return the URIs of other robust classifiers, with each FILE.txt replaced by its lines.

    A line is a URI, or the name of a model in RobustBench's zoo for the data set and norm of the run. Empty lines and
    lines that begin with # are skipped.

    Raises:
        InvalidInputError: if a file cannot be read, or weights or other files are missing.
        BaseClassifierError: for a URI or a model that does not exist.
    """
    uris = list[str]()
    for each in given:
        if not each.endswith(".txt"):
            uris.append(each)
            continue
        try:
            lines = Path(each).read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInputError(f"--rob {each} cannot be read as lines of text: {error}") from error
        zoo = f"?dataset={config.data.uri.scheme}&threat={config.threat.norm}"
        names = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        uris += [name if ":" in name else f"robustbench:{name}{zoo}" for name in names]
    if lacking := [item for uri in uris for item in ClassifierSource(uri).missing("--rob")]:
        listed = "".join(f"\n  {item.what}: {item.path}\n    {item.command}" for item in lacking)
        raise InvalidInputError(f"--rob: {len(lacking)} missing. Get them first:{listed}")
    return uris


def result_console() -> Console:
    """Return a console on standard output, wide enough for the tables if the output is redirected."""
    return Console(file=sys.stdout, width=None if sys.stdout and sys.stdout.isatty() else _LOG_WIDTH, highlight=False)


def study_files(name: str, outcome: Outcome, config: RunConfig) -> dict[str, bytes]:
    """Return the files of a study: the table as CSV and LaTeX, all of it as JSON, and the figure as SVG and PDF."""
    about, paper, same = STUDIES.entries()[name], *printed_for(name, outcome, config)
    table, section = _next_to(outcome.table, same), about.facts.get("section", "")
    content = {
        "format": FORMAT,
        "study": name,
        "section": section,
        "title": about.describes,
        "run_id": config.run_id(),
        **table.to_json(),
        "findings": list(outcome.findings),
        "remarks": list(outcome.remarks),
        "differs": outcome.differs,
        "same_set_up_as_the_paper": same is not None,
        "paper": [
            {"label": printed.label, "set_up": printed.set_up["words"], "columns": list(printed.table.columns),
             "rows": [list(row) for row in printed.table.rows], "note": printed.note}
            for printed in paper
        ],
    }  # fmt: skip
    return {
        "table.csv": table.as_csv().encode(),
        "table.tex": table.as_latex(f"{about.describes}; {section}; run {config.run_id()}").encode(),
        "study.json": json.dumps(content, indent=1, allow_nan=False).encode(),
        "figure.svg": outcome.figure.svg(name).encode(),
        "figure.pdf": outcome.figure.pdf(),
    }


def print_study(name: str, outcome: Outcome, config: RunConfig, address: str, console: Console) -> None:
    """Print the title, the table, findings, remarks, the paper's numbers and the address of the files."""
    about, paper, same = STUDIES.entries()[name], *printed_for(name, outcome, config)
    section = f", section {about.facts['section']}" if "section" in about.facts else ""
    console.print(Text(f"\n{about.describes}  ({name}{section})", style="bold"))
    print_table(_next_to(outcome.table, same), console)
    if outcome.differs:
        set_up = f"{outcome.differs} So the paper's numbers are not shown."
    elif not paper:
        set_up = "The paper prints no numbers for this study."
    elif same is not None:
        set_up = (
            f"The set-up is that of {same.label} ({same.set_up['words']}), whose numbers are next to ours. {same.note}"
        )
    else:
        ours = f"{config.data.uri}, rob {config.rob}, std {config.std}, {config.threat.norm} {config.threat.eps:.4g}"
        set_up = (
            f"The set-up differs from the paper's: here it is {ours}. The paper's numbers below show what to look for. "
            "Do not compare them one by one."
        )
    for sentence in (*outcome.findings, *outcome.remarks, set_up.strip()):
        console.print(Text(f"- {sentence}"))
    for printed in paper if same is None else ():
        console.print(Text(f"  the paper, {printed.label}: {printed.set_up['words']}. {printed.note}", style="dim"))
        print_table(printed.table, console)
    console.print(Text(f"  {address}", style="dim"))


def write_overview(store: Store, config: RunConfig) -> str:
    """Write the page of all finished studies of the run, which links their files, and return its address."""
    there, found = sorted(store.names("studies")), dict[str, Any]()
    for name in (name for name in dict.fromkeys((*STUDIES.names(), *there)) if name in there):
        with suppress(MissingArtifact, ValueError):  # skip a study that is not finished
            found[name] = json.loads(store.read(f"studies/{name}/study.json"))
    figures = {name: Markup(store.read(f"studies/{name}/figure.svg").decode()) for name in found}
    page = rendered(
        "studies", "overview.html",
        run_id=config.run_id(), name=config.name, studies=found, figures=figures, files=FILES,
    )  # fmt: skip
    store.write("studies/index.html", page.encode())
    return store.address("studies/index.html")


# --- the paper's numbers ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PaperTable:
    """One table of the paper for one set-up; the first column has the same names as in our table."""

    label: str
    table: Table
    note: str
    set_up: Mapping[str, Any]  # as in `paper_numbers.yaml`; `words` has the data, the threat and the base classifiers

    def is_of(self, config: RunConfig) -> bool:
        """Return whether a run has the same data, threat and base classifiers."""
        return (
            config.data.uri.scheme == self.set_up["data"]
            and config.threat.norm == self.set_up["norm"]
            and abs(config.threat.eps - self.set_up["eps_255"] / 255) < 1e-9
            and any(name in config.rob for name in self.set_up["rob"])
            and any(name in str(config.std) for name in self.set_up["std"])
        )


def paper_tables(study: str) -> tuple[PaperTable, ...]:
    """Return the paper's tables for a study; () for some studies, and for studies in extensions."""
    content = yaml.safe_load(Path(__file__).with_name("paper_numbers.yaml").read_text())
    printed, set_ups = content["studies"].get(study, ()), content["set_ups"]
    return tuple(
        PaperTable(each["label"], Table(each["columns"], each["rows"]), each.get("note", ""), set_ups[each["set_up"]])
        for each in printed
    )


def printed_for(study: str, outcome: Outcome, config: RunConfig) -> tuple[tuple[PaperTable, ...], PaperTable | None]:
    """Return the paper's tables to show with an outcome, and the table for the set-up of this run or None.

    If the experiment differs from the paper's, no table is shown.
    """
    printed = () if outcome.differs else paper_tables(study)
    return printed, same_set_up(printed, config)


def same_set_up(printed: Sequence[PaperTable], config: RunConfig) -> PaperTable | None:
    """Return the table of the paper for the data, threat and base classifiers of this run."""
    return next((table for table in printed if table.is_of(config)), None)


def _next_to(table: Table, paper: PaperTable | None) -> Table:
    """Return our table with a further column `paper: ...` for every column that the paper's table has too.

    Rows that only the paper's table has are added at the end, without our numbers.
    """
    if paper is None:
        return table
    first, *columns = table.columns
    shared = [column for column in paper.table.columns[1:] if column in columns]
    ours, theirs = ({str(row[each.columns[0]]): row for row in each.dicts()} for each in (table, paper.table))
    return Table.of(
        {
            first: name,
            **{column: ours.get(name, {}).get(column) for column in columns},
            **{f"paper: {column}": theirs.get(name, {}).get(column) for column in shared},
        }
        for name in {**ours, **theirs}
    )


# --- mixed classifiers under the same attack -------------------------------------------------------------------------


def variants(
    bench: Bench,
    kind: str,
    tried: Mapping[str, Mixture],
    cells: Mapping[str, Mapping[str, Cell]],
    *,
    reference: str,
    remarks: Sequence[str] = (),
) -> Outcome:
    """Run the same attack on every mixed classifier, and compare one of them with each of the others.

    Args:
        kind: heading of the first column, which has the names.
        cells: further columns of each row.
        reference: the name of the mixed classifier that is compared.
    """
    found = {name: bench.measured(f"{kind}: {name}", mixture) for name, mixture in tried.items()}
    own = found[reference]
    findings = [
        compared(what, (reference, own_N), (name, other_N))
        for name, one in found.items()
        if name != reference
        for what, own_N, other_N in (("Clean", own.clean_N, one.clean_N), ("Robust", own.robust_N, one.robust_N))
    ]
    table = Table.of({kind: name, **one.cells(), **cells[name]} for name, one in found.items())
    return Outcome(table, table_scatter(table), tuple(findings), (*remarks, *bench.reduction))
