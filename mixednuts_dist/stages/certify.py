"""The certify stage certifies images for the smoothed mixed classifier, at every alpha and beta.

The stage stores votes of the robust classifier under Gaussian noise. The votes do not depend on the searched
parameters, and only the class of the standard classifier matters, so one set of rows serves all mixed classifiers.

Shapes: B images of a partition, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ..config.register import STAGES
from ..config.section import Positive, Section, read_fraction
from ..storage.partitions import Partition
from ..storage.records import SearchResult
from .runs import Run
from .search_result import read_search_result
from .stage import Certified, Stage

if TYPE_CHECKING:
    from torch import Tensor

    from ..certification.smoothing import SmoothedAnswers, SmoothingPlan
    from ..distributed.tasks import Columns, Counts
    from ..distributed.workbench import Workbench
    from ..mixing.mixture import Mixture

Radius = Annotated[float, BeforeValidator(read_fraction), Field(gt=0, le=1000)]


def _certifiable(alpha: float) -> float:
    if not 0.5 < alpha <= 1:
        raise ValueError(f"{alpha:g} cannot be certified: up to 1/2, `std` alone decides; give alphas in (0.5, 1]")
    return alpha


Alpha = Annotated[float, AfterValidator(_certifiable)]
_STEPS = 24  # points of the curve over the radius


class CertifyKeys(Section):
    """The noise, the number of draws, and the radii."""

    sigma: float = Field(default=0.25, gt=0, le=1000)
    """Standard deviation of the noise, for pixels in [0, 1]."""
    n: Positive = 10_000
    """Maximum number of draws of noise per image, which bound the vote of its class."""
    n_choose: Positive = 100
    """Number of separate draws, before those of `n`, that choose the class of an image."""
    confidence: float = Field(default=0.999, gt=0, lt=1)
    """Simultaneous confidence of all certificates of one image."""
    radii: tuple[Radius, ...] | None = Field(default=None, max_length=100)
    """L2 radii to certify. By default, 0.4, 1, and 2 sigma."""
    alphas: tuple[Alpha, ...] = Field(default=(1.0, 0.9, 0.8, 0.7), min_length=1, max_length=100)
    """Stop drawing for an image if its certificates at these alphas and `radii` can no longer change."""

    @model_validator(mode="after")
    def _enough_draws(self) -> CertifyKeys:
        from ..certification.confidence import require_enough_draws

        require_enough_draws(self.n, self.confidence, self.plan().least_vote)
        return self

    def plan(self) -> SmoothingPlan:
        """Return the noise and the draws of each image."""
        from ..certification.smoothing import SmoothingPlan

        radii = self.radii or tuple(round(share * self.sigma, 9) for share in (0.4, 1, 2))
        return SmoothingPlan(self.sigma, self.n, self.confidence, self.n_choose, self.alphas, radii)


@STAGES("certify", describes="certified robustness in L2, by randomized smoothing", order=3)
class Certify(Stage):
    """Stores votes of the robust classifier under noise."""

    Keys = CertifyKeys
    keys: CertifyKeys

    def compute(self, worker: Workbench, partition: Partition) -> tuple[Columns, Counts]:
        from ..certification.smoothing import ROB_ALONE, SmoothedAnswers, smoothed_votes

        x, y = worker.images(partition)
        plan, n_classes = self.keys.plan(), worker.logits(worker.rob, x[:1]).shape[1]
        votes = smoothed_votes(
            lambda x_BCHW: worker.logits(worker.rob, x_BCHW), x, y, plan, n_classes=n_classes,
            sample_ids=range(partition.start, partition.stop), seed=worker.spec.seed, rows=worker.shape(x).rows,
        )  # fmt: skip
        columns = {"chosen_counts": votes.chosen_counts_BK, "counts": votes.counts_BK}
        columns["n_drawn"] = votes.counts_BK.sum(dim=1).int()
        robust_B = SmoothedAnswers(plan, y.cpu(), None, votes).certified(ROB_ALONE, self.radii[0])
        counts = worker.counts("rob", votes.chosen_counts_BK, y.cpu(), robust_B, votes.n_forward, 0)
        if "std" not in worker.networks:
            return columns, counts
        counts["n_forward"] += len(x)
        return {**columns, "std_class": worker.logits(worker.std, x).argmax(dim=1)}, counts

    @property
    def radii(self) -> tuple[float, ...]:
        """The radii to certify at, in ascending order."""
        return tuple(sorted(self.keys.plan().radii))

    def passes(self, opened: Run) -> Mapping[str, tuple[int, int]]:  # noqa: ARG002
        return {"rob": (self.keys.n_choose + self.keys.n, 0)}

    def words(self) -> str:
        keys = self.keys
        return f"certified in L2 (smoothing, sigma {keys.sigma:g}, confidence {keys.confidence:g} per image)"

    def answers(self, opened: Run) -> SmoothedAnswers:
        """Return the stored rows in a form that certifies any mixed classifier.

        Raises:
            MissingArtifact: if the stage has not finished.
        """
        from ..certification.smoothing import SmoothedAnswers, Votes

        std = ["std_class"] * (opened.config.std is not None)
        rows = self.rows(opened, ["label", "chosen_counts", "counts", *std])
        votes = Votes(rows["chosen_counts"], rows["counts"])
        return SmoothedAnswers(self.keys.plan(), rows["label"], rows.get("std_class"), votes)

    def outcomes(self, opened: Run) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the images of the robust classifier alone and of the deployed mixed classifier at each radius."""
        answers, _, mixtures = self._read(opened)
        return {
            f"{name}, certified at {radius:g}": (answers.clean(mixture), answers.certified(mixture, radius))
            for name, mixture in mixtures.items()
            for radius in self.radii
        }

    def certified(self, opened: Run) -> Certified:
        """Return the numbers that the report draws over beta and over the radius."""
        answers, search, mixtures = self._read(opened)
        reaches = {name: answers.reach(mixture) for name, mixture in mixtures.items()}
        most = max(*self.radii, *(float(reach_N.max()) for reach_N in reaches.values()))
        steps = [step / _STEPS * most for step in range(_STEPS + 1)]
        by_radius = {
            name: [(step, int(((reach_N >= step) & (reach_N > 0)).sum())) for step in steps]
            for name, reach_N in reaches.items()
        }
        by_beta = {
            entry.beta: [int(answers.certified(entry.mixture(), radius).sum()) for radius in self.radii]
            for entry in (search.entries if search else ())
        }
        reach = reaches["mixed" if search else "rob"].tolist()
        return Certified(self._claim(answers), self.radii, by_beta, by_radius, reach, len(answers.labels_N))

    def tables(self, opened: Run) -> dict[str, tuple[list[str], list[list[object]]]]:
        """Return the certified images of the mixed classifier of each beta, without a network pass."""
        answers, search, mixtures = self._read(opened)
        by_beta = {f"{entry.beta:g}": entry.mixture() for entry in (search.entries if search else ())}
        rows: list[list[object]] = []
        for name, mixture in {"rob alone": mixtures["rob"], **by_beta}.items():
            certified = (answers.certified(mixture, radius) for radius in self.radii)
            rows.append([name, mixture.alpha, answers.clean(mixture), answers.predicted(mixture), *certified])
        counted = ["clean", "clean, abstentions as errors", *(f"certified at {radius:g}" for radius in self.radii)]
        return {f"certified, by beta: {self._claim(answers)}": (["beta", "alpha", *counted], rows)}

    def _claim(self, answers: SmoothedAnswers) -> str:
        """Return what a certificate guarantees, and with which confidence."""
        from ..certification.confidence import most_false

        n_images, confidence = len(answers.labels_N), self.keys.confidence
        return (
            f"{self.words()}. A certificate holds against every perturbation up to its L2 radius. It holds for the "
            "smoothed mixed classifier, which averages rob's votes under noise, and not for the deployed mixed "
            "classifier, which takes a single pass. The confidence is that of each image. Subtract "
            f"{most_false(n_images, confidence):,} from a count of certified images for a statement about all "
            f"{n_images:,} images together with confidence {confidence:g}"
        )

    def _read(self, opened: Run) -> tuple[SmoothedAnswers, SearchResult | None, dict[str, Mixture]]:
        """Return the rows, the search result (None without `std`), and "rob" alone and the deployed "mixed"."""
        from ..certification.smoothing import ROB_ALONE

        search = None if opened.config.std is None else read_search_result(opened)
        deployed = {"mixed": search.deployed().mixture()} if search else {}
        return self.answers(opened), search, {"rob": ROB_ALONE, **deployed}
