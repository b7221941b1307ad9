"""Results of one run, counted once from the stored rows, for the tables, the figures, the page and the JSON file.

Shapes: N images of a batch, K classes.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..attacks.budget import WARM_START
from ..config.threat import ThreatModel
from ..config.uris import ClassifierSource
from ..errors import InvalidInputError
from ..mixing.mixture import log_one_minus_cutoff
from ..mixing.transforms import LogitTransform
from ..selection.choice import Choice
from ..stages.stage import Certified
from ..storage.records import AttackRecords, EvaluateRecords, PartitionSummary, SearchResult
from .counts import Count, device_hours, minus, paired_interval, percent_text, points_text, share_text, weight_text
from .margins import CLASSIFIERS, MarginGroup, MarginSplit, MarginTally, margin_gap, margin_ratio
from .results_file import AccuracyRow, ResultsFile, StageCost, SurvivalStep
from .table import Cell, Table
from .worst_images import WorstImage, WorstTally

TRANSFER_ATTACK = "the adversarial examples of rob (std is a black box)"
BLACK_BOX_NOTE = (
    "The standard classifier is a black box. Its robustness was measured only on the adversarial examples of the "
    "robust classifier. The attacks on the mixed classifier followed the gradients of the robust classifier alone. "
    "Every result was verified on the mixed classifier itself. An adversary with gradients of the standard classifier "
    "may find more."
)

BLACK_BOX_ROB_NOTE = (
    "The robust classifier is a black box, so Square alone attacked it. An adversary with its gradients may find more."
)


@dataclass(frozen=True)
class RunResults:
    """Everything that a report shows about one run.

    A run without `std` attacks `rob` alone: it has one row of accuracy, no search and no margins.
    """

    run_id: str
    name: str
    dataset: str
    std: str | None
    rob: str
    threat: ThreatModel
    accuracy: tuple[AccuracyRow, ...]
    survival: tuple[SurvivalStep, ...]
    seconds: Mapping[str, float]
    notes: tuple[str, ...]
    found: SearchResult | None = None
    kept: Count | None = None  # images that are robust under `rob` and under `mixed`
    n_only_mixed: int = 0  # images that are robust under `mixed`, but not under `rob`
    n_std_decides: int = 0  # clean images on which `mixed` follows `std` against `rob`
    clean_only: tuple[int, int] = (0, 0)  # clean images that only `mixed` has right, and only `rob`
    margins: tuple[MarginGroup, ...] = ()
    splits: tuple[MarginSplit, ...] = ()  # what a margin threshold separates, for each form of `rob`
    stages: tuple[AccuracyRow, ...] = ()  # `mixed` on images that the search saw and on others, then added stages
    tables: Mapping[str, Table] = field(default_factory=dict)  # tables from added stages, by title
    warm_start: Sequence[tuple[int, int, int]] = ()  # images that this step broke: sample id, label, predicted class
    certified: Certified | None = None  # certificates, if a stage computed them
    candidates: tuple[Mapping[str, Any], ...] = ()  # rows of search/candidates.parquet at the deployed beta
    costs: tuple[StageCost, ...] = ()
    worst: tuple[WorstImage, ...] = ()
    class_names: tuple[str, ...] = ()  # names for the classes 0, 1, ..., if known
    names: Mapping[str, str] = field(default_factory=dict)  # shown instead of `std`, `rob` and `mixed`
    provenance: Mapping[str, str] = field(default_factory=dict)  # command, seed and versions

    @property
    def search(self) -> SearchResult:
        """Return the outcome of the search.

        Raises:
            InvalidInputError: if the run has no `std`, and therefore no search.
        """
        if self.found is None:
            raise InvalidInputError(f"run {self.run_id} has no `std`, so nothing was searched")
        return self.found

    @property
    def parameters(self) -> Choice:
        """Return the deployed choice: s, p, c, alpha and their beta."""
        return self.search.deployed()

    @property
    def n_images(self) -> int:
        """Return the number of evaluated images."""
        return self.accuracy[-1].clean.total

    @property
    def n_searched(self) -> int:
        """Return the number of images on which the base classifiers were attacked: all, or `search.first`."""
        return self.row("rob").clean.total

    def row(self, classifier: str) -> AccuracyRow:
        """Return the accuracy row of `std`, `rob` or `mixed`."""
        return next(row for row in self.accuracy if row.classifier == classifier)

    def called(self, classifier: str) -> str:
        """Return the name to show for `std`, `rob` or `mixed`."""
        return self.names.get(classifier, classifier)

    @property
    def clean_difference(self) -> tuple[float, float, float]:
        """Return the clean accuracy of `mixed` minus that of `rob`, in points, and its 95% interval."""
        only_mixed, only_rob = self.clean_only
        difference = 100 * (only_mixed - only_rob) / self.n_searched
        return difference, *paired_interval(only_mixed, only_rob, self.n_searched)

    def to_json(self) -> dict[str, Any]:
        """Return the content of `results.json`; `ResultsFile` is its schema."""
        run = {name: getattr(self, name) for name in ("name", "dataset", "std", "rob", "threat")}
        content: dict[str, Any] = {
            "format": ResultsFile.model_fields["format"].default,
            "run": {"id": self.run_id, **run},
            "n_images": self.n_images,
            "summary": " ".join(summary_sentences(self)),
            "provenance": self.provenance,
            "accuracy": {row.classifier: row for row in self.accuracy},
            "stages": {row.classifier: row for row in self.stages},
            "tables": self.tables,
            "survival": self.survival,
            "costs": self.costs,
            "seconds": self.seconds,
            "seconds_total": sum(self.seconds.values()),
            "notes": self.notes,
            **(self._searched() if self.found else {}),
        }
        plain: dict[str, Any] = json.loads(ResultsFile(**content).model_dump_json(exclude_unset=True))
        return plain

    def _searched(self) -> dict[str, Any]:
        """Return the keys that only a run with `std` has."""
        chosen, search = self.parameters, self.search
        return {
            "std_decides": self.n_std_decides,
            "clean_difference": self.clean_difference,
            "parameters": {**vars(search), **vars(chosen), **parameter_values(chosen), "cutoff": chosen.cutoff},
            "kept": {
                "beta": chosen.beta,
                "asked": asked(self),
                "predicted": kept_predicted(self, chosen),
                "measured": self.kept,
                "only_mixed": self.n_only_mixed,
            },
            "rounds": rounds_table(self).dicts(),
            "tradeoff": {"predicted": [prediction(entry) for entry in search.entries]},
            "margins": {
                "medians": self.margins,
                "ratios": {name: margin_ratio(self.margins, name) for name in CLASSIFIERS},
                "gaps": {name: margin_gap(self.margins, name) for name in CLASSIFIERS},
                "splits": self.splits,
            },
            "worst_images": self.worst,
        }


def gather_results(
    batches: Iterable[tuple[AttackRecords | None, EvaluateRecords]],
    *,
    search: SearchResult | None,
    attacks: Mapping[str, str],
    **description: Any,
) -> RunResults:
    """Count what the stages stored.

    Args:
        batches: rows of the attack stage and of the evaluate stage about the same images. The rows of the attack stage
            may end earlier, or be None.
        search: the outcome of the search; None for a run without `std`, which attacks `rob` alone.
        attacks: the attack on each of `std`, `rob` and `mixed`, in words.
        description: fields of `RunResults` that describe the run.

    Raises:
        InvalidInputError: if there are no rows, or if the rows of a batch are about different images.
    """
    if search is None:
        rob_tally = _AttackTally()
        for _, evaluate in batches:
            rob_tally.add(evaluate)
        alone, survival = rob_tally.accuracy("rob", attacks["rob"]), rob_tally.survival()
        notes, warm = _square_note(survival), rob_tally.warm_start
        return RunResults(**description, accuracy=(alone,), survival=survival, notes=tuple(notes), warm_start=warm)
    chosen, hits, mixed_tally = search.deployed(), Counter[str](), _AttackTally()
    transform = chosen.transform()
    margins, worst = MarginTally(transform, search.ln_k), WorstTally()
    for attack, evaluate in batches:
        mixed_tally.add(evaluate)
        if attack is None:
            continue
        searched = evaluate.first(len(attack.labels_N))
        if attack.sample_ids_N.tolist() != searched.sample_ids_N.tolist():
            raise InvalidInputError(
                f"a batch of {attack.sample_ids_N.numel()} attack rows and {searched.sample_ids_N.numel()} evaluate "
                "rows is not about the same images. Run: mixednuts evaluate CONFIG"
            )
        hits.update(_hits(attack, searched, transform))
        margins.add(attack)
        worst.add(attack, searched)
    if not hits["images"]:
        raise InvalidInputError("the attack stage's rows hold 0 images; nothing to report")
    n_seen = hits["images"]
    on_seen = [
        AccuracyRow(name, Count(hits[f"{name} clean"], n_seen), Count(hits[f"{name} robust"], n_seen), by)
        for name, by in attacks.items()
    ]
    seen = on_seen[-1]
    mixed = mixed_tally.accuracy("mixed", attacks["mixed"])
    results = RunResults(
        **description,
        accuracy=(*on_seen[:-1], mixed),
        stages=_seen_and_unseen(seen, mixed) if n_seen < mixed.clean.total else (),
        survival=mixed_tally.survival(),
        warm_start=mixed_tally.warm_start,
        notes=(),
        found=search,
        kept=Count(hits["kept"], hits["rob robust"]),
        n_only_mixed=hits["mixed robust"] - hits["kept"],
        n_std_decides=hits["std decides"],
        clean_only=(hits["clean only mixed"], hits["clean only rob"]),
        margins=margins.groups(),
        splits=margins.splits(log_one_minus_cutoff(chosen.mixture())),
        worst=worst.chosen(),
    )
    black_box = [BLACK_BOX_NOTE] if ClassifierSource(str(description["std"])).is_black_box else []
    black_box += [BLACK_BOX_ROB_NOTE] if ClassifierSource(results.rob).is_black_box else []
    return replace(results, notes=(*search.notes, *black_box, *_observations(results)))


def _seen_and_unseen(seen: AccuracyRow, mixed: AccuracyRow) -> tuple[AccuracyRow, ...]:
    """Return the rows of the images that the search saw and of the others (tab:overfit)."""
    clean, robust = (
        Count(every.correct - own.correct, every.total - own.total)
        for every, own in ((mixed.clean, seen.clean), (mixed.robust, seen.robust))
    )
    unseen = replace(mixed, classifier="mixed, unseen", clean=clean, robust=robust)
    return replace(seen, classifier="mixed, seen"), unseen


def _hits(attack: AttackRecords, evaluate: EvaluateRecords, transform: LogitTransform) -> dict[str, int]:
    labels_N, robust_N, mixed_N = attack.labels_N, evaluate.robust_N, evaluate.mixed_clean_NK.argmax(dim=1)
    rob_right_N, mixed_right_N = attack.rob_correct, mixed_N == labels_N
    found = {
        "std decides": mixed_N != transform(attack.rob_clean_NK.double()).argmax(dim=1),
        "clean only mixed": mixed_right_N & ~rob_right_N,
        "clean only rob": rob_right_N & ~mixed_right_N,
        "std clean": attack.std_correct,
        "std robust": ~attack.std_broken_N,
        "rob clean": rob_right_N,
        "rob robust": ~attack.rob_broken_N,
        "mixed clean": mixed_right_N,
        "mixed robust": robust_N,
        "kept": robust_N & ~attack.rob_broken_N,
    }
    return {"images": labels_N.numel(), **{name: int(hits_N.sum()) for name, hits_N in found.items()}}


class _AttackTally:
    """Counts what an attack did to one classifier, batch by batch."""

    def __init__(self) -> None:
        self._steps, self._n_images, self._n_robust = Counter[str](), 0, 0
        self.warm_start: list[tuple[int, int, int]] = []  # as in `RunResults`

    def add(self, rows: EvaluateRecords) -> None:
        """Add rows of the evaluate stage, whose fields `mixed_...` hold the logits of the attacked classifier."""
        right_N = standing_N = rows.mixed_clean_NK.argmax(dim=1) == rows.labels_N
        self._n_images += len(rows.labels_N)
        self._n_robust += int(rows.robust_N.sum())
        self._steps["clean"] += int(right_N.sum())
        for step, alive_N in rows.survived.items():
            standing_N = standing_N & alive_N
            self._steps[step] += int(standing_N.sum())
        if WARM_START in rows.survived:
            broken_N = right_N & ~rows.survived[WARM_START]
            columns = rows.sample_ids_N, rows.labels_N, rows.mixed_attacked_NK.argmax(dim=1)
            self.warm_start += zip(*(column[broken_N].tolist() for column in columns), strict=True)

    def accuracy(self, classifier: str, attack: str) -> AccuracyRow:
        """Return the classifier's row of the accuracy table."""
        clean, robust = (Count(n, self._n_images) for n in (self._steps["clean"], self._n_robust))
        return AccuracyRow(classifier, clean, robust, attack)

    def survival(self) -> tuple[SurvivalStep, ...]:
        """Return the steps in order, each with the number of images that it broke."""
        before = [self._n_images, *self._steps.values()]
        return tuple(
            SurvivalStep(n, self._n_images, step=step, lost=was - n)
            for (step, n), was in zip(self._steps.items(), before, strict=False)
        )


