"""Refinement rounds: attack the chosen mixed classifier, add the adversarial examples, and search again.

The margin of an image is the smallest one over all its known adversarial examples, so the examples of a round count for
every later choice. A round is distributed and resumable like a stage. Its rows depend only on the rows of the attack
stage and of the earlier rounds.

Shapes: N images, P adversarial examples ("points"), K classes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..attacks.budget import AttackBudget
from ..config.attack_config import EvaluateConfig
from ..config.run_config import RunConfig, digest
from ..config.uris import is_black_box
from ..distributed.executor import Executor
from ..mixing.margins import log_one_minus_gap, log_one_minus_signed_margin
from ..mixing.mixture import mixed_classes
from ..mixing.transforms import LogitMap
from ..selection.choice import Choice
from ..selection.grid import kept_images
from ..selection.inputs import AttackedPoints, CachedLogits
from ..storage.records import AttackRecords, SearchResult, SearchRound
from ..storage.tables import read_columns
from .challenge import RoundTask
from .partitioned import run_partitions
from .points import StoredPoints, points_of_round, round_folder
from .progress import RunProgress
from .runs import Run, finished_partitions, search_sample, searched_images
from .search_result import evaluate_content_hash
from .stage import budget_of

Mixed = tuple[float | str | int | None, ...]  # equal for two choices of the same mixed classifier
ROUND_ATTACKS = ("apgd-ce", "apgd-t")  # "apgd-t" includes the joint attack
STEP_ROUNDING = 1e-9  # relative distance at which a margin equals the threshold
# Attacked are the images closest to the margin threshold, as a share of the images predicted to remain robust, in the
# first and in later rounds: on the digits, nearly all images that break are among the closest third.
SHARES_ATTACKED, LEAST_ATTACKED = (0.5, 0.25), 100
SPARE = 0.003  # share of images kept beyond beta, rounded, because the evaluation is stronger than a round
ROUND_ITERATIONS = 50  # maximum number of iterations of an attack


@dataclass(frozen=True)
class Points:
    """The known adversarial examples of all images."""

    image_P: Tensor  # int64, the row of the image
    rob_PK: Tensor  # raw logits of the robust classifier
    std_P: Tensor  # int64, the class of the standard classifier

    @classmethod
    def of_attack(cls, opened: Run) -> "Points":
        """Return the examples of the attack stage, one per image."""
        names = "rob_attacked", "std_at_rob_attacked"
        given = opened.rows, "attack", opened.partitions, opened.attack_content_hash, names
        rows = read_columns(*given, sample_ids=searched_images(opened))
        rob_NK, std_NK = rows.values()
        return cls(torch.arange(len(rob_NK)), rob_NK, std_NK.argmax(dim=1))

    def joined(self, other: "Points") -> "Points":
        """Return these examples, then the others."""
        return Points(
            torch.cat([self.image_P, other.image_P]),
            torch.cat([self.rob_PK, other.rob_PK]),
            torch.cat([self.std_P, other.std_P]),
        )

    def beyond(self, n_images: int) -> AttackedPoints:
        """Return the examples after the attack stage's first one per image, in the form that the search reads."""
        return AttackedPoints(self.rob_PK[n_images:], self.image_P[n_images:], self.std_P[n_images:])

    def largest_log_gaps(self, labels_N: Tensor, transform: LogitMap, *, any_std: bool) -> Tensor:
        """Return log(1 - margin) of M(rob) at the hardest example of each image, (N,), float64.

        The signed margin holds for any class of the standard classifier. Without `any_std`, the examples of rounds
        count by the lead over its class, as in the search, if it is wrong and both `rob` and M(rob) are right.
        """
        mapped_PK, labels_P = transform(self.rob_PK.double()), labels_N[self.image_P]
        gaps_P = log_one_minus_signed_margin(mapped_PK, labels_P)
        if not any_std:
            leads_P = (self.rob_PK.argmax(dim=1) == labels_P) & (mapped_PK.argmax(dim=1) == labels_P)
            leads_P &= self.std_P != labels_P
            leads_P[: len(labels_N)] = False
            gaps_P = torch.where(leads_P, log_one_minus_gap(mapped_PK, labels_P, self.std_P), gaps_P)
        nothing_N = torch.full_like(labels_N, -torch.inf, dtype=torch.float64)
        return nothing_N.scatter_reduce(0, self.image_P, gaps_P, "amax")


