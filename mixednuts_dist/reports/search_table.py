"""The selected parameters of every beta, for the terminal."""

from rich.table import Table

from ..data.records import SearchResult, SelectedParameters
from .intervals import Count
from .wording import percent_text


def search_table(result: SearchResult) -> Table:
    """One row a beta, the deployed one marked."""
    table = Table(
        box=None, pad_edge=False, title=f"criterion {result.criterion}, clamp {result.clamp}", title_justify="left"
    )
    for heading in ("beta", "s", "p", "c", "1 - alpha", "clean", "robust, at least"):
        table.add_column(heading, justify="right")
    for entry in result.entries:
        table.add_row(*_cells(entry), style="bold" if entry.beta == result.deployed_beta else None)
    return table


def _cells(entry: SelectedParameters) -> list[str]:
    clean, robust = (Count(n, entry.total) for n in (entry.clean_correct, entry.robust_correct_bound))
    numbers = [f"{value:.4g}" for value in (entry.beta, entry.scale, entry.power, entry.bias, entry.one_minus_alpha)]
    return [*numbers, percent_text(clean), percent_text(robust)]
