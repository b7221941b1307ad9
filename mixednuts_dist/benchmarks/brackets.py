"""What is certified beside what the strongest attacks leave: the truth lies between, and nothing certified may fall.

Run: `mixednuts benchmark brackets`, L2 by smoothing on the digits, or with `--bounds --eps 2/255` and URIs of your own,
Linf by bounds. The whole adaptive AutoAttack, with its published budget, attacks the mixture at every image that is
certified there. For bounds MMAA on rob's margin at every image says too what a std that is hostile everywhere would
leave at each alpha. What is found for parts of the images (`--skip`) adds up.
The tables go to stderr, all numbers as JSON to stdout.

Shapes: B images of C x H x W, N of them certified, D draws, K classes.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..attacks.adaptive import adaptive_autoattack
from ..attacks.budget import AttackBudget
from ..attacks.minimum_margin import minimum_margin_attack
from ..certification.answers import ROB_ALONE, Answers, BoundedAnswers, SmoothedAnswers
from ..certification.linear_bounds import logit_bounds
from ..certification.smoothed_mixture import ABSTAINS, SmoothedMixture
from ..certification.smoothing import SmoothingPlan, noisy, smoothed_votes
from ..classifiers.base_classifiers import load_classifier
from ..config.search_config import SearchConfig
from ..config.threat import ThreatModel
from ..images.datasets import open_dataset
from ..mixing.certificates import cutoff_of
from ..mixing.classifier import MixedClassifier
from ..mixing.margins import signed_margin
from ..mixing.mixture import Mixture
from ..mixing.transforms import IdentityTransform, LogitMap
from ..reports.table import Cell, Table
from ..selection.certified import certified_selection
from ..stages.choosing import grid_of

ALPHAS = (1.0, 0.9, 0.8, 0.7)
SIGMA, CONFIDENCE = 0.25, 0.999
ATTACKED_ALPHA = 0.8  # of the smoothed mixture that AutoAttack is run on
BETA = 0.95  # of the mixture that is chosen by certificates, for bounds
_ATTACK_DRAWS = (4, 32, 256)  # that AutoAttack averages over; more where other draws deny what fewer said
_JUDGED = 10_000  # draws that judge an attacked image
_SHARPNESS = 4.0  # of an attacked vote: near the hard vote that is certified, and with a gradient
_OTHER_SEED = 1  # of those, which no attack has seen
_ROWS = 256
_COLUMNS = ("rob's logits", "alpha", "certified", "attacked leaves", "certified and fell")  # the last two for bounds


def run(
    n_images: int = 899,
    model: str = "demo:noisy",
    std: str = "demo:std",
    data: str = "digits",
    eps: float = 0.25,
    draws: int = 1000,
    *,
    bounds: bool = False,
    skip: int = 0,
    budget: AttackBudget | None = None,
) -> dict[str, Any]:
    """Certified images, what the attacks leave, and how many certified images fell, which should be none.

    Args:
        n_images, skip: the images of `data` after the first `skip`.
        model, std, data: URIs of rob, std and the images.
        eps: the radius, in L2 or, for bounds, in Linf.
        draws: that bound a vote.
        bounds: certify by bounds in place of smoothing.
        budget: of both attacks; the published ones by default.
    """
    x, y = open_dataset(data).read(skip, skip + n_images)
    pair = _Pair(load_classifier(std, "std"), load_classifier(model, "rob"), x, y, range(skip, skip + len(x)))
    found = (_by_bounds if bounds else _by_smoothing)(pair, eps, draws, budget or AttackBudget())
    norm = "Linf, by bounds" if bounds else f"L2, by smoothing (sigma {SIGMA:g}, {draws:,} draws)"
    table = Table(list(_COLUMNS[: len(found.rows[0])]), found.rows)
    _say(f"{model} on {len(x)} images of {data}, {found.n_right} right; radius {eps:.4g} in {norm}")
    _say(table.as_markdown())
    n_fell, n_undecided = found.attack() if found.n_certified else (0, 0)
    _say(
        f"adaptive AutoAttack on {found.mixture}: of {found.n_certified} certified images {n_fell} fell, "
        f"{n_undecided} undecided"
    )
    autoattack = {
        "mixture": found.mixture, "certified": found.n_certified, "fell": n_fell, "undecided": n_undecided
    }  # fmt: skip
    brackets = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    return {"right": found.n_right, "brackets": brackets, "autoattack": autoattack}


@dataclass(frozen=True)
class _Pair:
    std: nn.Module
    rob: nn.Module
    x: Tensor
    y: Tensor
    sample_ids: range  # of the images, which key their draws


@dataclass(frozen=True)
class _Found:
    n_right: int  # of rob's classes, or votes
    rows: list[list[Cell]]
    mixture: str  # that AutoAttack is to be run on
    n_certified: int
    attack: Callable[[], tuple[int, int]]  # does so; certified images that fell, and that are undecided


def _by_bounds(pair: _Pair, eps: float, _draws: int, budget: AttackBudget) -> _Found:
    """The M that the search by certificates chooses, and none, at each alpha."""
    boxes = [logit_bounds(pair.rob, pair.x[[i]], pair.y[[i]], eps).box for i in range(len(pair.x))]
    ends = (torch.cat([getattr(box, f"{end}_BK") for box in boxes])[:, None] for end in ("lower", "upper", "leads"))
    with torch.no_grad():
        answers = BoundedAnswers((eps,), pair.y, pair.std(pair.x).argmax(dim=1), pair.rob(pair.x), *ends)
    chosen = certified_selection(answers.rows(eps), grid_of(SearchConfig(beta=BETA))).for_beta(BETA)
    maps: dict[str, LogitMap] = {"as they are": IdentityTransform(), _words(chosen.at): chosen.transform()}
    threat, margins = ThreatModel("Linf", eps), {}
    for name, transform in maps.items():
        x_adv = _smallest_margins(nn.Sequential(pair.rob, transform), pair, threat, budget)
        with torch.no_grad():
            margins[name] = signed_margin(transform(pair.rob(x_adv).double()).softmax(dim=1), pair.y)
    alphas = (*ALPHAS, chosen.alpha)
    mixtures = {(name, alpha): _mixture(transform, alpha) for name, transform in maps.items() for alpha in alphas}
    held_B = answers.certified(chosen.mixture(), eps)

    def attack() -> tuple[int, int]:
        mixed = MixedClassifier.from_mixture(pair.std, pair.rob, chosen.mixture())
        outcome = adaptive_autoattack(mixed, pair.x[held_B], pair.y[held_B], threat=threat, budget=budget)
        return int((~outcome.robust).sum()), int((~outcome.decided).sum())

    words = f"M {_words(chosen.at)} at alpha {chosen.alpha:.4g}"
    rows, n_right = _rows(answers, mixtures, eps, margins), int(answers.clean(ROB_ALONE).sum())
    return _Found(n_right, rows, words, int(held_B.sum()), attack)


def _by_smoothing(pair: _Pair, eps: float, draws: int, budget: AttackBudget) -> _Found:
    """The attack sees an average over a few draws; other draws judge."""
    plan = SmoothingPlan(SIGMA, draws, CONFIDENCE, 100, ALPHAS, (eps,), stop_when_decided=False)
    with torch.no_grad():
        n_classes, std_pred = pair.rob(pair.x[:1]).shape[1], pair.std(pair.x).argmax(dim=1)
        votes = smoothed_votes(
            pair.rob, pair.x, pair.y, plan, n_classes=n_classes, sample_ids=pair.sample_ids, seed=0, rows=_ROWS
        )
    answers = SmoothedAnswers(plan, pair.y, std_pred, votes.chosen_counts_BK, votes.counts_BK, votes.n_drawn_B)
    rows: list[list[Cell]] = [
        ["votes", alpha, int(answers.certified(_mixture(IdentityTransform(), alpha), eps).sum())] for alpha in ALPHAS
    ]
    held_B = answers.certified(_mixture(IdentityTransform(), ATTACKED_ALPHA), eps)

    def mixed(rob: nn.Module) -> MixedClassifier:
        return MixedClassifier(pair.std, rob, IdentityTransform(), ATTACKED_ALPHA)

    def attack() -> tuple[int, int]:
        judge = SmoothedMixture(mixed(pair.rob), sigma=SIGMA, confidence=CONFIDENCE, seed=_OTHER_SEED)
        x, y, n_fell = pair.x[held_B], pair.y[held_B], 0
        for n_draws in _ATTACK_DRAWS:
            averaged = mixed(_Average(pair.rob, x[0], n_draws))
            outcome = adaptive_autoattack(
                averaged,
                x,
                y,
                threat=ThreatModel("L2", eps),
                budget=budget,
                batch_size=min(_ROWS, len(x)),
                precision="fp32",
            )
            fooled = ~outcome.robust
            classes = judge.predict(outcome.x_adv[fooled], _JUDGED) if bool(fooled.any()) else y[:0]
            denied = (classes == y[fooled]) | (classes == ABSTAINS)
            n_fell += int((~denied).sum())
            x, y = x[fooled][denied], y[fooled][denied]
            _say(f"{n_draws} draws: {int(fooled.sum())} fooled, {len(x)} of them denied by {_JUDGED:,} other draws")
            if not len(x):
                break
        return n_fell, len(x)

    n_right = int(answers.clean(ROB_ALONE).sum())
    return _Found(n_right, rows, f"the mean vote at alpha {ATTACKED_ALPHA:g}", int(held_B.sum()), attack)


def _rows(
    answers: Answers, mixtures: Mapping[tuple[str, float], Mixture], eps: float, margins: Mapping[str, Tensor]
) -> list[list[Cell]]:
    """An attacked image is left where rob's smallest margin there is above the cutoff."""
    rows: list[list[Cell]] = []
    for (name, alpha), mixture in mixtures.items():
        certified_B = answers.certified(mixture, eps)
        left_B = margins[name] > cutoff_of(alpha)
        fell = int((certified_B & ~left_B).sum())
        rows.append([name, alpha, int(certified_B.sum()), int(left_B.sum()), fell])
    return rows


