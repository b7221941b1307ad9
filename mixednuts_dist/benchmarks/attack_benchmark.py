"""Compare standard AutoAttack here with pyautoattack's, on the same classifier, images, radius and budgets.

Shapes: B images of C x H x W.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..acceleration.precision import FastCopies
from ..acceleration.tf32 import tf32_allowed
from ..attacks.adaptive import autoattack
from ..attacks.budget import STANDARD_ATTACKS, AttackBudget
from ..attacks.result import AttackResult
from ..classifiers.base_classifiers import load_classifier
from ..classifiers.factories import DEMO_EPS
from ..config.threat import ThreatModel
from ..errors import InvalidInputError
from ..images.datasets import open_dataset
from ..mixing.classifier import MixedClassifier
from ..stages.published import pyautoattack_images

PUBLISHED_BUDGET = AttackBudget(border_restarts=0, joint_starts=0)
_WARM_UP = AttackBudget(2, 1, 1, border_restarts=0, joint_starts=0)


@dataclass(frozen=True)
class Subject:
    """A classifier, and images that it classifies correctly."""

    network: nn.Module
    x: Tensor  # (B, C, H, W)
    y: Tensor  # (B,)
    eps: float  # Linf


def subject(model: str, data: str, eps: float, n_images: int, device: torch.device) -> Subject:
    """Return the classifier of a URI, and the first `n_images` of its correct images among 2,000 of a dataset."""
    network, dataset = load_classifier(model).to(device), open_dataset(data)
    x, y = (values.to(device) for values in dataset.read(0, min(2000, len(dataset))))
    right = torch.cat([network(part).argmax(dim=1) for part in torch.split(x, 100)]) == y
    return Subject(network, x[right][:n_images], y[right][:n_images], eps)


def run(
    *, model: str = "demo:rob", data: str = "digits", eps: float | None = None, n_images: int = 40
) -> dict[str, Any]:
    """Attack the same images with both packages, report on stderr, and return the numbers.

    A `MixedClassifier` (the URI of a function that returns one) is attacked with its gradient bypass, and
    pyautoattack receives `as_bypass()`.

    Raises:
        InvalidInputError: for another classifier without `eps`.
        MixedNutsError: for a classifier or dataset that cannot be opened.
    """
    if eps is None and model != "demo:rob":
        raise InvalidInputError(f"--model {model} needs the radius of its threat model. Add --eps")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    attacked = subject(model, data, eps or DEMO_EPS, n_images, device)
    where = torch.cuda.get_device_name() if attacked.x.is_cuda else f"CPU, {torch.get_num_threads()} threads"
    threat, rows = ThreatModel("Linf", attacked.eps), len(attacked.x)
    described = f"{model}, {rows} images: {data}; {threat}"
    say(f"{described}; {where}; standard AutoAttack")

    def theirs(budget: AttackBudget) -> Tensor:
        """Return the images on which pyautoattack leaves the classifier robust in full float32, (B,) bool."""
        x_adv, _, _ = pyautoattack_images(
            differentiable(attacked.network), attacked.x, attacked.y, threat=threat, budget=budget, seed=0,
            batch_size=rows, attacks=STANDARD_ATTACKS,
        )  # fmt: skip
        with tf32_allowed(False), torch.no_grad():
            return torch.as_tensor(attacked.network(x_adv).argmax(dim=1) == attacked.y)

    ours = partial(
        attacked_here, attacked.network, attacked.x, attacked.y, threat=threat, precision=FastCopies("auto"),
        batch_size=rows if attacked.x.is_cuda else None,  # pyautoattack receives all images at once
    )  # fmt: skip
    theirs(_WARM_UP)
    ours(budget=_WARM_UP)  # network copies are made and tried before the clock runs
    their_seconds, robust_theirs = _timed(lambda: theirs(PUBLISHED_BUDGET))
    seconds, found = _timed(lambda: ours(budget=PUBLISHED_BUDGET))
    robust, n_theirs = found.robust.to(robust_theirs.device), int(robust_theirs.sum())
    here = {
        "seconds": seconds,
        "speedup": their_seconds / seconds,
        "robust": int(robust.sum()),
        "broken_by_pyautoattack_only": (robust & ~robust_theirs).nonzero().squeeze(1).tolist(),
        "broken_here_only": (robust_theirs & ~robust).nonzero().squeeze(1).tolist(),
        "survived": {attack: int(survived.sum()) for attack, survived in found.survived.items()},
        "n_forward": found.n_forward,
        "n_backward": found.n_backward,
    }
    say(f"{here['speedup']:.2f}x as fast as pyautoattack; robust: {here['robust']}, pyautoattack {n_theirs}")
    return {
        "subject": described,
        "device": where,
        "here": here,
        "pyautoattack": {"seconds": their_seconds, "robust": n_theirs},
    }


def _timed(attack: Callable[[], Any]) -> tuple[float, Any]:
    def wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    wait()
    started = time.perf_counter()
    found = attack()
    wait()
    return time.perf_counter() - started, found


def attacked_here(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> AttackResult:
    """Run `autoattack`, for a `MixedClassifier` in the mode that pyautoattack supports too."""
    outcome = autoattack(model, x, y, mode="bypass", **options)
    if not bool(outcome.decided.all()):  # an interrupted attack is not a measurement
        raise KeyboardInterrupt
    return outcome


def differentiable(model: nn.Module) -> nn.Module:
    """Return the classifier for pyautoattack; a `MixedClassifier` has its surrogate's gradient."""
    return model.as_bypass() if isinstance(model, MixedClassifier) else model


def say(line: str) -> None:
    """Print to stderr; stdout carries the JSON."""
    print(line, file=sys.stderr, flush=True)
