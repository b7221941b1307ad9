"""`init`, `check`, `estimate` and `schema`: the commands before a run."""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
import psutil
from rich.console import Console

from ..config.register import REGISTERS
from ..config.run_config import RunConfig, config_with_stages, load_config, stages_with_keys
from ..config.uris import TWO_CHECKPOINTS, ClassifierSource
from ..errors import ConfigError, MixedNutsError
from .options import (
    MESSAGES,
    Invocation,
    command,
    json_option,
    local_option,
    on_config,
    worker_options,
)

if TYPE_CHECKING:
    from ..stages.estimate import Estimate

_WORKER_BYTES = 0.6e9  # measured for a worker with torch, without classifiers and images

TEMPLATE, ONE_CLASSIFIER = (
    Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("mixednuts.yaml.txt", "one.yaml.txt")
)


@command("init mine.yaml", "init mine.yaml --model torchvision:resnet18")
@click.argument("file", type=click.Path(dir_okay=False), default="mixednuts.yaml", metavar="[FILE]")
@click.option("--model", metavar="URI", help="Write a CONFIG that attacks only this classifier with AutoAttack.")
def init(file: str, model: str | None) -> None:
    """Write a commented CONFIG to start from.

    The command also writes nets.py, a template with one loader function per checkpoint, unless nets.py exists.
    """
    path = Path(file)
    if path.exists():
        raise ConfigError(f"{path} exists already. Choose another name, or remove it")
    name = re.sub("[^A-Za-z0-9]", "-", path.stem)[:64].lstrip("-") or "mine"
    template = TEMPLATE if model is None else ONE_CLASSIFIER
    path.write_text(template.format(file=file, model=model, name=name))
    nets, written = path.with_name("nets.py"), str(path)
    if (model is None or ClassifierSource(model).code_file == nets.name) and not nets.exists():
        nets.write_text(TWO_CHECKPOINTS)
        written = f"{path} and {nets}"
    MESSAGES.print(f"Wrote {written}. Edit, then run: {Invocation(file).typed('check')}")


@command("check jobs/configs/cifar10.yaml", "check mine.yaml --fetch")
@on_config
@local_option
@click.option("--fetch", is_flag=True, help="First download missing files whose source is known.")
def check(given: Invocation, fetch: bool) -> None:
    """Check a configuration and list every problem.

    The command prints each problem with the command that fixes it. It first checks files and the storage, which takes
    seconds (up to 20 s if a bucket does not respond). If nothing is missing, it opens the images and tries the
    classifiers on a few of them. Without --fetch, it writes nothing.
    """
    config = given.config
    from ..stages.stage import stages_of

    stages_of(config)  # raises for settings that the stages cannot combine
    problems = [*_missing(config, fetch), *_storage_problems(config)]
    if not problems:
        MESSAGES.print("all files are present; trying the classifiers on a few images")
        problems = list(_problems_of_use(config))
    for problem in problems:
        click.echo(problem)
    if problems:
        raise SystemExit(1)
    click.echo(f"nothing is missing. Next: {given.typed('run')}")


def _missing(config: RunConfig, fetch: bool) -> Iterator[str]:
    """Download the missing files if `fetch` is set, and yield a problem per file that is still missing."""
    for key, source in config.sources.items():
        try:
            for lacking in source.missing(key):
                if fetch:
                    from ..classifiers.checkpoints import fetch as download

                    MESSAGES.print(f"{key}: {lacking.what} -> {lacking.path}")
                    click.echo(f"sha256 {download(lacking)}  {lacking.path}")
                else:
                    yield f"{key}: {lacking.what} is missing: {lacking.path}\n    {lacking.command}"
        except MixedNutsError as error:
            yield str(error)


def _storage_problems(config: RunConfig) -> Iterator[str]:
    if "://" in config.storage:
        from ..storage.outages import FIRST_ANSWER_SECONDS
        from ..storage.store import Store

        try:
            Store(config.storage, FIRST_ANSWER_SECONDS).names("")
        except MixedNutsError as error:
            yield f"storage: {error}"
        return
    folder = Path(config.storage).absolute()
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not there.is_dir():
        yield f"storage: {there} is a file, not a folder"
    elif not os.access(there, os.W_OK):
        yield f"storage: {there} cannot be written by this user"


