"""Search rounds: the chosen mixture is attacked, and the search chooses again with the points that broke it.

Under a candidate an image's margin is the smallest over the points known for it, so a choice pays for all that any
round has found. A round is a stage of its own, `search/round-<i>/`: distributed, resumable, and made again from the
files of the rounds before it if it is lost.

Shapes: N images, P points, K classes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..config import digest
from ..distributed.cluster import RaySession
from ..distributed.tasks import RoundTask, StoredPoints
from ..mixing.closed_forms import mixed_classes
from ..mixing.margins import log_one_minus_gap, log_one_minus_signed_margin
from ..mixing.transforms import LogitMap
from ..selection.choice import Choice
from ..selection.grid import kept_images
from ..selection.inputs import CachedLogits
from ..storage.records import AttackRecords, SearchResult, SearchRound
from ..storage.tables import read_columns
from .partitioned import budget_of, run_partitions
from .progress import Progress
from .runs import Run, finished_partitions

Mixed = tuple[float | str | int | None, ...]  # what tells one choice's mixture from another's
ROUND_ATTACKS = ("apgd-ce", "apgd-t")  # "apgd-t" includes the joint attack; FAB and Square wait for the evaluation
STEP_ROUNDING = 1e-9  # relative: gaps this close to the cutoff are the step's own end
ROUND_ITERATIONS, ROUND_RESTARTS = 50, 1  # at most; the evaluation has the whole budget


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
        rows = read_columns(opened.store, "attack", opened.partitions, opened.attack_fingerprint, names)
        rob_NK, std_NK = rows.values()
        return cls(torch.arange(len(rob_NK)), rob_NK, std_NK.argmax(dim=1))

    def joined(self, other: "Points") -> "Points":
        """These, then the others."""
        return Points(
            torch.cat([self.image_P, other.image_P]),
            torch.cat([self.rob_PK, other.rob_PK]),
            torch.cat([self.std_P, other.std_P]),
        )

    def hardest(self, labels_N: Tensor, transform: LogitMap) -> Tensor:
        """Of each image rob's logits at the point whose margin under the map is the smallest, shape (N, K)."""
        gaps_P = log_one_minus_signed_margin(transform(self.rob_PK.double()), labels_N[self.image_P])
        ascending_P = gaps_P.argsort(stable=True)
        ranks_P = torch.empty_like(ascending_P)
        ranks_P[ascending_P] = torch.arange(len(ranks_P))
        largest_N = torch.full_like(labels_N, -1).scatter_reduce_(0, self.image_P, ranks_P, "amax")
        return self.rob_PK[ascending_P[largest_N]]


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
        self._done: list[SearchRound] = []

    def run(self, session: RaySession | None, progress: Progress) -> SearchResult:
        """Round after round, until every beta to be measured is kept or `search.rounds` are done."""
        search = self._opened.config.search
        betas = search.measured_betas() if search.rounds else ()
        result = self._choose(self._points)
        while len(self._done) < search.rounds and (attacked := self._unmet(result, betas)):
            self._attack(result, attacked, session, progress)
            held = {beta: entry for beta, entry in result.by_beta().items() if self._is_kept(entry)}
            if all(beta in held for beta in betas):
                break
            result = self._choose(self._points).with_entries(held)
        return replace(result, rounds=tuple(self._done))

    def _unmet(self, result: SearchResult, betas: Sequence[float]) -> list[Choice]:
        entries = result.by_beta()
        return [entries[beta] for beta in betas if beta in entries and not self._is_kept(entries[beta])]

    def _attack(
        self, result: SearchResult, attacked: list[Choice], session: RaySession | None, progress: Progress
    ) -> None:
        number = len(self._done) + 1
        task = self._task(number, attacked, result.surrogate_alpha)
        run_partitions(self._opened, task, session, progress)
        self._take_in(task, attacked)
        self._done.append(self._record(number, task, attacked))
        self._sources.append(stored_points(self._done[-1]))

    def _task(self, number: int, attacked: Sequence[Choice], surrogate_alpha: float) -> RoundTask:
        opened, evaluate = self._opened, self._opened.config.evaluate
        budget = budget_of(evaluate)
        budget = replace(
            budget,
            n_iter=min(budget.n_iter, ROUND_ITERATIONS),
            border_restarts=min(budget.border_restarts, ROUND_RESTARTS),
        )
        mixtures = tuple(entry.mixture() for entry in attacked)
        depends_on = {
            "mixtures": [mixture.settings() for mixture in mixtures],
            "budget": [budget.n_iter, budget.n_target_classes, budget.border_restarts],
            "surrogate": [surrogate_alpha, evaluate.rd, evaluate.mode],
            "points": [[source.stage, source.fingerprint] for source in self._sources],
        }
        return RoundTask(
            stage=round_folder(number),
            fingerprint=digest({"attack": opened.attack_fingerprint, **depends_on}),
            budget=budget,
            mixtures=mixtures,
            attacks=ROUND_ATTACKS,
            mode=evaluate.mode,
            surrogate_alpha=surrogate_alpha,
            rd=evaluate.rd,
            points=tuple(self._sources),
        )

    def _take_in(self, task: RoundTask, attacked: Sequence[Choice]) -> None:
        """Join the round's points to the others."""
        opened = self._opened
        for i, entry in enumerate(attacked):
            names = [f"{name}_{i}" for name in ("tried", "broken", "rob_attacked", "std_attacked")]
            rows = read_columns(opened.store, task.stage, opened.partitions, task.fingerprint, names)
            tried_N, broken_N, rob_NK, std_NK = rows.values()
            image_P = tried_N.nonzero().squeeze(1)
            self._points = self._points.joined(Points(image_P, rob_NK[image_P], std_NK[image_P].argmax(dim=1)))
            self._broken[_mixed(entry)] = broken_N

    def _record(self, number: int, task: RoundTask, attacked: Sequence[Choice]) -> SearchRound:
        receipts = finished_partitions(self._opened, task.stage, task.fingerprint).values()
        return SearchRound(
            round=number,
            fingerprint=task.fingerprint,
            attacked=tuple(attacked),
            kept=tuple(self._kept(entry) for entry in attacked),
            of=int((~self._records.rob_broken_N).sum()),
            n_forward=sum(receipt.n_forward for receipt in receipts),
            n_backward=sum(receipt.n_backward for receipt in receipts),
        )

    def _is_kept(self, entry: Choice) -> bool:
        """Whether the choice was attacked and keeps its share of rob's robust images at all points known by now."""
        n_robust = int((~self._records.rob_broken_N).sum())
        return _mixed(entry) in self._broken and self._kept(entry) >= kept_images(entry.beta, n_robust)

    def _kept(self, entry: Choice) -> int:
        """Images that rob keeps, and the mixture too: on the clean image, at every point, and by the judge."""
        mixture, labels_N = entry.mixture(), self._records.labels_N
        classes_P = mixed_classes(self._points.rob_PK, self._points.std_P, mixture)
        std_clean_N = self._records.std_clean_NK.argmax(dim=1)
        kept_N = mixed_classes(self._records.rob_clean_NK, std_clean_N, mixture) == labels_N
        kept_N &= ~self._records.rob_broken_N & ~self._broken[_mixed(entry)]
        kept_N[self._points.image_P[classes_P != labels_N[self._points.image_P]]] = False
        return int(kept_N.sum())


