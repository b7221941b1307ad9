"""What an attack is: phases that an image walks through, and one step for many images at a time.

To add one, register a subclass of `Attack` in a file of its own, in this folder or anywhere else (then name the file in
the configuration: `extensions: [my_attack.py]`)::

    @dataclass
    class NoiseState(SlotArrays):
        x: Tensor     # every field is a tensor whose first axis is the slot
        x_new: Tensor
        left: Tensor

    @ATTACKS("noise", describes="uniform noise, 10 draws", options=())
    class Noise(Attack):
        takes_gradient = False

        @staticmethod
        def passes(budget, n_classes):
            return 10, 0

        def state(self, like):
            return NoiseState(torch.zeros_like(like), torch.zeros_like(like), like.new_zeros(len(like)))

        def begin(self, state, slots, arrivals):
            state.x[slots], state.left[slots] = arrivals.x, 10.0

        def propose(self, state):
            torch.rand(state.x.shape, out=state.x_new)
            return self.setting.ball.project(state.x_new, state.x)

        def absorb(self, state, x_new, seen):
            state.left -= 1
            return state.left <= 0

The engine does the rest. Each round it calls, for all slots of a lane at once,

    x_new = propose(state)                        where each slot wants to be evaluated
    outputs = model(x_new)                        one forward of the run's batch shape
    objective(state, outputs), its gradient       one backward, only with `takes_gradient`
    done = absorb(state, x_new, seen)             which slots have ended their phase

It keeps the point with the smallest margin of each slot, has it verified in float32 when the phase ends or the point is
misclassified, counts passes, continues with fewer slots where memory runs out, and gives free slots to further images.

What an attack may rely on and has to keep:
- Slots are independent: nothing computed for one may depend on another slot or on how many there are. Free slots hold
  old values and are computed along. Random numbers come from `keyed_generator(seed, attack, restart, sample_id, ...)`.
- `propose` may be called again with the same state after memory ran out, so it changes nothing but its own output. The
  tensor that it returns may be an array of the state; the engine reads it until `absorb` returns. The points lie in the
  ball and in [0, 1]; an attack that also searches outside of the ball (FAB) says so with `stays_inside = False`, and
  the engine keeps only what lies inside.
- `absorb` writes in place and asks nothing of the device (`bool(tensor)`, `nonzero`, `.cpu()`), so that a GPU never
  waits for the host; on a CPU such shortcuts are free (`losses.anyone`). A slot that has ended may be stepped once more
  before it is emptied; what it then does is ignored.
- An image's phases come one after the other. A phase may run `beside` the one before it, as an attack's targets do, if
  it needs nothing of what that finds: it then takes free slots of their lane early. Of those that break an image the
  first one counts.

Shapes: S slots, images of C x H x W, K classes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..config.register import ATTACKS
from ..config.threat import ThreatModel
from ..mixing.classifier import MixedClassifier
from ..norms.ball import Ball, ball_of
from .budget import AttackBudget
from .gradient_model import Outputs

# Three shares of the clean margin. With less than `NEAR_BORDER` an image is attacked again: by MMAA from other starts,
# and by the joint attack at all. `NEAR` and `NEXT_TO` are bounds on what coarse arithmetic hides: of the 144 images
# nearest to the border that APGD with the published budgets had left standing on five networks, FAB-T and Square in
# float32 broke none; where APGD in bfloat16 left a larger margin than in float32, on 319 standing images, it was by at
# most .0016.
NEAR_BORDER = 0.05
NEAR, NEXT_TO = 0.1, 0.02


@dataclass(frozen=True)
class Setting:
    """What an attack is made for."""

    threat: ThreatModel
    budget: AttackBudget
    n_classes: int
    seed: int = 0
    model: Any = None  # the attacked classifier; the joint attack reads the weights of a `MixedClassifier`
    coarse: bool = False  # passes compute below float32, but for phases that are `in_float32`

    @cached_property
    def ball(self) -> Ball:
        """The threat model's norm, at its radius."""
        return ball_of(self.threat)


@dataclass(frozen=True)
class Known:
    """What is known of some images as a phase is about to begin, on the host; one entry an image."""

    margin: Tensor  # float64, the smallest signed margin so far, in float32 arithmetic
    clean_margin: Tensor  # float64, on the clean image
    gained: Tensor  # float64, by how much the phase before lowered the margin
    behind: Tensor  # float64, by how much the same phase in coarse arithmetic ended above the best of these; 0 else


