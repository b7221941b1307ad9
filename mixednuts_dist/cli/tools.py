"""The commands around the stages: jobs, studies, benchmarks, images, and what comes out of a run."""

import json
import tempfile
import webbrowser
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import click

from ..config.register import STUDIES
from ..config.section import read_fraction
from ..config.uris import check_dataset_uri
from ..errors import ClusterError, MissingArtifact
from .options import (
    Invocation,
    address_option,
    config_argument,
    examples,
    local_option,
    prepared,
    reported,
    run_or_config_argument,
    set_option,
    store_of,
    trust_option,
    typed,
    verbose_option,
)

_PAGE = "report/index.html"
run_argument = click.argument("run")
beta_option = click.option("--beta", type=float, help="Another searched beta than the deployed one.")


@click.command(
    epilog=examples("submit mine.yaml --address http://127.0.0.1:8265 --set storage=s3://bucket/prefix --wait")
)
@config_argument
@set_option
@click.option("--address", required=True, help="The cluster's dashboard, http://127.0.0.1:8265 for instance.")
@click.option(
    "--uv", "with_uv", is_flag=True, help="Nodes without the dependencies: uv installs what pyproject.toml pins."
)
@click.option("--wait/--no-wait", help="Show the job's log until it ends.")
def submit(config: str, overrides: tuple[str, ...], address: str, with_uv: bool, wait: bool) -> None:
    """All stages as a Ray job; the current folder travels to the cluster."""
    with reported(verbose=False) as console:
        loaded = prepared(config, overrides, console)
        travelling = _travelling(config, loaded.storage)
        from ..distributed.submission import follow_job, submit_job

        options = [f"--set={override}" for override in overrides]
        job = submit_job(
            address, ["run", travelling, *options], folder=Path.cwd(), run_id=loaded.run_id(), with_uv=with_uv
        )
        console.print(f"run {loaded.run_id()} is job {job}", highlight=False, soft_wrap=True)
        for what in ("status", "logs --follow", "stop"):
            console.print(f"  ray job {what} --address {address} {job}", highlight=False, soft_wrap=True)
        console.print(f"  {typed('status', config, overrides)}", highlight=False, soft_wrap=True)
        if wait and not follow_job(address, job, partial(click.echo, nl=False)):
            raise ClusterError(f"job {job} did not succeed; the same command goes on from what is written")


def _travelling(config: str, storage: str) -> str:
    """Where the job finds the configuration; what it leaves must not lie in its own folder, which is deleted."""
    if "://" not in storage and not Path(storage).is_absolute():
        raise ClusterError(
            f"storage={storage!r} would lie in the job's temporary folder; give --set storage=s3://bucket/prefix, or "
            f"the absolute path of a folder that every node shares"
        )
    path = Path(config).resolve()
    if not path.is_relative_to(Path.cwd()):
        raise ClusterError(f"{path} does not lie below {Path.cwd()}, the folder that travels to the cluster")
    return str(path.relative_to(Path.cwd()))


