"""A replacement for the class of the `autoattack` package, for existing scripts."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor, nn

from ..acceleration.batch_shape import ON_CPU
from ..config.threat import ThreatModel
from ..config.versions import version_named
from ..errors import InvalidInputError
from .adaptive import autoattack
from .budget import AttackBudget
from .result import AttackResult


class AutoAttack:
    """AutoAttack with the constructor and the methods of the `autoattack` package. New code should call `autoattack`.

    As in that package, `run_standard_evaluation` returns the adversarial example of each broken image and the clean
    image of each robust one. `result` holds the `AttackResult` of the last call.

    Args:
        model: images (B, C, H, W) in [0, 1] to logits (B, K), in evaluation mode, or a `MixedClassifier`.
        norm, eps: "Linf", "L2" or "L1", and the radius in units of the pixel range.
        verbose, log_path: after each call, print the accuracies, and append them to a file.
        attacks_to_run: the attacks of version "custom"; also an attribute.
        version: "standard", "plus", "rand" or "custom".
        device: the device on which to attack the images; by default, the device of the model's parameters.
        budget: iterations, targets and queries; AutoAttack's by default.

    Example:
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).eval()
        >>> adversary = AutoAttack(model, norm="Linf", eps=0.1, version="custom", verbose=False)
        >>> adversary.attacks_to_run = ["apgd-ce"]
        >>> x, y = torch.rand(5, 1, 2, 2), torch.zeros(5, dtype=torch.long)
        >>> x_adv = adversary.run_standard_evaluation(x, y, bs=5)
        >>> x_adv.shape, 0 <= adversary.result.robust_accuracy <= 1
        (torch.Size([5, 1, 2, 2]), True)
    """

    def __init__(  # noqa: PLR0917 - the order of the autoattack package
        self,
        model: Callable[[Tensor], Tensor],
        norm: str = "Linf",
        eps: float = 0.3,
        seed: int | None = None,
        verbose: bool = True,
        attacks_to_run: Sequence[str] = (),
        version: str = "standard",
        device: torch.device | str | None = None,
        log_path: str | Path | None = None,
        budget: AttackBudget | None = None,
    ) -> None:
        if attacks_to_run and version != "custom":
            raise InvalidInputError(f"version={version!r} names the attacks. Use version='custom' for attacks_to_run.")
        self.model, self.norm, self.epsilon, self.seed, self.verbose = model, norm, eps, seed, verbose
        self.version, self.device, self.log_path, self.budget = version, device, log_path, budget
        self.attacks_to_run = list(attacks_to_run if version == "custom" else version_named(version).attacks)
        self.result: AttackResult | None = None

    def __getattr__(self, name: str) -> NoReturn:  # for the objects that hold each attack's settings in that package
        known = ("apgd", "apgd_targeted", "fab", "square")
        advice = ": set iterations, targets, queries and restarts by budget=AttackBudget(...)" if name in known else ""
        raise AttributeError(f"AutoAttack has no attribute {name!r}{advice}")

    def run_standard_evaluation(
        self, x_orig: Tensor, y_orig: Tensor, bs: int = 250, return_labels: bool = False, state_path: Path | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Run the attacks in order and return the adversarial examples, with `return_labels` also their classes.

        Raises:
            InvalidInputError: for a `state_path`, which is not supported, and as in `autoattack`.
        """
        if state_path is not None:
            raise InvalidInputError(f"state_path='{state_path}' is not supported. Use `mixednuts run`, which resumes.")
        return self._adversarial(x_orig, y_orig, bs, return_labels, self.attacks_to_run)

    def run_standard_evaluation_individual(
        self, x_orig: Tensor, y_orig: Tensor, bs: int = 250, return_labels: bool = False
    ) -> dict[str, Tensor | tuple[Tensor, Tensor]]:
        """Run each attack alone on all images and return attack -> the result of `run_standard_evaluation`."""
        given = x_orig, y_orig, bs, return_labels
        return {attack: self._adversarial(*given, [attack]) for attack in self.attacks_to_run}

    def clean_accuracy(self, x_orig: Tensor, y_orig: Tensor, bs: int = 250) -> float:
        """Return the share of images that are classified correctly without an attack."""
        return self._attacked(x_orig, y_orig, bs, ()).clean_accuracy

    def _adversarial(
        self, x: Tensor, y: Tensor, bs: int, return_labels: bool, attacks: Sequence[str]
    ) -> Tensor | tuple[Tensor, Tensor]:
        found = self._attacked(x, y, bs, attacks)
        x_adv = torch.where(found.broken[:, None, None, None], found.x_adv, x.to(found.x_adv)).to(x.device)
        return (x_adv, found.logits.argmax(dim=1).to(x.device)) if return_labels else x_adv

    def _attacked(self, x: Tensor, y: Tensor, bs: int, attacks: Sequence[str]) -> AttackResult:
        parameters = self.model.parameters() if isinstance(self.model, nn.Module) else ()
        device = self.device or next((each.device for each in parameters), x.device)
        on_cpu = torch.device(device).type == "cpu"
        self.result = autoattack(
            self.model, x.to(device), y.to(device), threat=ThreatModel(self.norm, self.epsilon), attacks=attacks,
            version="standard" if self.version == "custom" else self.version, seed=self.seed or 0, budget=self.budget,
            batch_size=None if on_cpu and bs >= ON_CPU else min(bs, max(1, len(x))),
        )  # fmt: skip
        if self.verbose:
            print(self.result)
        if self.log_path is not None:
            with Path(self.log_path).open("a") as log:
                log.write(f"{self.result}\n")
        return self.result
