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
    RESUMES,
    Invocation,
    command,
    config_argument,
    config_of,
    json_option,
    log_format_option,
    log_is_json,
    reported,
    run_argument,
    run_command,
    run_folder,
    set_option,
    trust_option,
    typed,
)


@command("submit mine.yaml --address http://127.0.0.1:8265 --set storage=s3://bucket/prefix")
@config_argument
@set_option
@click.option("--address", required=True, help="Address of the cluster's dashboard, for example http://127.0.0.1:8265.")
@click.option("--no-wait", is_flag=True, help="Return once the job is submitted.")
@log_format_option
def submit(config: str, overrides: tuple[str, ...], address: str, no_wait: bool) -> None:
    """Run all stages as a Ray job in a copy of the current folder.

    The command uploads the current folder and shows the log of the job until the job ends. It exits with status 1 if
    the job fails. Ctrl-C does not stop the job.
    """
    with reported("Interrupted. The job continues.") as console:
        loaded = config_of(config, overrides)
        loaded.check_sources()
        travelling = _travelling(config, loaded.storage)
        from ..distributed.submission import follow_job, submit_job

        options = [f"--set={override}" for override in overrides] + ["--log-format=json"] * log_is_json()
        job = submit_job(address, ["run", travelling, *options], folder=Path.cwd(), run_id=loaded.run_id())
        console.print(f"run {loaded.run_id()} is job {job}")
        for what in ("status", "logs --follow", "stop"):
            console.print(f"  ray job {what} --address {address} {job}")
        console.print(f"  {typed('status', config, overrides)}")
        if not no_wait and not follow_job(address, job, partial(click.echo, nl=False)):
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


@run_command(
    "study margins mine.yaml",
    "study all runs/a/runs/a-0af3c2d1 --full",
    runs=True,
    logs=False,
    before=click.argument("name", metavar="NAME|all"),
)
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
    if name != "all":
        STUDIES.check(name)
    given.require_inputs()
    from ..studies import study as studies

    shown = studies.result_console()
    given.on_workers(partial(studies.run, given.config, name, full=full, robs=robs, console=shown), prints=shown)


@command("compare runs/a/runs/a-0af3c2d1 runs/b/runs/b-77e01f3c", "compare --json RUN RUN RUN")
@click.argument("runs", nargs=-1, required=True, metavar="RUN RUN [...]")
@trust_option
@json_option
def compare(runs: tuple[str, ...], trust_code: bool, as_json: bool) -> None:
    """Compare finished runs image by image.

    For each pair of runs, the command counts the images that are correct in both runs, in one, and in neither. It adds
    the 95% interval of the difference and McNemar's exact test, with Holm's correction over all pairs.
    """
    with reported():
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


@command("benchmark attack --model demo:rob --data digits --eps 0.1 -n 24", name="attack")
@click.option("--model", metavar="NAME|URI", help="resnet-18, wrn-28-10, wrn-70-16, or a classifier's URI.")
@click.option("--data", metavar="URI", help="Images; by default CIFAR-10 if it is present, otherwise synthetic ones.")
@click.option("--eps", type=_radius, metavar="NUMBER", help="Linf radius; required with a classifier's URI.")
@click.option(
    "-n",
    "--num-images",
    "n_images",
    type=click.IntRange(min=1),
    default=40,
    show_default=True,
    help="Number of images.",
)
def benchmark_attack(**options: Any) -> None:
    """Run standard AutoAttack in this package and in pyautoattack."""
    from ..benchmarks import attack_benchmark

    with reported():
        click.echo(json.dumps(attack_benchmark.run(**options), indent=2))


@command("benchmark search", name="search")
def benchmark_search() -> None:
    """Run Algorithm 1 in this package and as a plain loop."""
    from ..benchmarks import search_benchmark

    with reported():
        click.echo(json.dumps(search_benchmark.run(), indent=2))


for _benchmark in (benchmark_attack, benchmark_search):
    benchmark.add_command(_benchmark)


@command("prepare folder:photos?preprocess=Res256Crop224 --to s3://bucket/photos")
@click.argument("uri")
@click.option("--to", "output", required=True, metavar="FOLDER|s3://BUCKET/PREFIX", help="Where to write.")
def prepare(uri: str, output: str) -> None:
    """Write a dataset as class-balanced Parquet parts.

    On a cluster, each worker then reads only the parts that it needs, with 100 images each. Existing parts are kept.
    To use a cluster, set RAY_ADDRESS.
    """
    with reported(RESUMES) as console:
        DatasetSource(uri).check("data.uri")
        from ..distributed import preparation as stage
        from ..distributed.executor import make_executor
        from .terminal import TerminalProgress

        done: dict[bool, int] = {True: 0, False: 0}  # images that existed, and that were written
        with make_executor("ray") as executor, TerminalProgress(console) as progress:

            def count(part: stage.PartDone, n_images: int) -> None:
                done[part.was_there] += part.part.stop - part.part.start
                progress.counted("prepare", sum(done.values()), n_images)

            made = stage.run(uri, output, executor=executor, on_part=count)
        kept = f", {done[True]} images were present already" if done[True] else ""
        console.print(f"{len(made.labels)} images in {len(made.parts)} parts{kept}")
        click.echo(f"data: {{uri: parquet:{output}}}")


@command(
    "export runs/digits/runs/digits-5fd247dd --to digits-mixture",
    "export s3://bucket/runs/cifar10/runs/cifar10-0af3c2d1 --to hf:ORG/NAME",
)
@run_argument
@click.option("--to", "output", required=True, metavar="FOLDER|hf:ORG/NAME", help="Where to write.")
@click.option("--robustbench", is_flag=True, help="Write the adversarial images and forms for RobustBench instead.")
@click.option("--beta", type=float, help="Use this searched beta instead of the deployed one.")
@trust_option
def export(run: str, output: str, *, robustbench: bool, beta: float | None, trust_code: bool) -> None:
    """Export the mixed classifier of a run with a model card."""
    with reported() as console:
        hub = output.removeprefix("hf:") if output.startswith("hf:") else None
        if hub is not None and robustbench:
            raise click.UsageError("--robustbench writes a folder; RobustBench takes a link to the tensor in it")
        from ..deployment.export import export_run, require_token, upload
        from ..deployment.loading import read_run

        if hub is not None:
            require_token(hub)
        run_folder(run)
        console.print(f"reading {run}")
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary if hub is not None else output)
            if robustbench:
                from ..deployment.robustbench_submission import export_submission

                console.print("writing the adversarial images and the forms")
                written, missing = export_submission(run, folder, beta=beta, trust_code=trust_code)
                if missing:
                    console.print(f"the run left out {missing:,} images of the test set; RobustBench requires all")
            else:
                found = read_run(run, beta=beta, trust_code=trust_code)
                console.print(f"loading the classifiers of {found.run_id}, writing weights, parameters and card")
                written = export_run(found, folder, address=output)
            shown = ", trust_code=True" if any(folder.glob("*.py")) else ""
            if hub is not None:
                console.print(f"uploading to hf:{hub}")
            place = upload(folder, hub) if hub is not None else str(folder)
        console.print(f"{place}: {', '.join(written)}")
        if not robustbench:
            click.echo(f'load_pretrained("{output}"{shown})')
