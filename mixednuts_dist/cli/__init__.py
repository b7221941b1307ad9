"""The command `mixednuts`. Libraries that load slowly are imported only after the configuration has been checked."""

import click

from .options import examples_text
from .setup import check, estimate, init, schema
from .stage_commands import attack, evaluate, report, run, search
from .status import status
from .tools import benchmark, compare, export, prepare, study, submit

__all__ = ["attack", "evaluate", "main", "report", "run", "search", "status", "study"]

SECTIONS = {
    "Before a run": (init, check, estimate, prepare),
    "Run": (run, attack, search, evaluate, report),
    "On a cluster, and while it runs": (submit, status),
    "With the results": (export, compare, study),
    "Reference": (schema, benchmark),
}
REPLACED = {
    "fetch": "mixednuts check CONFIG --fetch",
    "describe": "mixednuts estimate CONFIG --sizes",
    "open": "mixednuts report RUN --open",
    "verify": "mixednuts status RUN --verify",
    "runs": "mixednuts status STORAGE",
    "judge": "mixednuts evaluate CONFIG --adv-images FILE",
    "list": "mixednuts schema --names",
    "serve": "python examples/serve.py RUN",
    **{stage: f"mixednuts run CONFIG --only {stage}" for stage in ("certify", "individual", "corruptions")},
}


class _Sections(click.Group):
    """A group whose help lists the commands by section, in the order in which users need them."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in REPLACED:
            raise click.UsageError(f"`{args[0]}` was replaced. Run: {REPLACED[args[0]]}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        width = max(len(name) for name in self.commands)
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                rows = [(f"{command.name:<{width}}", command.get_short_help_str(80)) for command in commands]
                formatter.write_dl(rows)


@click.group(
    cls=_Sections,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=examples_text(("init mine.yaml", "check mine.yaml", "run jobs/configs/digits.yaml --local")),
)
@click.version_option(package_name="mixednuts-dist")
def main() -> None:
    """Mix an accurate and a robust classifier without training, or attack one classifier with AutoAttack."""


for _section in SECTIONS.values():
    for _command in _section:
        main.add_command(_command)
