"""The judge stage: attacked images that somebody hands in, held against the ball, the pixel range and the classifiers.

Shapes: B images of a piece, N of the run, M classifiers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import Field

from ..config.register import STAGES
from ..config.run_config import digest
from ..config.section import Section
from ..storage.partitions import Partition
from .points import held_points
from .progress import RunProgress
from .runs import Run, finished_partitions, run_dataset
from .stage import Outcome, Stage, classifier_names, stage_of

if TYPE_CHECKING:
    from torch import Tensor

    from ..distributed.executor import Executor
    from ..distributed.tasks import Columns, Summary
    from ..distributed.workbench import Workbench

_BORDER = 1e-5  # of the largest logit: float32 passes of one network on two kinds of CPU differ by less
_MOST_NAMED = 20  # images at the border


class JudgeKeys(Section):
    """Whose points are judged."""

    points: str = Field(
        description="File of adversarial images (.pt, .npy, .npz, or Parquet) in the order of the dataset, or with "
        "`sample_id`."
    )


@STAGES("judge", describes="submitted adversarial images, verified in float32", order=5, names_files=True)
class JudgePoints(Stage):
    """Given points inside the ball and [0, 1] count; each of std, rob and the mixture is judged at them."""

    Keys = JudgeKeys
    keys: JudgeKeys
    of_mixture = True

    def compute(self, worker: Workbench, piece: Partition) -> tuple[Columns, Summary]:
        import torch

        from ..attacks.verification import Verifier

        x, y = worker.images(piece)
        held = held_points(worker, piece, self.keys.points)
        counts = held.counts.cpu()
        models = {**worker.networks, worker.model_name: worker.model}
        judges = [Verifier(model, worker.shape(x)) for model in models.values()]
        clean = [judge.verify(x, y) for judge in judges]
        found = [judge.verify(held.tried, y) for judge in judges]
        right = torch.stack([~each.wrong for each in found], dim=1)
        columns = {
            "given": held.given.cpu(),
            "in_range": held.in_range.cpu(),
            "counts": counts,
            "distance": held.distance.cpu().double(),
            "clean_right": torch.stack([~each.wrong for each in clean], dim=1),
            "right": right,
            "at_border": torch.stack([_at_border(each.logits) for each in found], dim=1) & counts[:, None],
        }
        robust_B = columns["clean_right"][:, -1] & right[:, -1]
        n_forward = 2 * len(x) * len(worker.networks)
        return columns, worker.summary(worker.model_name, clean[-1].logits, y.cpu(), robust_B, n_forward)

    def fingerprint(self, opened: Run) -> str:
        from ..images.points import points_checksum

        return digest({"stage": super().fingerprint(opened), "points": points_checksum(self.keys.points)})

    def complete(self, opened: Run, executor: Executor | None, progress: RunProgress) -> None:
        """Check the points, then compute the partitions.

        Raises:
            DatasetError: for points of other images.
        """
        from ..images.points import read_points_file

        first, _ = run_dataset(opened.config).read(0, 1)
        read_points_file(self.keys.points).require_of(opened.inputs.n_images, first)
        super().complete(opened, executor, progress)

    def passes(self, opened: Run) -> Mapping[str, tuple[int, int]]:
        return {self.model_name(opened.config): (2, 0)}

    def further(self) -> Mapping[str, str]:
        return {"an evaluation that tries these images first": f"evaluate.points={self.keys.points}"}

    def words(self) -> str:
        return f"right at the points of {self.keys.points} too"

    def _rows(self, opened: Run) -> dict[str, Tensor]:
        return self.rows(opened, ["given", "in_range", "counts", "distance", "clean_right", "right", "at_border"])

    def _standing(self, opened: Run) -> Tensor | None:
        """What the evaluation has left of the deployed mixture (without std: of rob), (N,) bool; None before it."""
        evaluation = stage_of(opened.config, "evaluate")
        done = finished_partitions(opened, evaluation.name, evaluation.fingerprint(opened))
        return evaluation.rows(opened, ["robust"])["robust"] if len(done) == len(opened.partitions) else None

    def outcomes(self, opened: Run) -> list[Outcome]:
        """What stands of each classifier at the points; of the last one after the evaluation and the points."""
        rows, names, standing = self._rows(opened), classifier_names(opened.config), self._standing(opened)
        robust = rows["clean_right"] & rows["right"]
        if standing is not None:
            robust[:, -1] &= standing
        return [
            Outcome(f"{name}, at given points", int(clean_N.sum()), int(robust_N.sum()), len(robust_N))
            for name, clean_N, robust_N in zip(names, rows["clean_right"].T, robust.T, strict=True)
        ]

    def tables(self, opened: Run) -> dict[str, tuple[list[str], list[list[object]]]]:
        """The points themselves, and which images of each classifier they break."""
        rows, names, standing = self._rows(opened), classifier_names(opened.config), self._standing(opened)
        given, outside = rows["given"], rows["given"] & rows["in_range"] & ~rows["counts"]
        n_given, threat = int(given.sum()), opened.config.threat
        largest = float(rows["distance"][given].max()) if n_given else 0.0
        about: list[list[object]] = [
            ["submitted", n_given],
            [f"valid: in [0, 1] and within {threat.norm} {threat.eps:.5g}", int(rows["counts"].sum())],
            ["outside the ball", int(outside.sum())],
            ["outside [0, 1]", int((given & ~rows["in_range"]).sum())],
            [f"largest distance ({threat.norm})", largest],
        ]
        judged: list[list[object]] = []
        for column, name in enumerate(names):
            clean, broken = rows["clean_right"][:, column], ~rows["right"][:, column]
            new = (broken & standing) if standing is not None and name == names[-1] else None
            border = rows["at_border"][:, column].nonzero().squeeze(1).tolist()
            judged.append([
                name, (int(clean.sum()), len(clean)), int((clean & broken & rows["counts"]).sum()),
                None if new is None else _listed(new.nonzero().squeeze(1)), _listed(border),
            ])  # fmt: skip
        columns = ["classifier", "clean", "broken", "newly broken", "borderline"]
        return {
            f"adversarial images of {self.keys.points}": (["images", "count"], about),
            "verified in float32": (columns, judged),
        }


def _at_border(logits_BK: Tensor) -> Tensor:
    """Where the two largest logits are so close that another machine's rounding may swap them, (B,) bool."""
    top_B2 = logits_BK.double().topk(2, dim=1).values
    close_B: Tensor = top_B2[:, 0] - top_B2[:, 1] <= _BORDER * logits_BK.double().abs().amax(dim=1)
    return close_B


def _listed(ids: Tensor | list[int]) -> str:
    """Return the number of images and the first sample ids, as in `2: 5, 17`."""
    shown = [str(int(each)) for each in ids]
    named = ", ".join(shown[:_MOST_NAMED]) + (", ..." if len(shown) > _MOST_NAMED else "")
    return f"{len(shown)}: {named}" if shown else "0"
