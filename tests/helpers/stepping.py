"""Step an attack's runs one pass at a time, to compare them with the published code."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mixednuts_dist.attacks.attack import Attack
from mixednuts_dist.attacks.gradient_model import AttackedModel
from mixednuts_dist.attacks.stepper import Run, StartBatch, Stepper, StepResult
from mixednuts_dist.mixing.margins import log_one_minus_signed_margin
from mixednuts_dist.norms.random import key_number


@dataclass
class Pass:
    """The images and outputs of one pass over all slots."""

    x: Tensor
    took_gradient: bool
    wrong: Tensor
    done: Tensor


def start_keys(name: str, n: int, seed: int = 0) -> Tensor:
    """Return the keys of the random starts of a run on the images 0 .. n - 1, (n,)."""
    return torch.tensor([key_number(seed, name, 0, i) for i in range(n)])


def started(
    run: Run, x: Tensor, y: Tensor, targets: Tensor | None = None, ids: Sequence[int] | None = None
) -> StartBatch:
    """Images that begin a run, with the ids 0, 1, ... unless they are given."""
    names = [run.name.format(rank=2)] * len(x)
    return StartBatch([run] * len(x), x, x, y, y if targets is None else targets, names, ids or range(len(x)))


def one_pass(
    stepper: Stepper[Any],
    state: Any,
    model: Callable[[Tensor], Tensor],
    y: Tensor,
    targets: Tensor,
    *,
    gradient: bool = True,
) -> Pass:
    """Step all slots once."""
    x = stepper.ask(state)
    leaf = x.clone().requires_grad_(gradient)
    outputs = AttackedModel.of(model).fast.run(leaf)
    loss, grad = outputs.logits.new_empty(0), outputs.logits.new_empty(0)
    if gradient:
        loss = stepper.loss(state, outputs, y, targets)
        (grad,) = torch.autograd.grad(loss.sum(), leaf)
    logits = outputs.model_logits
    wrong = logits.argmax(dim=1) != y
    result = StepResult(logits, y, targets, log_one_minus_signed_margin(logits, y), wrong, loss.detach(), grad)
    return Pass(leaf.detach(), gradient, wrong, stepper.tell(state, x, result).clone())


def stepped(
    run: Run,
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    targets: Tensor | None = None,
    ids: Sequence[int] | None = None,
    state: Any = None,
) -> Iterator[Pass]:
    """Every pass of one run, until all slots have ended it; slots that ended earlier are stepped along."""
    stepper, targets = run.stepper, y if targets is None else targets
    state = stepper.init(x) if state is None else state
    stepper.start(state, torch.arange(len(x)), started(run, x, y, targets, ids))
    over, n = torch.zeros(len(x), dtype=torch.bool), 0
    while not bool(over.all()):
        every = stepper.gradient_every
        seen = one_pass(stepper, state, model, y, targets, gradient=every > 0 and n % every == 0)
        over, n = seen.done, n + 1
        yield seen


def iterates(
    attack: Attack, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, targets: Tensor | None = None
) -> list[Tensor]:
    """All points that the attack's first run evaluates."""
    return [each.x for each in stepped(attack.runs()[0], model, x, y, targets)]
