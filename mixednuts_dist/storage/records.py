"""The data that stages store for each other: rows, the selected parameters, and summaries of partitions.

Shapes: N images of the run, K classes. There is one row per image, and `sample_id` is its index in the split.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from ..selection.choice import Choice
from .partitions import Partition

if TYPE_CHECKING:  # commands that only look at a run's files do not import PyTorch
    from torch import Tensor

Record = TypeVar("Record")


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def from_plain(kind: Callable[..., Record], content: object) -> Record:
    """Return an object of type `kind` from the content of a JSON file; ValueError if a value has the wrong type."""
    try:
        found: Record = _adapter(kind).validate_python(content)
        return found
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


@dataclass(frozen=True)
class AttackRecords:
    """The rows of the attack stage without images, which are enough for Algorithm 1 and every closed form."""

    sample_ids_N: Tensor  # int64
    labels_N: Tensor  # int64
    std_clean_NK: Tensor  # float32 logits of the standard classifier on the clean image
    std_attacked_NK: Tensor  # float32 logits of the standard classifier on the image from its own attack
    rob_clean_NK: Tensor  # float32 raw logits of the robust classifier on the clean image
    rob_attacked_NK: Tensor  # float32 raw logits of the robust classifier on the minimum-margin image
    log_one_minus_margin_N: Tensor  # float64, log(1 - signed margin) of `LN(rob)` on the minimum-margin image
    std_broken_N: Tensor  # bool: the standard classifier is wrong on the clean image, or APGD-CE + APGD-T broke it
    rob_broken_N: Tensor  # bool: `LN(rob)` is wrong on the clean image, or MMAA broke it

    @property
    def std_correct(self) -> Tensor:
        """Return whether the standard classifier is correct on each clean image."""
        return self.std_clean_NK.argmax(dim=1) == self.labels_N

    @property
    def rob_correct(self) -> Tensor:
        """Return whether the robust classifier is correct on each clean image."""
        return self.rob_clean_NK.argmax(dim=1) == self.labels_N

    @property
    def rob_attacked_correct(self) -> Tensor:
        """Return whether the robust classifier is correct on each minimum-margin image."""
        return self.rob_attacked_NK.argmax(dim=1) == self.labels_N


@dataclass(frozen=True)
class EvaluateRecords:
    """The rows of the evaluate stage, in which the adaptive attack runs on the mixed classifier."""

    sample_ids_N: Tensor  # int64
    labels_N: Tensor  # int64
    mixed_clean_NK: Tensor  # float32 logits of the mixed classifier on the clean image
    mixed_attacked_NK: Tensor  # float32 logits on the stored attacked image
    clean_N: Tensor  # bool: correct on the clean image
    robust_N: Tensor  # bool: correct on the clean image and at every point that the attacks tried
    survived: dict[str, Tensor]  # "warm-start", then each attack in order -> bool (N,): still correct after it


@dataclass(frozen=True)
class SearchRound:
    """One refinement round, which attacks the current choices and searches again."""

    round: int  # from 1
    content_hash: str  # content hash of its rows
    attacked: tuple[Choice, ...]  # one per beta
    kept: tuple[int, ...]  # number of images that each choice keeps robust, as measured by this round
    of: int  # number of robust images of the robust classifier
    n_forward: int
    n_backward: int
    evaluated: str = ""  # content hash of the evaluation that supplied the examples; empty if this round attacked
    tried: tuple[int, ...] = ()  # number of images on which each choice was attacked


@dataclass(frozen=True)
class SearchResult:
    """The content of `search/selected.json`."""

    criterion: str
    clamp: str  # clamp and ln_k belong to the deployed entry
    ln_k: int | None
    deployed_beta: float
    surrogate_alpha: float  # alpha_d of f_aux
    entries: tuple[Choice, ...]  # one per beta, the largest beta first
    n_candidates: int
    n_undeployable: int  # candidates that float32 cannot represent
    notes: tuple[str, ...]  # sentences for the report, on violated assumptions, the grid, and what beta promises
    rounds: tuple[SearchRound, ...] = ()

    def deployed(self) -> Choice:
        """Return the entry of `deployed_beta`."""
        return self.by_beta()[self.deployed_beta]

    def by_beta(self) -> dict[float, Choice]:
        """Return beta -> entry."""
        return {entry.beta: entry for entry in self.entries}


@dataclass(frozen=True)
class PartitionSummary:
    """The summary of a finished partition, which its worker reports and the file's footer keeps."""

    __pydantic_config__ = ConfigDict(allow_inf_nan=False)

    stage: str  # the folder of the stage: "attack", "search/round-1", ...
    partition: int
    start: int
    stop: int
    clean_correct: int  # images that `classifier` classifies correctly
    robust: int  # images on which `classifier` remains robust
    seconds: float  # that the worker took
    n_forward: int
    n_backward: int
    node: str
    device: str = "cpu"  # or the accelerator's name
    n_devices: float = 1.0  # cores or accelerators of the worker; below 1 if workers share one
    precision: str = "std fp32, rob fp32"  # as chosen for gradients on this device
    rows: int = 0  # images per pass; fewer after the memory has run out
    float32_rows: int = 0  # images per float32 pass
    repeatable: bool = True  # two passes over the same images gave the same bits
    finished: float = 0.0  # time in seconds since 1970
    classifier: str = ""  # "rob" or "mixed"
    n_bytes: int = field(default=0, compare=False)  # size of the whole file, which its footer cannot hold

    @property
    def n_images(self) -> int:
        return self.stop - self.start

    def is_of(self, partition: Partition) -> bool:
        """Whether this summary describes the same images as `partition`."""
        return (self.start, self.stop) == (partition.start, partition.stop)
