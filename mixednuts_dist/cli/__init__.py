"""The command `mixednuts`. Heavy libraries are imported only once the configuration is known to be sound."""

import click

from .stages import attack, evaluate, report, run, search, status
from .tools import benchmark, describe, estimate, prepare, schema, study, submit

__all__ = ["attack", "evaluate", "main", "report", "run", "search", "status", "study"]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="mixednuts-dist")
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    help="json: progress and log, a line an object.",
)
def main(log_format: str) -> None:
    """MixedNUTS on Ray: attack, search, evaluate, report."""


for _command in (
    *(run, attack, search, evaluate, report, status),
    *(prepare, estimate, submit, study, describe, benchmark, schema),
):
    main.add_command(_command)