def stage_costs(
    summaries: Mapping[str, Sequence[PartitionSummary]], seconds: Mapping[str, float]
) -> tuple[StageCost, ...]:
    """Return the cost of each stage that has finished partitions.

    Args:
        summaries: by stage, one per partition.
        seconds: stage -> wall-clock seconds of this run.
    """
    return tuple(
        StageCost(
            stage,
            sum(each.n_images for each in found),
            len(found),
            len({each.node for each in found}),
            tuple(sorted({each.device for each in found})),
            *device_hours(found),
            seconds.get(stage),
            sum(each.n_forward for each in found),
            sum(each.n_backward for each in found),
        )
        for stage, found in summaries.items()
        if found
    )


# --- predicted and measured ------------------------------------------------------------------------------------------


def parameter_values(chosen: Choice) -> dict[str, float]:
    """Return beta, s, p, c, alpha and 1 - alpha under the names that all files of the report use."""
    return {
        "beta": chosen.beta,
        "s": chosen.scale,
        "p": chosen.power,
        "c": chosen.bias,
        "alpha": chosen.alpha,
        "one_minus_alpha": chosen.one_minus_alpha,
    }


def predicted(entry: Choice) -> tuple[Count, Count]:
    """Return the predicted clean and robust images of all, with the intervals of the search."""
    (clean_low, clean_high), (low, high) = entry.clean_interval, entry.kept_interval
    return (
        Count(entry.clean_correct, entry.total, (100 * clean_low, 100 * clean_high)),
        Count(entry.kept_predicted, entry.total, (100 * low, 100 * high)),
    )


