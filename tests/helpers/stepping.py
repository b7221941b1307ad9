"""Step an attack's runs one pass at a time, to compare them with the published code."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mixednuts_dist.attacks.attack import Run, StartBatch, StepResult
from mixednuts_dist.attacks.gradient_model import AttackedModel
from mixednuts_dist.mixing.margins import log_one_minus_signed_margin
from mixednuts_dist.norms.random import key_number


@dataclass
class Pass:
    """The images and outputs of one pass over all slots."""

    x: Tensor
    took_gradient: bool
    wrong: Tensor
    done: Tensor


def start_keys(name: str, n: int, seed: int = 0, restart: int = 0) -> Tensor:
    """Return the keys of the random numbers of a run on the images 0 .. n - 1, (n,)."""
    return torch.tensor([key_number(seed, name, restart, i) for i in range(n)])


def started(run: Run, x: Tensor, keys: Tensor | None = None) -> StartBatch:
    """Images that begin a run, with the ids 0, 1, ... unless their keys are given."""
    name = f"{run.name}/2" if run.target else run.name
    keys = start_keys(name, len(x), restart=run.restart) if keys is None else keys
    return StartBatch([run] * len(x), x, x, keys)


def stepped(
    run: Run,
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    targets: Tensor | None = None,
    keys: Tensor | None = None,
    state: Any = None,
) -> Iterator[Pass]:
    """Every pass of one run, until all slots have ended it; slots that ended earlier are stepped along."""
    stepper = run.stepper
    state = stepper.init(x) if state is None else state
    state.x[:], state.labels[:], state.targets[:], state.n_passes[:] = x, y, y if targets is None else targets, 0
    stepper.start(state, torch.arange(len(x)), started(run, x, keys))
    over, n = torch.zeros(len(x), dtype=torch.bool), 0
    while not bool(over.all()):
        asked, gradient = stepper.ask(state), stepper.gradient_every > 0 and n % stepper.gradient_every == 0
        leaf = asked.clone().requires_grad_(gradient)
        outputs = AttackedModel.of(model).fast.run(leaf)
        logits, loss, grad = outputs.model_logits, outputs.logits.new_empty(0), outputs.logits.new_empty(0)
        if gradient:
            loss = stepper.loss(state, outputs)
            (grad,) = torch.autograd.grad(loss.sum(), leaf)
        wrong, log1m_margin = logits.argmax(dim=1) != y, log_one_minus_signed_margin(logits, y)
        result = StepResult(logits, log1m_margin, wrong, loss.detach(), grad)
        state.n_passes += 1
        over, n = stepper.tell(state, asked, result).clone(), n + 1
        yield Pass(leaf.detach(), gradient, wrong, over)


def iterates(
    run: Run, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, targets: Tensor | None = None
) -> list[Tensor]:
    """All points that the run evaluates."""
    return [each.x for each in stepped(run, model, x, y, targets)]