@dataclass(frozen=True)
class Phase:
    """One run of an attack on one image: for instance against one target. A plan is a list of these."""

    attack: str  # the name under which it is recorded what breaks an image; `phases_of` sets the registered one
    name: str  # of this phase; with seed, restart and sample id the key of its random numbers
    stepper: "Attack"
    target: int = 0  # i: the i-th of the image's targets, the likeliest first; 0: untargeted
    restart: int = 0
    beside: bool = False  # may run beside the phase before it in its lane: neither needs what the other finds
    in_float32: bool = False  # gradients in float32 whatever the arithmetic
    # (n,) bool, on the host: which images take the phase, all by default. Called when its block of phases begins.
    wanted: Callable[[Known], Tensor] | None = None


@dataclass
class Arrivals:
    """Images that take free slots; each field has one entry an image, in the order of the slots."""

    phases: Sequence[Any]  # the attack's own phases, of the type that it made
    x: Tensor  # clean images
    best: Tensor  # the points with the smallest verified margins so far; the clean image where there is none
    labels: Tensor
    targets: Tensor  # classes; the label where the phase has no target
    names: Sequence[str]  # `Phase.name` with the target's rank on the clean image in place of "{rank}"
    sample_ids: Sequence[int]

    def at(self, index: Sequence[int]) -> "Arrivals":
        """Some of them."""
        rows, there = list(index), sent(index, self.labels)
        return Arrivals(
            [self.phases[i] for i in rows], self.x[there], self.best[there], self.labels[there], self.targets[there],
            [self.names[i] for i in rows], [self.sample_ids[i] for i in rows],
        )  # fmt: skip

    def random_start(self, setting: Setting, ball: Ball | None = None) -> Tensor:
        """AutoAttack's random start, by default in the threat model's ball; keyed (seed, phase, restart, sample id)."""
        keys = [start_key(setting, *each) for each in zip(self.names, self.phases, self.sample_ids, strict=True)]
        return (ball or setting.ball).random_start(self.x, keys)


def start_key(setting: Setting, name: str, phase: Phase, sample_id: int) -> tuple[object, ...]:
    """What the random start of a phase on an image is keyed by; `name` as in `Arrivals`."""
    return setting.seed, name, phase.restart, sample_id


def sent(values: Sequence[float], like: Tensor) -> Tensor:
    """Numbers of the host as `like` has them, where it is; the host does not wait for a GPU to take them."""
    return torch.tensor(values, dtype=like.dtype).to(like.device, non_blocking=True)


@dataclass
class Seen:
    """What a pass has shown, one row a slot; on the device, without a graph."""

    logits: Tensor  # (S, K) the attacked classifier's own, in the arithmetic of the pass
    labels: Tensor
    targets: Tensor  # the label where the phase has no target
    log_gap: Tensor  # (S,) float64, log(1 - signed margin) of `logits`
    wrong: Tensor  # (S,) bool, whether the class is not the label
    objective: Tensor  # (S,) of `Attack.objective`; empty without gradients
    grad: Tensor  # (S, C, H, W) its gradient; empty without. Copy what is to be kept: its memory is used again


class SlotArrays:
    """Base of an attack's state: every attribute is a tensor whose first axis is the slot.

    Attributes may be exchanged for others of the same shape (two buffers that change places).
    """

    def take(self, index: Tensor) -> dict[str, Tensor]:
        """Copies of the rows of `index`."""
        return {name: values[index] for name, values in vars(self).items()}

    def put(self, index: Tensor, rows: dict[str, Tensor]) -> None:
        """Write rows that `take` gave."""
        for name, values in vars(self).items():
            values[index] = rows[name]

    def resize(self, index: Tensor, n_slots: int) -> None:
        """Keep the rows of `index`, in that order, and have `n_slots` rows; the others hold old values."""
        for name, values in vars(self).items():
            if n_slots <= len(values):
                values[: len(index)] = values[index]
                setattr(self, name, values[:n_slots])
            else:
                larger = values.new_zeros(n_slots, *values.shape[1:])
                larger[: len(index)] = values[index]
                setattr(self, name, larger)


