"""An attack's phases stepped by hand, as the golden tests compare them with the published code, and a slow listener."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from mixednuts_dist.attacks.attack import Arrivals, Attack, Phase, Seen
from mixednuts_dist.attacks.gradient_model import AttackedModel, Outputs
from mixednuts_dist.attacks.lane import Lane, of_same_attempts
from mixednuts_dist.mixing.margins import log_one_minus_signed_margin


@dataclass
class Pass:
    """What one pass over all slots was asked and has shown."""

    x: Tensor
    took_gradient: bool
    wrong: Tensor
    done: Tensor


def stepped(
    attack: Attack,
    phase: Phase,
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    targets: Tensor | None = None,
    ids: Sequence[int] | None = None,
) -> Iterator[Pass]:
    """Every pass of one phase, until all slots have ended it; slots that ended earlier are stepped along."""
    targets, ids, state = y if targets is None else targets, ids or list(range(len(x))), attack.state(x)
    names = [phase.name] * len(x)
    attack.begin(state, torch.arange(len(x)), Arrivals([phase] * len(x), x, x, y, targets, names, ids))
    ended = torch.zeros(len(x), dtype=torch.bool)
    while not bool(ended.all()):
        x_new, with_gradient = attack.propose(state).clone(), attack.takes_gradient
        leaf = x_new.requires_grad_(with_gradient)
        outputs = Outputs(model(leaf))
        objective, grad = outputs.logits.new_empty(0), outputs.logits.new_empty(0)
        if with_gradient:
            objective = attack.objective(state, outputs, y, targets)
            (grad,) = torch.autograd.grad(objective.sum(), leaf)
        logits, x_new = outputs.model_logits, leaf.detach()
        wrong = logits.argmax(dim=1) != y
        seen = Seen(logits, y, targets, log_one_minus_signed_margin(logits, y), wrong, objective.detach(), grad)
        ended = attack.absorb(state, x_new, seen)
        yield Pass(x_new, with_gradient, wrong, ended.clone())


def read_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags are read one step after they were raised, as on a GPU."""
    flags_at_once = Lane._flags

    def late(self: Lane) -> Tensor:
        raised, attempts = flags_at_once(self), self._attempts.clone()
        before, self.__dict__["before"] = self.__dict__.get("before"), (raised.clone(), attempts)
        return torch.zeros_like(raised) if before is None else of_same_attempts(*before, attempts)

    monkeypatch.setattr(Lane, "_flags", late)
    monkeypatch.setattr(Lane, "_lags", True)


def arrivals(
    attack: Attack, x: Tensor, y: Tensor, *, phase: Phase | None = None, targets: Tensor | None = None
) -> Arrivals:
    """Images that begin the attack's first phase, with the ids 0, 1, ..."""
    phase = phase or attack.phases()[0]
    name = phase.name.format(rank=2)
    return Arrivals([phase] * len(x), x, x, y, y if targets is None else targets, [name] * len(x), range(len(x)))


def one_pass(attack: Attack, state: object, model: nn.Module, labels: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """One round of an attack by hand: (where it was evaluated, whose phase has ended)."""
    x_new = attack.propose(state).clone()
    leaf = x_new.clone().requires_grad_()
    outputs = AttackedModel.of(model).fast.run(leaf)
    value = attack.objective(state, outputs, labels, targets)
    (grad,) = torch.autograd.grad(value.sum(), leaf)
    logits = outputs.model_logits
    seen = Seen(
        logits, labels, targets, log_one_minus_signed_margin(logits, labels), logits.argmax(dim=1) != labels,
        value.detach(), grad,
    )  # fmt: skip
    return x_new, attack.absorb(state, attack.propose(state), seen)


def iterates(attack: Attack, model: nn.Module, x: Tensor, y: Tensor, targets: Tensor | None = None) -> list[Tensor]:
    """All points that the attack's first phase evaluates."""
    targets = y if targets is None else targets
    phase = attack.phases()[0]
    attack = phase.stepper
    state, seen = attack.state(x), []
    attack.begin(state, torch.arange(len(x)), arrivals(attack, x, y, phase=phase, targets=targets))
    ended = torch.zeros(len(x), dtype=torch.bool)
    while not bool(ended.all()):
        x_new, ended = one_pass(attack, state, model, y, targets)
        seen.append(x_new)
    return seen
