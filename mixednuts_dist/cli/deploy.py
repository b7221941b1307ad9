"""What comes after a run: its mixture as files for others, and as a service."""

import tempfile
import time
from pathlib import Path

import click

from .options import address_option, examples, reported, verbose_option

run_argument = click.argument("run")
beta_option = click.option("--beta", type=float, help="Another searched beta than the deployed one.")


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
@verbose_option
def export(
    run: str, destination: str, formats: tuple[str, ...], robustbench: bool, beta: float | None, verbose: bool
) -> None:
    """The mixture of RUN, a run's folder or URI, as files: weights, parameters, model card."""
    with reported(verbose) as console:
        hub = destination.removeprefix("hf:") if destination.startswith("hf:") else None
        if hub is not None and robustbench:
            raise click.UsageError("--robustbench writes a folder; RobustBench takes a link to the tensor in it")
        from ..deployment.export import export_run, require_token, upload
        from ..deployment.loading import read_run

        if hub is not None:
            require_token(hub)
        found = read_run(run, beta=beta)
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary if hub is not None else destination)
            if robustbench:
                from ..deployment.robustbench_submission import export_submission, missing_images

                written = export_submission(found, folder)
                if missing := missing_images(found):
                    console.print(
                        f"the run left out {missing:,} images of the test set; RobustBench wants all", highlight=False
                    )
            else:
                written = export_run(found, folder, formats=formats, address=destination)
            place = upload(folder, hub) if hub is not None else str(folder)
        console.print(f"{place}: {', '.join(written)}", highlight=False, soft_wrap=True)
        if not robustbench:
            click.echo(f'MixedClassifier.from_pretrained("{destination}")')


@click.command(epilog=examples("serve runs/digits-bc980c1c", "serve s3://bucket/runs/cifar10-0af3c2d1 --num-gpus 0.5"))
@run_argument
@click.option("--host", default="127.0.0.1", show_default=True, help="0.0.0.0 answers other machines too.")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True)
@click.option("--max-batch", type=click.IntRange(min=1), default=64, show_default=True, help="Requests a batch.")
@click.option("--replicas", type=click.IntRange(min=1), default=1, show_default=True, help="Of rob and of std.")
@click.option("--num-cpus", type=float, default=1.0, show_default=True, help="Cores a replica.")
@click.option("--num-gpus", type=float, default=0.0, show_default=True, help="GPUs a replica; fractions share one.")
@beta_option
@address_option
@verbose_option
def serve(
    run: str, *, host: str, port: int, max_batch: int, replicas: int, num_cpus: float, num_gpus: float,
    beta: float | None, address: str | None, verbose: bool,
) -> None:  # fmt: skip
    """The mixture of RUN, a run's folder or URI, behind HTTP, until Ctrl-C; needs the extra `serve`."""
    with reported(verbose) as console:
        from ..deployment.loading import read_run

        found = read_run(run, beta=beta)
        from ..distributed.cluster import RaySession
        from ..errors import ClusterError

        try:
            from ..deployment import service
        except ImportError as error:
            raise ClusterError(f"serving needs {error.name}: pip install 'mixednuts-dist[serve]'") from error
        options = service.ServiceOptions(max_batch=max_batch, replicas=replicas, num_cpus=num_cpus, num_gpus=num_gpus)
        with RaySession(address) as session:
            console.print(f"starting {found.run_id}, beta = {found.chosen.beta:g} ...", highlight=False)
            session.ensure()
            with service.serving({"/": service.application(run, beta, options)}, host=host, port=port):
                console.print(f"http://{host}:{port}/ answers; Ctrl-C ends it", highlight=False)
                while True:
                    time.sleep(3600)
