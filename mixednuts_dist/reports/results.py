"""One run's results: computed once from the stored rows; tables, figures, page and JSON only show them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidInputError
from ..selection.choice import Choice
from ..storage.records import AttackRecords, EvaluateRecords, SearchResult
from ..threat import ThreatModel
from ..uris import is_black_box
from .confidence import CLASSIFIERS, MarginGroup, margin_gap, margin_groups
from .cost import StageCost
from .intervals import Count
from .json_form import results_json
from .measured import MeasuredPoint
from .worst_images import WorstImage

BASE_ATTACK = "APGD-CE + APGD-T"
TRANSFER_ATTACK = "the images attacked on rob (std is a black box)"
BLACK_BOX_NOTE = (
    "std is a black box: its own robustness is not known beyond the images that were attacked on rob, and the "
    "gradients against the mixture were rob's alone. Every verdict is the real mixture's, but an adversary with std's "
    "gradients may find more."
)
MINIMUM_MARGIN_ATTACK = "APGD-CE + APGD-T (MMAA)"
MIXED_ATTACK = "adaptive AutoAttack"


@dataclass(frozen=True)
class AccuracyRow:
    """One line of the accuracy table: `std`, `rob` or `mixed`, and the attack that `robust` was measured under."""

    classifier: str
    clean: Count
    robust: Count
    attack: str


@dataclass(frozen=True)
class SurvivalStep:
    """How many images the mixture still has right after one step of the adaptive attack; the first is `clean`."""

    step: str
    standing: Count
    lost: int


@dataclass(frozen=True)
class RunResults:
    """Everything a report shows about one run; `to_json` documents the fields."""

    run_id: str
    name: str
    dataset: str
    std: str
    rob: str
    threat: ThreatModel
    accuracy: tuple[AccuracyRow, ...]
    search: SearchResult
    survival: tuple[SurvivalStep, ...]
    margins: tuple[MarginGroup, ...]
    seconds: Mapping[str, float]
    notes: tuple[str, ...]
    measured: tuple[MeasuredPoint, ...] = ()  # this run's point and those of its siblings, largest beta first
    candidates: tuple[Mapping[str, Any], ...] = ()  # rows of search/candidates.parquet at the deployed beta
    costs: tuple[StageCost, ...] = ()
    worst: tuple[WorstImage, ...] = ()

    @property
    def parameters(self) -> Choice:
        """What was deployed: s, p, c, alpha and the beta they were chosen for."""
        return self.search.deployed()

    @property
    def n_images(self) -> int:
        """How many images the run covers."""
        return self.accuracy[0].clean.total

    def row(self, classifier: str) -> AccuracyRow:
        """The accuracy row of `std`, `rob` or `mixed`."""
        return next(row for row in self.accuracy if row.classifier == classifier)

    def gaps(self) -> dict[str, float | None]:
        """The paper's margin gap of each classifier; None where it cannot be computed."""
        return {classifier: margin_gap(self.margins, classifier) for classifier in CLASSIFIERS}

    def to_json(self) -> dict[str, Any]:
        """A plain dict for `mixednuts run --json` and `results.json`; no NaN or infinity, None instead.

        - `format`: "mixednuts-results/1"; `run`: `id`, `name`, `dataset`, `std`, `rob`, `threat` {`norm`, `eps`};
          `n_images`; `summary`: two plain sentences.
        - `accuracy`: `std`, `rob`, `mixed` -> `clean`, `robust` -> `correct`, `total`, `percent`, `low`, `high` (95 %
          interval in percent); `attack`: what `robust` was measured under.
        - `parameters`: `s`, `p`, `c`, `alpha`, `one_minus_alpha`, `beta`, `cutoff`, `objective`, `criterion`, `clamp`,
          `ln_k`, `surrogate_alpha`, `on_grid_edge`, `n_candidates`, `n_undeployable`.
        - `tradeoff`: `predicted`, one entry a beta, largest first: `beta`, `s`, `p`, `c`, `alpha`, `one_minus_alpha`,
          `clean` and `robust_bound` (counts as above), `clean_bootstrap` and `robust_bootstrap` (95 % intervals in
          percent); `measured`: `beta`, `clean`, `robust`;
          `measured_runs`: the same of every finished run beside this one, with `run`, `criterion`, `clamp`, s, p, c.
        - `survival`: in order, from `clean` on: `step`, `lost` and the count of images still right after it.
        - `margins`: `medians`, a list of `classifier`, `images`, `correct`, `n`, `median`; `gaps`: classifier -> gap.
        - `worst_images`: `sample_id`, `label`, `reason` ("lost", "narrow"), `verdicts` (`classifier`, `images`,
          `predicted`, `margin`); `costs`, one entry a stage: `images`, `partitions`, `nodes`, `devices`, `core_hours`,
          `gpu_hours`, `wall_seconds`, `images_per_second`, `n_forward`, `n_backward`.
        - `seconds`: stage -> seconds; `seconds_total`; `notes`: plain sentences.
        """
        return results_json(self)