def _list_studies(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        for entry in STUDIES.entries().values():
            click.echo(f"{entry.name:<20}{entry.facts.get('section', ''):<33}{entry.describes}")
        context.exit()


@click.command(epilog=examples("study --list", "study margins mine.yaml", "study all runs/mine-0af3c2d1 --full"))
@click.argument("name", metavar="NAME|all")
@run_or_config_argument
@set_option
@address_option
@local_option
@trust_option
@verbose_option
@click.option(
    "--list", is_flag=True, is_eager=True, expose_value=False, callback=_list_studies, help="Every NAME in a line."
)
@click.option("--rob", "robs", multiple=True, metavar="URI", help="Another robust classifier to compare with.")
@click.option("--full", is_flag=True, help="All images under the configured attacks, not fewer and cheaper.")
def study(
    name: str, config: str, overrides: tuple[str, ...], *, address: str | None, local: bool, trust: bool,
    verbose: bool, robs: tuple[str, ...], full: bool,
) -> None:  # fmt: skip
    """A study of the paper: table, figure and findings."""
    with reported(verbose) as console:
        given = Invocation(prepared(config, overrides, console, trust=trust), console, address, local)
        if name != "all":
            STUDIES.check(name)
        from ..studies import study as studies

        shown = studies.result_console()
        given.on_ray(partial(studies.run, given.config, name, full=full, robs=robs, console=shown), prints=shown)


def _radius(text: str) -> float:
    """Read a number or a fraction."""
    try:
        return float(str(read_fraction(text)))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a number or a fraction, e.g. 8/255.") from None


_NOTHING_KEPT = "interrupted: nothing of this benchmark is kept"


@click.group(epilog=examples("benchmark search", "benchmark attack --model resnet-18 -n 48"))
def benchmark() -> None:
    """Compare the speed and the results of this package with a reference implementation; print them as JSON."""


@benchmark.command(name="attack", epilog=examples("benchmark attack --model demo:rob --data digits --eps 0.1 -n 24"))
@click.option("--model", metavar="NAME|URI", help="resnet-18, wrn-28-10, wrn-70-16, or a classifier's URI.")
@click.option("--data", metavar="URI", help="Images; by default CIFAR-10 if it is present, otherwise synthetic ones.")
@click.option("--eps", type=_radius, metavar="NUMBER", help="Linf radius; required with a classifier's URI.")
@click.option("-n", "--num-images", "n_images", type=click.IntRange(min=1), default=40, show_default=True)
def benchmark_attack(**options: Any) -> None:
    """Run standard AutoAttack here and in pyautoattack on the same classifier and images."""
    from ..benchmarks import attack_benchmark

    with reported(verbose=False, interrupted=_NOTHING_KEPT):
        click.echo(json.dumps(attack_benchmark.run(**options), indent=2))


@benchmark.command(name="search", epilog=examples("benchmark search"))
def benchmark_search() -> None:
    """Run Algorithm 1 here and as a plain loop over the candidates, on the same logits."""
    from ..benchmarks import search_benchmark

    with reported(verbose=False, interrupted=_NOTHING_KEPT):
        click.echo(json.dumps(search_benchmark.run(), indent=2))


@click.command(epilog=examples("verify mine.yaml", "verify runs/mine-0af3c2d1 --repair"))
@run_or_config_argument
@set_option
@click.option("--repair", is_flag=True, help="Set what is damaged aside; `mixednuts run` makes it again.")
def verify(config: str, overrides: tuple[str, ...], repair: bool) -> None:
    """Hold every file of a run against its checksum; list what is damaged."""
    with reported(verbose=False):
        from ..storage import manifest

        store = store_of(config, overrides)
        bad, n_files = manifest.verify(store)
        if not n_files:
            raise MissingArtifact(f"there is no run under {store.uri}. Run: mixednuts run {config}")
        for damage in bad:
            click.echo(f"{store.address(damage.path)}: {damage.reason}")
        if bad and repair:
            for path in manifest.repair(store, bad):
                click.echo(f"kept as {store.address(path)}")
            click.echo(f"Next: {typed('run', config, overrides)}")
        elif bad:
            again = typed("verify --repair", config, overrides)
            click.echo(f"{len(bad)} of {n_files} files are damaged. Next: {again}")
            raise SystemExit(1)
        else:
            click.echo(
                f"all {n_files} files of {store.uri} were read, and none is damaged as far as it carries a checksum"
            )


@click.command(name="open", epilog=examples("open runs/mine-0af3c2d1", "open mine.yaml"))
@run_or_config_argument
@set_option
def open_page(config: str, overrides: tuple[str, ...]) -> None:
    """The page of a run in the browser, also while it goes; prints its path.

    The page of a run in a bucket is fetched into a temporary file first.
    """
    with reported(verbose=False):
        store = store_of(config, overrides)
        if not store.exists(_PAGE):
            raise MissingArtifact(f"{store.address(_PAGE)} does not exist. Run: mixednuts report {config}")
        path = Path(store.address(_PAGE))
        if "://" in store.uri:
            path = Path(tempfile.mkdtemp(prefix="mixednuts-")) / f"{store.uri.rpartition('/')[2]}.html"
            path.write_bytes(store.read(_PAGE))
        click.echo(path)
        with suppress(webbrowser.Error):  # without a browser the path is enough
            webbrowser.open(path.absolute().as_uri())


@click.command(epilog=examples("prepare folder:photos?preprocess=Res256Crop224 --to s3://bucket/photos"))
@click.argument("uri")
@click.option("--to", "destination", required=True, metavar="FOLDER|s3://BUCKET/PREFIX", help="Where to write.")
@click.option("-n", type=click.IntRange(min=1), help="The first N images only.")
@click.option("--part-size", type=click.IntRange(min=1), default=100, show_default=True, help="Images a part.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the order.")
@address_option
@verbose_option
def prepare(
    uri: str, destination: str, n: int | None, part_size: int, seed: int, address: str | None, verbose: bool
) -> None:
    """Write images as class-balanced Parquet parts, for clusters.

    Workers read their parts by themselves; parts that are there already are kept.
    """
    with reported(verbose) as console:
        check_dataset_uri(uri)
        from ..distributed import preparation as stage
        from ..distributed.executor import make_executor
        from .terminal import PreparationProgress

        with make_executor("ray", address) as executor, PreparationProgress(console) as progress:
            made = stage.run(uri, destination, n=n, part_size=part_size, seed=seed, executor=executor, on_part=progress)
        kept = f", {progress.n_kept} images were there already" if progress.n_kept else ""
        console.print(f"{len(made.labels)} images in {len(made.parts)} parts{kept}", highlight=False, soft_wrap=True)
        click.echo(f"data: {{uri: parquet:{destination}}}")


@click.command(
    epilog=examples(
        "export runs/digits-bc980c1c --to digits-mixture",
        "export s3://bucket/runs/cifar10-0af3c2d1 --to hf:ORG/NAME",
    )
)
@run_argument
@click.option("--to", "destination", required=True, metavar="FOLDER|hf:ORG/NAME", help="Where to put it.")
@click.option("--robustbench", is_flag=True, help="The adversarial images and the forms for RobustBench instead.")
@beta_option
@trust_option
@verbose_option
def export(
    run: str, destination: str, *, robustbench: bool, beta: float | None, trust: bool, verbose: bool
) -> None:  # fmt: skip
    """The mixture of RUN, a run's folder or URI, as files.

    Weights, parameters and a model card.
    """
    with reported(verbose) as console:
        hub = destination.removeprefix("hf:") if destination.startswith("hf:") else None
        if hub is not None and robustbench:
            raise click.UsageError("--robustbench writes a folder; RobustBench takes a link to the tensor in it")
        from ..deployment.export import export_run, has_code, require_token, upload
        from ..deployment.loading import read_run

        if hub is not None:
            require_token(hub)
        doing = partial(console.print, highlight=False, markup=False, soft_wrap=True)
        doing(f"reading {run}")
        found = read_run(run, beta=beta, trust_code=trust)
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary if hub is not None else destination)
            if robustbench:
                from ..deployment.robustbench_submission import export_submission, missing_images

                doing(f"writing {found.run_id}'s adversarial images and the forms")
                written = export_submission(found, folder)
                if missing := missing_images(found):
                    said = f"the run left out {missing:,} images of the test set; RobustBench wants all"
                    console.print(said, highlight=False, soft_wrap=True)
            else:
                doing(f"loading the classifiers of {found.run_id}, writing weights, parameters and card")
                written = export_run(found, folder, address=destination)
            shown = ", trust_code=True" if has_code(folder) else ""
            if hub is not None:
                doing(f"uploading to hf:{hub}")
            place = upload(folder, hub) if hub is not None else str(folder)
        console.print(f"{place}: {', '.join(written)}", highlight=False, soft_wrap=True)
        if not robustbench:
            click.echo(f'MixedClassifier.from_pretrained("{destination}"{shown})')
