"""The corruptions stage: what common corruptions leave of std, rob and every beta's mixture, from one pass of each.

Shapes: B images of a piece, N of the run, C corruptions, S severities, M classifiers.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from pydantic import Field, field_validator

from ..config.register import DATASETS, STAGES
from ..config.run_config import digest
from ..config.section import Section
from ..errors import DatasetError
from ..images.corruptions import SEVERITIES, Suite
from ..storage.partitions import Partition
from .progress import Progress
from .runs import Run, finished_partitions
from .stage import Outcome, Stage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from ..distributed.executor import Executor
    from ..distributed.tasks import Columns, Summary, Task
    from ..distributed.workbench import Workbench
    from ..images.datasets import Dataset
    from ..mixing.mixture import Mixture


_SHOWN = ("std", "rob", "mixed")  # where every beta's mixture would be too much


class CorruptionsKeys(Section):
    """Which corrupted copies of the run's images are classified."""

    data: str = Field(description="cifar10c:ROOT, cifar100c:ROOT, imagenetc:ROOT, imagenet3dcc:ROOT or corrupted:ROOT")
    corruptions: tuple[str, ...] | None = Field(
        default=None, min_length=1, max_length=100, description="their names; by default all of the published set"
    )

    @field_validator("data")
    @classmethod
    def _is_a_set(cls, data: str) -> str:
        scheme, _, target = data.partition(":")
        sets = [name for name in DATASETS.names() if "corruption" in DATASETS.entries()[name].facts.get("options", {})]
        if scheme not in sets or not target or "?" in target:
            raise ValueError(f"{data!r} is no set of corruptions; valid: {', '.join(f'{name}:ROOT' for name in sets)}")
        return data

    @property
    def suite(self) -> Suite:
        """The set's names and reference errors."""
        suite: Suite = DATASETS.get(self.data.partition(":")[0]).suite
        return suite

    @property
    def names(self) -> tuple[str, ...]:
        """The corruptions that are asked for."""
        return self.corruptions or self.suite.names


@STAGES("corruptions", describes="accuracy under common corruptions of std, rob and every beta's mixture", order=4,
        names_files=True)  # fmt: skip
