"""The commands before a run: a configuration to start from, what it lacks, and what there is to choose from."""

import json
import os
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import click
import psutil
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from rich.console import Console

from ..config.register import REGISTERS
from ..config.run_config import RunConfig, config_with_stages, load_config, stages_with_keys
from ..config.search_config import RangeConfig
from ..config.section import Registered, section_in
from ..config.uris import TWO_CHECKPOINTS, code_files, missing_input, missing_inputs
from ..errors import ConfigError, MixedNutsError
from .options import config_argument, examples, local_option, reported, set_option, typed

_WORKER_BYTES = 0.6e9  # of a worker with torch, measured; its classifiers and images come on top
_NAMES = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "null"}

TEMPLATE = Path(__file__).with_name("mixednuts.yaml.txt").read_text(encoding="utf-8")


@click.command(epilog=examples("init mine.yaml --images folder:photos --rob py:nets.py:robust"))
@click.argument("file", type=click.Path(dir_okay=False), default="mixednuts.yaml", metavar="[FILE]")
@click.option("--images", default="npz:images.npz", show_default=True, metavar="URI", help="The images.")
@click.option("--std", default="py:nets.py:std", show_default=True, metavar="URI", help="The accurate classifier.")
@click.option("--rob", default="py:nets.py:rob", show_default=True, metavar="URI", help="The robust one.")
def init(file: str, images: str, std: str, rob: str) -> None:
    """Write a commented CONFIG for two classifiers and images of yours.

    Beside it nets.py, unless it is there: two checkpoints of yours as the functions that CONFIG names by default.
    """
    with reported(verbose=False) as console:
        path = Path(file)
        if path.exists():
            raise ConfigError(f"{path} exists already; give another name, or remove it")
        name = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in path.stem)[:64]
        path.write_text(TEMPLATE.format(file=file, name=name.lstrip("-") or "mine", images=images, std=std, rob=rob))
        nets, written = path.with_name("nets.py"), f"{path} is"
        if nets.name in code_files(std, rob) and not nets.exists():
            nets.write_text(TWO_CHECKPOINTS)
            written = f"{path} and {nets} are"
        console.print(f"{written} written. Edit, then: mixednuts check {file}", highlight=False, soft_wrap=True)


@click.command(epilog=examples("check jobs/configs/cifar10.yaml"))
@config_argument
@set_option
@local_option
def check(config: str, overrides: tuple[str, ...], *, local: bool) -> None:
    """All that is missing or wrong, at once, with the commands that fix it.

    Nothing is written. Files and the storage are looked for first: a second, or twenty where a bucket's server does
    not answer. Where they are all there, the images are opened and the classifiers tried on a few of them.
    """
    with reported(verbose=False) as console:
        loaded = load_config(config, overrides)
        from ..stages.stage import stages_of

        stages_of(loaded)  # refuses what its stages cannot do together
        problems = [*_missing(loaded), *_storage_problems(loaded)]
        if not problems:
            said = "all files are there; trying the classifiers on a few images"
            console.print(said, highlight=False, soft_wrap=True)
            problems = list(_problems_of_use(loaded))
        for problem in problems:
            click.echo(problem)
        if problems:
            raise SystemExit(1)
        click.echo(f"nothing is missing. Next: {typed('run', config, overrides, local=local)}")


@click.command(epilog=examples("fetch jobs/configs/cifar10.yaml"))
@config_argument
@set_option
def fetch(config: str, overrides: tuple[str, ...]) -> None:
    """Download what `check` misses and whose source is known.

    Files are held against their published checksums where there are any; what broke off is taken up again.
    """
    with reported(verbose=False) as console:
        loaded = load_config(config, overrides)
        items = missing_inputs(data=loaded.data.uri, std=loaded.std, rob=loaded.rob)
        from ..classifiers.checkpoints import fetch as fetched

        failed = 0
        for key, item in items:
            console.print(f"{key}: {item.what} -> {item.path}", highlight=False, soft_wrap=True)
            try:
                click.echo(f"sha256 {fetched(item)}  {item.path}")
            except MixedNutsError as error:
                failed += 1
                console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        if failed:
            raise SystemExit(1)
        click.echo(f"{'fetched' if items else 'nothing is missing'}. Next: {typed('check', config, overrides)}")


def _missing(config: RunConfig) -> Iterator[str]:
    for key, uri in (("data.uri", config.data.uri), ("std", config.std), ("rob", config.rob)):
        if uri is None:
            continue
        try:
            for lacking in missing_input(key, uri):
                yield f"{key}: {lacking.what} is missing: {lacking.path}\n    {lacking.command}"
        except MixedNutsError as error:
            yield str(error)


def _storage_problems(config: RunConfig) -> Iterator[str]:
    if "://" in config.storage:
        yield from _remote_storage_problems(config.storage)
        return
    folder = Path(config.storage).absolute()
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not there.is_dir():
        yield f"storage: {there} is a file, not a folder"
    elif not os.access(there, os.W_OK):
        yield f"storage: {there} cannot be written by this user"


