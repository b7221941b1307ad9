"""Compare the robust images here with pyautoattack's, for any norm, version and defense, in one process.

Run `python -m benchmarks.threats --help`. Tables go to stderr in Markdown, and all numbers as JSON to stdout. Both
packages receive the same images, radius, version, iterations, targets and queries. The float32 verification decides
whether an image is broken. An adversarial example of pyautoattack outside the ball does not count. A pass is one image
through the network, forward or backward.

Shapes: B images of C x H x W.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import click
import torch
from torch import Tensor, nn

from benchmarks.defenses import Defense, defense_named
from mixednuts_dist.acceleration.batch_shape import shape_of
from mixednuts_dist.attacks.budget import AttackBudget
from mixednuts_dist.attacks.draws import Draws, misclassified_share
from mixednuts_dist.attacks.verification import Verifier
from mixednuts_dist.benchmarks.attack_benchmark import attacked_here, differentiable, say
from mixednuts_dist.classifiers.base_classifiers import load_classifier
from mixednuts_dist.classifiers.straight_through import straight_through
from mixednuts_dist.config.section import read_fraction
from mixednuts_dist.config.threat import ThreatModel
from mixednuts_dist.config.versions import version_named
from mixednuts_dist.errors import InvalidInputError
from mixednuts_dist.images.datasets import open_dataset
from mixednuts_dist.norms.ball import ball_of
from mixednuts_dist.reports.table import Cell, Table
from mixednuts_dist.stages.published import pyautoattack_images

SEEDS = (0, 1)  # for attacks on random classifiers
_HERE, _THERE = "here", "pyautoattack"
_COLUMNS = [
    "threat", "attacks", "clean", _HERE, _THERE, "robust here only", f"robust for {_THERE} only",
    f"passes per image, {_HERE}", f"passes, {_THERE}", "ratio",
]  # fmt: skip


@dataclass(frozen=True)
class Contest:
    """The classifier, images and attacks that both packages use."""

    model: nn.Module
    x: Tensor
    y: Tensor
    clean: Tensor  # (B,) bool: images to count, which are right without an attack
    threat: ThreatModel
    budget: AttackBudget

    @property
    def settings(self) -> dict[str, Any]:
        """Return the arguments of both packages' attacks."""
        return {"threat": self.threat, "budget": self.budget, "seed": SEEDS[0]}

    def standing(self, x_adv: Tensor) -> Tensor:
        """Return the images that remain robust, (B,) bool; an example outside the ball or [0, 1] breaks nothing."""
        right = ~Verifier(self.model, shape_of(None, self.model, self.x)).verify(x_adv, self.y).wrong
        inside = ball_of(self.threat).contains(x_adv, self.x) & (x_adv >= 0).flatten(1).all(dim=1)
        return self.clean & (right | ~(inside & (x_adv <= 1).flatten(1).all(dim=1)))


@dataclass(frozen=True)
class Side:
    """The outcome of one package's attack."""

    standing: Tensor  # (B,) bool, the images that remain robust
    n_passes: int


