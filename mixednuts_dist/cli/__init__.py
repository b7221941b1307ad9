"""The command `mixednuts`. Heavy libraries are imported only once the configuration is known to be sound."""

import click

from .deploy import export, serve
from .options import examples
from .setup import check, fetch, init, list_entries
from .stages import attack, evaluate, report, run, search, status
from .tools import benchmark, describe, estimate, prepare, schema, study, submit, verify

__all__ = ["attack", "evaluate", "main", "report", "run", "search", "status", "study"]


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
