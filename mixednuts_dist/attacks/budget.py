"""The one budget of all attacks, which travels whole from the configuration to them."""

from dataclasses import dataclass, fields

from ..errors import InvalidInputError


@dataclass(frozen=True)
class AttackBudget:
    """How much an attack may spend on an image; the defaults are the published budgets.

    Example:
        >>> AttackBudget(n_iter=20).n_queries
        5000
    """

    n_iter: int = 100  # iterations of APGD-CE, and of each target of APGD-T and FAB-T
    n_target_classes: int = 9  # targets of APGD-T and FAB-T, capped to the classes less one
    n_queries: int = 5000  # of Square
    border_restarts: int = 3  # extra starts for images that stand by a hair; 0 is the papers' budget

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), int(field.name != "border_restarts")
            if value < least:
                raise InvalidInputError(f"{field.name}={value} must be at least {least}")

    def n_targets(self, n_classes: int) -> int:
        """Targets that an image has among `n_classes`."""
        return min(self.n_target_classes, n_classes - 1)
