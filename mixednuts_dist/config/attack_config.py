"""The keys of attacks: the threat model, and the settings and budgets of MMAA and of the adaptive AutoAttack."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from .register import ATTACKS, NORMS
from .section import Positive, Registered, Repeats, Section, read_fraction
from .threat import ThreatModel
from .versions import FAST, version_named


class ThreatConfig(Section):
    """The threat model; see `ThreatModel`."""

    norm: Annotated[str, Registered(NORMS)] = "Linf"
    """Norm of the perturbation."""
    eps: Annotated[float, BeforeValidator(read_fraction)]
    """Radius for pixels in [0, 1], for example 8/255."""

    @model_validator(mode="after")
    def _check(self) -> "ThreatConfig":
        self.threat_model()
        return self

    def threat_model(self) -> ThreatModel:
        return ThreatModel(self.norm, self.eps)


class AttackConfig(Section):
    """MMAA on the LayerNormed robust classifier."""

    method: Literal["apgd", "square"] = "apgd"
    """Method of minimum-margin AutoAttack (MMAA). `apgd` uses gradients, and `square` uses only queries, for a robust
    classifier without gradients."""
    n_iter: Positive = 100
    """Iterations of APGD-CE and of each target of APGD-T."""
    n_target_classes: Positive = 9
    """Target classes of APGD-T, at most the number of classes minus one."""
    stop_when_broken: bool = True
    """Stop attacking an image once it is broken. Set `false` to study confidence."""
    border_restarts: Repeats = 2
    """Extra restarts for borderline images. The paper uses 0."""
    n_queries: Positive = 5000
    """Queries per image if `method` is `square`."""


class EvaluateConfig(Section):
    """The adaptive AutoAttack on the mixed classifier."""

    preset: Literal["standard", "fast"] = Field(default="standard", exclude=True)
    """Set of default values for the keys below. `fast`, for a first look, takes about a tenth of the passes and is not
    AutoAttack."""
    attacks: tuple[Annotated[str, Registered(ATTACKS)], ...] = Field(
        default=("apgd-ce", "apgd-t", "fab-t", "square"), min_length=1
    )
    """Attacks, in this order. Each attacks the images that are still robust."""
    version: Literal["standard", "plus", "rand"] = "standard"
    """Version of AutoAttack, which defines the attacks and their restarts and targets for the norm."""
    eot: Positive | None = None
    """For a random classifier, the number of draws over which gradients are averaged. 100 new draws at the final image
    decide whether it is broken. The version `rand` sets 20."""
    mode: Literal["transfer", "bypass"] = "transfer"
    """Source of the loss. `transfer` uses the surrogate, a smooth approximation of the mixed classifier. `bypass` uses
    the mixed classifier. Both use the gradient of the surrogate."""
    n_iter: Positive = 100
    """Iterations of APGD and FAB."""
    n_target_classes: Positive = 9
    """Target classes of APGD-T and FAB-T."""
    n_queries: Positive = 5000
    """Queries of Square per image."""
    rd: float = Field(default=0.9, ge=0, le=1)
    """Share of the raw logits of the robust classifier in the surrogate (r_d)."""
    joint_starts: Repeats = 3
    """Most random starts of the joint attack per target. 100 iterations allow 2. The paper uses 0."""
    warm_start: bool = True
    """Try the stored adversarial examples of the attack stage and the refinement rounds first."""
    check: Literal["pyautoattack"] | None = None
    """Cross-check: the unmodified package `pyautoattack` attacks the images that are still robust."""
    check_n: Positive | None = None
    """Number of images for the cross-check, evenly spaced. By default, all robust images."""

    @model_validator(mode="before")
    @classmethod
    def _of_preset_and_version(cls, content: Any) -> Any:
        if not isinstance(content, Mapping):
            return content
        if content.get("preset") == "fast":
            content = {**FAST, **content}
        if content.get("version", "standard") == "standard":
            return content
        version = version_named(str(content["version"]))
        if tuple(content.get("attacks", version.attacks)) != version.attacks:
            raise ValueError(
                f"version: {content['version']} defines which attacks run. Remove version, or attacks and preset: fast"
            )
        return {"eot": version.eot, **content, "attacks": version.attacks}

    @model_validator(mode="after")
    def _check(self) -> "EvaluateConfig":
        if twice := [name for name in self.attacks if self.attacks.count(name) > 1]:
            raise ValueError(f"attacks: {twice[0]!r} occurs twice; each attack has one column of the results")
        if "joint" in self.attacks and not self.joint_starts:
            raise ValueError(
                "joint_starts=0 disables the attack 'joint'. Set it to at least 1, or remove 'joint' from attacks"
            )
        return self

    @property
    def notes(self) -> list[str]:
        """Caveats about results with these settings; `docs/validation.md` has the count."""
        values = self.model_dump(mode="json")
        if any(values[key] != value for key, value in FAST.items()):
            return []
        return [
            "The fast preset is not AutoAttack: of 275 images that the standard attacks broke on the calibration "
            "classifiers it missed none (docs/validation.md)."
        ]
