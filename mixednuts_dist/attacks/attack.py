"""Attacks: a registered function plans the runs, and a `Stepper` takes their steps for many images at a time.

To add an attack, register a function `Setting -> runs` in its own file, in this folder or anywhere else (then name the
file in the configuration: `extensions: [my_attack.py]`). `examples/pgd.py` is a complete one.

`options` lists the keys of the budget that the attack uses. The decorator also takes `norms` (by default, the attack
supports all of them), `gradients=False` (the attack may run on black boxes; then set `Stepper.gradient_every = 0`),
`mixtures_only`, and `then_on_mixtures`: attacks that follow on mixed classifiers and are reported under this name.

The scheduler does the rest (`scheduler.py`). It keeps each run's point with the smallest margin and verifies it. An
image takes the runs of a plan one after another. Only consecutive runs with the same `Run.block` and the same stepper
may run on an image at the same time, because none of them needs the result of another one. If several of them break
the image, the first one in the plan counts.

A `Stepper` has no state: the object that `init` returns holds the state of all slots of a batch. Further settings are
fields of a frozen dataclass, and runs with equal steppers share a batch. Each step of a batch calls, for all slots at
once,

    x = ask(state)                   where each slot wants to be evaluated
    outputs = model(x)               one forward pass in the run's batch shape
    loss(state, outputs)             and its gradient, one backward pass, if a gradient is due
    over = tell(state, x, result)    which runs are over

The contract:
- Slots are independent. Nothing computed for one slot may depend on another one or on the number of slots. Slots
  without a run hold old values, and all functions compute them as well.
- Random numbers come from `norms/random.py` and `StartBatch.keys`, or from `StartBatch.start`.
- `ask` may be called again with the same state after memory ran out, so it must not change the state. It may
  return an array of the state. The points lie in the ball and in [0, 1]. An attack that also searches outside of the
  ball (FAB) declares `stays_inside = False`, and the batch then keeps only points inside.
- `tell` changes the state, but does not read from a GPU (`bool(tensor)`, `nonzero`, `.cpu()`), because reading makes
  the host wait. On a CPU, such shortcuts are free (`losses.anyone`). A slot whose run is over may take a few more steps
  before it is freed, and these steps are ignored.

Shapes: S slots, images of C x H x W, K classes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar, get_type_hints

import torch
from torch import Tensor

from ..config.threat import ThreatModel
from ..mixing.classifier import MixedClassifier
from ..norms.ball import Ball, ball_of, per_image
from .budget import AttackBudget
from .gradient_model import Outputs

BORDERLINE = 0.05  # an image is borderline if its margin is below this share of its clean margin
_LEAST_REFERENCE = 0.1  # a smaller clean margin counts as this


@dataclass(frozen=True)
class ImageSummary:
    """One image before a block of runs begins; margins are signed and verified in float32."""

    margin: float  # the smallest so far
    clean_margin: float
    gain: float  # by how much the previous block of runs lowered the margin
    repeated_margin: float  # the smallest of the low-precision run that this run repeats; `margin` if there is none


@dataclass(frozen=True)
class Run:
    """An entry of the plan, for all images: an attack from one start, for instance towards one target.

    `image_record.Job` is such a run on one image.
    """

    name: str  # part of the key of its random numbers, with the target's rank on the clean image if it has a target
    stepper: "Stepper[Any]"
    target: int = 0  # i: the i-th of the image's targets, the likeliest first; 0: untargeted
    restart: int = 0
    block: str = ""  # consecutive runs of one block may run on an image at once; "": no other run at the same time
    from_best: bool = False  # begin at the best point so far, not at a random one
    loss: str = ""  # name of a registered loss, for steppers that take any (APGD)
    weight: float = 1.0  # weight of the standard classifier's margin in the joint attack; other attacks ignore it
    float32: bool = False  # gradients in float32 (TF32 on a GPU) although the precision is bfloat16
    wanted: Callable[[ImageSummary], bool] | None = None  # which images take the run; all by default
    attack: str = ""  # the name under which results report the images that the run breaks; `runs_of` sets it

    @property
    def start(self) -> tuple[str, int, int]:
        """The same for runs that begin at the same point, perhaps in another precision."""
        return self.name, self.target, self.restart


@dataclass(frozen=True)
class Setting:
    """The threat model, the budget and the classifier that an attack plans its runs for."""

    threat: ThreatModel
    budget: AttackBudget
    n_classes: int
    model: Any = None  # the attacked classifier; the joint attack reads the weights of a `MixedClassifier`
    low_precision: bool = False  # passes compute in bfloat16, except for runs with `float32`
    tf32: bool = False  # runs with `float32` compute in TF32, which takes little longer than bfloat16

    @property
    def targets(self) -> range:
        """The values of `Run.target`, one per target."""
        return range(1, self.budget.n_targets(self.n_classes) + 1)

    def is_borderline(self, image: ImageSummary, *, slack: float = 0.0) -> bool:
        """Return whether rounding or the random start may decide if an image remains robust: its margin is close to 0.

        The margin minus `slack` has to be below `BORDERLINE` times the clean margin, which counts as at least 0.1. If
        T = 0 and the standard classifier of a mixed classifier votes against the label, the margin is at most
        2 alpha - 1, so the limit is at most half of that.
        """
        limit, mixed = BORDERLINE * max(image.clean_margin, _LEAST_REFERENCE), self.model
        if isinstance(mixed, MixedClassifier) and mixed.mixture.temperature == 0:
            limit = min(limit, (mixed.alpha - mixed.mixture.one_minus_alpha) / 2)
        return image.margin >= 0 and image.margin - slack < limit


# Annotations of arrays, which `Slots.of` creates.
Images = Annotated[Tensor, "images"]  # (S, C, H, W)
Numbers = Annotated[Tensor, None]  # (S,), in the dtype of the images
Doubles = Annotated[Tensor, torch.float64]  # (S,)
Counts = Annotated[Tensor, torch.long]  # (S,)
Flags = Annotated[Tensor, torch.bool]  # (S,)


@dataclass
class Slots:
    """Arrays whose first axis is the slot."""

    @classmethod
    def of(cls, like_SCHW: Tensor, **others: Any) -> Self:
        """Return zeros, with one slot per image; `others` are the attributes without an annotation from above."""
        for name, hint in get_type_hints(cls, include_extras=True).items():
            for kind in getattr(hint, "__metadata__", ()):
                of_images = (like_SCHW.shape, None)
                shape, dtype = of_images if kind == "images" else (like_SCHW.shape[:1], kind)
                others[name] = like_SCHW.new_zeros(shape, dtype=dtype)
        return cls(**others)

    def resize(self, index: Tensor, n_slots: int) -> None:
        """Move the rows of `index` to the front, in that order, and change the number of rows to `n_slots`."""
        for name, values in vars(self).items():
            if isinstance(values, Tensor):
                resized = values.new_zeros(n_slots, *values.shape[1:])
                resized[: len(index)] = values[index]
                setattr(self, name, resized)


@dataclass
class SlotState(Slots):
    """Base of a stepper's state. The batch keeps these four attributes; `start` sets all others.

    A stepper may replace a tensor by another one of the same shape, for example to swap two buffers.
    """

    x: Images  # clean images
    labels: Counts
    targets: Counts  # classes; the label if the run has no target
    n_passes: Counts  # passes of each run so far; in `tell`, with the pass whose result it gets


@dataclass
class StartBatch:
    """Runs that begin in free slots; each field has one entry per run, in the order of the slots."""

    runs: Sequence[Run]
    x: Tensor  # clean images
    best: Tensor  # the points with the smallest verified margins so far; the clean image if there is none
    keys: Tensor  # int64, hashes of (seed, run, restart, sample id)

    def start(self, ball: Ball) -> Tensor:
        """Return the best points so far for runs with `from_best`, and AutoAttack's random starts for the others."""
        start = ball.random_start(self.x, self.keys)
        copy_rows(start, self.best, self.each(lambda run: run.from_best, self.keys).bool())
        return start

    def each(self, value: Callable[[Run], float], like: Tensor) -> Tensor:
        """Return a number per run, on the device of `like` and in its dtype."""
        return sent([value(run) for run in self.runs], like)


