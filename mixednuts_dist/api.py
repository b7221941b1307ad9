"""MixedNUTS in one call: two modules and images in, a mixed classifier with its report out.

The call is a run like any other, by the stages' own code, in this process and without Ray. Its folder holds the images
as an .npz file; its base classifiers are copies of the caller's modules, which this process holds under a name.
"""

import copy
import functools
import secrets
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from . import pipeline
from .config.run_config import parse_config
from .config.threat import ThreatModel, check_threat
from .deployment.loading import read_run
from .distributed.executor import make_executor
from .errors import InvalidInputError
from .images.arrays import ArrayImages
from .mixing.classifier import MixedClassifier
from .reports.figures import figures
from .reports.page import report_files
from .reports.results import RunResults
from .reports.tables import accuracy_table, search_table
from .stages.progress import Progress

_HELD: dict[str, nn.Module] = {}  # what `mix` was called with, while it runs


@dataclass(frozen=True, repr=False)
class MixReport:
    """What `mix` has measured and predicted."""

    results: RunResults  # everything as values; `results.to_json()` is plain

    @functools.cached_property
    def files(self) -> Mapping[str, bytes]:
        """The report's page, figures and tables by name; drawn when they are first asked for."""
        return report_files(self.results)

    @property
    def table(self) -> str:
        """Clean and robust accuracy of std, rob and the mixture with 95 % intervals, as Markdown."""
        return accuracy_table(self.results).as_markdown()

    @property
    def curve(self) -> str:
        """The trade-off of clean against robust accuracy over all betas, as SVG."""
        return figures(self.results)["tradeoff"].svg("tradeoff")

    @property
    def choices(self) -> str:
        """The parameters at every beta with what they are predicted to reach, as Markdown."""
        return search_table(self.results.search).as_markdown()

    @property
    def page(self) -> str:
        """The report as one HTML page that needs no other file."""
        return self.files["index.html"].decode()

    def save(self, folder: str | Path) -> Path:
        """Write the page, the figures and the tables into `folder`; returns the page's path."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (target / name).write_bytes(content)
        return target / "index.html"

    def __repr__(self) -> str:
        return self.table

    def _repr_html_(self) -> str:
        return f"{accuracy_table(self.results).as_html()}{self.curve}"


def mix(
    std: nn.Module,
    rob: nn.Module,
    images_BCHW: Tensor,
    labels_B: Tensor,
    *,
    threat: ThreatModel,
    beta: float = 0.95,
    preset: Literal["standard", "fast"] = "fast",
    seed: int = 0,
    folder: str | Path | None = None,
    attack: Mapping[str, Any] | None = None,
    search: Mapping[str, Any] | None = None,
    evaluate: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    verbose: bool = False,
) -> MixedClassifier:
    """Attack rob, search s, p, c and alpha with rounds, attack the mixture: the mixed classifier, with its `report`.

    Everything happens in this process. Neither the caller's modules nor their modes and images change: the classifier
    that comes back holds copies in eval mode, without parameters that ask for gradients.

    Args:
        std: images (B, C, H, W) in [0, 1] -> logits (B, K), normalisation inside; accurate on clean images.
        rob: the same; robust.
        images_BCHW: (B, C, H, W) floats in [0, 1] or uint8, a tensor or an array; what is
            attacked and searched on. Some hundred images are a start.
        labels_B: one class an image, (B,) integers in 0 .. K - 1.
        threat: what the adversary may change, e.g. `ThreatModel("Linf", 8 / 255)`; eps in units of the pixel range.
        beta: share in [0, 1] of rob's robust images that must stay right.
        preset: of all attacks; "fast" takes a tenth of the passes of "standard", which is AutoAttack.
        seed: of every random start.
        folder: where the run is kept, as `folder/<run id>`; `mixednuts report` of that draws its page. By default it is
            deleted. The report of the classifier is held in memory in both cases, and drawn when it is asked for.
        attack, search, evaluate: keys of these sections of the configuration (docs/configuration.md), for instance
            `attack={"n_iter": 20}`.
        progress: is called at the beginning and end of each stage and after each partition.
        verbose: show the progress on stderr, as the command `mixednuts run` does.

    Raises:
        InvalidInputError: for base classifiers that are no modules, or where no mixture can be had.
        DatasetError: for images or labels of another kind or shape.
        BaseClassifierError: where a module does not answer one image with finite logits that depend on it alone.
        ConfigError: for keys or values that the configuration does not have.

    Example:
        >>> import mixednuts_dist as mn
        >>> std, rob = mn.load_classifier("demo:std", "std"), mn.load_classifier("demo:rob", "rob")
        >>> x, y = mn.open_dataset("digits").read(0, 24)
        >>> few = {"n_iter": 5, "n_target_classes": 2}
        >>> mixed = mix(std, rob, x, y, threat=mn.ThreatModel("Linf", 0.15), beta=0.9, attack=few, evaluate=few)
        >>> mixed(x).shape, mixed.report.results.search.deployed_beta
        (torch.Size([24, 10]), 0.9)
    """
    for role, model in (("std", std), ("rob", rob)):
        if not isinstance(model, nn.Module):
            raise InvalidInputError(f"{role} is a {type(model).__name__}, not a torch module; wrap a function in one")
    check_threat(threat)
    images, labels = (
        np.ascontiguousarray(values.detach().cpu() if isinstance(values, Tensor) else values)
        for values in (images_BCHW, labels_B)
    )
    ArrayImages("mix", images, labels)  # refuses them before there is a file for a message to name
    names = {role: f"{role}-{secrets.token_hex(4)}" for role in ("std", "rob")}
    with ExitStack() as stack:
        storage = Path(folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="mixednuts-"))).absolute()
        stack.callback(torch.set_num_threads, torch.get_num_threads())  # a worker sets its own
        if verbose and progress is None:
            from .cli.terminal import TerminalProgress

            progress = stack.enter_context(TerminalProgress(Console(stderr=True)))
        for role, model in (("std", std), ("rob", rob)):
            _HELD[names[role]] = model
            stack.callback(_HELD.pop, names[role])
        config = parse_config({
            "name": "mix",
            "data": {"uri": f"npz:{_stored(storage, images, labels)}"},
            **{role: f"py:{__name__}:held?name={name}" for role, name in names.items()},
            "threat": {"norm": threat.norm, "eps": threat.eps},
            "seed": seed,
            "storage": str(storage),
            "compute": {"num_cpus": torch.get_num_threads()},
            "preset": preset,
            "attack": attack or {},
            "search": {"beta": beta, **(search or {})},
            "evaluate": evaluate or {},
        })  # fmt: skip
        with make_executor("debug") as executor:
            results = pipeline.run(config, executor=executor, progress=progress, drawn=False)
        run = storage / config.run_id()
        mixed = read_run(str(run), trust_code=True).classifier()
        mixed.report = MixReport(results)
        return mixed


def held(name: str) -> nn.Module:
    """A copy of a module that `mix` was called with, which is there while the call runs.

    Raises:
        InvalidInputError: in another process, or after the call.
    """
    if name not in _HELD:
        raise InvalidInputError(
            f"{name} was a module of the process that called mixednuts_dist.mix; keep the mixed classifier with "
            "save_pretrained and load it with load_pretrained"
        )
    return copy.deepcopy(_HELD[name])


def _stored(folder: Path, images: Any, labels: Any) -> Path:
    """The .npz file of the images and labels, which the run reads."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"images-{secrets.token_hex(4)}.npz"
    np.savez(path, images=images, labels=labels)
    return path
