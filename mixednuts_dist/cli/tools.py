"""Commands around a run: clusters, studies, comparisons, exports and benchmarks."""

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from ..config.register import STUDIES
from ..config.section import read_fraction
from ..config.uris import DatasetSource
from ..errors import ClusterError
from .options import (
    MESSAGES,
    RESUMES,
    Command,
    Invocation,
    command,
    json_option,
    log_format_option,
    log_is_json,
    on_config,
    on_config_or_run,
    run_folder,
    trust_option,
    worker_options,
)


@command(
    "submit mine.yaml --address http://127.0.0.1:8265 --set storage=s3://bucket/prefix",
    interrupted="Interrupted. The job continues.",
)
@on_config
@click.option(
    "--address",
    "dashboard",
    required=True,
    help="Address of the cluster's dashboard, for example http://127.0.0.1:8265.",
)
@click.option("--no-wait", is_flag=True, help="Return once the job is submitted.")
@log_format_option
def submit(given: Invocation, dashboard: str, no_wait: bool) -> None:
    """Run all stages as a Ray job in a copy of the current folder.

    The command uploads the current folder and shows the log of the job until the job ends. It exits with status 1 if
    the job fails. Ctrl-C does not stop the job.
    """
    given.config.check_sources()
    run_id, travelling = given.config.run_id(), _travelling(given.source, given.config.storage)
    from ..distributed.submission import follow_job, submit_job

    options = [f"--set={override}" for override in given.overrides] + ["--log-format=json"] * log_is_json()
    job = submit_job(dashboard, ["run", travelling, *options], folder=Path.cwd(), run_id=run_id)
    MESSAGES.print(f"run {run_id} is job {job}")
    for what in ("status", "logs --follow", "stop"):
        MESSAGES.print(f"  ray job {what} --address {dashboard} {job}")
    MESSAGES.print(f"  {given.typed('status')}")
    if not no_wait and not follow_job(dashboard, job, partial(click.echo, nl=False)):
        raise ClusterError(f"job {job} did not succeed. Run the same command to resume from what is stored")


def _travelling(config: str, storage: str) -> str:
    """Return the path of the configuration in the job; its storage must be outside the job's temporary folder."""
    if "://" not in storage and not Path(storage).is_absolute():
        raise ClusterError(
            f"storage={storage!r} would be in the job's temporary folder. Give --set storage=s3://bucket/prefix, or "
            "the absolute path of a folder that every node shares"
        )
    path = Path(config).resolve()
    if not path.is_relative_to(Path.cwd()):
        raise ClusterError(f"{path} is not in {Path.cwd()}, the folder that `submit` uploads. Move it there")
    return str(path.relative_to(Path.cwd()))


@command("study margins mine.yaml", "study all runs/a/runs/a-0af3c2d1 --full", interrupted=RESUMES)
@click.argument("name", metavar="NAME|all")
@on_config_or_run
@worker_options
@click.option(
    "--rob",
    "robs",
    multiple=True,
    metavar="URI|FILE.txt",
    help="Also compare this robust classifier, or those of FILE.txt. Repeatable.",
)
@click.option("--full", is_flag=True, help="Use all images and the configured budgets. Default: a reduced sample.")
def study(given: Invocation, name: str, robs: tuple[str, ...], full: bool) -> None:
    """Run a study of the paper: table, figure, and findings.

    `mixednuts schema --names` lists the studies; `all` runs every study that suits the run.
    """
    config = given.config  # first, because its extensions may register the study
    if name != "all":
        STUDIES.check(name)
    given.require_inputs()
    from ..studies import study as studies

    shown = studies.result_console()
    given.on_workers(partial(studies.run, config, name, full=full, robs=robs, console=shown), prints=shown)


@command("compare runs/a/runs/a-0af3c2d1 runs/b/runs/b-77e01f3c", "compare --json RUN RUN RUN")
@click.argument("runs", nargs=-1, required=True, metavar="RUN RUN [...]")
@trust_option
@json_option
def compare(runs: tuple[str, ...], trust_code: bool, as_json: bool) -> None:
    """Compare finished runs image by image.

    For each pair of runs, the command counts the images that are correct in both runs, in one, and in neither. It adds
    the 95% interval of the difference and McNemar's exact test, with Holm's correction over all pairs.
    """
    from ..reports import comparison
    from ..reports.table import print_table
    from ..stages.runs import stored_run

    opened = [stored_run(run_folder(run), trusted=trust_code) for run in runs]
    pairs = comparison.compare(opened)
    if as_json:
        names = [run.config.run_id() for run in opened]
        click.echo(json.dumps({"format": "mixednuts-comparison/1", "runs": names, "pairs": pairs}, indent=2))
        return
    print_table(comparison.comparison_table(opened, pairs), Console())
    for note in comparison.comparison_notes(opened):
        click.echo(note)