def run(
    *,
    model: str = "demo:rob",
    data: str = "digits",
    n_images: int = 100,
    threats: Sequence[str] = ("Linf:0.12",),
    versions: Sequence[str] = ("standard",),
    individual: bool = False,
    behind: str | None = None,
    n_iter: int = 100,
    n_target_classes: int = 9,
    n_queries: int = 5000,
) -> dict[str, Any]:
    """Attack with both packages, and return the robust images, the images that only one package breaks, and the passes.

    Args:
        model, data: URIs.
        n_images: the first of `data`.
        threats: norms and radii, e.g. `L1:12` or `Linf:8/255`.
        versions: AutoAttack's versions; `rand` for random classifiers, whose results are averages over new draws.
        individual: also run each attack of a version alone on all images.
        behind: a defense before the classifier and its strength, e.g. `noise:0.1` (`defenses.py`). If the defense masks
            the gradient, attacks through a handwritten backward pass are compared too.
        n_iter, n_target_classes, n_queries: budgets, at most; the published ones by default.

    Raises:
        InvalidInputError: for an unknown threat, version or defense.
    """
    network, (x, y) = load_classifier(model, "rob"), open_dataset(data).read(0, n_images)
    defense, strength = defense_named(behind) if behind else (Defense(lambda net, _: net), 0.0)
    attacked, budget = defense.behind(network, strength).eval(), AttackBudget(n_iter, n_target_classes, n_queries)
    contests = [
        Contest(attacked, x, y, torch.ones_like(y, dtype=torch.bool), threat, budget)
        for threat in map(_threat, threats)
    ]
    say(
        f"{model}{f' behind {behind}' if behind else ''}, the first {n_images} images of {data}; {n_iter} iterations, "
        f"{n_target_classes} targets, {n_queries} queries"
    )
    tables: dict[str, list[list[Cell]]] = {}

    def add(kind: str, rows: list[list[Cell]]) -> None:
        for row in rows:
            say("  ".join(str(cell) for cell in row))
        tables.setdefault(kind, []).extend(rows)

    for given in contests:
        for version in versions:
            if version_named(version).eot is not None:
                add("random", _random(given, version))
                continue
            contest = replace(given, clean=given.standing(x))
            if defense.by_hand is None:
                add("versions", [_versions(contest, version)])
            else:
                add("masked gradients", _masked(contest, version, defense.by_hand(network, strength).eval()))
            if individual:
                add("individual", _individual(contest, version))
    shown = {kind: Table(_HEADS.get(kind, _COLUMNS), rows) for kind, rows in tables.items()}
    say("\n" + "\n\n".join(table.as_markdown() for table in shown.values()))
    return {kind: [dict(zip(table.columns, row, strict=True)) for row in table.rows] for kind, table in shown.items()}


def _threat(text: str) -> ThreatModel:
    norm, _, radius = text.partition(":")
    try:
        eps = float(str(read_fraction(radius)))
    except ValueError:
        raise InvalidInputError(
            f"threat={text!r} is not a norm and radius. Write Linf:8/255, L2:0.5 or L1:12"
        ) from None
    return ThreatModel(norm, eps)


def _versions(contest: Contest, version: str) -> list[Cell]:
    here, there = _here(contest, contest.model, version=version), _there(contest, contest.model, version)
    return _row(contest, version, here, there)


def _row(contest: Contest, attacks: str, here: Side, there: Side) -> list[Cell]:
    n = len(contest.y)
    passes_here, passes_there = here.n_passes / n, there.n_passes / n
    only_here, only_there = here.standing & ~there.standing, there.standing & ~here.standing
    return [
        str(contest.threat), attacks, int(contest.clean.sum()), int(here.standing.sum()), int(there.standing.sum()),
        _ids(only_here), _ids(only_there), passes_here, passes_there, passes_here / passes_there,
    ]  # fmt: skip


def _ids(chosen: Tensor) -> str:
    return ", ".join(map(str, chosen.nonzero().squeeze(1).tolist())) or "none"


def _here(contest: Contest, model: nn.Module, **options: Any) -> Side:
    found = attacked_here(model, contest.x, contest.y, **{**contest.settings, **options})
    return Side(contest.standing(found.x_adv), found.n_forward + found.n_backward)


def _there(contest: Contest, model: nn.Module, version: str, attacks: Sequence[str] | None = None) -> Side:
    x_adv, n_forward, n_backward = pyautoattack_images(
        differentiable(model),
        contest.x,
        contest.y,
        version=version,
        attacks=attacks,
        batch_size=len(contest.x),
        **contest.settings,
    )
    return Side(contest.standing(x_adv), n_forward + n_backward)


def _individual(contest: Contest, version: str) -> list[list[Cell]]:
    """Return one row per attack, and one for the images that remain robust after all of them."""
    rows, left = [], [Side(contest.clean, 0), Side(contest.clean, 0)]
    for attack in version_named(version).attacks:
        sides = [
            _here(contest, contest.model, version=version, attacks=(attack,)),
            _there(contest, contest.model, version, attacks=(attack,)),
        ]
        rows.append(_row(contest, f"{attack} alone", *sides))
        left = [
            Side(before.standing & side.standing, before.n_passes + side.n_passes)
            for before, side in zip(left, sides, strict=True)
        ]
    return [*rows, _row(contest, f"all of {version}", *left)]


