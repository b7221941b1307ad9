"""The commands on several runs: two or more compared image by image, and all runs of a storage in one table."""

import json

import click
from rich.console import Console

from .options import examples, json_option, reported, trust_option

_WIDE, _NARROW = 140, ("run", "clean", "robust", "beta", "state")  # columns of a terminal; what fits into 80


@click.command(epilog=examples("compare runs/a-0af3c2d1 runs/b-77e01f3c", "compare RUN RUN RUN --json"))
@click.argument("runs", nargs=-1, required=True, metavar="RUN RUN [...]")
@trust_option
@json_option
def compare(runs: tuple[str, ...], trust: bool, as_json: bool) -> None:
    """Finished runs on the same images, image by image.

    Which are right in both, in one, in neither; McNemar's exact test with Holm's correction over all pairs; the
    difference with its interval. RUN is a run's folder or URI.
    """
    with reported(verbose=False):
        from ..reports import comparison
        from ..reports.table import print_table
        from ..stages.runs import stored_run
        from ..storage.store import Store

        found = comparison.compare([stored_run(Store(uri), trusted=trust) for uri in runs])
        if as_json:
            click.echo(json.dumps(found.to_json(), indent=2))
            return
        print_table(found.table(), console := Console())
        for sentence in found.sentences():
            console.print(sentence, highlight=False, markup=False, soft_wrap=True)


@click.command(epilog=examples("runs runs", "runs s3://bucket/prefix --sort robust"))
@click.argument("storage")
@click.option("--sort", default="finished", show_default=True, metavar="COLUMN", help="By which column.")
@trust_option
@json_option
def runs(storage: str, sort: str, trust: bool, as_json: bool) -> None:
    """All runs under STORAGE: data, threat, clean, robust, beta, cost, date, state."""
    with reported(verbose=False):
        from ..reports import leaderboard
        from ..reports.table import print_table

        found = leaderboard.ordered(leaderboard.entries(storage, trusted=trust), sort)
        if as_json:
            listed = {"format": "mixednuts-runs/1", "runs": [entry.to_json() for entry in found]}
            click.echo(json.dumps(listed, indent=2))
        else:
            shown, console = leaderboard.table(found), Console()
            print_table(shown if console.width >= _WIDE else shown.only(_NARROW), console)