def prediction(entry: Choice) -> dict[str, Cell]:
    """Return the parameters of a choice and what they are predicted to reach, as a row."""
    return {**parameter_values(entry), **dict(zip(("clean", "robust_predicted"), predicted(entry), strict=True))}


def kept_predicted(results: RunResults, entry: Choice) -> Count:
    """Return the predicted retention: robust images of `rob` that are robust under the stored examples."""
    robust = results.row("rob").robust
    kept = round(entry.kept_predicted * robust.total / entry.total)  # the search may have read a sample
    return Count(min(kept, robust.correct), robust.correct)


def asked(results: RunResults) -> int:
    """Return the number of images that beta requires to remain robust."""
    return math.ceil(results.parameters.beta * results.row("rob").robust.correct - 1e-9)


def kept_by_rounds(search: SearchResult) -> dict[float, Count]:
    """Return a dict from beta to the retention that the last refinement round measured for the current choice."""
    current = {beta: entry.settings() for beta, entry in search.by_beta().items()}
    return {
        entry.beta: Count(kept, done.of)
        for done in search.rounds
        for entry, kept in zip(done.attacked, done.kept, strict=True)
        if current.get(entry.beta) == entry.settings()
    }


def rounds_table(results: RunResults) -> Table:
    """Return one row per refinement round and beta: predicted and achieved retention."""
    rows: list[list[Cell]] = []
    for done in results.search.rounds:
        passes = done.n_forward + done.n_backward
        for entry, kept in zip(done.attacked, done.kept, strict=True):
            clean, _ = predicted(entry)
            rows.append(
                [done.round, entry.beta, clean, Count(min(entry.kept_predicted, done.of), done.of),
                 Count(kept, done.of), passes]
            )  # fmt: skip
            passes = 0  # the total per round is shown once
    columns = ["round", "beta", "clean", "kept_predicted", "kept_measured", "passes"]
    several = len({row[1] for row in rows}) > 1
    return Table(columns, rows, printed=[name for name in columns[:5] if several or name != "beta"])


