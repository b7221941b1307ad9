"""A study as the terminal shows it."""

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..config import RunConfig
from .beside import as_table, beside, comparison_sentence, same_set_up
from .outcome import Outcome, StudyTable, cell_text
from .study import Study


def print_study(study: Study, outcome: Outcome, config: RunConfig, address: str, console: Console) -> None:
    """Title, table, findings, remarks, the paper's numbers, and where the files are."""
    same = same_set_up(study.paper, config)
    console.print(Text(f"\n{study.title}  ({study.name}, section {study.section})", style="bold"))
    console.print(rich_table(outcome.table if same is None else beside(outcome.table, same)))
    for sentence in (*outcome.findings, *outcome.remarks, comparison_sentence(study.paper, config)):
        console.print(Text(f"- {sentence}"))
    for printed in () if same else study.paper:
        console.print(Text(f"  the paper, {printed.label}: {printed.set_up.words}. {printed.note}", style="dim"))
        console.print(rich_table(as_table(printed)))
    console.print(Text(f"  {address}", style="dim"))


def rich_table(shown: StudyTable) -> Table:
    """The table; wide ones wrap their headings."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    for index, heading in enumerate(shown.columns):
        table.add_column(Text(heading), justify="right" if index else "left")
    for row in shown.rows:
        table.add_row(*(Text(cell_text(cell)) for cell in row))
    return table