class Corruptions(Stage):
    """Which of the classifiers are right on each corrupted copy of an image."""

    Keys = CorruptionsKeys
    keys: CorruptionsKeys
    of_mixture = True
    mixtures: Mapping[str, Mixture] = {}  # every beta's, given to the workers with the task

    def compute(self, worker: Workbench, piece: Partition) -> tuple[Columns, Summary]:
        import torch

        x, y = worker.images(piece)
        columns = {"clean": self._right(worker, x, y)}
        for done, name in enumerate(self.keys.names):
            copies = (_opened(self._uri(name, severity)).read(piece.start, piece.stop)[0] for severity in SEVERITIES)
            columns[name] = torch.stack([self._right(worker, each.to(worker.device), y) for each in copies], dim=1)
            worker.report(len(x) * (done + 1) / len(self.keys.names))
        # Its column: the deployed mixture's, in a run of rob alone rob's.
        model = len(worker.networks) if self.mixtures else 0
        robust_B = torch.stack([columns[name][..., model].all(dim=1) for name in self.keys.names]).all(dim=0)
        summary = {
            "classifier": worker.model_name,
            "clean_correct": int(columns["clean"][:, model].sum()),
            "robust": int(robust_B.sum()),
            "n_forward": len(x) * len(worker.networks) * (1 + len(SEVERITIES) * len(self.keys.names)),
            "n_backward": 0,
        }
        return columns, summary

    def _right(self, worker: Workbench, x: Tensor, y: Tensor) -> Tensor:
        """(B, M), in the order of `classifiers`."""
        import torch

        logits = {name: worker.logits(network, x) for name, network in worker.networks.items()}
        classes = [logits_BK.argmax(dim=1) for logits_BK in logits.values()]
        classes += [mixture.classes(logits["std"], logits["rob"]) for mixture in self.mixtures.values()]
        return torch.stack([classes_B == y for classes_B in classes], dim=1)

    def _uri(self, corruption: str, severity: int) -> str:
        return f"{self.keys.data}?{urlencode({'corruption': corruption, 'severity': severity})}"

    def classifiers(self, opened: Run) -> dict[str, Mixture | None]:
        """What is classified with, in the order of the columns; a mixture's name is its beta."""
        search = self.searched(opened)
        if search is None:
            return {"rob": None}
        every = {f"beta {entry.beta:g}": entry.mixture() for entry in search.entries}
        return {"std": None, "rob": None, "mixed": search.deployed().mixture(), **every}

    def fingerprint(self, opened: Run) -> str:
        settings = [each.settings() for each in self.classifiers(opened).values() if each is not None]
        return digest({"stage": super().fingerprint(opened), "mixtures": settings})

    def task(self, opened: Run) -> Task:
        travelling = copy(self)
        travelling.mixtures = {name: each for name, each in self.classifiers(opened).items() if each is not None}
        return replace(super().task(opened), of=travelling)  # type: ignore[call-arg]

    def complete(self, opened: Run, executor: Executor | None, progress: Progress) -> None:
        """As of any stage; the corrupted images are looked at before the first pass.

        Raises:
            DatasetError: for a corruption or severity that is not there, or that has other images than the run.
        """
        if len(finished_partitions(opened, self.name, self.fingerprint(opened))) < len(opened.partitions):
            self._require_same_images(opened)
        super().complete(opened, executor, progress)

    def _require_same_images(self, opened: Run) -> None:
        uri, n = opened.config.data.uri, opened.inputs.n_images
        clean = _opened(uri)
        for name in self.keys.names:
            for severity in SEVERITIES:
                corrupted = _opened(self._uri(name, severity))
                if _identity(clean, n) != _identity(corrupted, n):
                    raise DatasetError(
                        f"corruptions.data: {corrupted.uri} has other images or labels than the first {n} of {uri}; "
                        "name the set that was made of these"
                    )

    def passes(self, opened: Run) -> Mapping[str, tuple[int, int]]:
        return {self.model_name(opened.config): (1 + len(SEVERITIES) * len(self.keys.names), 0)}

    def words(self) -> str:
        return f"right under each of {len(self.keys.names)} corruptions at {len(SEVERITIES)} severities"

    def right(self, opened: Run) -> tuple[dict[str, Tensor], Tensor]:
        """Classifier -> which clean images it gets right, (N,); and which corrupted ones all do, (M, C, S, N); bool.

        Raises:
            MissingArtifact: where the stage has not finished.
        """
        import torch

        rows = self.rows(opened, ["clean", *self.keys.names])
        clean = dict(zip(self.classifiers(opened), rows["clean"].unbind(dim=1), strict=True))
        return clean, torch.stack([rows[name] for name in self.keys.names]).permute(3, 0, 2, 1)

    def outcomes(self, opened: Run) -> list[Outcome]:
        """One row for each of std, rob and the deployed mixture: right under every corruption and severity."""
        clean, right_MCSN = self.right(opened)
        found = zip(clean.items(), right_MCSN.all(dim=2).all(dim=1), strict=True)
        return [
            Outcome(f"{name}, corrupted", int(clean_N.sum()), int(every_N.sum()), len(clean_N))
            for (name, clean_N), every_N in found
            if name in _SHOWN
        ]

    def tables(self, opened: Run) -> dict[str, tuple[list[str], list[list[object]]]]:
        """Each classifier's accuracy by severity with its mCE, and by corruption."""
        clean, right_MCSN = self.right(opened)
        reference, words = self._reference(clean, right_MCSN)
        rows: list[list[object]] = []
        for (name, clean_N), right_CSN in zip(clean.items(), right_MCSN, strict=True):
            by_severity = [_percent(right_CSN[:, severity]) for severity in range(len(SEVERITIES))]
            error = mean_corruption_error(right_CSN, reference)
            rows.append([name, (int(clean_N.sum()), len(clean_N)), _percent(right_CSN), *by_severity, error])
        columns = ["classifier", "clean", "corrupted, mean (%)", *(f"severity {each} (%)" for each in SEVERITIES)]
        shown = [place for place, name in enumerate(clean) if name in _SHOWN]
        by_corruption: list[list[object]] = [
            [name, *(_percent(right_MCSN[place, row]) for place in shown)] for row, name in enumerate(self.keys.names)
        ]
        names = list(clean)
        return {
            f"severity of the corruptions, {self.keys.data.partition(':')[0]}": ([*columns, f"mCE {words} (%)"], rows),
            "corruptions one by one, mean of the severities (%)": (
                ["corruption", *(names[place] for place in shown)],
                by_corruption,
            ),
        }

    def _reference(self, clean: Mapping[str, Tensor], right_MCSN: Tensor) -> tuple[list[float], str]:
        """The errors that mCE divides by, one a corruption, and whose they are."""
        known = self.keys.suite.reference_errors
        if all(name in known for name in self.keys.names):
            return [known[name] for name in self.keys.names], "against AlexNet"
        first = next(iter(clean))
        return [1 - float(each.double().mean()) for each in right_MCSN[0]], f"against {first}"


def mean_corruption_error(right_CSN: Tensor, reference: list[float]) -> float | None:
    """mCE in percent: errors over the severities, divided by the reference's, averaged over the corruptions.

    None where the reference makes no mistake (Hendrycks and Dietterich 2019, section 3).
    """
    errors = [1 - float(each.double().mean()) for each in right_CSN]
    if not all(reference):
        return None
    shares = [error / base for error, base in zip(errors, reference, strict=True)]
    return round(100 * math.fsum(shares) / len(shares), 1)


def _percent(right: Tensor) -> float:
    return round(100 * float(right.double().mean()), 1)


@cache
def _opened(uri: str) -> Dataset:
    """Once a process: ImageNet's lists of files are long."""
    from ..images.datasets import open_dataset

    return open_dataset(uri)


def _identity(dataset: Dataset, n: int) -> tuple[Any, ...]:
    """What tells images of one set from those of another: names of files where there are some, and labels."""
    names = getattr(dataset, "names", ())
    return len(dataset) >= n, tuple(names[:n]), tuple(dataset.labels[:n].tolist())
