"""The certify stage: which images no perturbation takes from the smoothed mixture, for every alpha and beta.

The stage stores votes of the robust classifier under Gaussian noise. The votes do not depend on the searched mixture,
and the standard classifier gives only its class, so one set of rows answers for all mixtures.

Shapes: B images of a partition, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ..config.register import STAGES
from ..config.run_config import RunConfig
from ..config.section import Positive, Section, read_fraction
from ..errors import InvalidInputError
from ..storage.partitions import Partition
from ..storage.records import SearchResult
from ..storage.tables import read_columns
from .runs import Run, read_search_result, require_complete
from .stage import Certified, Outcome, Stage

if TYPE_CHECKING:
    from torch import Tensor

    from ..certification.answers import SmoothedAnswers
    from ..certification.smoothing import SmoothingPlan
    from ..distributed.tasks import Columns, Summary
    from ..distributed.workbench import Workbench
    from ..mixing.mixture import Mixture
    from ..selection.inputs import Certificates

Radius = Annotated[float, BeforeValidator(read_fraction), Field(gt=0, le=1000)]


def _certifiable(alpha: float) -> float:
    if not 0.5 < alpha <= 1:
        raise ValueError(f"{alpha:g} cannot be certified: up to 1/2 std alone decides; give alphas in (0.5, 1]")
    return alpha


Alpha = Annotated[float, AfterValidator(_certifiable)]
_MOST_KEPT = 1000  # noisy logits of an image, all classes together, times 10
_STEPS = 24  # of the curve over the radius
NOT_CLAIMED = (
    "A certificate holds against every perturbation up to its L2 length, for the smoothed mixture, which averages "
    "rob's votes under noise, and not for the mixture that is deployed, which takes a single pass"
)


class CertifyKeys(Section):
    """What is certified, and how surely."""

    sigma: float = Field(default=0.25, gt=0, le=1000, description="of the noise, in units of the pixel range [0, 1]")
    n: Positive = Field(default=10_000, description="draws that bound an image's vote, at most")
    n_choose: Positive = Field(default=100, description="draws that choose its class, before them")
    confidence: float = Field(default=0.999, gt=0, lt=1, description="of each image's certificates, all together")
    radii: tuple[Radius, ...] | None = Field(
        default=None,
        max_length=100,
        description="L2 radii to certify at; 0.4, 1 and 2 sigma by default",
    )
    alphas: tuple[Alpha, ...] = Field(
        default=(1.0, 0.9, 0.8, 0.7),
        min_length=1,
        max_length=100,
        description="draws of an image end when its certificates at these alphas and `radii` can no longer change",
    )
    stop_when_decided: bool = Field(default=True, description="false: all n draws for every image")
    radius: Radius | None = Field(
        default=None,
        description="at which search.criterion certified counts certified images; the smallest of `radii` by default",
    )

    @model_validator(mode="after")
    def _enough_draws(self) -> CertifyKeys:
        from ..certification.confidence import require_enough_draws

        require_enough_draws(self.n, self.confidence, self.plan().thresholds)
        return self

    def plan(self) -> SmoothingPlan:
        """The draws of each image."""
        from ..certification.smoothing import SmoothingPlan

        radii = self.radii or tuple(round(share * self.sigma, 9) for share in (0.4, 1, 2))
        return SmoothingPlan(
            self.sigma, self.n, self.confidence, self.n_choose, self.alphas, radii, self.stop_when_decided
        )


@STAGES("certify", describes="certified robustness in L2, by randomized smoothing", order=3)
class Certify(Stage):
    """Store votes of the robust classifier under noise."""

    Keys = CertifyKeys
    keys: CertifyKeys

    def compute(self, worker: Workbench, piece: Partition) -> tuple[Columns, Summary]:
        x, y = worker.images(piece)
        columns, summary = self._smoothed(worker, piece.start, x, y)
        if "std" in worker.networks:
            columns["std_class"] = worker.logits(worker.std, x).argmax(dim=1)
            summary["n_forward"] += len(x)
        return columns, summary

    def _smoothed(self, worker: Workbench, start: int, x: Tensor, y: Tensor) -> tuple[Columns, Summary]:
        from ..certification.smoothing import smoothed_votes

        plan, n_classes = self.keys.plan(), worker.logits(worker.rob, x[:1]).shape[1]
        votes = smoothed_votes(
            lambda x_BCHW: worker.logits(worker.rob, x_BCHW), x, y, plan, n_classes=n_classes,
            sample_ids=range(start, start + len(x)), seed=worker.spec.seed, rows=worker.shape(x).rows,
            n_kept=max(1, 10 * _MOST_KEPT // n_classes), progress=worker.report,
        )  # fmt: skip
        columns = {
            "chosen_counts": votes.chosen_counts_BK,
            "counts": votes.counts_BK,
            "n_drawn": votes.n_drawn_B,
            "noisy_logits": votes.logits_BNK,
        }
        from ..certification.answers import ROB_ALONE, SmoothedAnswers

        answers = SmoothedAnswers(plan, y.cpu(), None, votes.chosen_counts_BK, votes.counts_BK, votes.n_drawn_B)
        robust_B = answers.certified(ROB_ALONE, min(plan.radii))
        return columns, worker.summary("rob", votes.chosen_counts_BK, y.cpu(), robust_B, votes.n_forward, 0)

    @property
    def radii(self) -> tuple[float, ...]:
        """The radii to certify at, in rising order."""
        return tuple(sorted(self.keys.plan().radii))

    def fingerprint(self, opened: Run) -> str:
        """Leave out the radius that the search asks for: it moves no row."""
        self._require_usable(opened.config)
        asked = {"radius": None, "radii": self.radii}
        return Stage.fingerprint(Certify(self.name, self.keys.model_copy(update=asked)), opened)

    def _require_usable(self, config: RunConfig) -> None:
        if config.evaluate.eot is not None:
            raise InvalidInputError(
                f"certify: evaluate.eot={config.evaluate.eot} admits a random classifier, whose votes cannot be "
                "reproduced. Certify a run without eot"
            )

    def passes(self, opened: Run) -> Mapping[str, tuple[int, int]]:  # noqa: ARG002
        return {"rob": (self.keys.n_choose + self.keys.n, 0)}

    def words(self) -> str:
        keys = self.keys
        return f"certified in L2 (smoothing, sigma {keys.sigma:g}, confidence {keys.confidence:g} per image)"

    def answers(self, opened: Run) -> SmoothedAnswers:
        """Return what the stored rows say about any mixture.

        Raises:
            MissingArtifact: if the stage has not finished.
        """
        from ..certification.answers import SmoothedAnswers

        fingerprint = self.fingerprint(opened)
        require_complete(opened, self.name, fingerprint)
        std = ["std_class"] if opened.config.std is not None else []
        names = ["label", "chosen_counts", "counts", "n_drawn", *std]
        rows = read_columns(opened.store, self.name, opened.partitions, fingerprint, names)
        return SmoothedAnswers(
            self.keys.plan(), rows["label"], rows.get("std_class"), *(rows[name] for name in names[1:4])
        )

    def certificates(self, opened: Run, sample_ids: Sequence[int] | None) -> Certificates:
        """Errors as in `answers`."""
        radius = self.keys.radius or self.radii[0]
        return self.answers(opened).certificates(radius, sample_ids)

    def outcomes(self, opened: Run) -> list[Outcome]:
        """Rob alone and the deployed mixture at each radius."""
        from ..certification.answers import ROB_ALONE

        answers, mixtures = self.answers(opened), {"rob": ROB_ALONE}
        if search := self._search(opened):
            mixtures["mixed"] = search.deployed().mixture()
        return [
            Outcome(f"{name}, certified at {radius:g}", *self._counts(answers, mixture, radius))
            for name, mixture in mixtures.items()
            for radius in self.radii
        ]

    def certified(self, opened: Run) -> Certified:
        from ..certification.answers import ROB_ALONE

        answers, radii, search = self.answers(opened), self.radii, self._search(opened)
        deployed = search.deployed().mixture() if search else ROB_ALONE
        mixtures = {"rob": ROB_ALONE, **({"mixed": deployed} if search else {})}
        reaches = {name: self._reach(answers, mixture) for name, mixture in mixtures.items()}
        most = max(*radii, *(float(reach_N.max()) for reach_N in reaches.values()))
        steps = [step / _STEPS * most for step in range(_STEPS + 1)]
        below = {name: [(step, int((reach_N >= step).logical_and(reach_N > 0).sum())) for step in steps]
                 for name, reach_N in reaches.items()}  # fmt: skip
        by_beta = {
            entry.beta: tuple(self._counts(answers, entry.mixture(), radius)[1] for radius in radii)
            for entry in (search.entries if search else ())
        }
        return Certified(
            f"C{self.words()[1:]}. {NOT_CLAIMED}", "L2",
            {radius: f"{radius:g}" for radius in radii}, by_beta, below,
            reaches["mixed" if search else "rob"].tolist(), len(answers.labels_N),
        )  # fmt: skip

    @staticmethod
    def _reach(answers: SmoothedAnswers, mixture: Mixture) -> Tensor:
        return answers.reach(mixture) if mixture.alpha > 0.5 else answers.labels_N.double() * 0

    def tables(self, opened: Run) -> dict[str, tuple[list[str], list[list[object]]]]:
        """What each beta's mixture has certified, without a pass."""
        from ..certification.answers import ROB_ALONE

        answers, radii, search = self.answers(opened), self.radii, self._search(opened)
        mixtures = {"rob alone": ROB_ALONE}
        if search:
            mixtures |= {f"{entry.beta:g}": entry.mixture() for entry in search.entries}
        rows: list[list[object]] = []
        for name, mixture in mixtures.items():
            counts = [self._counts(answers, mixture, radius) for radius in radii]
            clean, _, total = counts[0]
            rows.append([name, mixture.alpha, (clean, total), *((certified, total) for _, certified, _ in counts)])
        columns = ["beta", "alpha", "clean", *(f"certified at {radius:g}" for radius in radii)]
        return {f"certified, by beta: {self.words()}. {NOT_CLAIMED}": (columns, rows)}

    def _search(self, opened: Run) -> SearchResult | None:
        return read_search_result(opened) if opened.config.std is not None else None

    @staticmethod
    def _counts(answers: SmoothedAnswers, mixture: Mixture, radius: float) -> tuple[int, int, int]:
        """(clean, certified, all) images. Up to alpha = 1/2 std alone may decide: nothing is certified."""
        certified = int(answers.certified(mixture, radius).sum()) if mixture.alpha > 0.5 else 0
        return int(answers.clean(mixture).sum()), certified, len(answers.labels_N)
