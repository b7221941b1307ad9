"""The report stage reads a finished run batch by batch and writes the page, the tables and the figures."""

import functools
import logging
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
import yaml

from ..config.run_config import RunConfig
from ..config.uris import GIVEN
from ..deployment.loading import loading_line
from ..errors import DatasetError, ReadOnlyStorage, redacted
from ..images.datasets import open_dataset
from ..stages.attack import ATTACKS_OF, STD_ATTACKS
from ..stages.driver_notes import stage_clock, stage_seconds
from ..stages.evaluate import cross_check, steps_of
from ..stages.progress import RunProgress
from ..stages.red_flags import FLAGS, UNREPEATABLE, findings
from ..stages.runs import Run, reopen_run, require_complete
from ..stages.search import read_candidates
from ..stages.search_result import read_search_result
from ..stages.stage import Stage, stage_of
from ..storage.records import AttackRecords, EvaluateRecords, PartitionSummary
from ..storage.store import Store, concurrently
from ..storage.tables import FLAG, read_attack_records, read_columns, read_evaluate_records
from .attack_words import attack_words, spent_words
from .counts import count, outcome_counts
from .figures import tradeoff
from .page import report_files
from .results import TRANSFER_ATTACK, RunResults, gather_results, notes_on, stage_costs
from .results_file import AccuracyRow, SurvivalStep
from .table import Cell, Table
from .tables import accuracy_table
from .worst_images import WorstImage

logger = logging.getLogger(__name__)

_LOGITS_AT_A_TIME = 1 << 21  # per column: 8 MB, and a few float64 copies


