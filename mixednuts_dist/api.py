"""The function `mix`, which takes two modules and images, and returns a mixed classifier with its report.

A call is an ordinary run. Its stages are computed in this process, without Ray.
"""

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from . import pipeline
from .classifiers.base_classifiers import load_classifier
from .config.keys import SearchConfig
from .config.run_config import parse_config
from .config.threat import ThreatModel, check_threat
from .config.uris import GIVEN
from .distributed.executor import make_executor
from .errors import InvalidInputError
from .images.arrays import ArrayImages
from .mixing.classifier import MixedClassifier
from .reports.report import RunReport

_BETA: float = SearchConfig.model_fields["beta"].default


@dataclass(frozen=True, repr=False)
class MixResult:
    """The mixed classifier and its report."""

    classifier: MixedClassifier  # on the CPU, in eval mode
    report: RunReport

    def __repr__(self) -> str:
        return repr(self.report)

    def _repr_html_(self) -> str:
        return self.report._repr_html_()


def mix(
    std: nn.Module,
    rob: nn.Module,
    images_BCHW: Tensor,
    labels_B: Tensor,
    *,
    threat: ThreatModel,
    beta: float = _BETA,
    preset: Literal["standard", "fast"] = "standard",
    seed: int = 0,
    folder: str | Path | None = None,
    attack: Mapping[str, Any] | None = None,
    search: Mapping[str, Any] | None = None,
    evaluate: Mapping[str, Any] | None = None,
    verbose: bool = False,
) -> MixResult:
    """Attack `rob`, search s, p, c and alpha with refinement rounds, attack the mixed classifier, and report.

    Everything happens in this process. The caller's modules and images do not change: the classifier that is returned
    holds copies in eval mode, without parameters that require gradients.

    Args:
        std: images (B, C, H, W) in [0, 1] -> logits (B, K), normalization inside; accurate on clean images.
        rob: the same; robust.
        images_BCHW: (B, C, H, W) floats in [0, 1] or uint8, a tensor or an array, to attack and search on. A few
            hundred images are enough to start with.
        labels_B: one class per image, (B,) integers in 0 .. K - 1.
        threat: what the adversary may change, e.g. `ThreatModel("Linf", 8 / 255)`; eps in units of the pixel range.
        beta: target retention in [0, 1], the share of the robust images of `rob` that remain robust after mixing.
        preset: budget for all attacks; "standard" is AutoAttack, and "fast" takes a tenth of its passes.
        seed: seed of all random numbers.
        folder: storage of the run, in `folder/mix/runs/<run id>`; `mixednuts report` with that path draws the page. By
            default, the run is stored in a temporary folder, which is deleted. The returned report needs no files.
        attack, search, evaluate: keys of these sections of the configuration (docs/configuration.md), for instance
            `attack={"n_iter": 20}`.
        verbose: show the progress on stderr, as the command `mixednuts run` does.

    Raises:
        InvalidInputError: for base classifiers that are not modules, or if no mixed classifier is possible.
        DatasetError: for images or labels of another type or shape.
        BaseClassifierError: if a module does not return finite logits, or if they depend on the rest of the batch.
        ConfigError: for unknown keys or invalid values in `attack`, `search` or `evaluate`.

    Example:
        >>> import mixednuts_dist as mn
        >>> std, rob = mn.load_classifier("demo:std"), mn.load_classifier("demo:rob")
        >>> x, y = mn.open_dataset("digits").read(0, 24)
        >>> few = {"n_iter": 5, "n_target_classes": 2}
        >>> mixed = mix(std, rob, x, y, threat=mn.ThreatModel("Linf", 0.15), beta=0.9, preset="fast",
        ...             attack=few, evaluate=few)
        >>> mixed.classifier(x).shape, mixed.report.search.deployed_beta
        (torch.Size([24, 10]), 0.9)
    """
    classifiers = {"std": std, "rob": rob}
    for role, model in classifiers.items():
        if not isinstance(model, nn.Module):
            raise InvalidInputError(f"{role} is a {type(model).__name__}, not a torch module; wrap a function in one")
    check_threat(threat)
    pixels, labels = (
        np.ascontiguousarray(values.detach().cpu() if isinstance(values, Tensor) else values)
        for values in (images_BCHW, labels_B)
    )
    images = ArrayImages("mix", pixels, labels)
    with ExitStack() as stack:
        storage = Path(folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="mixednuts-"))).absolute()
        stack.callback(torch.set_num_threads, torch.get_num_threads())  # restored, because the worker sets its own
        progress = None
        if verbose:
            from .cli.options import MESSAGES
            from .cli.terminal import TerminalProgress

            progress = stack.enter_context(TerminalProgress(MESSAGES))
        config = parse_config({
            "name": "mix",
            "data": {"uri": GIVEN},
            "std": GIVEN,
            "rob": GIVEN,
            "threat": {"norm": threat.norm, "eps": threat.eps},
            "seed": seed,
            "storage": str(storage),
            "compute": {"num_cpus": torch.get_num_threads()},
            "preset": preset,
            "attack": attack or {},
            "search": {"beta": beta, **(search or {})},
            "evaluate": evaluate or {},
        })  # fmt: skip
        config = pipeline.with_objects(config, classifiers, images)
        with make_executor("debug") as executor:
            results = pipeline.run(config, executor=executor, progress=progress, drawn=False)
        std, rob = (load_classifier(source, role) for role, source in config.classifiers.items())
        mixture = replace(results.parameters.mixture(), rd=config.evaluate.rd)
        return MixResult(MixedClassifier.from_mixture(std, rob, mixture), results)
