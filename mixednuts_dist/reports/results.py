"""Results of one run, counted once from the stored rows, for the tables, the figures, the page and the JSON file.

Shapes: N images of a batch, K classes.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..attacks.budget import WARM_START
from ..config.threat import ThreatModel
from ..config.uris import ClassifierSource
from ..errors import InvalidInputError
from ..mixing.mixture import log_one_minus_threshold
from ..selection.choice import Choice
from ..stages.stage import Certified
from ..storage.records import AttackRecords, EvaluateRecords, PartitionSummary, SearchResult
from .counts import (
    Count,
    count,
    device_hours,
    minus,
    paired_interval,
    percent_text,
    points_text,
    share_text,
    weight_text,
)
from .image_rows import read_batches
from .margins import Margins, MarginSplit, margin_splits
from .results_file import AccuracyRow, StageCost, SurvivalStep, plain
from .table import Cell, Table
from .worst_images import WorstImage, worst_images

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
    notes: tuple[str, ...] = ()
    found: SearchResult | None = None
    kept: Count | None = None  # images that are robust under `rob` and under `mixed`
    n_only_mixed: int = 0  # images that are robust under `mixed`, but not under `rob`
    n_std_decides: int = 0  # clean images on which `mixed` follows `std` against `rob`
    clean_only: tuple[int, int] = (0, 0)  # clean images that only `mixed` has right, and only `rob`
    distances: Margins = field(default_factory=dict)
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
        """Return the content of `results.json`; the keys from `std_decides` on exist for runs with `std`."""
        about = {name: getattr(self, name) for name in ("name", "dataset", "std", "rob", "threat")}
        copied = ("provenance", "tables", "survival", "costs", "seconds", "notes")
        content = {
            "format": "mixednuts-results/3",
            "run": {"id": self.run_id, **about},
            "n_images": self.n_images,
            "summary": " ".join(summary_sentences(self)),
            "accuracy": {row.classifier: row for row in self.accuracy},
            "stages": {row.classifier: row for row in self.stages},
            **{name: getattr(self, name) for name in copied},
            "seconds_total": sum(self.seconds.values()),
            **(self._searched() if self.found else {}),
        }
        found: dict[str, Any] = plain(content)
        return found

    def _searched(self) -> dict[str, Any]:
        """Return the keys that only a run with `std` has."""
        chosen, search = self.parameters, self.search
        of_choice = ("cutoff", "objective", "clamp", "ln_k", "surrogate_alpha", "on_grid_edge")
        of_search = ("criterion", "n_candidates", "n_undeployable")
        return {
            "std_decides": self.n_std_decides,
            "clean_difference": self.clean_difference,
            "parameters": {
                **parameter_values(chosen),
                **{key: getattr(chosen, key) for key in of_choice},
                **{key: getattr(search, key) for key in of_search},
            },
            "kept": {
                "beta": chosen.beta,
                "asked": asked(self),
                "predicted": kept_predicted(self, chosen),
                "measured": self.kept,
                "only_mixed": self.n_only_mixed,
            },
            "rounds": rounds_table(self).dicts(),
            "tradeoff": {"predicted": [prediction(entry) for entry in search.entries]},
            "margins": {"splits": self.splits},
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
        InvalidInputError: if the rows of a batch are about different images.
    """
    rows, margins = read_batches(batches, search)
    attacked = "rob" if search is None else "mixed"
    right_N = standing_N = rows["clean"]
    whole = AccuracyRow(attacked, count(right_N), count(rows["robust"]), attacks[attacked])
    survival = [SurvivalStep(whole.clean.correct, len(right_N), step="clean", lost=int((~right_N).sum()))]
    for step in (name.removeprefix("after ") for name in rows if name.startswith("after ")):
        standing_N = standing_N & rows[f"after {step}"]
        n_standing = int(standing_N.sum())
        survival.append(SurvivalStep(n_standing, len(right_N), step=step, lost=survival[-1].correct - n_standing))
    broken_N = right_N & ~rows.get(f"after {WARM_START}", right_N)
    columns = (rows[name][broken_N].tolist() for name in ("sample_id", "label", "mixed, attacked"))
    description |= {"survival": tuple(survival), "warm_start": tuple(zip(*columns, strict=True))}
    if search is None:
        return RunResults(**description, accuracy=(whole,))
    n_seen = len(rows["rob broken"])
    seen = {name: values_N[:n_seen] for name, values_N in rows.items()}
    right = {name: seen[f"{name}, clean"] == seen["label"] for name in attacks} | {"mixed": seen["clean"]}
    robust = {"std": ~seen["std broken"], "rob": ~seen["rob broken"], "mixed": seen["robust"]}
    *base, mixed = (AccuracyRow(name, count(right[name]), count(robust[name]), by) for name, by in attacks.items())
    return RunResults(
        **description,
        accuracy=(*base, whole),
        stages=_seen_and_unseen(mixed, whole) if n_seen < right_N.numel() else (),
        found=search,
        kept=count(robust["mixed"][robust["rob"]]),
        n_only_mixed=int((robust["mixed"] & ~robust["rob"]).sum()),
        n_std_decides=int((seen["mixed, clean"] != seen["rob+M, clean"]).sum()),
        clean_only=(int((right["mixed"] & ~right["rob"]).sum()), int((right["rob"] & ~right["mixed"]).sum())),
        splits=margin_splits(margins, log_one_minus_threshold(search.deployed().mixture())),
        distances=margins,
        worst=worst_images(seen),
    )


