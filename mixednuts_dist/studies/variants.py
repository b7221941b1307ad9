"""Mixed classifiers under the same attack, compared in one table, one figure and a few sentences."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..mixing.mixture import Mixture
from ..reports.charts import accuracy_scatter
from ..reports.counts import compared, count
from ..reports.drawing import Figure
from ..reports.table import Cell, Table
from .bench import Bench, Measured


@dataclass(frozen=True)
class Variants:
    """The outcome of the attack on each variant; `cells` are further columns of its row."""

    kind: str  # heads the column of names
    found: Mapping[str, Measured]
    cells: Mapping[str, Mapping[str, Cell]]

    def table(self) -> Table:
        """Return one row per variant: clean, robust, and its further cells."""
        return Table.of(
            [
                {
                    self.kind: name,
                    "clean": count(one.clean_N),
                    "robust": count(one.robust_N),
                    **self.cells.get(name, {}),
                }
                for name, one in self.found.items()
            ]
        )

    def figure(self) -> Figure:
        """Draw clean against robust accuracy."""
        return accuracy_scatter(
            {name: [(name, count(one.clean_N), count(one.robust_N))] for name, one in self.found.items()}
        )

    def against(self, reference: str) -> tuple[str, ...]:
        """Compare the reference with every other variant, on clean and on attacked images."""
        own = self.found[reference]
        return tuple(
            compared(what, (reference, own_N), (name, other_N))
            for name, one in self.found.items()
            if name != reference
            for what, own_N, other_N in (
                ("Clean", own.clean_N, one.clean_N),
                ("Robust", own.robust_N, one.robust_N),
            )
        )


def variants(
    bench: Bench, kind: str, tried: Mapping[str, Mixture], cells: Mapping[str, Mapping[str, Cell]] | None = None
) -> Variants:
    """Attack every mixed classifier alike."""
    found = {name: bench.measured(f"{kind}: {name}", mixture) for name, mixture in tried.items()}
    return Variants(kind, found, cells or {})