def _smallest_margins(model: nn.Module, pair: _Pair, threat: ThreatModel, budget: AttackBudget) -> Tensor:
    """Where MMAA found the smallest margin of each image."""
    return minimum_margin_attack(
        model, pair.x, pair.y, threat=threat, n_iter=budget.n_iter, n_target_classes=budget.n_target_classes,
        stop_when_broken=False,
    ).x_adv  # fmt: skip


class _Average(nn.Module):
    """Rob's vote averaged over fixed draws, as logits: a network with gradients, whose draws an attack sees."""

    def __init__(self, rob: nn.Module, like_CHW: Tensor, n_draws: int) -> None:
        super().__init__()
        noise_DCHW = noisy(torch.zeros_like(like_CHW), SIGMA, 0, -1, 0, n_draws)
        self.rob = rob
        self.register_buffer("noise_DCHW", noise_DCHW)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """The log of the mean vote, (B, K): as sums of logs, which do not saturate."""
        noisy_BDCHW = x_BCHW[:, None] + self.get_buffer("noise_DCHW")
        votes_BDK = self.rob(noisy_BDCHW.flatten(0, 1)).unflatten(0, noisy_BDCHW.shape[:2])
        mean_BK: Tensor = (_SHARPNESS * votes_BDK).log_softmax(dim=2).logsumexp(dim=1)
        return mean_BK


def _mixture(transform: LogitMap, alpha: float) -> Mixture:
    return Mixture(transform, alpha, 1 - alpha)


def _words(at: tuple[float, float, float]) -> str:
    return "({:.4g}, {:.4g}, {:.4g})".format(*at)


def _say(line: str) -> None:
    """To stderr: stdout carries the JSON."""
    print(f"{line}\n", file=sys.stderr, flush=True)