def gather_results(  # the run's own description and one argument a stage
    *,
    run_id: str,
    name: str,
    dataset: str,
    std: str,
    rob: str,
    threat: ThreatModel,
    attack: AttackRecords,
    search: SearchResult,
    evaluate: EvaluateRecords,
    seconds: Mapping[str, float],
) -> RunResults:
    """Count what the stages stored.

    Args:
        run_id, name, dataset, std, rob, threat: what was run, as the configuration says it.
        attack, search, evaluate: what the three stages left; attack and evaluate about the same images.
        seconds: wall-clock seconds of each stage, in the order to be shown.

    Raises:
        InvalidInputError: where the two sets of rows are empty or not about the same images.
    """
    evaluate = _same_images(attack, evaluate)
    black_box = is_black_box(std)
    accuracy = _accuracy(attack, evaluate, TRANSFER_ATTACK if black_box else BASE_ATTACK)
    survival = _survival(evaluate)
    return RunResults(
        run_id=run_id,
        name=name,
        dataset=dataset,
        std=std,
        rob=rob,
        threat=threat,
        accuracy=accuracy,
        search=search,
        survival=survival,
        margins=margin_groups(attack, search),
        seconds=dict(seconds),
        notes=(
            *search.notes,
            *([BLACK_BOX_NOTE] if black_box else []),
            *_observations(accuracy, survival, search.deployed()),
        ),
    )


def _same_images(attack: AttackRecords, evaluate: EvaluateRecords) -> EvaluateRecords:
    """Check that both are about the same images, and return the evaluate rows in the attack rows' order."""
    attacked, evaluated = attack.sample_ids_N, evaluate.sample_ids_N
    if attacked.numel() == 0:
        raise InvalidInputError("the attack stage's rows hold 0 images; nothing to report")
    attack_order, evaluate_order = attacked.argsort(), evaluated.argsort()
    if not torch.equal(attacked[attack_order], evaluated[evaluate_order]):
        common = int(torch.isin(attacked, evaluated).sum())
        raise InvalidInputError(
            f"the attack stage has {attacked.numel()} rows and the evaluate stage {evaluated.numel()}, "
            f"with {common} images in common; both must be about the same images. Rerun: mixednuts evaluate CONFIG"
        )
    order = torch.empty_like(attack_order)
    order[attack_order] = evaluate_order
    return EvaluateRecords(
        sample_ids_N=evaluated[order],
        labels_N=evaluate.labels_N[order],
        mixed_clean_NK=evaluate.mixed_clean_NK[order],
        mixed_attacked_NK=evaluate.mixed_attacked_NK[order],
        robust_N=evaluate.robust_N[order],
        survived={step: alive_N[order] for step, alive_N in evaluate.survived.items()},
    )


def _accuracy(attack: AttackRecords, evaluate: EvaluateRecords, std_attack: str) -> tuple[AccuracyRow, ...]:
    labels_N = attack.labels_N

    def row(classifier: str, clean_NK: Tensor, robust_N: Tensor, attack_name: str) -> AccuracyRow:
        return AccuracyRow(classifier, _count(clean_NK.argmax(dim=1) == labels_N), _count(robust_N), attack_name)

    return (
        row("std", attack.std_clean_NK, ~attack.std_broken_N, std_attack),
        row("rob", attack.rob_clean_NK, ~attack.rob_broken_N, MINIMUM_MARGIN_ATTACK),
        row("mixed", evaluate.mixed_clean_NK, evaluate.robust_N, MIXED_ATTACK),
    )


def _survival(evaluate: EvaluateRecords) -> tuple[SurvivalStep, ...]:
    return survival_steps(evaluate.mixed_clean_NK.argmax(dim=1) == evaluate.labels_N, evaluate.survived)


def survival_steps(standing_N: Tensor, survived: Mapping[str, Tensor]) -> tuple[SurvivalStep, ...]:
    """Counts after each step, from those right on the clean image and who stood after each attack."""
    steps = [SurvivalStep("clean", _count(standing_N), int((~standing_N).sum()))]
    for step, alive_N in survived.items():
        lost = int((standing_N & ~alive_N).sum())
        standing_N = standing_N & alive_N
        steps.append(SurvivalStep(step, _count(standing_N), lost))
    return tuple(steps)


def _observations(accuracy: tuple[AccuracyRow, ...], survival: tuple[SurvivalStep, ...], chosen: Choice) -> list[str]:
    """Where the measurement does not say what the prediction, the assumptions or the attacks' design let expect."""
    std, rob, mixed = accuracy
    notes = []
    if std.clean.correct <= rob.clean.correct:
        notes.append(
            f"std is not more accurate than rob on clean images ({std.clean.correct} against "
            f"{rob.clean.correct} of {rob.clean.total}): mixing has nothing to gain here."
        )
    if (mixed.clean.correct, mixed.clean.total) != (chosen.clean_correct, chosen.total):
        notes.append(
            f"The search predicted {chosen.clean_correct} of {chosen.total} clean images right; the deployed "
            f"mixture has {mixed.clean.correct} of {mixed.clean.total}."
        )
    if mixed.robust.percent < 100 * chosen.kept_predicted / chosen.total:
        notes.append(
            f"The adaptive attack left {mixed.robust.correct} of {mixed.robust.total} standing, fewer than the "
            f"{chosen.kept_predicted} of {chosen.total} guaranteed under the stored perturbations: it found "
            f"perturbations that the attack stage had not."
        )
    return [*notes, *square_note(survival)]


def square_note(survival: tuple[SurvivalStep, ...]) -> list[str]:
    """What Square's finding anything says of the attacks before it."""
    square = next((step for step in survival if step.step == "square"), None)
    if square is None or not square.lost:
        return []
    return [
        f"Square broke {square.lost} of the images that the white-box attacks had left standing; a hint that the "
        f"gradients were not good enough."
    ]


def _count(hits_N: Tensor) -> Count:
    return Count(int(hits_N.sum()), hits_N.numel())
