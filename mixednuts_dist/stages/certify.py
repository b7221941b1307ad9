"""The certify stage: what no attack can take from the mixture, for every alpha and beta from one pass over the images.

`method: smoothing` stores votes of rob under Gaussian noise, `method: bounds` bounds of rob's logits over Linf balls.
Neither depends on the searched mixture, nor asks anything of std but its class, so one set of rows answers for all.

Shapes: B images of a piece, R radii, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ..config.register import STAGES
from ..config.run_config import RunConfig
from ..config.section import Positive, Section, read_fraction
from ..errors import InvalidInputError
from ..storage.partitions import Partition
from ..storage.records import SearchResult
from ..storage.tables import read_columns
from .choosing import grid_of
from .runs import Run, read_search_result, require_complete
from .stage import Certified, Outcome, Stage

if TYPE_CHECKING:
    from torch import Tensor

    from ..certification.answers import Answers
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
_CROWN_PASSES = 8000  # of a row, forward and backward, that bounds take an image and radius (docs/certificates.md)
_STEPS = 24  # of the curve over the radius
NOT_CLAIMED = {
    "smoothing": "A certificate holds against every perturbation up to its L2 length, for the smoothed mixture, which "
    "averages rob's votes under noise, and not for the one that a single pass deploys",
    "bounds": "A certificate holds against every perturbation up to its Linf size, whatever std answers, for the "
    "mixture itself",
}
_ENDS = ("lower", "upper", "leads")  # columns of bounds, the fields of a LogitBox


class CertifyKeys(Section):
    """What is certified, and how surely."""

    method: Literal["smoothing", "bounds"] = Field(
        default="smoothing",
        description="smoothing: L2, of the smoothed mixture, by votes under noise, any rob; bounds: Linf, of the "
        "mixture itself, for a rob of affine layers and ReLU",
    )
    sigma: float = Field(default=0.25, gt=0, le=1000, description="of the noise, in units of the pixel range [0, 1]")
    n: Positive = Field(default=10_000, description="draws that bound an image's vote, at most")
    n_choose: Positive = Field(default=100, description="draws that choose its class, before them")
    confidence: float = Field(default=0.999, gt=0, lt=1, description="of each image's certificates, all together")
    radii: tuple[Radius, ...] | None = Field(
        default=None,
        max_length=100,
        description="to certify at; 0.4, 1 and 2 sigma by default, for bounds `radius` or the threat model's",
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
        if self.method == "smoothing":
            from ..certification.confidence import require_enough_draws

            require_enough_draws(self.n, self.confidence, self.plan().thresholds)
        elif self.radius is not None and self.radii is not None and self.radius not in self.radii:
            raise ValueError(
                f"radius {self.radius:g} is not among radii ({', '.join(f'{radius:g}' for radius in self.radii)}), and "
                "bounds hold at those alone"
            )
        return self

    def plan(self) -> SmoothingPlan:
        """The draws of each image."""
        from ..certification.smoothing import SmoothingPlan

        radii = self.radii or tuple(round(share * self.sigma, 9) for share in (0.4, 1, 2))
        return SmoothingPlan(
            self.sigma, self.n, self.confidence, self.n_choose, self.alphas, radii, self.stop_when_decided
        )


@STAGES("certify", describes="certified robustness: what no attack can take, by smoothing or by bounds", order=3)
class Certify(Stage):
    """Votes under noise, or bounds of logits, of rob alone."""

    Keys = CertifyKeys
    keys: CertifyKeys

    def compute(self, worker: Workbench, piece: Partition) -> tuple[Columns, Summary]:
        x, y = worker.images(piece)
        computed = self._smoothed if self.keys.method == "smoothing" else self._bounded
        columns, summary = computed(worker, piece.start, x, y)
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

    def _bounded(self, worker: Workbench, _start: int, x: Tensor, y: Tensor) -> tuple[Columns, Summary]:
        import torch

        from ..certification.answers import ROB_ALONE, BoundedAnswers
        from ..certification.linear_bounds import logit_bounds

        radii, found = self.radii(worker.spec.threat.eps), []
        for image in range(len(x)):  # alone: an image's bounds are the same bits in whatever company
            rows = slice(image, image + 1)
            found.append([logit_bounds(worker.rob, x[rows], y[rows], radius) for radius in radii])
            worker.report(image + 1)
        columns = {
            name: torch.cat(
                [torch.stack([getattr(each.box, f"{name}_BK") for each in bounds], dim=1) for bounds in found]
            )
            for name in _ENDS
        }
        clean = worker.logits(worker.rob, x)
        answers = BoundedAnswers(radii, y, None, clean, *columns.values())
        certified_B = answers.certified(ROB_ALONE, min(radii))
        n_forward, n_backward = (
            sum(getattr(each, name) for bounds in found for each in bounds) for name in ("n_forward", "n_backward")
        )
        return {"rob_clean": clean, **columns}, worker.summary("rob", clean, y, certified_B, n_forward, n_backward)

    def radii(self, eps: float) -> tuple[float, ...]:
        """What is certified at, ascending; `eps` is the threat model's."""
        if self.keys.method == "smoothing":
            return tuple(sorted(self.keys.plan().radii))
        return tuple(sorted(self.keys.radii or (self.keys.radius or eps,)))

    def fingerprint(self, opened: Run) -> str:
        """Of the radii, and not of the one among them that the search asks for."""
        self._require_usable(opened.config)
        asked = {"radius": None, "radii": self.radii(opened.config.threat.eps)}
        return Stage.fingerprint(Certify(self.name, self.keys.model_copy(update=asked)), opened)

    def _require_usable(self, config: RunConfig) -> None:
        """Refuse what cannot be certified before anything is computed."""
        if config.evaluate.eot is not None:
            raise InvalidInputError(
                f"certify: evaluate.eot={config.evaluate.eot} admits a random classifier: bounds would hold for one of "
                "its draws alone, and its votes would not come back. Certify a run without eot"
            )
        if self.keys.method == "bounds" and config.threat.norm != "Linf":
            raise InvalidInputError(
                f"certify: method bounds certifies Linf balls, this run's threat model is {config.threat.norm}. Use "
                "method: smoothing, which certifies L2"
            )

    def passes(self, opened: Run) -> Mapping[str, tuple[int, int]]:
        if self.keys.method == "smoothing":
            return {"rob": (self.keys.n_choose + self.keys.n, 0)}
        n_passes = _CROWN_PASSES * len(self.radii(opened.config.threat.eps))
        return {"rob": (n_passes, n_passes)}

    def words(self) -> str:
        keys = self.keys
        if keys.method == "smoothing":
            return f"certified in L2 (smoothing, sigma {keys.sigma:g}, confidence {keys.confidence:g} an image)"
        return "certified in Linf (bounds)"

    def answers(self, opened: Run) -> Answers:
        """What the stored rows say of any mixture.

        Raises:
            MissingArtifact: where the stage has not finished.
        """
        from ..certification.answers import BoundedAnswers, SmoothedAnswers

        fingerprint = self.fingerprint(opened)
        require_complete(opened, self.name, fingerprint)
        smoothing = self.keys.method == "smoothing"
        names = ["chosen_counts", "counts", "n_drawn"] if smoothing else ["rob_clean", *_ENDS]
        shared = ["label", *(["std_class"] if opened.config.std is not None else [])]
        rows = read_columns(opened.store, self.name, opened.partitions, fingerprint, [*shared, *names])
        labels_N, std_pred_N = rows["label"], rows.get("std_class")
        own = [rows[name] for name in names]
        if smoothing:
            return SmoothedAnswers(self.keys.plan(), labels_N, std_pred_N, *own)
        return BoundedAnswers(self.radii(opened.config.threat.eps), labels_N, std_pred_N, *own)

    def certificates(self, opened: Run, sample_ids: Sequence[int] | None) -> Certificates:
        """Errors as in `answers`."""
        radius = self.keys.radius or self.radii(opened.config.threat.eps)[0]
        return self.answers(opened).certificates(radius, sample_ids)

    def outcomes(self, opened: Run) -> list[Outcome]:
        """Rob alone and the deployed mixture at each radius."""
        from ..certification.answers import ROB_ALONE

        answers, mixtures = self.answers(opened), {"rob": ROB_ALONE}
        if search := self._search(opened):
            mixtures["mixed"] = search.deployed().mixture()
        return [
            Outcome(f"{name}, certified at {radius_words(radius)}", *self._counts(answers, mixture, radius))
            for name, mixture in mixtures.items()
            for radius in self.radii(opened.config.threat.eps)
        ]

    def certified(self, opened: Run) -> Certified:
        from ..certification.answers import ROB_ALONE

        answers, radii, search = self.answers(opened), self.radii(opened.config.threat.eps), self._search(opened)
        deployed = search.deployed().mixture() if search else ROB_ALONE
        mixtures = {"rob": ROB_ALONE, **({"mixed": deployed} if search else {})}
        reaches = {name: self._reach(answers, mixture) for name, mixture in mixtures.items()}
        smoothing = self.keys.method == "smoothing"
        most = max(*radii, *(float(reach_N.max()) for reach_N in reaches.values()))
        steps = [step / _STEPS * most for step in range(_STEPS + 1)] if smoothing else list(radii)
        below = {name: [(step, int((reach_N >= step).logical_and(reach_N > 0).sum())) for step in steps]
                 for name, reach_N in reaches.items()}  # fmt: skip
        by_beta = {
            entry.beta: tuple(self._counts(answers, entry.mixture(), radius)[1] for radius in radii)
            for entry in (search.entries if search else ())
        }
        return Certified(
            f"C{self.words()[1:]}. {NOT_CLAIMED[self.keys.method]}", "L2" if smoothing else "Linf",
            {radius: radius_words(radius) for radius in radii}, by_beta, below,
            reaches["mixed" if search else "rob"].tolist(), len(answers.labels_N), not smoothing,
        )  # fmt: skip

    @staticmethod
    def _reach(answers: Answers, mixture: Mixture) -> Tensor:
        return answers.reach(mixture) if mixture.alpha > 0.5 else answers.labels_N.double() * 0

    def tables(self, opened: Run) -> dict[str, tuple[list[str], list[list[object]]]]:
        """What each beta's mixture has certified, without a pass."""
        from ..certification.answers import ROB_ALONE

        answers, radii, search = self.answers(opened), self.radii(opened.config.threat.eps), self._search(opened)
        mixtures = {"rob alone": ROB_ALONE}
        if search:
            mixtures |= {f"{entry.beta:g}": entry.mixture() for entry in search.entries}
        rows: list[list[object]] = []
        for name, mixture in mixtures.items():
            counts = [self._counts(answers, mixture, radius) for radius in radii]
            clean, _, total = counts[0]
            rows.append([name, mixture.alpha, (clean, total), *((certified, total) for _, certified, _ in counts)])
        columns = ["beta", "alpha", "clean", *(f"certified at {radius_words(radius)}" for radius in radii)]
        title = f"certified, by beta: {self.words()}. {NOT_CLAIMED[self.keys.method]}"
        return {title: (columns, rows), **(self._chosen(opened) if search and self.keys.method == "bounds" else {})}

    def _chosen(self, opened: Run) -> dict[str, tuple[list[str], list[list[object]]]]:
        """What the search's own grid has for each beta with certified margins in place of attacked ones."""
        from ..certification.answers import ROB_ALONE, BoundedAnswers
        from ..selection.certified import certified_selection

        answers, rows, search = self.answers(opened), list[list[object]](), opened.config.search
        assert isinstance(answers, BoundedAnswers)
        for radius in answers.radii:
            held = int(answers.certified(ROB_ALONE, radius).sum())
            for choice in certified_selection(answers.rows(radius), grid_of(search)).chosen if held else ():
                if choice is not None:
                    clean, certified, total = self._counts(answers, choice.mixture(), radius)
                    parameters = [choice.scale, choice.power, choice.bias, choice.alpha]
                    rows.append([radius_words(radius), choice.beta, *parameters, (clean, total), (certified, total)])
        columns = ["radius", "beta", "s", "p", "c", "alpha", "clean", "certified"]
        title = "chosen by certificates: the most clean images among mixtures certified on a share beta of rob's"
        return {title: (columns, rows)} if rows else {}

    def _search(self, opened: Run) -> SearchResult | None:
        return read_search_result(opened) if opened.config.std is not None else None

    @staticmethod
    def _counts(answers: Answers, mixture: Mixture, radius: float) -> tuple[int, int, int]:
        """(clean, certified, all) images. Up to alpha = 1/2 std alone may decide: nothing is certified."""
        certified = int(answers.certified(mixture, radius).sum()) if mixture.alpha > 0.5 else 0
        return int(answers.clean(mixture).sum()), certified, len(answers.labels_N)


def radius_words(radius: float) -> str:
    """A radius as grey levels where that is how it was meant.

    >>> radius_words(2 / 255), radius_words(0.25)
    ('2/255', '0.25')
    """
    levels = round(radius * 255, 9)
    return f"{levels:g}/255" if levels == int(levels) and len(f"{radius:g}") > 5 else f"{radius:g}"
