"""The command `mixednuts`, and its stages. Heavy libraries are imported once the configuration is known to be sound."""

import json
from functools import partial

import click
from rich.console import Console

from ..config import load_config
from .options import (
    Invocation,
    config_argument,
    examples,
    json_option,
    print_result,
    reported,
    run_command,
    set_option,
    verbose_option,
)
from .setup import check, fetch, init, list_entries, schema
from .sizing import describe, estimate
from .tools import benchmark, export, prepare, serve, study, submit, verify

__all__ = ["attack", "evaluate", "main", "report", "run", "search", "status", "study"]


@run_command(
    "run jobs/configs/digits.yaml",
    "run mine.yaml --set storage=s3://bucket/prefix --set compute.num_workers=8",
    "run mine.yaml --local",
    as_json=True,
)
def run(given: Invocation, as_json: bool) -> None:
    """All stages in order; what is done is skipped."""
    from .. import pipeline

    print_result(given.on_ray(partial(pipeline.run, given.config)), as_json)
    if given.config.std is not None:
        from ..deployment.loading import loading_line

        line = loading_line(f"{given.config.storage}/{given.config.run_id()}")
        given.console.print(line, highlight=False, soft_wrap=True)


@run_command("attack mine.yaml")
def attack(given: Invocation) -> None:
    """The first stage: the minimum-margin attack on the robust classifier."""
    from ..stages import attack as stage

    given.on_ray(partial(stage.run, given.config))


@run_command("search mine.yaml --beta 0.97", beta=True)
def search(given: Invocation) -> None:
    """s, p, c and alpha for every beta, from the cached logits."""
    from ..reports.table import print_table
    from ..reports.tables import search_table
    from ..stages import search as stage

    result = given.on_ray(partial(stage.run, given.config))
    print_table(search_table(result), Console(), f"criterion {result.criterion}")
    given.tell_run()


@run_command("evaluate mine.yaml --address 10.0.0.7:6379")
def evaluate(given: Invocation) -> None:
    """The adaptive AutoAttack on the mixed classifier."""
    from ..stages import evaluate as stage

    given.on_ray(partial(stage.run, given.config))


@run_command("report mine.yaml --json", "report mine.yaml --otlp http://127.0.0.1:4318", ray=False, as_json=True)
@click.option("--otlp", metavar="URL", help="Send the numbers to an OpenTelemetry collector too (extra `otlp`).")
def report(given: Invocation, as_json: bool, otlp: str | None) -> None:
    """Tables, figures and the page of a finished run."""
    from ..reports import report as stage
    from .terminal import TerminalProgress

    with TerminalProgress(given.console) as progress:
        results = stage.run(given.config, progress=progress)
    print_result(results, as_json)
    if otlp:
        stage.send_table(results, otlp)


@click.command(epilog=examples("status mine.yaml", "status mine.yaml --set storage=s3://bucket/prefix --json"))
@config_argument
@set_option
@json_option
@verbose_option
def status(config: str, overrides: tuple[str, ...], as_json: bool, verbose: bool) -> None:
    """What is done, what is missing, what failed; reads the storage only."""
    with reported(verbose):
        loaded = load_config(config, overrides)
        from .status import print_status, run_status

        found = run_status(loaded)
        if as_json:
            click.echo(json.dumps(found.to_json(), indent=2))
        else:
            print_status(found, Console())


SECTIONS = {
    "Before a run": (init, check, fetch, describe, estimate, prepare),
    "A run, whole or stage by stage": (run, attack, search, evaluate, report),
    "Elsewhere, and later": (submit, status, verify),
    "With what came out": (export, serve),
    "Around it": (study, benchmark, list_entries, schema),
}


class _Sections(click.Group):
    """A group whose help lists the commands in the order in which one needs them."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        width = max(len(name) for name in self.commands)
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                rows = [(f"{command.name:<{width}}", command.get_short_help_str(80)) for command in commands]
                formatter.write_dl(rows)


@click.group(
    cls=_Sections,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=examples("init mine.yaml", "check mine.yaml", "run mine.yaml", "run jobs/configs/digits.yaml"),
)
@click.version_option(package_name="mixednuts-dist")
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    help="json: progress and log, one object a line.",
)
def main(log_format: str) -> None:
    """Mix an accurate and a robust classifier without training: attack, search, evaluate, report, on Ray."""


for _section in SECTIONS.values():
    for _command in _section:
        main.add_command(_command)
