"""The selected parameters of every beta, for the terminal."""

from rich.table import Table

from ..selection.choice import Choice
from ..storage.records import SearchResult
from .intervals import Count
from .wording import percent_text


def search_table(result: SearchResult) -> Table:
    """One row a beta, the deployed one marked; clamp and LayerNorm width where the search tried several.

    The predictions are shares of the images, in percent, with their 95 % bootstrap intervals.
    """
    several = len({(entry.clamp, entry.ln_k) for entry in result.entries}) > 1
    table = Table(
        box=None, pad_edge=False, title=f"criterion {result.criterion}, clamp {result.clamp}", title_justify="left"
    )
    pair = ("clamp", "ln_k") if several else ()
    for heading in ("beta", *pair, "s", "p", "c", "1 - alpha", "clean", "95 %", "robust, at least", "95 %"):
        table.add_column(heading, justify="right")
    for entry in result.entries:
        beta, *numbers = _cells(entry)
        names = (entry.clamp, str(entry.ln_k or "default")) if several else ()
        table.add_row(beta, *names, *numbers, style="bold" if entry.beta == result.deployed_beta else None)
    return table


def _cells(entry: Choice) -> list[str]:
    clean, robust = (Count(n, entry.total) for n in (entry.clean_correct, entry.kept_predicted))
    numbers = [f"{value:.4g}" for value in (entry.beta, entry.scale, entry.power, entry.bias, entry.one_minus_alpha)]
    return [
        *numbers,
        percent_text(clean), _interval_text(entry.clean_interval),
        percent_text(robust), _interval_text(entry.kept_interval),
    ]  # fmt: skip


def _interval_text(interval: tuple[float, float]) -> str:
    low, high = (100 * end for end in interval)
    return f"\\[{low:.1f}, {high:.1f}]"