def _masked(contest: Contest, version: str, by_hand: nn.Module) -> list[list[Cell]]:
    """Compare attacks on the masked gradient, through `straight_through`, and through a handwritten backward pass.

    The drop is measured with our attack and the same random starts, so that only the backward passes differ.
    """
    sides = {
        _THERE: _there(contest, contest.model, version),
        f"{_HERE}, masked": _here(contest, contest.model, version=version),
        _HERE: _here(contest, straight_through(contest.model), version=version),
        f"{_HERE}, by hand": _here(contest, by_hand, version=version),
        f"{_THERE}, by hand": _there(contest, by_hand, version),
    }
    left = {name: int(side.standing.sum()) for name, side in sides.items()}
    blind, by_hand_left = left[f"{_HERE}, masked"], left[f"{_HERE}, by hand"]
    return [
        [
            str(contest.threat), f"{version}: {name}", int(contest.clean.sum()), left[name],
            100 * (blind - left[name]) / max(1, blind - by_hand_left), side.n_passes / len(contest.y),
        ]
        for name, side in sides.items()
    ]  # fmt: skip


def _random(contest: Contest, version: str) -> list[list[Cell]]:
    """Compare the robust images after our attack with two seeds and after theirs, evaluated on new draws."""
    threat, y, n = str(contest.threat), contest.y, len(contest.y)
    rows = shape_of(None, contest.model, contest.x).rows
    eot = version_named(version).eot or 1

    def robust(x_adv: Tensor) -> Tensor:
        draws = Draws(contest.model, eot, SEEDS[0])
        return misclassified_share(draws, x_adv, y, rows=max(1, rows // eot)) < 0.5

    sides: dict[str, Side] = {}
    with _seeded(SEEDS[0]):
        clean = robust(contest.x)
    for seed in SEEDS:
        with _seeded(seed):
            found = attacked_here(contest.model, contest.x, y, **{**contest.settings, "version": version, "seed": seed})
            sides[f"{_HERE}, seed {seed}"] = Side(found.robust, found.n_forward + found.n_backward)
    with _seeded(SEEDS[0]):
        x_adv, *passes = pyautoattack_images(
            differentiable(contest.model), contest.x, y, version=version, batch_size=n, **contest.settings
        )
        sides[_THERE] = Side(robust(x_adv), sum(passes))
    first = next(iter(sides.values())).standing
    return [
        [
            threat, name, int(clean.sum()), int(side.standing.sum()), int((side.standing != first).sum()),
            side.n_passes / n,
        ]
        for name, side in sides.items()
    ]  # fmt: skip


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch's generator, so that the classifier's draws repeat."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


_HEADS = {
    "masked gradients": [
        "threat", "attack", "clean", "robust", "percent of the drop with handwritten gradients", "passes per image",
    ],
    "random": ["threat", "attack", "clean", "robust", "results that differ from the first row", "passes per image"],
}  # fmt: skip


@click.command()
@click.option("--model", metavar="URI", default="demo:rob")
@click.option("--data", metavar="URI", default="digits")
@click.option("-n", "n_images", type=int, default=100, help="Number of images.")
@click.option("--threat", "threats", metavar="NORM:EPS", multiple=True, default=["Linf:0.12"])
@click.option("--version", "versions", multiple=True, default=["standard"], help="standard, plus or rand.")
@click.option("--individual", is_flag=True, help="Also run each attack of a version alone.")
@click.option("--behind", metavar="KIND:STRENGTH", help="A defense: noise, dropout, rounded or jpeg.")
@click.option("--n-iter", type=int, default=100)
@click.option("--n-target-classes", type=int, default=9)
@click.option("--n-queries", type=int, default=5000)
def main(**options: Any) -> None:
    """Compare the robust images here with those of pyautoattack."""
    click.echo(json.dumps(run(**options), indent=2))


if __name__ == "__main__":
    main()
