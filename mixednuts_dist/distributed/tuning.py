"""The search as a Ray Tune job over the cached logits.

The parameter space is the power and the bias; a trial scores all scales and betas at once. It reports the clean
accuracy and the predicted retention of the best candidate of each beta, and the scores of all of its candidates, which
the driver takes from the ResultGrid. The logits are put into Ray's object store once. Importing this module imports Ray
Tune, which takes two seconds, so only the search imports it.
"""

import logging
import os
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from ray import tune
from safetensors.torch import load, save
from torch import Tensor

from ..config.register import CRITERIA, require_extensions
from ..config.uris import travelled
from ..errors import ClusterError, MixedNutsError
from ..selection.criteria import Criterion, Scores
from ..selection.grid import Grid
from ..selection.inputs import CachedLogits
from ..selection.selection import score_candidates
from .executor import PoolSettings
from .tasks import SearchTask

_MAX_FAILURES = 3  # per trial; a lost node does not count
_QUIET = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # its handler would stay and ignore the first Ctrl-C in a later stage
}
_CHATTY = ("ray.tune.analysis.experiment_analysis", "ray.tune.tune", "ray.tune.execution.tune_controller")

_criteria: dict[str, Criterion] = {}  # by content hash, in a trial's process, which is used for many trials


@dataclass(frozen=True)
class TunedScoring:
    """Scores a grid on the connected Ray, in one Tune job."""

    rows: CachedLogits
    task: SearchTask
    settings: PoolSettings  # `n_workers` trials run at a time; pending trials would only start more processes
    reserved: Mapping[str, float]  # the resources of a trial

    def __call__(self, grid: Grid) -> Scores:
        """Return the scores of every candidate.

        Raises:
            MixedNutsError: if a trial failed more than `_MAX_FAILURES` times, with its error.
            ClusterError: if no trial could start for `compute.start_seconds`.
        """
        space = {"power": tune.grid_search([*grid.powers]), "bias": tune.grid_search([*grid.biases])}
        trial = tune.with_parameters(score_trial, rows=self.rows, task=self.task, grid=grid)
        with _experiment_folder(self.task) as folder, _quiet():
            tuner = tune.Tuner(
                tune.with_resources(trial, _resources(self.reserved, self.settings.placement)),
                param_space=space,
                tune_config=tune.TuneConfig(
                    metric="clean_accuracy",
                    mode="max",
                    reuse_actors=True,
                    max_concurrent_trials=self.settings.n_workers,
                ),
                run_config=tune.RunConfig(
                    name=f"{self.task.content_hash}-{uuid.uuid4().hex[:8]}",
                    storage_path=folder,
                    verbose=0,
                    failure_config=tune.FailureConfig(max_failures=_MAX_FAILURES),
                    callbacks=[_Patience(self.settings.start_seconds)],
                ),
            )
            results = tuner.fit()
            _remove_empty_folders(Path(results.experiment_path))
        if results.errors:
            raise MixedNutsError(f"{len(results.errors)} of {len(results)} search trials failed: {results.errors[0]}")
        found: dict[tuple[float, float], dict[str, Tensor]] = {}
        for i in range(len(results)):
            config, metrics = results[i].config or {}, results[i].metrics or {}
            found[config["power"], config["bias"]] = load(metrics["scores"])

        def joined(name: str) -> Tensor:  # (betas, scales, powers, biases)
            rows = [torch.cat([found[power, bias][name] for bias in grid.biases], dim=-1) for power in grid.powers]
            return torch.cat(rows, dim=-2)

        return Scores(*map(joined, Scores._fields))


def score_trial(config: dict[str, Any], rows: CachedLogits, task: SearchTask, grid: Grid) -> None:
    """Score all scales and betas at one power and bias, and report them to Tune."""
    torch.set_num_threads(1)
    require_extensions(task.extensions, travelled(task.working_folder))
    key = task.content_hash
    if key not in _criteria:
        _criteria[key] = CRITERIA.get(task.criterion).from_rows(rows, clamp=grid.clamp, ln_k=grid.ln_k)
    criterion, part = _criteria[key], replace(grid, powers=(config["power"],), biases=(config["bias"],))
    scores = score_candidates(criterion, part)
    content = save({name: values.contiguous() for name, values in scores._asdict().items()})
    tune.report({**_metrics(criterion, part, scores), "scores": content})


def _metrics(criterion: Criterion, grid: Grid, scores: Scores) -> dict[str, Any]:
    """Return a trial's metrics for Tune and the dashboard: per beta, the best candidate's accuracy and retention."""
    found: dict[str, Any] = {}
    for i, beta in enumerate(grid.betas):
        counts, kept = scores.counts[i].flatten(), scores.kept[i].flatten()
        best = int(counts.argmax() if criterion.maximized else counts.argmin())
        found[f"clean_accuracy/{beta:g}"] = int(counts[best]) / max(1, len(criterion.clean_NK))
        found[f"predicted_retention/{beta:g}"] = int(kept[best]) / max(1, criterion.n_attacked)
    return {"clean_accuracy": found[f"clean_accuracy/{grid.betas[0]:g}"], **found}


def _resources(reserved: Mapping[str, float], placement: Mapping[str, Any]) -> tune.PlacementGroupFactory:
    """Return the resources of a trial, on nodes where workers may run."""
    bundle = dict(reserved)
    if kind := placement.get("accelerator_type"):
        bundle[f"accelerator_type:{kind}"] = 0.001
    options: dict[str, Any] = {}
    if labels := placement.get("label_selector"):
        options["bundle_label_selector"] = [labels]
    return tune.PlacementGroupFactory([bundle], **options)


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
                f"no trial of the search could start for {self._seconds:g} s: the cluster has no free core; end what "
                "holds them, or search in this process with search.tune=false"
            )


@contextmanager
def _experiment_folder(task: SearchTask) -> Iterator[str]:
    """Yield the folder for Tune's state: in the run's folder, or temporary if the run is in a bucket.

    Tune would pickle a bucket's credentials next to its state.
    """
    if "://" not in task.store_uri:
        yield str(Path(task.store_uri) / "search" / "tune")
    else:
        with tempfile.TemporaryDirectory(prefix="mixednuts-tune-") as folder:
            yield folder


def _remove_empty_folders(experiment: Path) -> None:
    """Remove the folder that Tune makes for each trial and that stays empty."""
    for folder in experiment.iterdir():
        if folder.is_dir():
            with suppress(OSError):
                folder.rmdir()


@contextmanager
def _quiet() -> Iterator[None]:
    """Run Tune without its banner, its tables and its warning that its loggers are off."""
    before = {name: logging.getLogger(name).level for name in _CHATTY}
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
    added = {name: value for name, value in _QUIET.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