class Attack:
    """Base class of all attacks; see the module's text for what is to be written and what may be relied on."""

    name: ClassVar[str] = ""  # begins the keys of its random numbers: under another registered name they are the same
    # Whether the attack climbs a loss to its end: afterwards small margins show which images stand near the border.
    # After coarse gradients the last such attack of a plan ends with float32 steps (`apgd.float32_phases`).
    climbs_to_the_end: ClassVar[bool] = False
    # Attacks whose phases come after its own, under its name, where the ensemble does not name them itself.
    followed_by: ClassVar[tuple[str, ...]] = ()
    takes_gradient: bool = True  # of the next pass: FAB takes it in every other one, and changes it in `absorb`
    stays_inside: ClassVar[bool] = True  # every point that `propose` returns is in the ball

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    @staticmethod
    def passes(budget: AttackBudget, n_classes: int) -> tuple[int, int]:
        """(forward, backward) passes of an image that survives, the verifications left out."""
        raise NotImplementedError

    @property
    def lane(self) -> str:
        """Phases whose steppers agree here share slots, and the first one's `propose` and `absorb` serve all."""
        return f"{type(self).__module__}.{type(self).__qualname__}"

    def phases(self) -> Sequence[Phase]:
        """What an image walks through, in order; a single untargeted phase by default."""
        return [Phase(self.name, self.name, self)]

    def start_ball(self, phase: Any) -> Ball | None:  # noqa: ARG002
        """Where the phase's random start is drawn, on a GPU ahead of its turn; None where `begin` draws none there."""
        return None

    def state(self, like_SCHW: Tensor) -> SlotArrays:
        """The arrays of as many slots as `like_SCHW` has rows, of its image shape, dtype and device."""
        raise NotImplementedError

    def begin(self, state: Any, slots: Tensor, arrivals: Arrivals) -> None:
        """Write the rows `slots` anew for images that begin a phase."""
        raise NotImplementedError

    def propose(self, state: Any) -> Tensor:
        """(S, C, H, W) in [0, 1]: the points to evaluate."""
        raise NotImplementedError

    def objective(self, state: Any, outputs: Outputs, labels: Tensor, targets: Tensor) -> Tensor:
        """(S,) with a graph: what gradients are taken of. Only called with `takes_gradient`."""
        raise NotImplementedError

    def absorb(self, state: Any, x_new: Tensor, seen: Seen) -> Tensor:
        """Take in what the pass has shown; returns (S,) bool on the device: whose phase has ended."""
        raise NotImplementedError


def phases_of(name: str, setting: Setting) -> list[Phase]:
    """What the attack that is registered as `name` has an image walk through."""
    own = replace(setting, budget=setting.budget.of(name))
    return [replace(phase, attack=name) for phase in ATTACKS.get(name)(own).phases()]


def again_in_float32(phases: Sequence[Phase], setting: Setting) -> list[Phase]:
    """The phases and, where passes are coarse, once more in float32 for images that stand near the border.

    For attacks that decide by small differences, between two queries or on which side of the border a point lies. Far
    from the border rounding changes their path but not the verdict. Images next to the border are attacked again from
    the start; so are images within `NEAR` of the clean margin whose margin the coarse phases have lowered below what
    earlier attacks had left, since there this attack finds what the others did not.
    """

    def near(known: Known) -> Tensor:
        return next_to_border(known, setting) | (
            (known.gained > 0) & (known.margin < NEAR * decisive_margin(known, setting))
        )

    if not setting.coarse:
        return list(phases)
    stepper = type(phases[0].stepper)(setting)  # of its own lane: FAB's remembers which pass is due
    return [*phases, *(replace(phase, stepper=stepper, in_float32=True, wanted=near) for phase in phases)]


def next_to_border(known: Known, setting: Setting) -> Tensor:
    """Whose margin is so small that the rounding of coarse passes may decide whether the image stands."""
    return known.margin < NEXT_TO * decisive_margin(known, setting)


def decisive_margin(known: Known, setting: Setting) -> Tensor:
    """What small margins are measured against: the clean one, which counts as a quarter at least.

    Of a mixture with a one-hot std no more than 2 alpha - 1 is left, however sure rob is, where std votes against the
    label. An alpha next to a half would bring every such image next to the border; half of what can be left does.
    """
    margin, mixed = known.clean_margin.clamp(min=0.25), setting.model
    if isinstance(mixed, MixedClassifier) and mixed.temperature == 0:
        margin = margin.clamp(max=(mixed.alpha - mixed.one_minus_alpha) / 2 / NEXT_TO)
    return margin


def copy_rows(kept: Tensor, new: Tensor, chosen: Tensor) -> None:
    """Set `kept[chosen] = new[chosen]` in place, for a mask over the slots, without waiting for an accelerator."""
    if kept.device.type == "cpu":  # row by row: torch and numpy would gather the rows first and then scatter them
        to, rows = kept.numpy(), new.detach().numpy()
        for slot in chosen.numpy().nonzero()[0].tolist():
            to[slot] = rows[slot]
    else:
        torch.where(chosen.view(-1, *[1] * (kept.dim() - 1)), new, kept, out=kept)
