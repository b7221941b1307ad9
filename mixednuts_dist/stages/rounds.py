"""Search rounds: the chosen mixture is attacked, and the search chooses again with the points that the attack ended on.

Under a candidate an image's margin is the smallest over the points known for it, so every point that any round has
found counts for every later choice. A round is a stage of its own, `search/round-<i>/`: distributed and resumable. Its
rows depend on the attack stage's and the earlier rounds' rows alone, so a lost round is computed again from those.

Shapes: N images, P points, K classes.
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
from .runs import Run, evaluate_fingerprint, finished_partitions, search_sample, searched_images
from .stage import budget_of

Mixed = tuple[float | str | int | None, ...]  # equal for two choices of the same mixture
ROUND_ATTACKS = ("apgd-ce", "apgd-t")  # "apgd-t" includes the joint attack; FAB and Square are the evaluation's
STEP_ROUNDING = 1e-9  # relative: a gap this close to the cutoff is the one that the cutoff was put on
# Of the images that are predicted to stay those next to the cutoff are attacked: half of them in the first round, then
# a quarter. On the digits the first two rounds broke 59 images, nearly all among the nearest third, the later ones
# images among the nearest 17 of 580.
SHARES_ATTACKED, LEAST_ATTACKED = (0.5, 0.25), 100
# Of rob's robust images: what the rounds keep beyond beta. On the digits the evaluation, with twice the iterations and
# three starts, broke 1 image of 609 that the rounds had left.
SPARE = 0.003
ROUND_ITERATIONS = 50  # at most; the evaluation has the whole budget


@dataclass(frozen=True)
class Points:
    """The attacked points known so far, of all images together."""

    image_P: Tensor  # int64, the row of the point's image
    rob_PK: Tensor  # raw logits of rob
    std_P: Tensor  # int64, std's class

    @classmethod
    def of_attack(cls, opened: Run) -> "Points":
        """The attack stage's: one an image."""
        names = "rob_attacked", "std_at_rob_attacked"
        given = opened.rows, "attack", opened.partitions, opened.attack_fingerprint, names
        rows = read_columns(*given, sample_ids=searched_images(opened))
        rob_NK, std_NK = rows.values()
        return cls(torch.arange(len(rob_NK)), rob_NK, std_NK.argmax(dim=1))

    def joined(self, other: "Points") -> "Points":
        """These, then the others."""
        return Points(
            torch.cat([self.image_P, other.image_P]),
            torch.cat([self.rob_PK, other.rob_PK]),
            torch.cat([self.std_P, other.std_P]),
        )

    def beyond(self, n_images: int) -> AttackedPoints:
        """All but the attack stage's first one of every image, as the search takes them."""
        return AttackedPoints(self.rob_PK[n_images:], self.image_P[n_images:], self.std_P[n_images:])

    def largest_log_gaps(self, labels_N: Tensor, transform: LogitMap, *, any_std: bool) -> Tensor:
        """log(1 - margin) of M(rob) at each image's hardest point, (N,), float64.

        The margin is the signed one, which holds whatever std answers; but for `any_std` it is, as in the search, at
        the points that rounds have found the lead over std's class there, where std is wrong and both rob and M(rob)
        are right.
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
    """The rounds of one search.

    Args:
        choose: the search over all points that are known: every beta's choice.
    """

    def __init__(self, opened: Run, records: AttackRecords, choose: Callable[[Points], SearchResult]) -> None:
        self._opened, self._records, self._choose = opened, records, choose
        self._sources = [StoredPoints("attack", opened.attack_fingerprint)]
        self._points = Points.of_attack(opened)
        self._broken: dict[Mixed, Tensor] = {}  # by the judge, in the rounds that attacked the choice
        self._settled = set[tuple[float, Mixed]]()  # betas with mixtures that were attacked and chosen again
        self._done: list[SearchRound] = []

    def run(self, executor: Executor | None, progress: RunProgress) -> SearchResult:
        """Round after round, until every beta to be measured is kept or `search.rounds` are done.

        Rounds whose files exist, also those that an evaluation has started, are only read.
        """
        result = self._attacked(self._choose(self._points), executor, progress)
        while self._is_there(task := self._evaluation_task(result, evaluate_fingerprint(self._opened, result))):
            learnt = self._learnt(result, task, executor, progress)
            if learnt is None:
                break
            result = learnt
        return result

    def learn(self, result: SearchResult, executor: Executor | None, progress: RunProgress) -> SearchResult | None:
        """One more round from the images that the evaluation of `result` ended on, and rounds of attack after it.

        None where the same mixture is chosen again: no other one keeps more, and it is evaluated already.
        """
        for done in result.rounds:
            self._take_in(done)
        task = self._evaluation_task(result, evaluate_fingerprint(self._opened, result))
        return self._learnt(result, task, executor, progress)

    def _attacked(self, result: SearchResult, executor: Executor | None, progress: RunProgress) -> SearchResult:
        """Rounds of attack, beginning with this choice, until it keeps enough."""
        rounds, n_before = self._opened.config.search.rounds, sum(1 for done in self._done if done.evaluated)
        while len(self._done) - n_before < rounds * (1 + n_before) and (left := self._unmet(result)):
            self._round(self._task(left, result), left, executor, progress)
            result = self._chosen_again(result) if self._unmet(result) else result
        return replace(result, rounds=tuple(self._done))

    def _learnt(
        self, result: SearchResult, task: RoundTask, executor: Executor | None, progress: RunProgress
    ) -> SearchResult | None:
        """The choice after the round with an evaluation's images, and those that attack it; None as `learn`."""
        evaluated = task.points[-1].fingerprint
        self._round(task, [result.deployed()], executor, progress, evaluated=evaluated)
        learnt = self._chosen_again(result)
        if _mixed(learnt.deployed()) == _mixed(result.deployed()):
            return None
        return self._attacked(learnt, executor, progress)

    def _chosen_again(self, result: SearchResult) -> SearchResult:
        """The search over all points; what has been attacked and is kept stays chosen."""
        held = {beta: entry for beta, entry in result.by_beta().items() if self._is_kept(entry)}
        result = self._choose(self._points).with_entries(held)
        self._settled |= {(entry.beta, _mixed(entry)) for entry in result.entries if _mixed(entry) in self._broken}
        return result

    def _unmet(self, result: SearchResult) -> list[Choice]:
        """The choices to be measured that have not been attacked or do not keep enough.

        Left out are choices that were attacked, fell short, and were chosen again all the same, for instance because
        rob itself keeps no more images at all points: another round would find the same points.
        """
        return [
            entry
            for entry in self._measured(result)
            if not self._is_kept(entry) and (entry.beta, _mixed(entry)) not in self._settled
        ]

    def _measured(self, result: SearchResult) -> list[Choice]:
        """The choices to be measured, the deployed one first."""
        entries, measure = result.by_beta(), self._opened.config.search.measure
        betas = dict.fromkeys((result.deployed_beta, *(entries if measure == "all" else measure)))
        return [entries[beta] for beta in betas if beta in entries]

    def _round(
        self,
        task: RoundTask,
        attacked: Sequence[Choice],
        executor: Executor | None,
        progress: RunProgress,
        *,
        evaluated: str = "",
    ) -> None:
        if task.attacks and executor is not None and not self._is_there(task):
            executor.report(self._announcement(task, attacked))
        run_partitions(self._opened, task, executor, progress)
        receipts = finished_partitions(self._opened, task.stage, task.fingerprint).values()
        done = SearchRound(
            round=len(self._done) + 1,
            fingerprint=task.fingerprint,
            attacked=tuple(attacked),
            kept=(),
            of=int((~self._records.rob_broken_N).sum()),
            n_forward=sum(receipt.n_forward for receipt in receipts),
            n_backward=sum(receipt.n_backward for receipt in receipts),
            evaluated=evaluated,
        )
        tried = self._take_in(done)
        self._done[-1] = replace(done, kept=tuple(self._kept(entry) for entry in attacked), tried=tried)

    def _announcement(self, task: RoundTask, attacked: Sequence[Choice]) -> str:
        """What a round is about to attack."""
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
        """Whether all files of the round exist already."""
        return len(finished_partitions(self._opened, task.stage, task.fingerprint)) == len(self._opened.partitions)

    def _evaluation_task(self, result: SearchResult, evaluated: str) -> RoundTask:
        """No attack: of the points known of each image, the evaluation's among them, the hardest one is stored."""
        task = self._task([result.deployed()], result)
        points = (*task.points, StoredPoints("evaluate", evaluated))
        return replace(task, attacks=(), points=points, fingerprint=digest({"of": task.fingerprint, "by": evaluated}))

    def _task(self, attacked: Sequence[Choice], result: SearchResult) -> RoundTask:
        """The next round, on these choices of a result."""
        number, surrogate_alpha = len(self._done) + 1, result.surrogate_alpha
        opened, evaluate = self._opened, self._opened.config.evaluate
        budget, sample = round_budget(evaluate), search_sample(opened)
        mixtures = tuple(
            replace(entry.mixture(), surrogate_alpha=surrogate_alpha, rd=evaluate.rd) for entry in attacked
        )
        # The other betas together attack half as many images as the deployed one: their points mostly serve all.
        # With as many, five betas took 2.2 times the passes of one in three rounds (240 digits); so they take 2.05.
        others = max(1, sum(entry.beta != result.deployed_beta for entry in attacked))
        weights = [1 if entry.beta == result.deployed_beta else 0.5 / others for entry in attacked]
        share = SHARES_ATTACKED[min(number, len(SHARES_ATTACKED)) - 1]
        reaches = tuple(self._reach(entry, share, weight) for entry, weight in zip(attacked, weights, strict=True))
        depends_on = {
            "mixtures": [mixture.settings() for mixture in mixtures],
            "reaches": reaches,
            "budget": [budget.n_iter, budget.n_target_classes, budget.joint_starts],
            "surrogate": [surrogate_alpha, evaluate.rd, evaluate.mode],
            "points": [[source.stage, source.fingerprint] for source in self._sources],
            **({"sample": vars(sample)} if sample else {}),
            **({"eot": evaluate.eot} if evaluate.eot else {}),
        }
        return RoundTask(
            stage=round_folder(number),
            fingerprint=digest({"attack": opened.attack_fingerprint, **depends_on}),
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
        """The log(1 - margin) down to which images are attacked: the nearest share of those that are predicted to stay.

        Images far above the cutoff hardly ever break, and attacking them takes most of a round's time. The evaluation
        attacks them too.
        """
        kept_N = self._stable_log_gaps(entry)
        if not len(kept_N):
            return -math.inf
        n_near = math.ceil(max(LEAST_ATTACKED, share * len(kept_N)) * weight)
        return float(kept_N.sort(descending=True).values[min(n_near, len(kept_N)) - 1])

    def _stable_log_gaps(self, entry: Choice) -> Tensor:
        """log(1 - margin) of the images that the choice is predicted to keep."""
        gaps_N = self._points.largest_log_gaps(self._records.labels_N, entry.transform(), any_std=True)
        return gaps_N[~self._records.rob_broken_N & (gaps_N <= entry.log_one_minus_cutoff)]

    def _take_in(self, done: SearchRound) -> tuple[int, ...]:
        """Join the round's points to the others; returns how many images each choice was attacked on."""
        opened, tried = self._opened, list[int]()
        for i, entry in enumerate(done.attacked):
            names = [f"{name}_{i}" for name in ("tried", "broken", "rob_attacked", "std_attacked")]
            given = opened.rows, round_folder(done.round), opened.partitions, done.fingerprint, names
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
        """Whether the choice was attacked and keeps its share of rob's robust images at all points known by now."""
        return _mixed(entry) in self._broken and self._kept(entry) >= self._wanted(entry.beta)

    def _wanted(self, beta: float) -> int:
        return wanted_images(beta, int((~self._records.rob_broken_N).sum()))

    def _kept(self, entry: Choice) -> int:
        """Images that rob keeps, and the mixture too: on the clean image, at every point, and by the judge."""
        mixture, labels_N = entry.mixture(), self._records.labels_N
        classes_P = mixed_classes(self._points.rob_PK, self._points.std_P, mixture)
        std_clean_N = self._records.std_clean_NK.argmax(dim=1)
        kept_N = mixed_classes(self._records.rob_clean_NK, std_clean_N, mixture) == labels_N
        kept_N &= ~self._records.rob_broken_N & ~self._broken[_mixed(entry)]
        kept_N[self._points.image_P[classes_P != labels_N[self._points.image_P]]] = False
        return int(kept_N.sum())


def round_attacks(config: RunConfig) -> tuple[str, ...]:
    """The attacks of a refinement round: Square alone if `rob` has no gradients."""
    return ("square",) if is_black_box(config.rob) else ROUND_ATTACKS


def round_budget(evaluate: EvaluateConfig) -> AttackBudget:
    """The evaluation's budget with fewer iterations."""
    budget = budget_of(evaluate)
    return replace(budget, n_iter=min(budget.n_iter, ROUND_ITERATIONS))


def wanted_images(beta: float, n_robust: int) -> int:
    """Return how many of the robust classifier's robust images the rounds want to keep: a few to spare.

    >>> wanted_images(0.95, 609)
    581
    """
    return min(n_robust, kept_images(beta, n_robust) + math.ceil(SPARE * n_robust))


def _mixed(entry: Choice) -> Mixed:
    return entry.scale, entry.power, entry.bias, entry.one_minus_alpha, entry.clamp, entry.ln_k


def centre_cutoff(entry: Choice, cached: CachedLogits) -> Choice:
    """The same candidate with its cutoff moved to the middle of the interval in which its clean count is the same.

    The search puts the cutoff at an order statistic, so one image's margin equals it: the last bits decide whether that
    image is kept, and an attack that lowers its margin at all breaks it. A lower cutoff keeps at least as many images.
    The clean count changes only where the cutoff passes a clean image's gap `p_t - p_k` between M(rob)'s class and
    std's, so the cutoff is lowered half of the way to the next such gap.
    """
    mapped_BK = entry.transform()(cached.rob_clean_BK.double())
    gaps_B = log_one_minus_gap(mapped_BK, mapped_BK.argmax(dim=1), cached.std_pred_B)
    start = entry.log_one_minus_cutoff
    above_B = gaps_B[(gaps_B > start + STEP_ROUNDING * abs(start)) & (gaps_B < 0)]
    end = float(above_B.min()) if len(above_B) else 0.0
    cutoff = -math.expm1((start + end) / 2)
    return replace(
        entry, alpha=1 / (1 + cutoff), one_minus_alpha=cutoff / (1 + cutoff), log_one_minus_cutoff=(start + end) / 2
    )