def _remote_storage_problems(uri: str) -> Iterator[str]:
    from ..storage.outages import FIRST_ANSWER_SECONDS
    from ..storage.store import Store

    try:
        store = Store(uri, FIRST_ANSWER_SECONDS)
        store.require_bucket()
        store.exists("run.yaml")
    except MixedNutsError as error:
        yield f"storage: {error}"


def _problems_of_use(config: RunConfig) -> Iterator[str]:
    from ..stages.runs import inspect_inputs

    try:
        inputs = inspect_inputs(config)
        shape = " x ".join(map(str, inputs.image_shape))
        click.echo(f"{inputs.n_images} images of {shape}, {inputs.n_classes} classes")
    except MixedNutsError as error:
        yield str(error)
    import torch

    from ..distributed.gpus import nvidia_driver, unusable_gpu

    if config.compute.num_gpus != 0 and nvidia_driver() and not torch.cuda.is_available():
        yield f"compute: {unusable_gpu()}"
    n_workers, free = config.compute.num_workers or os.cpu_count() or 1, psutil.virtual_memory().available
    if not os.environ.get("RAY_ADDRESS") and n_workers * _WORKER_BYTES > free:
        yield (
            f"compute: {n_workers} workers on this machine take {n_workers * _WORKER_BYTES / 1e9:.1f} GB of memory "
            f"and {free / 1e9:.1f} GB are free\n    --set compute.num_workers={max(1, int(free / _WORKER_BYTES))}"
        )


@click.command(name="list", epilog=examples("list", "list mine.yaml"))
@click.argument("config", required=False, type=click.Path(dir_okay=False), metavar="[CONFIG]")
@set_option
def list_entries(config: str | None, overrides: tuple[str, ...]) -> None:
    """The attacks, clamps, data sets, studies and so on that CONFIG can name.

    With CONFIG, those of the files in its key `extensions` too.
    """
    with reported(verbose=False):
        if config is not None:
            load_config(config, overrides)
        console = Console(soft_wrap=True, highlight=False)
        for register in REGISTERS:
            entries = register.entries().values()
            if not entries:
                continue
            console.print(f"[bold]{register.plural}[/bold]")
            width = max(len(entry.name) for entry in entries)
            for entry in entries:
                added = "" if entry.home.startswith("mixednuts_dist.") else "  (yours)"
                console.print(f"  {entry.name:<{width}}  {entry.describes}{added}", markup=False)


@click.command(epilog=examples("schema --markdown", "schema mine.yaml"))
@click.argument("config", required=False, type=click.Path(dir_okay=False), metavar="[CONFIG]")
@set_option
@click.option("--markdown", is_flag=True, help="A table of all keys instead.")
def schema(config: str | None, overrides: tuple[str, ...], markdown: bool) -> None:
    """The JSON schema of the configuration file.

    With CONFIG, the keys that the files in its key `extensions` add too.
    """
    with reported(verbose=False):
        if config is not None:
            load_config(config, overrides)
        valid = config_with_stages(stages_with_keys())
        click.echo(config_reference() if markdown else json.dumps(valid.model_json_schema(), indent=2))


def config_reference() -> str:
    """A Markdown table, one line a key: its path, what it takes, its default and what it means."""
    head = ["| key | takes | default | meaning |", "| --- | --- | --- | --- |"]
    return "\n".join(
        [*head, *(_line(path, field) for path, field in fields_of(config_with_stages(stages_with_keys())))]
    )


def fields_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key of a section and of the sections in it, in the order of the file."""
    for name, field in model.model_fields.items():
        section = section_in(field.annotation)
        if section is not None:
            yield from fields_of(section, f"{prefix}{name}.")
        if section is None or not section.model_fields:
            yield f"{prefix}{name}", field


def _line(path: str, field: FieldInfo) -> str:
    cells = (f"`{path}`", _takes(field.annotation, field.metadata), _default(field), field.description or "")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    value = field.default
    if isinstance(value, RangeConfig):
        value = value.model_dump()
    return f"`{json.dumps(value)}`"


def _takes(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A type as a person would say it; `metadata` is what pydantic has taken off an `Annotated`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    registered = next((mark for mark in (*metadata, *arguments) if isinstance(mark, Registered)), None)
    if registered is not None or origin is Literal:
        return ", ".join(f"`{value}`" for value in (registered.register.names() if registered else arguments))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_takes(argument) for argument in arguments))
    if origin in (dict, Mapping):
        return f"map of {_takes(arguments[0])} to {_takes(arguments[1])}"
    if origin in (Annotated, tuple, list):
        inner = _takes(arguments[0])
        return inner if origin is Annotated else f"list of {inner}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "{" + ", ".join(annotation.model_fields) + "}"
    return _NAMES.get(annotation, str(annotation))