# --- sentences -------------------------------------------------------------------------------------------------------


def summary_sentences(results: RunResults) -> tuple[str, ...]:
    """Return the outcome in sentences: decisions by `std`, clean accuracy, robustness, and what to try next."""
    rob = results.row("rob")
    if results.kept is None:
        return (
            f"The classifier is correct on {share_text(rob.clean)} clean images and on {share_text(rob.robust)} under "
            "attack.",
        )
    std, mixed = results.row("std"), results.row("mixed")
    difference, low, high = results.clean_difference
    where = "" if results.n_searched == results.n_images else f" on the {results.n_searched} images of the search"
    decides = (
        f"The standard classifier decides {results.n_std_decides} of {results.n_searched} clean images.",
        f"The mixed classifier is correct on {share_text(mixed.clean)} clean images, the robust classifier on "
        f"{share_text(rob.clean)}, and the standard classifier on {share_text(std.clean)}. Mixed minus robust{where} "
        f"is {points_text(difference)} (95% interval [{minus(f'{low:+.2f}')}, {minus(f'{high:+.2f}')}]).",
    )
    return (*decides, _retention_sentence(results), *_next_step(results, low))


def _retention_sentence(results: RunResults) -> str:
    rob, mixed, kept = results.row("rob"), results.row("mixed"), results.kept
    if kept is None or not rob.robust.correct:
        return f"The robust classifier is correct on none of {rob.robust.total} attacked images; there is no retention."
    beta = f"beta = {results.parameters.beta:g}"
    more = f" and on {results.n_only_mixed} more images" if results.n_only_mixed else ""
    return (
        f"Under attack, the mixed classifier remains robust on {kept.correct} of the {kept.total} images on which the "
        f"robust classifier does (retention {percent_text(kept)}%; {beta} requires {asked(results)}){more}: "
        f"{share_text(mixed.robust)} in all."
    )


