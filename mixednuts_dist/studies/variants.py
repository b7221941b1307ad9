"""Mixed classifiers under the same attack, compared in one table, one figure and a few sentences."""

from collections.abc import Mapping, Sequence

from ..mixing.mixture import Mixture
from ..reports.charts import table_scatter
from ..reports.counts import compared
from ..reports.table import Cell, Table
from .bench import Bench, Measured
from .study import Outcome


def measured_all(bench: Bench, kind: str, tried: Mapping[str, Mixture]) -> dict[str, Measured]:
    """Attack every mixed classifier alike; `kind` is what their names are."""
    return {name: bench.measured(f"{kind}: {name}", mixture) for name, mixture in tried.items()}


def variants(
    bench: Bench,
    kind: str,
    tried: Mapping[str, Mixture],
    cells: Mapping[str, Mapping[str, Cell]],
    *,
    reference: str,
    remarks: Sequence[str] = (),
) -> Outcome:
    """Attack every mixed classifier alike, and compare one of them with each other one.

    Args:
        kind: heads the column of names.
        cells: further columns of each row.
        reference: the name of the mixed classifier that is compared.
    """
    found = measured_all(bench, kind, tried)
    own = found[reference]
    findings = [
        compared(what, (reference, own_N), (name, other_N))
        for name, one in found.items()
        if name != reference
        for what, own_N, other_N in (("Clean", own.clean_N, one.clean_N), ("Robust", own.robust_N, one.robust_N))
    ]
    table = Table.of({kind: name, **one.cells(), **cells[name]} for name, one in found.items())
    return Outcome(table, table_scatter(table), tuple(findings), (*remarks, *bench.reduction))