@dataclass(frozen=True, repr=False)
class RunReport(RunResults):
    """The results of a finished run, with their page, figures and tables; it prints as the accuracy table."""

    @functools.cached_property
    def files(self) -> Mapping[str, bytes]:
        """Return the report's page, figures and tables by name, drawn on first access."""
        return report_files(self)

    @property
    def curve(self) -> str:
        """Return the trade-off of clean against robust accuracy over all betas, as SVG; empty without a search."""
        drawn = tradeoff(self)
        return drawn.svg("tradeoff") if drawn else ""

    def save(self, folder: str | Path) -> Path:
        """Write the page, the figures and the tables into `folder`, and return the page's path."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (target / name).write_bytes(content)
        return target / "index.html"

    def __repr__(self) -> str:
        return accuracy_table(self).as_markdown()

    def _repr_html_(self) -> str:
        return f"{accuracy_table(self).as_html()}{self.curve}"


def run(config: RunConfig, *, progress: RunProgress | None = None) -> RunReport:
    """Write the report of a finished run and return its results; warn if the storage is read-only.

    Raises:
        MissingArtifact: if a stage has not finished.
        ContentHashMismatch: if stored rows belong to another run.
    """
    opened = reopen_run(config)
    results = collect(opened)
    try:
        opened.store.require_writable()
    except ReadOnlyStorage as error:
        logger.warning("the page is not written: %s", error)
        return results
    with stage_clock(opened.store, "report"):
        for name in sorted(results.files, key=lambda name: name.endswith(".json")):  # results.json comes last
            opened.store.write(f"report/{name}", results.files[name])
    (progress or RunProgress()).stage_finished("report", opened.store.address("report/index.html"))
    return results


def collect(opened: Run) -> RunReport:
    """Return the results of a finished run from its files; it raises what `run` raises."""
    config, stage, taken = opened.config, stage_of(opened.config, "evaluate"), stage_seconds(opened.store)
    stage.require_needs(opened)
    content_hash = stage.content_hash(opened)
    summaries, search = {stage.name: [*require_complete(opened, stage.name, content_hash).values()]}, None
    if config.std is not None:
        attacked = require_complete(opened.searched, "attack", opened.attack_content_hash)
        summaries, search = {"attack": [*attacked.values()], **summaries}, read_search_result(opened)
    stages = "attack", "search", "evaluate", *config.added_stages()
    counted = gather_results(
        _batches(opened, content_hash), search=search, attacks=attacks_said(config, mixed=opened.inputs.mixed),
        run_id=config.run_id(), name=config.name, dataset=config.data.uri.written,
        std=config.std and config.std.written, rob=config.rob.written, names=dict(config.names),
        threat=config.threat.threat_model(), seconds={each: taken[each] for each in stages if each in taken},
    )  # fmt: skip
    worst, class_names, missing = _pictures(opened, counted.worst, content_hash)
    added, unfinished = _added_stages(opened)
    survival, opinion = _second_opinion(opened, counted.survival)
    changes = {
        "candidates": tuple(read_candidates(opened, search.deployed_beta)) if search else (),
        "worst": worst,
        "class_names": class_names,
        "survival": survival,
        "notes": (
            *config.evaluate.notes, *_bits_notes(*summaries.values()),
            *notes_on(counted), *missing, *opinion, *_red_flags(opened, content_hash), *unfinished,
        ),
        "stages": (*counted.stages, *(row for stage, found in added.items() for row in _rows(opened, stage, found))),
        "tables": stage_tables(opened, [stage, *added]),
        "certified": next((found for found in (stage.certified(opened) for stage in added) if found), None),
        "costs": stage_costs({**summaries, **{stage.name: found for stage, found in added.items()}}, counted.seconds),
        "provenance": _provenance(config, opened.store),
    }  # fmt: skip
    return RunReport(**{**vars(counted), **changes})


def attacks_said(config: RunConfig, *, mixed: bool = True) -> dict[str, str]:
    """Return the attack on each of `std`, `rob` and `mixed`, with its budget.

    Args:
        mixed: whether `rob` is a mixed classifier itself, if the run has no `std`.
    """
    attack, adaptive = config.attack, attack_words(config.evaluate.model_dump(mode="json"), config.threat.norm)
    if config.std is None:
        return {"rob": f"adaptive {adaptive}" if mixed else adaptive}
    on_std, on_rob = (
        spent_words({**attack.model_dump(), "attacks": names}) for names in (STD_ATTACKS, ATTACKS_OF[attack.method])
    )
    std = TRANSFER_ATTACK if config.std.is_black_box else on_std
    return {"std": std, "rob": f"MMAA by {on_rob}", "mixed": f"adaptive {adaptive}"}


def _added_stages(opened: Run) -> tuple[dict[Stage, list[PartitionSummary]], tuple[str, ...]]:
    """Return the summaries of each complete added stage, and a note on each incomplete one."""
    found, notes = dict[Stage, list[PartitionSummary]](), []
    for name in opened.config.added_stages():
        if opened.config.section(name) is None:
            continue
        stage = stage_of(opened.config, name)
        done, n_all = stage.finished(opened), len(opened.partitions)
        if len(done) == n_all:
            found[stage] = list(done.values())
        else:
            notes.append(f"{name}: {len(done)} of {n_all} partitions are done. Run: mixednuts run CONFIG --only {name}")
    return found, tuple(notes)


def _rows(opened: Run, stage: Stage, summaries: Sequence[PartitionSummary]) -> list[AccuracyRow]:
    own = [
        AccuracyRow(name, count(clean_N), count(robust_N), stage.words())
        for name, (clean_N, robust_N) in stage.outcomes(opened).items()
    ]
    name = f"{stage.model_name(opened.config)}, {stage.name}"
    return own or [AccuracyRow(name, *outcome_counts(summaries), stage.words())]


def stage_tables(opened: Run, stages: Iterable[Stage]) -> dict[str, Table]:
    """Return the tables of stages, by title."""
    found = {}
    for stage in stages:
        for title, (columns, rows) in stage.tables(opened).items():
            cells = [[count(cell) if isinstance(cell, torch.Tensor) else cell for cell in row] for row in rows]
            found[title] = Table(columns, cast(Sequence[Sequence[Cell]], cells))
    return found


def _provenance(config: RunConfig, store: Store) -> dict[str, str]:
    """Return the facts with which a reader can repeat the run."""
    versions = yaml.safe_load(store.read("run.yaml"))["versions"]
    command = redacted(shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]))
    by_uri = config.std is not None and all(source.scheme != GIVEN for source in config.classifiers.values())
    loaded = {"in Python": loading_line(config, store.uri)} if by_uri else {}
    return {
        "run": config.run_id(),
        "folder": store.uri,
        **loaded,
        "report made by": command,
        "seed": str(config.seed),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }


def _batches(opened: Run, content_hash: str) -> Iterator[tuple[AttackRecords | None, EvaluateRecords]]:
    """Yield the rows of the attack stage, for at most `search.first` images, and of the evaluation, batch by batch.

    Each batch has a few partitions, so that memory does not grow with the number of partitions.
    """
    steps, first, std = steps_of(opened), opened.config.search.first, opened.config.std
    seen = None if first is None else torch.arange(first)
    each = max(1, _LOGITS_AT_A_TIME // (opened.inputs.n_classes * opened.partition_size))
    for start in range(0, len(opened.partitions), each):
        parts, classifier = opened.partitions[start : start + each], "rob" if std is None else "mixed"
        evaluated = read_evaluate_records(opened.rows, parts, content_hash, steps, classifier=classifier)
        read = [part for part in parts if std is not None and (first is None or part.start < first)]
        yield (
            read_attack_records(opened.rows, read, opened.attack_content_hash, sample_ids=seen) if read else None,
            evaluated,
        )


def _bits_notes(*stages: Iterable[PartitionSummary]) -> tuple[str, ...]:
    """Return a note on each device on which repeated passes differ in their last bits."""
    devices = sorted({each.device for summaries in stages for each in summaries if not each.repeatable})
    return tuple(
        f"On {device}, two passes over the same images differ in the last bits. A repeated run decides all but "
        "borderline images alike, and its stored numbers differ in the last bits."
        for device in devices
    )


def _red_flags(opened: Run, content_hash: str) -> tuple[str, ...]:
    classifier = "rob" if opened.config.std is None else "the mixed classifier"
    columns = [f"{FLAG}{flag}" for flag in FLAGS]
    flags = read_columns(opened.rows, "evaluate", opened.partitions, content_hash, columns)
    raised, eot = {flag: flags[f"{FLAG}{flag}"] for flag in FLAGS}, opened.config.evaluate.eot
    found: list[str] = []
    if eot is not None and not bool(raised.pop(UNREPEATABLE).any()):
        found.append(
            f"{classifier} gave the same logits twice on every image, so evaluate.eot = {eot} changed only the cost. "
            "Remove the key."
        )
    found += [
        f"The gradient of {role} is zero on the images that were tried, so attacks that follow it are blind. Wrap the "
        "classifier in mixednuts_dist.straight_through if a module rounds or quantizes."
        for role in opened.inputs.masked
    ]
    return (*found, *findings(raised, opened.inputs.n_classes, classifier))


def _second_opinion(
    opened: Run, survival: tuple[SurvivalStep, ...]
) -> tuple[tuple[SurvivalStep, ...], tuple[str, ...]]:
    """Return the steps, with the images that the unmodified package broke as the last one, and a sentence about it."""
    check = cross_check(opened.config)
    if check is None:
        return survival, ()
    package = str(opened.config.evaluate.check)
    if len(check.finished(opened)) < len(opened.partitions):
        return survival, (f"The check by {package} is not complete. Run: mixednuts evaluate",)
    rows = check.rows(opened, ["tried", "broken"])
    n_tried, n_broken = int(rows["tried"].sum()), int(rows["broken"].sum())
    last = survival[-1]
    sentence = (
        f"Check: the unmodified {package} attacked {n_tried} of the {last.correct} robust images and broke "
        f"{n_broken or 'none'}."
    )
    left = SurvivalStep(last.correct - n_broken, last.total, step=package, lost=n_broken)
    return (*survival, left), (sentence,)


def _pictures(
    opened: Run, chosen: tuple[WorstImage, ...], content_hash: str
) -> tuple[tuple[WorstImage, ...], tuple[str, ...], list[str]]:
    """Return the images to look at and the class names; no images and a note if the data set cannot be read."""
    names, source = opened.config.data.class_names, opened.config.data.uri
    if not chosen:
        return (), names, []
    try:
        if not opened.config.trusted and source.reaches_out:
            raise DatasetError(f"the run names {source.written}. If it is yours, pass --trust-code.")
        dataset = open_dataset(source)
        clean = [dataset.read(image.sample_id, image.sample_id + 1)[0] for image in chosen]
    except DatasetError as error:
        return (), names, [f"No images are shown: {error}"]

    def attacked(image: WorstImage) -> torch.Tensor:
        return opened.columns("evaluate", content_hash, ["x_adv"], torch.tensor([image.sample_id]))["x_adv"]

    seen = zip(chosen, clean, concurrently(attacked, chosen), strict=True)
    found = tuple(replace(image, pixels=(clean_1[0], attacked_1[0])) for image, clean_1, attacked_1 in seen)
    return found, names or tuple(getattr(dataset, "class_names", ())), []
