"""An estimate as a person reads it, and as JSON."""

from typing import Any

from rich.console import Console

from ..stages.estimate import Estimate, StageEstimate
from .wording import seconds_text


def estimate_json(estimate: Estimate) -> dict[str, Any]:
    """Keys: workers, unit, milliseconds_a_pass (std, rob, mixed), stages with their hours and wall seconds."""
    return {
        "workers": estimate.n_workers,
        "unit": estimate.unit,
        "milliseconds_a_pass": {
            name: {"forward": 1000 * seconds.forward, "forward_and_backward": 1000 * seconds.both}
            for name, seconds in estimate.pass_seconds.items()
        },
        "stages": [_stage_json(estimate, stage) for stage in estimate.stages],
    }


def print_estimate(estimate: Estimate, console: Console) -> None:
    """What was measured, then a line or two for each stage."""
    for name, seconds in estimate.pass_seconds.items():
        times = f"{1000 * seconds.forward:.3g} ms forward, {1000 * seconds.both:.3g} ms forward and backward"
        console.print(f"{name:<8} {times}, an image in a full batch", highlight=False)
    for stage in estimate.stages:
        forward, backward = stage.passes
        console.print(
            f"{stage.stage:<8} {stage.images_left} images left, up to {forward} forward and {backward} backward passes "
            f"each: at most {_cost(estimate, stage.at_most)}",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
        if stage.likely is not None:
            console.print(
                f"         likely {_cost(estimate, stage.likely)} ({stage.basis})", highlight=False, soft_wrap=True
            )


def _cost(estimate: Estimate, worker_seconds: float) -> str:
    hours = worker_seconds * estimate.devices_each / 3600
    plural = "s" if estimate.n_workers > 1 else ""
    wall = seconds_text(worker_seconds / estimate.n_workers)
    return f"{hours:.2g} {estimate.unit}-hours, {wall} on the {estimate.n_workers} worker{plural} of this cluster"


def _stage_json(estimate: Estimate, stage: StageEstimate) -> dict[str, Any]:
    def cost(seconds: float | None) -> dict[str, float] | None:
        if seconds is None:
            return None
        return {"hours": seconds * estimate.devices_each / 3600, "wall_seconds": seconds / estimate.n_workers}

    forward, backward = stage.passes
    return {
        "stage": stage.stage,
        "images_left": stage.images_left,
        "forward_passes": forward,
        "backward_passes": backward,
        "at_most": cost(stage.at_most),
        "likely": cost(stage.likely),
        "basis": stage.basis if stage.likely is not None else None,
    }
