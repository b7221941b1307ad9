"""Gauges for Prometheus: `ray_mixednuts_*` on the export port of the driver's node, by run and stage.

Only the driver sets the gauges, so no count disappears with a worker. All gauges are exported from the start of a
stage, with 0 for whatever has not happened yet. The `stage` label is the first part of the stage's folder: refinement
rounds count as "search" and the variants of studies as "studies". `jobs/grafana.json` shows all gauges.
"""

import functools
from typing import Any

from ray.util.metrics import Gauge

DESCRIPTIONS = {
    "images": "finished images of the stage",
    "broken": "finished images that the attack broke",
    "forward_passes": "images passed forward",
    "retries": "partitions queued again by this driver",
    "partitions_left": "partitions that are not written yet",
    "workers_ready": "workers that have loaded the classifiers",
    "workers_requested": "workers that the driver has asked for",
}


@functools.cache
def gauge(name: str) -> Any:
    """Return the gauge of one of `DESCRIPTIONS`."""
    return Gauge(f"mixednuts_{name}", description=DESCRIPTIONS[name], tag_keys=("run", "stage"))
