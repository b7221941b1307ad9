"""The keys of attacks: the threat model, and what MMAA and the adaptive AutoAttack may spend."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from .register import ATTACKS, NORMS
from .section import Positive, Registered, Repeats, Section, read_fraction
from .threat import ThreatModel
from .versions import FAST, version_named


class ThreatConfig(Section):
    """The threat model, as `ThreatModel`."""

    norm: Annotated[str, Registered(NORMS)] = Field(default="Linf", description="norm of the perturbation")
    eps: Annotated[float, BeforeValidator(read_fraction)] = Field(description="radius in [0, 1] pixels, e.g. 8/255")

    @model_validator(mode="after")
    def _check(self) -> "ThreatConfig":
        self.threat_model()
        return self

    def threat_model(self) -> ThreatModel:
        return ThreatModel(self.norm, self.eps)


class AttackConfig(Section):
    """MMAA on the LayerNormed robust classifier."""

    method: Literal["apgd", "square"] = Field(
        default="apgd", description="apgd: along rob's gradients; square: by queries alone, for a rob without gradients"
    )
    n_iter: Positive = Field(default=100, description="APGD iterations, of APGD-CE and of each target of APGD-T")
    n_target_classes: Positive = Field(default=9, description="targets of APGD-T; capped to the classes less one")
    stop_when_broken: bool = Field(default=True, description="false: attack to the end, for studies of confidence")
    border_restarts: Repeats = Field(default=2, description="repeats for images that survive by a hair; 0: the paper")
    n_queries: Positive = Field(default=5000, description="of method square, an image")


class EvaluateConfig(Section):
    """The adaptive AutoAttack on the mixed classifier."""

    preset: Literal["standard", "fast"] = Field(
        default="standard",
        exclude=True,
        description="what the keys below are by default; fast, for a first look: a tenth of the passes, and no "
        "AutoAttack",
    )
    attacks: tuple[Annotated[str, Registered(ATTACKS)], ...] = Field(
        default=("apgd-ce", "apgd-t", "fab-t", "square"),
        min_length=1,
        description="in this order, each on what still stands",
    )
    version: Literal["standard", "plus", "rand"] = Field(
        default="standard",
        description="AutoAttack's version: its attacks, with the restarts and targets that it has in the norm",
    )
    eot: Positive | None = Field(
        default=None,
        description="for a random classifier: the number of draws over which gradients are averaged; fresh draws at "
        "the final image decide; 20 in version rand",
    )
    mode: Literal["transfer", "bypass"] = Field(
        default="transfer", description="loss and gradient of the surrogate, or loss of the mixture itself"
    )
    n_iter: Positive = Field(default=100, description="iterations of APGD and FAB")
    n_target_classes: Positive = Field(default=9, description="targets of APGD-T and FAB-T")
    n_queries: Positive = Field(default=5000, description="queries of Square an image")
    rd: float = Field(default=0.9, ge=0, le=1, description="share of rob's raw logits in the surrogate (r_d)")
    joint_starts: Repeats = Field(
        default=3, description="starts of the joint attack on images that stand by a hair; 0: the paper"
    )
    warm_start: bool = Field(
        default=True,
        description="try the stored adversarial examples of the attack stage and the refinement rounds first",
    )
    points: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="a file of adversarial images, as `evaluate --adv-images` reads them, that are tried before any "
        "attack",
    )
    check: Literal["pyautoattack"] | None = Field(
        default=None, description="a second opinion: this package, unmodified, attacks the images that still stand"
    )
    check_n: Positive | None = Field(
        default=None, description="of the second opinion: how many of them, spread evenly; all by default"
    )
    until: Annotated[float, Field(gt=0, le=50)] | None = Field(
        default=None,
        description="for screening: partitions go in random order, and it is enough once robust accuracy is known to "
        "so many points up or down, with 95 % confidence over all looks; by default every image is evaluated",
    )

    @model_validator(mode="before")
    @classmethod
    def _of_preset(cls, content: Any) -> Any:
        if not isinstance(content, Mapping):
            return content
        if content.get("version", "standard") != "standard":
            version = version_named(str(content["version"]))
            named, fast = version.attacks, content.get("preset") == "fast"
            if tuple(content.get("attacks", named)) != named or fast:
                other = "preset: fast" if fast else "attacks"
                raise ValueError(f"version: {content['version']} says which attacks run; leave it or {other} out")
            content = {"eot": version.eot, **content, "attacks": named}
        return {**FAST, **content} if content.get("preset") == "fast" else content

    @field_validator("attacks")
    @classmethod
    def _once(cls, attacks: tuple[str, ...]) -> tuple[str, ...]:
        twice = next((name for i, name in enumerate(attacks) if name in attacks[:i]), None)
        if twice is not None:
            raise ValueError(f"{twice!r} is there twice; each attack has one column of the results")
        return attacks

    @model_validator(mode="after")
    def _runs(self) -> "EvaluateConfig":
        if "joint" in self.attacks and not self.joint_starts:
            raise ValueError("joint_starts=0 leaves the attack 'joint' out; give it at least 1 or do not name it")
        return self