class Rounds:
    """The refinement rounds of one search.

    Args:
        choose: searches over all known examples, and returns the choice of every beta.
    """

    def __init__(
        self, opened: Run, records: AttackRecords, choose: Callable[[Points], SearchResult], executor: Executor,
        progress: RunProgress,
    ) -> None:  # fmt: skip
        self._opened, self._records, self._choose = opened, records, choose
        self._executor, self._progress = executor, progress
        self._sources = [StoredPoints("attack", opened.attack_content_hash)]
        self._points = Points.of_attack(opened)
        self._broken: dict[Mixed, Tensor] = {}  # verified in float32, for each attacked choice
        self._settled = set[tuple[float, Mixed]]()  # choices of a beta that were attacked and chosen again
        self._done: list[SearchRound] = []

    def run(self) -> SearchResult:
        """Attack and search again until every measured beta is reached, or `search.rounds` are done.

        Rounds whose files exist are only read, also those that an evaluation has started.
        """
        result = self._attacked(self._choose(self._points))
        while self._is_there(task := self._evaluation_task(result)):
            learnt = self._learnt(result, task)
            if learnt is None:
                break
            result = learnt
        return result

    def learn(self, result: SearchResult) -> SearchResult | None:
        """Search again with the examples of the evaluation of `result`, and attack the new choice.

        None if the search chooses the same mixed classifier again, which is already evaluated.
        """
        for done in result.rounds:
            self._add(done)
        return self._learnt(result, self._evaluation_task(result))

    def _attacked(self, result: SearchResult) -> SearchResult:
        """Attack the choices of a result, and search again, until they keep enough images."""
        rounds, n_before = self._opened.config.search.rounds, sum(1 for done in self._done if done.evaluated)
        while len(self._done) - n_before < rounds * (1 + n_before) and (left := self._unmet(result)):
            self._round(self._task(left, result), left)
            result = self._chosen_again(result) if self._unmet(result) else result
        return replace(result, rounds=tuple(self._done))

    def _learnt(self, result: SearchResult, task: RoundTask) -> SearchResult | None:
        """Search again after a round with the examples of an evaluation; None as in `learn`."""
        self._round(task, [result.deployed()], evaluated=task.points[-1].content_hash)
        learnt = self._chosen_again(result)
        if _mixed(learnt.deployed()) == _mixed(result.deployed()):
            return None
        return self._attacked(learnt)

    def _chosen_again(self, result: SearchResult) -> SearchResult:
        """Search over all known examples; choices that were attacked and keep enough images remain chosen."""
        held = {beta: entry for beta, entry in result.by_beta().items() if self._is_kept(entry)}
        result = self._choose(self._points).with_entries(held)
        self._settled |= {(entry.beta, _mixed(entry)) for entry in result.entries if _mixed(entry) in self._broken}
        return result

    def _unmet(self, result: SearchResult) -> list[Choice]:
        """Return the choices to measure that have not been attacked or do not keep enough images.

        A choice that was attacked, missed its beta and was chosen again is left out: another round would find the same
        examples. This happens if the robust classifier alone is not robust on more images.
        """
        return [
            entry
            for entry in self._measured(result)
            if not self._is_kept(entry) and (entry.beta, _mixed(entry)) not in self._settled
        ]

    def _measured(self, result: SearchResult) -> list[Choice]:
        """Return the choices to measure, the deployed one first."""
        entries, measure = result.by_beta(), self._opened.config.search.measure
        betas = dict.fromkeys((result.deployed_beta, *(entries if measure == "all" else measure)))
        return [entries[beta] for beta in betas if beta in entries]

    def _round(self, task: RoundTask, attacked: Sequence[Choice], evaluated: str = "") -> None:
        """Compute a round on these choices, and add its examples."""
        if task.attacks and not self._is_there(task):
            self._executor.report(self._announcement(task, attacked))
        run_partitions(self._opened, task, self._executor, self._progress)
        summaries = finished_partitions(self._opened, task.stage, task.content_hash).values()
        done = SearchRound(
            round=len(self._done) + 1,
            content_hash=task.content_hash,
            attacked=tuple(attacked),
            kept=(),
            of=int((~self._records.rob_broken_N).sum()),
            n_forward=sum(summary.n_forward for summary in summaries),
            n_backward=sum(summary.n_backward for summary in summaries),
            evaluated=evaluated,
        )
        tried = self._add(done)
        self._done[-1] = replace(done, kept=tuple(self._kept(entry) for entry in attacked), tried=tried)

    def _announcement(self, task: RoundTask, attacked: Sequence[Choice]) -> str:
        near = []
        for entry, reach in zip(attacked, task.reaches, strict=True):
            gaps_N = self._stable_log_gaps(entry)
            near.append(f"about {int((gaps_N >= reach).sum()):,} close to the margin threshold of beta {entry.beta:g}")
        return (
            f"round {len(self._done) + 1} of at most {self._opened.config.search.rounds} attacks images: "
            f"{', '.join(near)} ({', '.join(task.attacks)}, {task.budget.n_iter} iterations; search.rounds: 0 attacks "
            "none)"
        )

    def _is_there(self, task: RoundTask) -> bool:
        """Return whether all files of the round exist."""
        return len(finished_partitions(self._opened, task.stage, task.content_hash)) == len(self._opened.partitions)

    def _evaluation_task(self, result: SearchResult) -> RoundTask:
        """Return a round without attacks that stores the hardest known example, including those of the evaluation."""
        evaluated = evaluate_content_hash(self._opened, result)
        task = self._task([result.deployed()], result)
        points = (*task.points, StoredPoints("evaluate", evaluated))
        return replace(task, attacks=(), points=points, content_hash=digest({"of": task.content_hash, "by": evaluated}))

    def _task(self, attacked: Sequence[Choice], result: SearchResult) -> RoundTask:
        """Return the next round on these choices of a result."""
        number, surrogate_alpha = len(self._done) + 1, result.surrogate_alpha
        opened, evaluate = self._opened, self._opened.config.evaluate
        budget, sample = round_budget(evaluate), search_sample(opened)
        mixtures = tuple(
            replace(entry.mixture(), surrogate_alpha=surrogate_alpha, rd=evaluate.rd) for entry in attacked
        )
        # All other betas together attack half as many images as the deployed one, whose examples mostly serve them too.
        others = max(1, sum(entry.beta != result.deployed_beta for entry in attacked))
        weights = [1 if entry.beta == result.deployed_beta else 0.5 / others for entry in attacked]
        share = SHARES_ATTACKED[min(number, len(SHARES_ATTACKED)) - 1]
        reaches = tuple(self._reach(entry, share, weight) for entry, weight in zip(attacked, weights, strict=True))
        depends_on = {
            "mixtures": [mixture.settings() for mixture in mixtures],
            "reaches": reaches,
            "budget": [budget.n_iter, budget.n_target_classes, budget.joint_starts],
            "surrogate": [surrogate_alpha, evaluate.rd, evaluate.mode],
            "points": [[source.stage, source.content_hash] for source in self._sources],
            **({"sample": vars(sample)} if sample else {}),
            **({"eot": evaluate.eot} if evaluate.eot else {}),
        }
        return RoundTask(
            stage=round_folder(number),
            content_hash=digest({"attack": opened.attack_content_hash, **depends_on}),
            budget=budget,
            mixtures=mixtures,
            reaches=reaches,
            attacks=round_attacks(opened.config),
            mode=evaluate.mode,
            eot=evaluate.eot,
            points=tuple(self._sources),
            sample=sample,
        )

    def _reach(self, entry: Choice, share: float, weight: float) -> float:
        """Return the log(1 - margin) down to which images are attacked, a share of those predicted to be robust.

        Images far above the margin threshold hardly ever break. Only the evaluation attacks them.
        """
        kept_N = self._stable_log_gaps(entry)
        if not len(kept_N):
            return -math.inf
        n_near = math.ceil(max(LEAST_ATTACKED, share * len(kept_N)) * weight)
        return float(kept_N.sort(descending=True).values[min(n_near, len(kept_N)) - 1])

    def _stable_log_gaps(self, entry: Choice) -> Tensor:
        """Return log(1 - margin) of the images on which the choice is predicted to be robust."""
        gaps_N = self._points.largest_log_gaps(self._records.labels_N, entry.transform(), any_std=True)
        return gaps_N[~self._records.rob_broken_N & (gaps_N <= entry.log_one_minus_cutoff)]

    def _add(self, done: SearchRound) -> tuple[int, ...]:
        """Add the examples of a round; return the number of images on which each choice was attacked."""
        opened, tried = self._opened, list[int]()
        for i, entry in enumerate(done.attacked):
            names = [f"{name}_{i}" for name in ("tried", "broken", "rob_attacked", "std_attacked")]
            given = opened.rows, round_folder(done.round), opened.partitions, done.content_hash, names
            rows = read_columns(*given, sample_ids=searched_images(opened))
            tried_N, broken_N, rob_NK, std_NK = rows.values()
            image_P = tried_N.nonzero().squeeze(1)
            tried.append(len(image_P))
            self._points = self._points.joined(Points(image_P, rob_NK[image_P], std_NK[image_P].argmax(dim=1)))
            self._broken[_mixed(entry)] = broken_N | self._broken.get(_mixed(entry), torch.zeros_like(broken_N))
        self._sources.append(points_of_round(done))
        self._done.append(done)
        return tuple(tried)

    def _is_kept(self, entry: Choice) -> bool:
        """Return whether the choice was attacked and keeps enough images at all known examples."""
        n_robust = int((~self._records.rob_broken_N).sum())
        return _mixed(entry) in self._broken and self._kept(entry) >= wanted_images(entry.beta, n_robust)

    def _kept(self, entry: Choice) -> int:
        """Count the images on which `rob` and the attacked choice remain robust at every known example."""
        mixture, labels_N = entry.mixture(), self._records.labels_N
        classes_P = mixed_classes(self._points.rob_PK, self._points.std_P, mixture)
        std_clean_N = self._records.std_clean_NK.argmax(dim=1)
        kept_N = mixed_classes(self._records.rob_clean_NK, std_clean_N, mixture) == labels_N
        kept_N &= ~self._records.rob_broken_N & ~self._broken[_mixed(entry)]
        kept_N[self._points.image_P[classes_P != labels_N[self._points.image_P]]] = False
        return int(kept_N.sum())