def round_folder(number: int) -> str:
    """Where a round's rows lie."""
    return f"search/round-{number}"


def stored_points(done: SearchRound) -> StoredPoints:
    """The images that a round has found, for those who try them first."""
    columns = tuple(f"x_adv_{i}" for i in range(len(done.attacked)))
    return StoredPoints(round_folder(done.round), done.fingerprint, columns)


def _mixed(entry: Choice) -> Mixed:
    return entry.scale, entry.power, entry.bias, entry.one_minus_alpha, entry.clamp, entry.ln_k


def eased(entry: Choice, cached: CachedLogits) -> Choice:
    """The same candidate with the cutoff in the middle of the step of its clean count.

    At the order statistic itself one image's margin equals the cutoff: the last bits decide whether it is kept, and an
    attack that lowers its margin by nothing breaks it. A lower cutoff keeps at least as many images, and the clean
    count changes only where the cutoff passes a clean image's gap `p_t - p_k` between M(rob)'s class and std's.
    """
    mapped_BK = entry.transform()(cached.rob_clean_BK.double())
    gaps_B = log_one_minus_gap(mapped_BK, mapped_BK.argmax(dim=1), cached.std_pred_B)
    start = entry.log_one_minus_cutoff
    above_B = gaps_B[(gaps_B > start + STEP_ROUNDING * abs(start)) & (gaps_B < 0)]
    end = float(above_B.min()) if len(above_B) else 0.0
    cutoff = -math.expm1((start + end) / 2)
    return replace(
        entry,
        alpha=1 / (1 + cutoff),
        one_minus_alpha=cutoff / (1 + cutoff),
        log_one_minus_cutoff=(start + end) / 2,
    )
