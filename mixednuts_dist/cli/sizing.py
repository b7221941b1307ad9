"""`mixednuts describe` (parameters and operations, from the URIs alone) and `mixednuts estimate` (time and cost)."""

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from ..classifiers.base_classifiers import ModelSize, measure_uri
from ..config import RunConfig
from ..images.datasets import open_dataset
from ..reports.counts import seconds_text
from ..reports.table import Table, print_table
from ..stages.estimate import Estimate, StageEstimate
from ..uris import known_image_shape


@dataclass(frozen=True)
class Description:
    """The sizes of what there is of `std`, `rob` and `mixed`; None where a black box leaves them unknown."""

    run_id: str
    image_shape: tuple[int, ...]
    sizes: dict[str, ModelSize | None]

    def to_json(self) -> dict[str, Any]:
        """`run_id`, `image_shape`, and for each classifier `parameters` and `flops` of one image, or None."""
        sizes = {name: None if size is None else asdict(size) for name, size in self.sizes.items()}
        return {"run_id": self.run_id, "image_shape": list(self.image_shape), **sizes}


def describe(config: RunConfig) -> Description:
    """Measure the base classifiers on one image of the configuration's data.

    Raises:
        BaseClassifierError, DatasetError: where a classifier cannot be built, or the image size cannot be told.
    """
    known = known_image_shape(config.data.uri)
    shape = tuple(open_dataset(config.data.uri).read(0, 1)[0].shape[1:]) if known is None else known
    rob = measure_uri(config.rob, "rob", shape)
    if config.std is None:
        return Description(config.run_id(), shape, {"rob": rob})
    std = measure_uri(config.std, "std", shape)
    return Description(config.run_id(), shape, {"std": std, "rob": rob, "mixed": _sum(std, rob)})


def _sum(std: ModelSize | None, rob: ModelSize | None) -> ModelSize | None:
    """The mixture: the transformation and the mixing add four numbers and nothing that counts."""
    if std is None or rob is None:
        return None
    return ModelSize(std.parameters + rob.parameters, std.flops + rob.flops)


def print_description(found: Description, config: RunConfig, console: Console) -> None:
    """The table, with what its numbers count."""
    size = " x ".join(map(str, found.image_shape))
    rows = [
        (name, *(("?", "?") if model is None else (f"{model.parameters / 1e6:,.4g} M", f"{model.flops / 1e9:,.4g}")))
        for name, model in found.sizes.items()
    ]
    table = Table(("classifier", "parameters", "GFLOPs"), rows)
    print_table(table, console, f"{found.run_id}: {config.data.uri}, images {size}")
    std = "" if config.std is None else f"std: {config.std}\n"
    console.print(f"{std}rob: {config.rob}", highlight=False, markup=False, soft_wrap=True)
    console.print("GFLOPs: one image, one pass; a multiply-accumulate counts as two (torch.utils.flop_counter).")


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