def round_attacks(config: RunConfig) -> tuple[str, ...]:
    """Return the attacks of a refinement round, which is Square alone if `rob` has no gradients."""
    return ("square",) if is_black_box(config.rob) else ROUND_ATTACKS


def round_budget(evaluate: EvaluateConfig) -> AttackBudget:
    """Return the budget of the evaluation with fewer iterations."""
    budget = budget_of(evaluate)
    return replace(budget, n_iter=min(budget.n_iter, ROUND_ITERATIONS))


def wanted_images(beta: float, n_robust: int) -> int:
    """Return how many robust images of the robust classifier the rounds keep: a few more than beta requires.

    >>> wanted_images(0.95, 609), wanted_images(0.95, 38)
    (581, 37)
    """
    return min(n_robust, kept_images(beta, n_robust) + round(SPARE * n_robust))


def _mixed(entry: Choice) -> Mixed:
    return entry.scale, entry.power, entry.bias, entry.one_minus_alpha, entry.clamp, entry.ln_k


def centered_threshold(entry: Choice, cached: CachedLogits) -> Choice:
    """Return the candidate with a lower margin threshold, in the middle of the interval with the same clean accuracy.

    The search puts the threshold at an order statistic, so it equals the margin of one image, and any attack that
    lowers that margin breaks the image. A lower threshold keeps at least as many images robust. The clean accuracy
    changes only at a lead `p_t - p_k` of the class of M(rob) over that of `std` on a clean image. The new threshold
    lies halfway to the next such lead.
    """
    mapped_BK = entry.transform()(cached.rob_clean_BK.double())
    gaps_B = log_one_minus_gap(mapped_BK, mapped_BK.argmax(dim=1), cached.std_pred_B)
    start = entry.log_one_minus_cutoff
    above_B = gaps_B[(gaps_B > start + STEP_ROUNDING * abs(start)) & (gaps_B < 0)]
    end = float(above_B.min()) if len(above_B) else 0.0
    threshold = -math.expm1((start + end) / 2)
    return replace(
        entry,
        alpha=1 / (1 + threshold),
        one_minus_alpha=threshold / (1 + threshold),
        log_one_minus_cutoff=(start + end) / 2,
    )