def _problems_of_use(config: RunConfig) -> Iterator[str]:
    from ..stages.run_inputs import inspect_inputs
    from ..stages.stage import stages_of

    try:
        inputs = inspect_inputs(config)
        for stage in stages_of(config):
            stage.check_inputs(inputs)
        shape = " x ".join(map(str, inputs.image_shape))
        click.echo(f"{inputs.n_images} images of {shape}, {inputs.n_classes} classes")
    except MixedNutsError as error:
        yield str(error)
    import torch

    from ..distributed.gpus import nvidia_driver, unusable_gpu

    if config.compute.num_gpus != 0 and nvidia_driver() and not torch.cuda.is_available():
        yield f"compute: {unusable_gpu()}"
    n_workers, free = config.compute.num_workers or os.cpu_count() or 1, psutil.virtual_memory().available
    on_cluster = config.compute.executor == "ray" and os.environ.get("RAY_ADDRESS")
    if not on_cluster and n_workers * _WORKER_BYTES > free:
        yield (
            f"compute: {n_workers} workers on this machine take {n_workers * _WORKER_BYTES / 1e9:.1f} GB of memory "
            f"and {free / 1e9:.1f} GB are free\n    --set compute.num_workers={max(1, int(free / _WORKER_BYTES))}"
        )


@command("estimate mine.yaml --local", "estimate jobs/configs/cifar100.yaml --sizes")
@on_config
@worker_options
@json_option
@click.option("--sizes", is_flag=True, help="Count parameters and GFLOPs instead, without weights.")
def estimate(given: Invocation, as_json: bool, sizes: bool) -> None:
    """Estimate GPU-hours and wall time from a few measured batches.

    The command prints an upper bound for each stage, because broken images need fewer passes. As soon as a stage has
    finished partitions, `status` predicts the rest.
    """
    if sizes:
        _print_sizes(given.config, as_json)
        return
    given.require_inputs()
    from ..stages import estimate as stage

    found = given.on_workers(lambda executor, progress: stage.run(given.config, executor=executor))  # noqa: ARG005
    if as_json:
        click.echo(json.dumps(asdict(found), indent=2))
    else:
        _print_estimate(found, Console())


def _print_sizes(config: RunConfig, as_json: bool) -> None:
    """Print the parameters, and the GFLOPs for one image, of each classifier; a black box has question marks."""
    from ..classifiers.base_classifiers import measure_uris
    from ..images.datasets import open_dataset

    shape = config.data.uri.image_shape or tuple(open_dataset(config.data.uri).read(0, 1)[0].shape[1:])
    sizes = measure_uris(config.std, config.rob, shape)
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


def _print_estimate(estimate: "Estimate", console: Console) -> None:
    """Print the measured times, then a line or two per stage."""
    say = partial(console.print, highlight=False, soft_wrap=True)
    for name, seconds in estimate.pass_seconds.items():
        times = f"{1000 * seconds.forward:.3g} ms forward, {1000 * seconds.both:.3g} ms forward and backward"
        say(f"{name:<8} {times} per image in a full batch")
    for stage in estimate.stages:
        forward, backward = stage.passes
        say(
            f"{stage.stage:<8} {stage.images_left} {stage.which}, up to {forward} forward and {backward} backward "
            f"passes each: at most {_cost(estimate, stage.at_most)}"
        )
    if len(estimate.stages) > 1:
        say(f"{'total':<8} at most {_cost(estimate, sum(stage.at_most for stage in estimate.stages))}")


def _cost(estimate: "Estimate", worker_seconds: float) -> str:
    from ..reports.counts import held_text, seconds_text

    held = held_text(worker_seconds * estimate.devices_each / 3600, estimate.unit)
    wall, plural = seconds_text(worker_seconds / estimate.n_workers), "s" if estimate.n_workers > 1 else ""
    return f"{held}, {wall} with {estimate.n_workers} worker{plural}"


@command("schema mine.yaml", "schema --names")
@click.argument("config", required=False, type=click.Path(dir_okay=False), metavar="[CONFIG]")
@click.option("--names", is_flag=True, help="List the attacks, datasets, stages and so on that CONFIG can name.")
def schema(config: str | None, names: bool) -> None:
    """Print the JSON schema of the configuration.

    With CONFIG, the keys and names that its extensions add are included. docs/configuration.md explains every key.
    """
    if config is not None:
        load_config(config)
    if names:
        _print_names(Console(soft_wrap=True, highlight=False))
    else:
        click.echo(json.dumps(config_with_stages(stages_with_keys()).model_json_schema(), indent=2))


def _print_names(console: Console) -> None:
    for register in REGISTERS:
        entries = register.entries().values()
        if not entries:
            continue
        console.print(f"[bold]{register.constant.lower()}[/bold]")
        width = max(len(entry.name) for entry in entries)
        for entry in entries:
            added = "" if entry.home.startswith("mixednuts_dist.") else "  (yours)"
            console.print(f"  {entry.name:<{width}}  {entry.describes}{added}", markup=False)
