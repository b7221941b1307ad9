"""What a stage cost: time, devices and passes, summed over the receipts in its files' footers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..storage.records import Receipt


@dataclass(frozen=True)
class StageCost:
    """The bill of one stage; rows that were taken over from another run count with what they cost there."""

    stage: str
    n_images: int
    n_partitions: int
    nodes: tuple[str, ...]
    devices: tuple[str, ...]  # names of accelerators, or "cpu"
    core_seconds: float  # of workers without an accelerator: cores held x seconds
    gpu_seconds: float  # of the others: accelerators, or shares of one, held x seconds
    wall_seconds: float | None  # on this run's own clock; None where it computed none of the rows
    n_forward: int  # images passed forward
    n_backward: int

    @property
    def images_per_second(self) -> float | None:
        """Images of the stage by its wall-clock seconds, all workers together."""
        return self.n_images / self.wall_seconds if self.wall_seconds else None

    @property
    def passes_per_image(self) -> float:
        """Forward and backward passes that one image took on average."""
        return (self.n_forward + self.n_backward) / self.n_images

    def to_json(self) -> dict[str, Any]:
        """The fields, with hours for seconds of devices."""
        return {
            "stage": self.stage,
            "images": self.n_images,
            "partitions": self.n_partitions,
            "nodes": len(self.nodes),
            "devices": list(self.devices),
            "core_hours": self.core_seconds / 3600,
            "gpu_hours": self.gpu_seconds / 3600,
            "wall_seconds": self.wall_seconds,
            "images_per_second": self.images_per_second,
            "n_forward": self.n_forward,
            "n_backward": self.n_backward,
        }


def stage_costs(receipts: Mapping[str, Sequence[Receipt]], seconds: Mapping[str, float]) -> tuple[StageCost, ...]:
    """One bill for each stage that has receipts, in their order.

    Args:
        receipts: stage -> one receipt a partition.
        seconds: stage -> wall-clock seconds of this run.
    """
    return tuple(_bill(stage, found, seconds.get(stage)) for stage, found in receipts.items() if found)


def _bill(stage: str, receipts: Sequence[Receipt], wall_seconds: float | None) -> StageCost:
    held = {True: 0.0, False: 0.0}
    for receipt in receipts:
        held[receipt.device == "cpu"] += receipt.n_devices * receipt.seconds
    return StageCost(
        stage=stage,
        n_images=sum(receipt.n_images for receipt in receipts),
        n_partitions=len(receipts),
        nodes=tuple(sorted({receipt.node for receipt in receipts})),
        devices=tuple(sorted({receipt.device for receipt in receipts})),
        core_seconds=held[True],
        gpu_seconds=held[False],
        wall_seconds=wall_seconds,
        n_forward=sum(receipt.n_forward for receipt in receipts),
        n_backward=sum(receipt.n_backward for receipt in receipts),
    )