def _seen_and_unseen(seen: AccuracyRow, mixed: AccuracyRow) -> tuple[AccuracyRow, ...]:
    """Return the rows of the images that the search saw and of the others (tab:overfit)."""
    clean, robust = (
        Count(every.correct - own.correct, every.total - own.total)
        for every, own in ((mixed.clean, seen.clean), (mixed.robust, seen.robust))
    )
    unseen = replace(mixed, classifier="mixed, unseen", clean=clean, robust=robust)
    return replace(seen, classifier="mixed, seen"), unseen


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


def notes_on(results: RunResults) -> Iterator[str]:
    """Yield the notes of the search, and notes on measurements that contradict a prediction or an assumption."""
    if results.found is not None:
        yield from results.found.notes
        yield from _observations(results)
    square = next((step for step in results.survival if step.step == "square"), None)
    if square is not None and square.lost:
        yield (
            f"Square broke {square.lost} of the images on which the classifier remained robust against the white-box "
            "attacks. The gradients may have been too weak."
        )


def _observations(results: RunResults) -> Iterator[str]:
    chosen, (std, rob, mixed) = results.parameters, (results.row(name) for name in ("std", "rob", "mixed"))
    if ClassifierSource(str(results.std)).is_black_box:
        yield BLACK_BOX_NOTE
    if ClassifierSource(results.rob).is_black_box:
        yield BLACK_BOX_ROB_NOTE
    if std.clean.correct <= rob.clean.correct:
        yield (
            f"The standard classifier is not more accurate than the robust one on clean images ({std.clean.correct} "
            f"against {rob.clean.correct} of {rob.clean.total}), so mixing cannot gain accuracy here."
        )
    seen = next((row for row in results.stages if row.classifier == "mixed, seen"), mixed).clean
    if (seen.correct, seen.total) != (chosen.clean_correct, chosen.total):
        yield (
            f"The search predicted {chosen.clean_correct} of {chosen.total} correct clean images. The deployed mixed "
            f"classifier has {seen.correct} of {seen.total}."
        )
    kept, foreseen = results.kept, kept_predicted(results, chosen)
    if kept is not None and kept.correct < foreseen.correct:
        yield (
            f"The achieved retention is {kept.correct} of {kept.total} images, and {foreseen.correct} were predicted "
            "from the stored adversarial examples. The adaptive attack found perturbations that the search had not "
            "seen."
        )
