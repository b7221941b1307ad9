"""Refinement rounds: attack the chosen mixed classifier, add the adversarial examples, and search again.

The margin of an image is the smallest one over all its stored adversarial examples, so the examples of a round count
for every later choice. A round is distributed and resumable like a stage. Its rows depend only on the rows of the
attack stage and of the earlier rounds.

Shapes: N images, P adversarial examples, K classes.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace

import torch
from torch import Tensor

from ..attacks.budget import AttackBudget
from ..config.keys import EvaluateConfig
from ..config.run_config import RunConfig, digest
from ..distributed.executor import Executor
from ..mixing.mixture import mixed_classes
from ..selection.choice import Choice
from ..selection.inputs import AttackedPoints
from ..selection.prediction import hardest_log1m_margins
from ..selection.selection import Selection
from ..storage.records import SearchResult, SearchRound
from .choosing import choose, search_rows, wanted_images
from .partitioned import run_partitions
from .progress import RunProgress
from .round_task import RoundTask
from .runs import Run, finished_partitions
from .search_result import evaluate_content_hash
from .stage import budget_of
from .warm_start import StoredExamples, examples_of_round, round_folder

ROUND_ATTACKS = ("apgd-ce", "apgd-t")  # "apgd-t" includes the joint attack
# A refinement round attacks the images with margins closest to the threshold: in the first and in later rounds, these
# shares of the images that are predicted to remain robust, but at least `LEAST_ATTACKED`. On the digits, nearly all
# images that break are among the closest third.
SHARES_ATTACKED, LEAST_ATTACKED = (0.5, 0.25), 100
ROUND_ITERATIONS = 50  # maximum number of iterations of each attack


class Rounds:
    """The refinement rounds of one search, with the adversarial examples of the attack stage and of all rounds."""

    selection: Selection  # set by each search

    def __init__(self, opened: Run, executor: Executor, progress: RunProgress) -> None:
        self._opened, self._executor, self._progress, rows = opened, executor, progress, search_rows(opened)
        attack = "attack", self._opened.attack_content_hash
        rob_broken_N, std_attacked_NK = self._read(*attack, ["rob_broken", "std_at_rob_attacked"])
        self._robust_N, self._std_attacked_N = ~rob_broken_N, std_attacked_NK.argmax(dim=1)
        none = torch.arange(0)
        self._points = AttackedPoints(rows.rob_attacked_BK[:0], none, none)
        self._rows = replace(rows, points=self._points)
        self._broken: dict[tuple[float, ...], Tensor] = {}  # verified in float32, for each attacked choice
        self._done: list[SearchRound] = []

    def _read(self, stage: str, content_hash: str, columns: Sequence[str]) -> list[Tensor]:
        """Return columns of the images that the search reads."""
        return [*self._opened.columns(stage, content_hash, columns, self._opened.sample_ids).values()]

    def run(self) -> SearchResult:
        """Attack and search again until every measured beta is reached, or `search.rounds` rounds are done.

        Refinement rounds whose files exist are only read, including those that an evaluation has started.
        """
        result = self._attacked(self._search())
        while self._is_there(task := self._evaluation_task(result)):
            learnt = self._learnt(result, task)
            if learnt is None:
                break
            result = learnt
        return result

    def learn(self, result: SearchResult) -> SearchResult | None:
        """Search again with the examples of the evaluation of `result`, and attack the new choice.

        Return None if the search chooses the same mixed classifier again, which is already evaluated.
        """
        for done in result.rounds:
            self._add(done.round, done.content_hash, done.attacked)
            self._done.append(done)
        return self._learnt(result, self._evaluation_task(result))

    def _attacked(self, result: SearchResult) -> SearchResult:
        """Attack the choices of a result, and search again, until they keep enough images.

        A choice that was attacked, missed its beta and was chosen again is not attacked again, because another round
        would find the same examples. This happens if even the robust classifier alone does not keep enough images.
        """
        n_before = sum(1 for done in self._done if done.evaluated)
        most = n_before + self._opened.config.search.rounds * (1 + n_before)
        while len(self._done) < most:
            left = [entry for entry in self._measured(result) if _mixed(entry) not in self._broken]
            if not left:
                break
            self._round(self._task(left, result), left)
            if not all(map(self._is_kept, left)):
                result = self._search_again(result)
        return replace(result, rounds=tuple(self._done))

    def _learnt(self, result: SearchResult, task: RoundTask) -> SearchResult | None:
        """Store a round with the examples of an evaluation, search again, and return as `learn` does."""
        self._round(task, [result.deployed()], evaluated=task.sources[-1].content_hash)
        learnt = self._search_again(result)
        return None if _mixed(learnt.deployed()) == _mixed(result.deployed()) else self._attacked(learnt)

    def _search(self) -> SearchResult:
        result, self.selection = choose(self._opened, self._rows, self._executor)
        return result

    def _search_again(self, result: SearchResult) -> SearchResult:
        """Search over all stored examples; choices that were attacked and keep enough images remain chosen."""
        held = {entry.beta: entry for entry in result.entries if self._is_kept(entry)}
        found = self._search()
        return replace(found, entries=tuple(held.get(entry.beta, entry) for entry in found.entries))

    def _measured(self, result: SearchResult) -> list[Choice]:
        """Return the choices to measure, the deployed one first."""
        entries, measure = result.by_beta(), self._opened.config.search.measure
        betas = dict.fromkeys((result.deployed_beta, *(entries if measure == "all" else measure)))
        return [entries[beta] for beta in betas if beta in entries]

    def _round(self, task: RoundTask, attacked: Sequence[Choice], evaluated: str = "") -> None:
        """Compute a round on these choices, and add its examples."""
        number = len(self._done) + 1
        if task.attacks and not self._is_there(task):
            self._executor.report(
                f"refinement round {number} of at most {self._opened.config.search.rounds} attacks the images close to "
                f"the margin threshold of beta {', '.join(f'{entry.beta:g}' for entry in attacked)} "
                f"({', '.join(task.attacks)}, {task.budget.n_iter} iterations; search.rounds: 0 disables the rounds)"
            )
        run_partitions(self._opened, task, self._executor, self._progress)
        summaries = finished_partitions(self._opened, task.stage, task.content_hash).values()
        tried = self._add(number, task.content_hash, attacked)
        done = SearchRound(
            round=number,
            content_hash=task.content_hash,
            attacked=tuple(attacked),
            kept=tuple(map(self._kept, attacked)),
            of=int(self._robust_N.sum()),
            n_forward=sum(summary.n_forward for summary in summaries),
            n_backward=sum(summary.n_backward for summary in summaries),
            evaluated=evaluated,
            tried=tried,
        )
        self._done.append(done)

    def _is_there(self, task: RoundTask) -> bool:
        """Return whether all files of the round exist."""
        return len(finished_partitions(self._opened, task.stage, task.content_hash)) == len(self._opened.partitions)

    def _evaluation_task(self, result: SearchResult) -> RoundTask:
        """Return a round that attacks nothing and stores the hardest example per image, also from the evaluation."""
        evaluated = evaluate_content_hash(self._opened, result)
        task = self._task([result.deployed()], result)
        sources = (*task.sources, StoredExamples("evaluate", evaluated))
        content_hash = digest({"of": task.content_hash, "by": evaluated})
        return replace(task, attacks=(), sources=sources, content_hash=content_hash)

    def _task(self, attacked: Sequence[Choice], result: SearchResult) -> RoundTask:
        """Return the next round on these choices of a result."""
        number, opened, evaluate = len(self._done) + 1, self._opened, self._opened.config.evaluate
        budget, sample = round_budget(evaluate), opened.sample
        sources = StoredExamples("attack", opened.attack_content_hash), *map(examples_of_round, self._done)
        mixtures = tuple(replace(entry.mixture(), rd=evaluate.rd) for entry in attacked)
        # All other betas together attack half as many images as the deployed one, whose examples mostly serve them too.
        others = max(1, sum(entry.beta != result.deployed_beta for entry in attacked))
        weights = [1 if entry.beta == result.deployed_beta else 0.5 / others for entry in attacked]
        share = SHARES_ATTACKED[min(number, len(SHARES_ATTACKED)) - 1]
        reaches = tuple(self._reach(entry, share, weight) for entry, weight in zip(attacked, weights, strict=True))
        depends_on = {
            "attack": opened.attack_content_hash,
            "mixtures": [{**mixture.settings(), **mixture.weights()} for mixture in mixtures],
            "reaches": reaches,
            "budget": asdict(budget),
            "mode": [evaluate.mode, evaluate.eot],
            "sources": [asdict(source) for source in sources],
            "sample": sample and vars(sample),
        }
        return RoundTask(
            stage=round_folder(number),
            content_hash=digest(depends_on),
            budget=budget,
            mixtures=mixtures,
            reaches=reaches,
            attacks=round_attacks(opened.config),
            mode=evaluate.mode,
            eot=evaluate.eot,
            sources=sources,
            sample=sample,
        )

    def _reach(self, entry: Choice, share: float, weight: float) -> float:
        """Return the lowest log(1 - margin) of the images to attack, a share of those predicted to remain robust.

        Images with margins far above the threshold hardly ever break. Only the evaluation attacks them.
        """
        gaps_N = hardest_log1m_margins(self._rows, entry.transform(), any_std=True)
        kept_N = gaps_N[self._robust_N & (gaps_N <= entry.log_one_minus_cutoff)]
        if not len(kept_N):
            return -math.inf
        n_near = math.ceil(max(LEAST_ATTACKED, share * len(kept_N)) * weight)
        return float(kept_N.sort(descending=True).values[min(n_near, len(kept_N)) - 1])

    def _add(self, number: int, content_hash: str, attacked: Sequence[Choice]) -> tuple[int, ...]:
        """Add the examples of a round; return the number of images on which each choice was attacked."""
        tried = []
        for i, entry in enumerate(attacked):
            names = [f"{name}_{i}" for name in ("tried", "broken", "rob_attacked", "std_attacked")]
            tried_N, broken_N, rob_NK, std_NK = self._read(round_folder(number), content_hash, names)
            image_P = tried_N.nonzero().squeeze(1)
            tried.append(len(image_P))
            found = AttackedPoints(rob_NK[image_P], image_P, std_NK[image_P].argmax(dim=1))
            self._points = self._points.joined(found)
            self._rows = replace(self._rows, points=self._points)
            self._broken[_mixed(entry)] = broken_N | self._broken.get(_mixed(entry), torch.zeros_like(broken_N))
        return tuple(tried)

    def _is_kept(self, entry: Choice) -> bool:
        """Return whether the choice was attacked, and keeps enough images robust at all stored examples."""
        wanted = wanted_images(entry.beta, int(self._robust_N.sum()))
        return _mixed(entry) in self._broken and self._kept(entry) >= wanted

    def _kept(self, entry: Choice) -> int:
        """Count the images on which `rob` and the attacked choice remain robust at every stored example."""
        rows, points, mixture = self._rows, self._points, entry.mixture()
        kept_N = self._robust_N & ~self._broken[_mixed(entry)]
        kept_N &= mixed_classes(rows.rob_clean_BK, rows.std_pred_B, mixture) == rows.labels_B
        kept_N &= mixed_classes(rows.rob_attacked_BK, self._std_attacked_N, mixture) == rows.labels_B
        classes_P = mixed_classes(points.rob_logits_PK, points.std_pred_P, mixture)
        kept_N[points.image_P[classes_P != rows.labels_B[points.image_P]]] = False
        return int(kept_N.sum())


def round_attacks(config: RunConfig) -> tuple[str, ...]:
    """Return the attacks of a refinement round, which is Square alone if `rob` has no gradients."""
    return ("square",) if config.rob.is_black_box else ROUND_ATTACKS


def round_budget(evaluate: EvaluateConfig) -> AttackBudget:
    """Return the budget of the evaluation with fewer iterations."""
    budget = budget_of(evaluate)
    return replace(budget, n_iter=min(budget.n_iter, ROUND_ITERATIONS))


def _mixed(entry: Choice) -> tuple[float, ...]:
    """Return a key that is equal for two choices exactly if they describe the same mixed classifier."""
    return *entry.at, entry.one_minus_alpha
