"""A study of the radius: how much of each classifier stands as the attacker's ball grows."""

from typing import Any

from ..config.register import STUDIES
from ..reports.charts import lines as line_chart
from ..reports.counts import compared, count
from ..reports.table import Table
from ..stages.stage import stage_of
from .bench import Bench
from .study import Outcome


@STUDIES(
    "radius",
    describes="Robust accuracy over the radius of std, rob and the mixture",
    section="not in the paper",
    order=41,
)
def radius(bench: Bench) -> Outcome:
    """The curves of the stage `radii`, clean accuracy as radius 0; those of `search.measure`'s betas too.

    Raises:
        InvalidInputError: for a run whose configuration has no key `radii`.
    """
    stage: Any = stage_of(bench.config, "radii")
    _ = bench.results  # its rows at the run's own radius
    stage.complete(bench.run, bench.executor, bench.progress)
    rows, radii = stage.robust(bench.run), [0.0, *(threat.eps for threat in stage.threats(bench.config))]
    right = {name: [rows[f"{name}_clean"], *rows[f"{name}_robust"].unbind(dim=1)] for name in ("std", "rob", "mixed")}
    search, measured = bench.search, bench.config.search.measure
    for beta, entry in search.by_beta().items():
        if beta != search.deployed_beta and (measured == "all" or beta in measured):
            name = f"mixed, beta = {beta:g}"
            found = bench.radii(name, entry.mixture())
            right[name] = [found["mixed_clean"], *found["mixed_robust"].unbind(dim=1)]
    table = Table(
        ("eps", *right),
        [(f"{eps:.5g}", *(count(hits[place]) for hits in right.values())) for place, eps in enumerate(radii)],
    )
    points = [
        {"x": eps, "y": count(hits_N).percent, "series": name}
        for name, hits in right.items()
        for eps, hits_N in zip(radii, hits, strict=True)
    ]
    figure = line_chart(points, x=f"eps ({bench.config.threat.norm})", y="right under attack (%)")
    findings = [
        compared(f"Right at eps = {eps:.5g}", ("mixed", right["mixed"][place]), ("rob", right["rob"][place]))
        for place, eps in enumerate(radii)
    ]
    return Outcome(table, figure, tuple(findings))