def _next_step(results: RunResults, low: float) -> tuple[str, ...]:
    """Return what to try if the mixed classifier is not more accurate than the robust one on clean images."""
    step = "Try a smaller beta, more images, or a larger grid."
    if not results.n_std_decides:
        return (f"The mixed classifier answers exactly as the robust classifier does. {step}",)
    return (f"A gain in clean accuracy is not shown. {step}",) if low <= 0 else ()


def attack_sentence(results: RunResults) -> str:
    """Name the attack of each row of the accuracy table."""
    rows: dict[str, list[str]] = {}
    for row in (*results.accuracy, *results.stages):
        rows.setdefault(row.attack, []).append(row.classifier)
    return "; ".join(f"{attack} for {' / '.join(names)}" for attack, names in rows.items())


def parameter_lines(results: RunResults) -> str:
    """Write beta, the parameters that the search chose for it, and how the search went, in three lines."""
    chosen, search = results.parameters, results.search
    width = "all logits (the top 250 of more)" if search.ln_k is None else f"the top {search.ln_k} logits"
    left_out = f"; {search.n_undeployable} left out because float32 could not carry them" * bool(search.n_undeployable)
    if n_rounds := len(search.rounds):
        reached = "reached" if results.kept is not None and results.kept.correct >= asked(results) else "not reached"
        rounds = f"{n_rounds} refinement round{'' if n_rounds == 1 else 's'}. The target retention is {reached}."
    else:
        rounds = "no refinement rounds (rounds: 0, as in the paper)."
    return (
        f"beta = {chosen.beta:g}: s = {chosen.scale:.5g}, p = {chosen.power:.5g}, c = {chosen.bias:.5g}, "
        f"alpha = {weight_text(chosen.alpha, chosen.one_minus_alpha)} "
        f"(1 - alpha = {chosen.one_minus_alpha:.4g})\n"
        f"criterion {search.criterion}, clamp {search.clamp}, LayerNorm over {width}\n"
        f"{search.n_candidates:,} candidates tried{left_out}. The search took {rounds}"
    )


def _observations(results: RunResults) -> list[str]:
    """Return notes on measurements that contradict a prediction or an assumption."""
    std, rob, mixed = (results.row(name) for name in ("std", "rob", "mixed"))
    chosen, notes = results.parameters, []
    if std.clean.correct <= rob.clean.correct:
        notes.append(
            f"The standard classifier is not more accurate than the robust one on clean images ({std.clean.correct} "
            f"against {rob.clean.correct} of {rob.clean.total}), so mixing cannot gain accuracy here."
        )
    seen = next((row for row in results.stages if row.classifier == "mixed, seen"), mixed).clean
    if (seen.correct, seen.total) != (chosen.clean_correct, chosen.total):
        notes.append(
            f"The search predicted {chosen.clean_correct} of {chosen.total} correct clean images. The deployed mixed "
            f"classifier has {seen.correct} of {seen.total}."
        )
    kept, foreseen = results.kept, kept_predicted(results, chosen)
    if kept is not None and kept.correct < foreseen.correct:
        notes.append(
            f"The achieved retention is {kept.correct} of {kept.total} images, and {foreseen.correct} were predicted "
            "from the stored adversarial examples. The adaptive attack found perturbations that the search had not "
            "seen."
        )
    return [*notes, *_square_note(results.survival)]


def _square_note(survival: tuple[SurvivalStep, ...]) -> list[str]:
    """Return a note if Square broke images after the white-box attacks."""
    square = next((step for step in survival if step.step == "square"), None)
    if square is None or not square.lost:
        return []
    return [
        f"Square broke {square.lost} of the images on which the classifier remained robust against the white-box "
        "attacks. The gradients may have been too weak."
    ]
