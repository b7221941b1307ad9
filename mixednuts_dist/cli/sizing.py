"""`estimate`: time and cost of a run, or parameters and operations of its classifiers."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from ..config.run_config import RunConfig
from .options import INTERRUPTED, Invocation, run_command

if TYPE_CHECKING:
    from ..classifiers.base_classifiers import ModelSize
    from ..stages.estimate import Estimate, StageEstimate


@run_command(
    "estimate mine.yaml --local",
    "estimate jobs/configs/cifar100.yaml --sizes",
    logs=False,
    as_json=True,
    interrupted=INTERRUPTED,
)
@click.option("--sizes", is_flag=True, help="Count parameters and GFLOPs instead; needs no weights.")
def estimate(given: Invocation, as_json: bool, sizes: bool) -> None:
    """Estimate GPU-hours and wall time from a few measured batches."""
    if sizes:
        _print_sizes(given.config, as_json)
        return
    given.require_inputs()
    from ..stages import estimate as stage

    found = given.on_workers(lambda executor, progress: stage.run(given.config, executor=executor))  # noqa: ARG005
    if as_json:
        click.echo(json.dumps(estimate_json(found), indent=2))
    else:
        print_estimate(found, Console())


def measure(config: RunConfig) -> "tuple[tuple[int, ...], dict[str, ModelSize | None]]":
    """Return the image shape (C, H, W) and the sizes of `std`, `rob` and `mixed`, or of `rob` alone, for one image.

    The size of a black box is None, since it is not known.

    Raises:
        BaseClassifierError: if a classifier cannot be built.
        DatasetError: if the image size is not known.
    """
    from ..classifiers.base_classifiers import measure_uris
    from ..images.datasets import open_dataset

    known = config.data.uri.image_shape
    shape = tuple(open_dataset(config.data.uri).read(0, 1)[0].shape[1:]) if known is None else known
    return shape, measure_uris(config.std, config.rob, shape)


def _print_sizes(config: RunConfig, as_json: bool) -> None:
    """Print the sizes as a table, with what its numbers count, or as JSON."""
    shape, sizes = measure(config)
    if as_json:
        each = {name: None if size is None else asdict(size) for name, size in sizes.items()}
        click.echo(json.dumps({"run_id": config.run_id(), "image_shape": list(shape), **each}, indent=2))
        return
    from ..reports.table import Table, print_table

    rows = [
        (name, *(("?", "?") if model is None else (f"{model.parameters / 1e6:,.4g} M", f"{model.flops / 1e9:,.4g}")))
        for name, model in sizes.items()
    ]
    title = f"{config.run_id()}: {config.data.uri}, images {' x '.join(map(str, shape))}"
    print_table(Table(("classifier", "parameters", "GFLOPs"), rows), Console(), title)
    std = "" if config.std is None else f"std: {config.std}\n"
    click.echo(f"{std}rob: {config.rob}")
    click.echo("GFLOPs: one image, one pass; a multiply-accumulate counts as two (torch.utils.flop_counter).")


def estimate_json(estimate: "Estimate") -> dict[str, Any]:
    """Return the estimate with the keys workers, unit, milliseconds_a_pass, and stages."""
    return {
        "workers": estimate.n_workers,
        "unit": estimate.unit,
        "milliseconds_a_pass": {
            name: {"forward": 1000 * seconds.forward, "forward_and_backward": 1000 * seconds.both}
            for name, seconds in estimate.pass_seconds.items()
        },
        "stages": [_stage_json(estimate, stage) for stage in estimate.stages],
    }


def print_estimate(estimate: "Estimate", console: Console) -> None:
    """Print the measured times, then a line or two per stage."""
    for name, seconds in estimate.pass_seconds.items():
        times = f"{1000 * seconds.forward:.3g} ms forward, {1000 * seconds.both:.3g} ms forward and backward"
        console.print(f"{name:<8} {times}, an image in a full batch", highlight=False, soft_wrap=True)
    for stage in estimate.stages:
        forward, backward = stage.passes
        console.print(
            f"{stage.stage:<8} {stage.images_left} {stage.which}, up to {forward} forward and {backward} backward "
            f"passes each: at most {_cost(estimate, stage.at_most)}",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
        if stage.likely is not None:
            console.print(
                f"         likely {_cost(estimate, stage.likely)} ({stage.basis})", highlight=False, soft_wrap=True
            )
    if len(estimate.stages) > 1:
        total = _cost(estimate, sum(stage.at_most for stage in estimate.stages))
        console.print(f"{'total':<8} at most {total}", highlight=False, soft_wrap=True)


def _cost(estimate: "Estimate", worker_seconds: float) -> str:
    hours = worker_seconds * estimate.devices_each / 3600
    plural = "s" if estimate.n_workers > 1 else ""
    from ..reports.counts import held_text, seconds_text

    wall = seconds_text(worker_seconds / estimate.n_workers)
    return f"{held_text(hours, estimate.unit)}, {wall} with {estimate.n_workers} worker{plural}"


def _stage_json(estimate: "Estimate", stage: "StageEstimate") -> dict[str, Any]:
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
