"""The `adv_images` stage verifies adversarial images from a file with the threat model and all classifiers of the run.

Shapes: B images of a partition, N images of the run, M classifiers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..config.register import STAGES
from ..config.run_config import digest
from ..config.section import Section
from ..config.uris import travelled
from ..storage.partitions import Partition
from .runs import Run
from .stage import Stage, classifier_names, stage_of

if TYPE_CHECKING:
    from torch import Tensor

    from ..distributed.tasks import Columns, Counts
    from ..distributed.workbench import Workbench
    from .run_inputs import Inputs

_BORDER = 1e-5  # relative to the largest logit; the float32 passes of two kinds of CPU differ by less
_MOST_NAMED = 20  # sample ids in a table cell


class AdvImagesKeys(Section):
    """The file to verify."""

    file: str
    """File of adversarial images (.pt, .npy, .npz, or Parquet) in the order of the dataset, or with `sample_id`."""


@STAGES("adv_images", describes="submitted adversarial images, verified in float32", order=5, names_files=True)
class VerifyAdvImages(Stage):
    """Verifies `std`, `rob` and the mixed classifier on the images of the file that are in the ball and in [0, 1]."""

    Keys = AdvImagesKeys
    keys: AdvImagesKeys
    of_mixture = True

    def compute(self, worker: Workbench, partition: Partition) -> tuple[Columns, Counts]:
        import torch

        from ..attacks.verification import Verifier
        from ..images.adv_image_files import read_adv_images

        x, y = worker.images(partition)
        adv_images = read_adv_images(travelled(worker.spec.working_folder)(self.keys.file))
        x_adv, checked = adv_images.checked(range(partition.start, partition.stop), x, worker.spec.threat)
        checked = {name: column.cpu() for name, column in checked.items()}
        models = {**worker.networks, worker.model_name: worker.model}
        verifiers = [Verifier(model, worker.shape(x)) for model in models.values()]
        clean = [verifier.verify(x, y) for verifier in verifiers]
        verified = [verifier.verify(x_adv, y) for verifier in verifiers]
        columns = {
            **checked,
            "clean_right": torch.stack([~each.wrong for each in clean], dim=1),
            "right": torch.stack([~each.wrong for each in verified], dim=1),
            "at_border": torch.stack([_borderline(each.logits) for each in verified], dim=1)
            & checked["counts"][:, None],
        }
        robust_B = columns["clean_right"][:, -1] & columns["right"][:, -1]
        n_forward = 2 * len(x) * len(worker.networks)
        return columns, worker.counts(worker.model_name, clean[-1].logits, y.cpu(), robust_B, n_forward)

    def content_hash(self, opened: Run) -> str:
        from ..images.adv_image_files import adv_images_checksum

        return digest({"stage": super().content_hash(opened), "file": adv_images_checksum(self.keys.file)})

    def check_inputs(self, inputs: Inputs) -> None:
        """Check the file.

        Raises:
            DatasetError: if it cannot be read, or holds examples for other images.
        """
        from ..images.adv_image_files import read_adv_images

        read_adv_images(self.keys.file).require_match(inputs.n_images, inputs.image_shape)
        read_adv_images.cache_clear()  # the driver keeps no images

    def passes(self, opened: Run) -> Mapping[str, tuple[int, int]]:
        return {self.model_name(opened.config): (2, 0)}

    def words(self) -> str:
        return f"also correct on the images of {self.keys.file}"

    def _rows(self, opened: Run) -> tuple[dict[str, Tensor], Tensor | None]:
        """Return the stage's rows, and the robust images (N,) of a finished evaluation or None."""
        rows = self.rows(opened, ["given", "in_range", "counts", "distance", "clean_right", "right", "at_border"])
        evaluation = stage_of(opened.config, "evaluate")
        done = evaluation.finished(opened)
        return rows, evaluation.rows(opened, ["robust"])["robust"] if len(done) == len(opened.partitions) else None

    def outcomes(self, opened: Run) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the images on which each classifier is correct.

        For the last classifier, the images must also be robust in the evaluation, if it has finished.
        """
        rows, evaluated_N = self._rows(opened)
        robust_NM = rows["clean_right"] & rows["right"]
        if evaluated_N is not None:
            robust_NM[:, -1] &= evaluated_N
        names = (f"{name}, submitted images" for name in classifier_names(opened.config))
        return dict(zip(names, zip(rows["clean_right"].T, robust_NM.T, strict=True), strict=True))

    def tables(self, opened: Run) -> dict[str, tuple[list[str], list[list[object]]]]:
        """Return a table of the submitted images, and one of the images that each classifier misclassifies."""
        (rows, evaluated_N), names, threat = self._rows(opened), classifier_names(opened.config), opened.config.threat
        given, counts, n_given = rows["given"], rows["counts"], int(rows["given"].sum())
        submitted: list[list[object]] = [
            ["submitted", n_given],
            [f"valid: in [0, 1] and within {threat.norm} {threat.eps:.5g}", int(counts.sum())],
            ["outside the ball", int((given & rows["in_range"] & ~counts).sum())],
            ["outside [0, 1]", int((given & ~rows["in_range"]).sum())],
            [f"largest distance ({threat.norm})", float(rows["distance"][given].max()) if n_given else 0.0],
        ]
        verified: list[list[object]] = []
        for column, name in enumerate(names):
            clean, broken = rows["clean_right"][:, column], ~rows["right"][:, column]
            new = None if evaluated_N is None or name != names[-1] else _listed(broken & evaluated_N)
            n_broken, borderline = int((clean & broken & counts).sum()), _listed(rows["at_border"][:, column])
            verified.append([name, clean, n_broken, new, borderline])
        columns = ["classifier", "clean", "broken", "newly broken", "borderline"]
        return {
            f"adversarial images of {self.keys.file}": (["images", "count"], submitted),
            "verified in float32": (columns, verified),
        }


def _borderline(logits_BK: Tensor) -> Tensor:
    """Return whether the rounding of another machine may swap the two largest logits, (B,) bool."""
    top_B2 = logits_BK.double().topk(2, dim=1).values
    close_B: Tensor = top_B2[:, 0] - top_B2[:, 1] <= _BORDER * logits_BK.double().abs().amax(dim=1)
    return close_B


def _listed(chosen_N: Tensor) -> str:
    """Return the number of images and the first sample ids, as in `2: 5, 17`."""
    ids = chosen_N.nonzero().squeeze(1).tolist()
    named = ", ".join(map(str, ids[:_MOST_NAMED])) + (", ..." if len(ids) > _MOST_NAMED else "")
    return f"{len(ids)}: {named}" if ids else "0"
