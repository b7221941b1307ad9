"""The commands around the stages: jobs, studies, benchmarks, images, and what comes out of a run."""

import importlib
import inspect
import json
import signal
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
    GOES_ON,
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
    """A number or a fraction."""
    return float(str(read_fraction(text)))


@click.command(epilog=examples("benchmark search", "benchmark attack --model resnet-18 -n 48", "benchmark gpu"))
@click.argument(
    "name", type=click.Choice(["search", "attack", "brackets", "certify", "float32", "gpu", "radii", "threats"])
)
@click.option(
    "--data", metavar="URI", help="attack, float32: images (CIFAR-10 or made-up ones); gpu: a folder; others: a URI."
)
@click.option(
    "--model", metavar="NAME", help="attack, float32: resnet-18, wrn-28-10, wrn-70-16, or a URI; others: a URI."
)
@click.option("--std", metavar="URI", help="brackets: the other classifier.")
@click.option(
    "--eps", type=_radius, metavar="NUMBER", help="attack, float32: Linf, for a URI; radii: the largest; brackets."
)
@click.option("--bounds", is_flag=True, default=None, help="brackets: Linf by bounds, not L2 by smoothing.")
@click.option("--skip", type=click.IntRange(min=0), help="brackets: images left out at the beginning.")
@click.option("--whole", is_flag=True, help="attack: all of standard AutoAttack, attack by attack.")
@click.option("--published", is_flag=True, default=None, help="attack: 100 iterations, 9 targets, not 50 and 4.")
@click.option("-n", "n_images", type=click.IntRange(min=1), help="all but gpu: how many images.")
@click.option("--draws", type=click.IntRange(min=50), help="brackets, certify: draws that bound a vote.")
@click.option("--rounds", type=click.IntRange(min=1), help="attack: how often each contestant runs.")
@click.option("--compile", is_flag=True, default=None, help="attack: torch.compile too; always on a GPU.")
@click.option("--threat", "threats", metavar="NORM:EPS", multiple=True, help="threats: L1:12, L2:0.5 ...; several.")
@click.option("--version", "versions", multiple=True, help="threats: standard, plus, rand; several.")
@click.option("--individual", is_flag=True, default=None, help="threats: each attack of a version by itself, too.")
@click.option("--behind", metavar="KIND:STRENGTH", help="threats: a defence: noise, dropout, rounded, jpeg.")
@click.option("--n-iter", type=click.IntRange(min=1), help="float32, threats: iterations of each attack.")
@click.option("--n-targets", "n_target_classes", type=click.IntRange(min=1), help="threats: targets, at most.")
@click.option("--n-queries", type=click.IntRange(min=1), help="threats: queries of Square.")
def benchmark(name: str, whole: bool, **options: Any) -> None:
    """Our code beside a plain one in the same process, as ratios, in JSON."""
    if whole and name != "attack":
        raise click.UsageError(f"benchmark {name} does not take whole")
    module = importlib.import_module(f"..benchmarks.{name}", __package__)
    run = module.run_whole if whole else module.run
    given = {option: value for option, value in options.items() if value is not None and value != ()}
    taken = inspect.signature(run).parameters
    if unknown := sorted(given.keys() - taken.keys()):
        raise click.UsageError(f"benchmark {name} does not take {', '.join(unknown)}")
    lost = GOES_ON if name == "gpu" else "interrupted: nothing of this benchmark is kept"
    with reported(verbose=False, interrupted=lost):
        click.echo(json.dumps(run(**given), indent=2))


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
        "export s3://bucket/runs/cifar10-0af3c2d1 --to hf:ORG/NAME --format torch",
    )
)
@run_argument
@click.option("--to", "destination", required=True, metavar="FOLDER|hf:ORG/NAME", help="Where to put it.")
@click.option(
    "--format",
    "formats",
    type=click.Choice(["torch", "onnx"]),
    multiple=True,
    help="Graphs beside the weights; may be given twice.",
)
@click.option("--robustbench", is_flag=True, help="The adversarial images and the forms for RobustBench instead.")
@beta_option
@trust_option
@verbose_option
def export(
    run: str, destination: str, formats: tuple[str, ...], *, robustbench: bool, beta: float | None, trust: bool,
    verbose: bool,
) -> None:  # fmt: skip
    """The mixture of RUN, a run's folder or URI, as files.

    Weights, parameters and a model card, with --format also graphs that run without this package.
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
                graphs = f", then {' and '.join(formats)} graphs, each held against the classifier" if formats else ""
                doing(f"loading the classifiers of {found.run_id}, writing weights, parameters and card{graphs}")
                written = export_run(found, folder, formats=formats, address=destination)
            shown = ", trust_code=True" if has_code(folder) else ""
            if hub is not None:
                doing(f"uploading to hf:{hub}")
            place = upload(folder, hub) if hub is not None else str(folder)
        console.print(f"{place}: {', '.join(written)}", highlight=False, soft_wrap=True)
        if not robustbench:
            click.echo(f'MixedClassifier.from_pretrained("{destination}"{shown})')


@click.command(epilog=examples("serve runs/digits-bc980c1c", "serve s3://bucket/runs/cifar10-0af3c2d1 --num-gpus 0.5"))
@run_argument
@click.option("--host", default="127.0.0.1", show_default=True, help="0.0.0.0 answers other machines too.")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True)
@click.option("--max-batch", type=click.IntRange(min=1), default=64, show_default=True, help="Requests a batch.")
@click.option("--replicas", type=click.IntRange(min=1), default=1, show_default=True, help="Of rob and of std.")
@click.option("--num-cpus", type=float, default=1.0, show_default=True, help="Cores a replica.")
@click.option("--num-gpus", type=float, default=0.0, show_default=True, help="GPUs a replica; fractions share one.")
@beta_option
@trust_option
@address_option
@verbose_option
def serve(
    run: str, *, host: str, port: int, max_batch: int, replicas: int, num_cpus: float, num_gpus: float,
    beta: float | None, trust: bool, address: str | None, verbose: bool,
) -> None:  # fmt: skip
    """The mixture of RUN, a run's folder or URI, behind HTTP.

    It answers until Ctrl-C, and needs the extra `serve`.
    """
    with reported(verbose, interrupted="ended; the run is as it was") as console:
        from ..deployment.loading import read_run

        found = read_run(run, beta=beta, trust_code=trust)
        from ..distributed.executor import make_executor
        from ..errors import ClusterError

        try:
            from ..deployment import service
        except ImportError as error:
            raise ClusterError(f"serving needs {error.name}: pip install 'ray[serve]'") from error
        options = service.ServiceOptions(
            max_batch=max_batch, replicas=replicas, num_cpus=num_cpus, num_gpus=num_gpus, trust_code=True
        )
        with make_executor("ray", address) as executor:
            console.print(f"starting {found.run_id}, beta = {found.chosen.beta:g} ...", highlight=False, soft_wrap=True)
            executor.start()
            with service.serving({"/": service.application(run, beta, options)}, host=host, port=port):
                console.print(f"http://{host}:{port}/ answers; Ctrl-C ends it", highlight=False, soft_wrap=True)
                signal.pause()
