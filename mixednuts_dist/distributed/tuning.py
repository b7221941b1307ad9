"""Score the candidates of a search in a Ray Tune job over the stored logits.

There is one trial per power, which scores all scales, biases and betas at once. A trial reports the clean accuracy and
the predicted retention of the best candidate of each beta, and the scores of all its candidates, which the driver takes
from the ResultGrid. The logits are put into Ray's object store once. Importing this module imports Ray Tune, which
takes two seconds, so only the search imports it.
"""

import logging
import math
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any

import torch
from ray import tune
from safetensors.torch import load, save

from ..config.register import CRITERIA, require_extensions
from ..config.uris import travelled
from ..errors import ClusterError, MixedNutsError
from ..selection.criteria import Criterion, Scores
from ..selection.grid import Grid
from ..selection.inputs import CachedLogits
from ..selection.selection import score_candidates
from .worker_spec import WorkerSpec

_MAX_FAILURES = 3  # per trial; a lost node does not count
# Transformed logits per process. A process computes them in about as many seconds as it needs to start; moreover, Tune
# waits 5 s at the end of a job for a process that starts when no trial is left.
_WORTH_A_PROCESS = 1 << 31
_QUIET = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # its handler would stay and ignore the first Ctrl-C in a later stage
}


def score_on_tune(
    grid: Grid, spec: WorkerSpec, rows: CachedLogits, criterion: str, reserved: Mapping[str, float],
    labels: Mapping[str, str], n_trials: int, start_seconds: float,
) -> Scores:  # fmt: skip
    """Return the scores of every candidate, which a Tune job on the connected Ray computes.

    Args:
        reserved: the resources of a trial.
        labels: Ray's labels of the nodes on which trials may run.
        n_trials: at most this many trials run at a time, and fewer if there is little to compute.

    Raises:
        MixedNutsError: if a trial failed more than `_MAX_FAILURES` times, with its error.
        ClusterError: if no trial could start for `start_seconds`.
    """
    trial = tune.with_parameters(
        score_power, rows=rows, criterion=criterion, grid=grid, extensions=spec.extensions, folder=spec.working_folder
    )
    on_nodes: dict[str, Any] = {"bundle_label_selector": [dict(labels)]} if labels else {}
    n_logits = 2 * rows.rob_clean_BK.numel() * math.prod(grid.shape[1:])
    # Tune would pickle a bucket's credentials next to its state, so the state of a run in a bucket is temporary.
    in_bucket = "://" in spec.run_uri
    state = TemporaryDirectory(prefix="mixednuts-tune-") if in_bucket else nullcontext(f"{spec.run_uri}/search/tune")
    with state as folder, _quiet():
        tuner = tune.Tuner(
            tune.with_resources(trial, tune.PlacementGroupFactory([dict(reserved)], **on_nodes)),
            param_space={"power": tune.grid_search([*grid.powers])},
            tune_config=tune.TuneConfig(
                metric="clean_accuracy",
                mode="max",
                reuse_actors=True,
                max_concurrent_trials=min(n_trials, math.ceil(n_logits / _WORTH_A_PROCESS)),
            ),
            run_config=tune.RunConfig(
                name=f"{spec.run_id}-{uuid.uuid4().hex[:8]}",
                storage_path=folder,
                verbose=0,
                failure_config=tune.FailureConfig(max_failures=_MAX_FAILURES),
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                callbacks=[_Patience(start_seconds)],
            ),
        )
        results = tuner.fit()
    if results.errors:
        raise MixedNutsError(f"{len(results.errors)} of {len(results)} search trials failed: {results.errors[0]}")
    found: dict[float, Scores] = {}
    for i in range(len(results)):
        config, metrics = results[i].config or {}, results[i].metrics or {}
        found[config["power"]] = Scores(**load(metrics["scores"]))
    by_power = [found[power] for power in grid.powers]
    return Scores(*(torch.cat(parts, dim=-2) for parts in zip(*by_power, strict=True)))


def score_power(
    config: Mapping[str, float], *, rows: CachedLogits, criterion: str, grid: Grid, extensions: Mapping[str, str],
    folder: str,
) -> None:  # fmt: skip
    """Score all scales, biases and betas at one power (`config`) as a trial; one process computes many trials."""
    torch.set_num_threads(1)
    require_extensions(extensions, travelled(folder))
    part = replace(grid, powers=(config["power"],))
    scored: Criterion = CRITERIA.get(criterion).from_rows(rows, clamp=grid.clamp, ln_k=grid.ln_k)
    scores = score_candidates(scored, part)
    content = save({name: values.contiguous() for name, values in scores._asdict().items()})
    tune.report({**_metrics(scored, part, scores), "scores": content})


def _metrics(criterion: Criterion, grid: Grid, scores: Scores) -> dict[str, Any]:
    """Return a trial's metrics for Tune and the dashboard: per beta, the best candidate's accuracy and retention."""
    found: dict[str, Any] = {}
    for i, beta in enumerate(grid.betas):
        counts, kept = scores.counts[i].flatten(), scores.kept[i].flatten()
        best = int(counts.argmax() if criterion.maximized else counts.argmin())
        found[f"clean_accuracy/{beta:g}"] = int(counts[best]) / max(1, len(criterion.clean_NK))
        found[f"predicted_retention/{beta:g}"] = int(kept[best]) / max(1, criterion.n_attacked)
    return {"clean_accuracy": found[f"clean_accuracy/{grid.betas[0]:g}"], **found}


class _Patience(tune.Callback):
    """Ends a job whose remaining trials have all waited for a node for too long."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._since, self._n_finished = seconds, time.monotonic(), 0

    def on_step_begin(self, iteration: int, trials: list[Any], **_info: Any) -> None:  # noqa: ARG002
        n_pending = sum(trial.status == "PENDING" for trial in trials)
        n_finished = sum(trial.is_finished() for trial in trials)
        if n_finished > self._n_finished or n_finished + n_pending < len(trials):
            self._since, self._n_finished = time.monotonic(), n_finished
        elif time.monotonic() - self._since > self._seconds:
            raise ClusterError(
                f"no trial of the search could start for {self._seconds:g} s, because the cluster has no free core. "
                "End the jobs that hold its cores, or search in this process with search.tune=false"
            )


@contextmanager
def _quiet() -> Iterator[None]:
    """Run Tune without its banner, its tables and its warning that its loggers are off."""
    chatty = logging.getLogger("ray.tune")
    before, added = chatty.level, {name: value for name, value in _QUIET.items() if name not in os.environ}
    chatty.setLevel(logging.ERROR)
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
        chatty.setLevel(before)