def _radius(text: str) -> float:
    """Read a number or a fraction."""
    try:
        return float(str(read_fraction(text)))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a number or a fraction, e.g. 8/255.") from None


@click.group()
def benchmark() -> None:
    """Compare with a reference implementation, and print JSON."""


@benchmark.command("attack", cls=Command, examples=("benchmark attack --model demo:rob --data digits --eps 0.1 -n 24",))
@click.option("--model", metavar="URI", default="demo:rob", help="Classifier. Default: demo:rob.")
@click.option("--data", metavar="URI", default="digits", help="Images. Default: digits.")
@click.option("--eps", type=_radius, metavar="NUMBER", help="Linf radius; required with --model.")
@click.option("-n", "--num-images", "n_images", type=click.IntRange(1), default=40, help="Images. Default: 40.")
def benchmark_attack(**options: Any) -> None:
    """Run standard AutoAttack in this package and in pyautoattack."""
    from ..benchmarks import attack_benchmark

    click.echo(json.dumps(attack_benchmark.run(**options), indent=2))


@benchmark.command("search", cls=Command, examples=("benchmark search",))
def benchmark_search() -> None:
    """Run Algorithm 1 in this package and as a plain loop."""
    from ..benchmarks import search_benchmark

    click.echo(json.dumps(search_benchmark.run(), indent=2))


@command("prepare folder:photos?preprocess=Res256Crop224 --to s3://bucket/photos", interrupted=RESUMES)
@click.argument("uri")
@click.option("--to", "output", required=True, metavar="FOLDER|s3://BUCKET/PREFIX", help="Where to write.")
def prepare(uri: str, output: str) -> None:
    """Write a dataset as class-balanced Parquet parts.

    On a cluster, each worker then reads only the parts that it needs, with 100 images each. Existing parts are kept.
    To use a cluster, set RAY_ADDRESS.
    """
    DatasetSource(uri).check("data.uri")
    from ..distributed import preparation as stage
    from ..distributed.executor import make_executor
    from .terminal import TerminalProgress

    done: dict[bool, int] = {True: 0, False: 0}  # images that existed, and that were written
    with make_executor("ray") as executor, TerminalProgress(MESSAGES) as progress:

        def count(part: stage.PartDone, n_images: int) -> None:
            done[part.was_there] += part.part.stop - part.part.start
            progress.counted("prepare", sum(done.values()), n_images)

        made = stage.run(uri, output, executor=executor, on_part=count)
    kept = f", {done[True]} images were present already" if done[True] else ""
    MESSAGES.print(f"{len(made.labels)} images in {len(made.parts)} parts{kept}")
    click.echo(f"data: {{uri: parquet:{output}}}")


@command(
    "export runs/digits/runs/digits-5fd247dd --to digits-mixture",
    "export s3://bucket/runs/cifar10/runs/cifar10-0af3c2d1 --to hf:ORG/NAME",
)
@click.argument("run")
@click.option("--to", "output", required=True, metavar="FOLDER|hf:ORG/NAME", help="Where to write.")
@click.option("--robustbench", is_flag=True, help="Write the adversarial images and forms for RobustBench instead.")
@click.option("--beta", type=float, help="Use this searched beta instead of the deployed one.")
@trust_option
def export(run: str, output: str, *, robustbench: bool, beta: float | None, trust_code: bool) -> None:
    """Export the mixed classifier of a run with a model card."""
    hub = output.removeprefix("hf:") if output.startswith("hf:") else None
    if hub is not None and robustbench:
        raise click.UsageError("--robustbench writes a folder; RobustBench takes a link to the tensor in it")
    from ..deployment.export import export_run, require_token, upload
    from ..deployment.loading import read_run

    if hub is not None:
        require_token(hub)
    run_folder(run)
    MESSAGES.print(f"reading {run}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary if hub is not None else output)
        if robustbench:
            from ..deployment.robustbench_submission import export_submission

            MESSAGES.print("writing the adversarial images and the forms")
            written, missing = export_submission(run, folder, beta=beta, trust_code=trust_code)
            if missing:
                MESSAGES.print(f"the run left out {missing:,} images of the test set; RobustBench requires all")
        else:
            found = read_run(run, beta=beta, trust_code=trust_code)
            MESSAGES.print(f"loading the classifiers of {found.run_id}, writing weights, parameters and card")
            written = export_run(found, folder, address=output)
        if hub is not None:
            MESSAGES.print(f"uploading to hf:{hub}")
        place = upload(folder, hub) if hub is not None else str(folder)
    MESSAGES.print(f"{place}: {', '.join(written)}")
    if not robustbench:
        trust = ", trust_code=True" if found.stored.config.runs_code else ""
        click.echo(f'load_pretrained("{output}"{trust})')
