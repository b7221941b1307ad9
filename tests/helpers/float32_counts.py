"""Float32's share of an attack's work on a GPU, counted in passes on any machine.

On tensor cores a float32 row costs about `DEARER` times a bfloat16 one, and a backward pass about as much as a forward
one. So the cost of a pass is its rows, doubled with a gradient, times `DEARER` in float32. MMAA runs as on a GPU, in
passes of 256 rows, once with the same rows for float32 and once with those of a GPU. Only the scheduling of passes
matters, so a CPU that emulates bfloat16 counts what a GPU would.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from mixednuts_dist.acceleration.arithmetic import Arithmetic
from mixednuts_dist.acceleration.batch_shape import ON_CARD, BatchShape
from mixednuts_dist.acceleration.gradient_copy import folded, frozen_copy
from mixednuts_dist.attacks.batch import Batch
from mixednuts_dist.attacks.budget import AttackBudget
from mixednuts_dist.attacks.gradient_model import AttackedModel, GradientModel, Outputs
from mixednuts_dist.attacks.minimum_margin import margin_plan
from mixednuts_dist.attacks.scheduler import Group, Scheduler
from mixednuts_dist.benchmarks.attack_subjects import Subject
from mixednuts_dist.config.threat import ThreatModel

DEARER = 10.0

Act = Callable[..., Any]


def counted(attacked: Subject, shape: BatchShape, budget: AttackBudget) -> dict[str, Any]:
    """MMAA's passes, and what they cost in bfloat16 rows forward."""
    engine = Scheduler(_in_two_arithmetics(attacked), margin_plan, ThreatModel("Linf", attacked.eps), budget, 0, shape)
    for passes in (*engine._passes.values(), engine.judge.passes):
        passes.rows_for = _unfilled  # type: ignore[method-assign]
    tally: dict[str, list[float]] = {}  # passes, useful rows and cost

    def note(name: str, passes: int, useful: int, cost: float) -> None:
        of = tally.setdefault(name, [0, 0, 0.0])
        of[0], of[1], of[2] = of[0] + passes, of[1] + useful, of[2] + cost

    def counting(act: Act, name: str, batch: Batch | None) -> Act:
        def acting(*given: Any) -> Any:
            result = act(*given)
            n_running = sum(job is not None for job in batch.jobs) if batch is not None else 0
            if batch is None:
                rows, n = shape.float32.rows, len(given[0])
                passes = -(-n // rows)
                note(name, passes, n, passes * rows * DEARER)
            else:
                rows, dear = batch.passes.shape.rows, DEARER if "float32" in name else 1.0
                note(name, 1, n_running, rows * 2 * dear)
            return result

        return acting

    watch(engine, counting)
    found = engine.run_one(Group(attacked.x, attacked.y, range(len(attacked.y))))
    cost = sum(each[2] for each in tally.values())
    dear = tally.get("apgd, float32", [0, 0, 0.0])
    return {
        "share": sum(each[2] for name, each in tally.items() if "float32" in name) / cost,
        "useful_rows": dear[1] / max(dear[0], 1), "float32_passes": dear[0], "passes": tally["apgd"][0], "cost": cost,
        "robust": int((~found.broken).sum()), "mean_margin": float(-found.log1m_margin[~found.broken].expm1().mean()),
        "tally": tally, "n_backward": found.n_backward,
    }  # fmt: skip


def _unfilled(n_images: int, like_BCHW: Tensor) -> int:  # noqa: ARG001 - of `Passes.rows_for`
    """Padding costs in the count alone: what is passed here has as many rows as images."""
    return n_images


def watch(scheduler: Scheduler, around: Callable[[Act, str, Batch | None], Act]) -> None:
    """Wrap the verifications and each batch's steps with `around`, which gets their names."""
    scheduler.judge.verdicts = around(scheduler.judge.verdicts, "judge, float32", None)  # type: ignore[method-assign]
    make = scheduler._make_plan

    def make_plan(n_classes: int) -> None:
        make(n_classes)
        for (stepper, float32), batch in scheduler._batches.items():
            name = f"{type(stepper).__name__.lower()}{', float32' * float32}"
            batch.step = around(batch.step, name, batch)  # type: ignore[method-assign]

    scheduler._make_plan = make_plan  # type: ignore[method-assign]


def _in_two_arithmetics(attacked: Subject) -> AttackedModel:
    if attacked.x.is_cuda:
        return AttackedModel.of(attacked.network, arithmetic=Arithmetic("bf16"), like_BCHW=attacked.x, rows=ON_CARD)
    exact = folded(attacked.network, attacked.x[:16])
    coarse = _rounded(frozen_copy(exact))
    return AttackedModel(
        attacked.network, GradientModel(lambda x_BCHW: Outputs(coarse(x_BCHW))),
        GradientModel(lambda x_BCHW: Outputs(exact(x_BCHW))),
    )  # fmt: skip


def _rounded(network: nn.Module) -> nn.Module:
    """Weights and layers' outputs are rounded to bfloat16 and computed with in float32, at its speed on any CPU."""
    heavy = [each for each in network.modules() if isinstance(each, nn.Conv2d | nn.Linear)]
    for layer in heavy[1:]:
        layer.weight.data = layer.weight.data.bfloat16().float()
    for layer in heavy:
        layer.register_forward_hook(lambda _layer, _given, out: out.bfloat16().float())
    return network
