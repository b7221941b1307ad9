"""Counters for Prometheus on every node's export port: `ray_mixednuts_*_total`, by run and stage.

A stage counts by the first part of its folder: rounds as "search" and the variants of studies as "studies", so that the
number of time series does not grow with them. `jobs/grafana.json` shows all of them.
"""

from typing import Any

import ray
from ray.util.metrics import Counter

from ..storage.records import Receipt

DESCRIPTIONS = {
    "images": "images attacked",
    "broken": "images that the attack broke",
    "forward_passes": "images passed forward",
    "retries": "pieces of work handed out again",
}


class RunMetrics:
    """Counts of one run in one process; nothing is counted without Ray, which is what carries the counts away."""

    def __init__(self, run_id: str) -> None:
        self._run = run_id
        self._counters: dict[str, Any] = {}

    def count_piece(self, receipt: Receipt) -> None:
        """A piece of work is done."""
        self._add("images", receipt.n_images, receipt.stage)
        self._add("broken", receipt.n_images - receipt.robust, receipt.stage)
        self._add("forward_passes", receipt.n_forward, receipt.stage)

    def count_retry(self, stage: str) -> None:
        """A piece of work is handed out again."""
        self._add("retries", 1, stage)

    def _add(self, name: str, value: float, stage: str) -> None:
        if not ray.is_initialized() or value <= 0:
            return
        if name not in self._counters:
            tags = ("run", "stage")
            self._counters[name] = Counter(f"mixednuts_{name}", description=DESCRIPTIONS[name], tag_keys=tags)
        self._counters[name].inc(value, tags={"run": self._run, "stage": stage.partition("/")[0]})