@dataclass
class StepResult:
    """The results of a pass, one row per slot; on the device, without a graph."""

    logits: Tensor  # (S, K) the attacked classifier's own, in the precision of the pass
    log1m_margin: Tensor  # (S,) float64, log(1 - signed margin) of `logits`
    wrong: Tensor  # (S,) bool, whether the class is not the label
    loss: Tensor  # (S,) of `Stepper.loss`; empty without a gradient
    grad: Tensor  # (S, C, H, W) its gradient, or empty. Copy what you keep: the next pass may reuse the memory


State = TypeVar("State", bound=SlotState)


@dataclass(frozen=True)
class Stepper(Generic[State]):
    """Base class of all steppers; the docstring of the module describes the contract."""

    threat: ThreatModel
    n_iter: int = 100  # steps of a run

    state_type: ClassVar[type[SlotState]] = SlotState
    # Every n-th pass of a run has a gradient, beginning with its first pass; 0: no pass has one.
    gradient_every: ClassVar[int] = 1
    stays_inside: ClassVar[bool] = True  # every point that `ask` returns is in the ball
    # Small differences matter, so borderline images take low-precision runs once more in float32. On a GPU, all images
    # take these runs in TF32 instead of bfloat16.
    repeats_in_float32: ClassVar[bool] = False

    @cached_property
    def ball(self) -> Ball:
        """The threat model's norm, at its radius."""
        return ball_of(self.threat)

    def most_passes(self, n_classes: int) -> int:  # noqa: ARG002
        """Return the most passes of a run on an image; by default, one at the start and one after each step."""
        return self.n_iter + 1

    @classmethod
    def n_backward(cls, n_passes: int) -> int:
        """Return how many of a run's first `n_passes` passes have a backward pass."""
        return -(-n_passes // cls.gradient_every) if cls.gradient_every else 0

    def init(self, like_SCHW: Tensor) -> State:
        """Return the state of as many slots as `like_SCHW` has rows, of its image shape, dtype and device."""
        return self.state_type.of(like_SCHW)  # type: ignore[return-value]

    def start(self, state: State, slots: Tensor, batch: StartBatch) -> None:
        """Overwrite these slots for runs that begin."""
        raise NotImplementedError

    def ask(self, state: State) -> Tensor:
        """Return the points to evaluate, (S, C, H, W) in [0, 1]."""
        raise NotImplementedError

    def loss(self, state: State, outputs: Outputs) -> Tensor:
        """Return the loss that gradients are taken of, (S,) with a graph."""
        raise NotImplementedError

    def tell(self, state: State, x: Tensor, result: StepResult) -> Tensor:
        """Update the state with the results of the pass over `x`; return (S,) bool on the device: whose run is over."""
        raise NotImplementedError


def sent(values: Sequence[float], like: Tensor) -> Tensor:
    """Copy numbers from the host to the device of `like`, in its dtype, without waiting for a GPU."""
    return torch.tensor(values, dtype=like.dtype).to(like.device, non_blocking=True)


def copy_rows(kept: Tensor, new: Tensor, chosen: Tensor) -> None:
    """Set `kept[chosen] = new[chosen]` in place, for a mask over the slots, without waiting for an accelerator."""
    if kept.device.type == "cpu":  # row by row: torch and numpy would gather the rows first and then scatter them
        to, rows = kept.numpy(), new.detach().numpy()
        for slot in chosen.numpy().nonzero()[0].tolist():
            to[slot] = rows[slot]
    else:
        torch.where(per_image(chosen, kept), new, kept, out=kept)
