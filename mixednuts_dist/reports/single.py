"""AutoAttack on one classifier, where a run has no std: its results, for the terminal and as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

from ..attacks.red_flags import FLAGS, findings
from ..stages.evaluate import autoattack_fingerprint
from ..stages.runs import Run, require_complete, stage_seconds
from ..storage.tables import FLAG, SURVIVED, read_columns
from ..threat import ThreatModel
from . import wording
from .intervals import Count
from .json_form import FORMAT
from .results import SurvivalStep, square_note, survival_steps


@dataclass(frozen=True)
class SingleResults:
    """Everything a report shows about one classifier under AutoAttack; `to_json` documents the fields."""

    run_id: str
    name: str
    dataset: str
    rob: str
    threat: ThreatModel
    clean: Count
    robust: Count
    survival: tuple[SurvivalStep, ...]
    seconds: Mapping[str, float]
    notes: tuple[str, ...]

    @property
    def attack(self) -> str:
        """The attacks that `robust` was measured under, in order."""
        return ", ".join(step.step for step in self.survival[1:])

    def summary(self) -> str:
        """What came out, for somebody who reads nothing else."""
        return (
            f"The classifier is right on {wording.share_text(self.clean)} clean images, and on "
            f"{wording.share_text(self.robust)} under attack."
        )

    def to_json(self) -> dict[str, Any]:
        """A plain dict in the format of `RunResults.to_json`, less what needs two classifiers.

        `format`, `run`, `n_images`, `summary`, `accuracy` with `rob` alone, `survival`, `seconds`, `seconds_total`,
        `notes`.
        """
        threat = {"norm": self.threat.norm, "eps": self.threat.eps}
        counts = {"clean": self.clean.to_json(), "robust": self.robust.to_json()}
        return {
            "format": FORMAT,
            "run": {"id": self.run_id, "name": self.name, "dataset": self.dataset, "rob": self.rob, "threat": threat},
            "n_images": self.clean.total,
            "summary": self.summary(),
            "accuracy": {"rob": {**counts, "attack": self.attack}},
            "survival": [{"step": step.step, "lost": step.lost, **step.standing.to_json()} for step in self.survival],
            "seconds": dict(self.seconds),
            "seconds_total": sum(self.seconds.values()),
            "notes": list(self.notes),
        }


def collect_single(opened: Run) -> SingleResults:
    """The results of a finished run without std, from its files alone.

    Raises:
        MissingArtifact: where the evaluate stage has not finished.
        FingerprintMismatch: where stored rows are not this run's.
    """
    config, fingerprint = opened.config, autoattack_fingerprint(opened)
    require_complete(opened, "evaluate", fingerprint)
    survived = [f"{SURVIVED}{attack}" for attack in config.evaluate.attacks]
    columns = ["label", "rob_clean", "robust", *survived, *(f"{FLAG}{flag}" for flag in FLAGS)]
    rows = read_columns(opened.store, "evaluate", opened.partitions, fingerprint, columns)
    survival = survival_steps(
        rows["rob_clean"].argmax(dim=1) == rows["label"],
        {attack: rows[f"{SURVIVED}{attack}"] for attack in config.evaluate.attacks},
    )
    flags: dict[str, Tensor] = {flag: rows[f"{FLAG}{flag}"] for flag in FLAGS}
    return SingleResults(
        run_id=config.run_id(),
        name=config.name,
        dataset=config.data.uri,
        rob=config.rob,
        threat=config.threat.threat_model(),
        clean=survival[0].standing,
        robust=Count(int(rows["robust"].sum()), len(rows["robust"])),
        survival=survival,
        seconds={stage: value for stage, value in stage_seconds(opened.store).items() if stage != "report"},
        notes=(*square_note(survival), *findings(flags, rows["rob_clean"].shape[1], "rob")),
    )


def render_single(results: SingleResults) -> Group:
    """The whole report for a terminal, in 80 columns."""
    parts: list[RenderableType] = [
        Text(f"{results.name}  ({results.run_id})", style="bold"),
        Text(f"{results.dataset}, {results.clean.total} images, {wording.threat_text(results.threat)}"),
        Text(f"rob = {results.rob}"),
        Text(),
        Text(results.summary()),
        Text(),
        _survival_table(results),
        Text(),
        Text("Time: " + ", ".join(f"{stage} {wording.seconds_text(s)}" for stage, s in results.seconds.items())),
    ]
    return Group(*parts, *(Text(f"- {note}") for note in results.notes))


def _survival_table(results: SingleResults) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("after", "right", "lost", "%", "95 % interval"):
        table.add_column(heading, justify="left" if heading == "after" else "right", no_wrap=True)
    for step in results.survival:
        count = step.standing
        cells = [f"{count.correct}/{count.total}", str(step.lost), wording.percent_text(count)]
        table.add_row(Text(step.step), *cells, wording.interval_text(count))
    return table
