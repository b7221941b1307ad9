"""The paper's numbers next to ours where the set-up is the same, and apart from them where it is not."""

from collections.abc import Sequence

from ..config import RunConfig
from .outcome import StudyTable
from .paper_numbers import PaperTable


def beside(table: StudyTable, printed: PaperTable) -> StudyTable:
    """Our table with a column `paper: ...` for every column that the paper's table shares with it, by row name.

    Rows that only the paper has come last, without numbers of ours.
    """
    shared = [column for column in printed.columns[1:] if column in table.columns]
    columns = (*table.columns, *(f"paper: {column}" for column in shared))
    ours = {str(row[0]): tuple(row) for row in table.rows}
    nothing = (None,) * (len(table.columns) - 1)
    names = dict.fromkeys([*ours, *(str(row[0]) for row in printed.rows)])
    rows = tuple(
        (*ours.get(name, (name, *nothing)), *(printed.value(name, column) for column in shared)) for name in names
    )
    return StudyTable(columns, rows)


def same_set_up(printed: Sequence[PaperTable], config: RunConfig) -> PaperTable | None:
    """The paper's table for this run's data, threat and base classifiers."""
    return next((table for table in printed if table.set_up.is_of(config)), None)


def as_table(printed: PaperTable) -> StudyTable:
    """The paper's table in the form of ours."""
    return StudyTable(printed.columns, printed.rows)


def comparison_sentence(printed: Sequence[PaperTable], config: RunConfig) -> str:
    """Whether our numbers may be held against the paper's."""
    if not printed:
        return "The paper shows this as a figure or in words, without numbers to stand beside ours."
    same = same_set_up(printed, config)
    if same is not None:
        note = f" {same.note}" if same.note else ""
        return f"The set-up is that of {same.label} ({same.set_up.words}): the paper's numbers stand beside ours.{note}"
    ours = f"{config.data.uri}, rob {config.rob}, std {config.std}, {config.threat.norm} {config.threat.eps:.4g}"
    return (
        f"The set-up differs from the paper's: here {ours}. The paper's numbers below show what to look for; they are "
        "not to be compared one by one."
    )
