"""What an attack leaves of a classifier, as a value that shows itself in a terminal and in a notebook.

Shapes: B images of C x H x W, K classes.
"""

from dataclasses import dataclass

from torch import Tensor

from .draws import FoolingRates


@dataclass(frozen=True, repr=False)
class AttackOutcome:
    """What is left of a classifier; every verdict is once more that of the float32 judge at the `x_adv` returned."""

    clean: Tensor  # (B,) bool: right on the clean image
    robust: Tensor  # (B,) bool: right on the clean image and after every attack
    survived: dict[str, Tensor]  # attack -> (B,) bool, still right after it and all before it
    x_adv: Tensor  # (B, C, H, W): an image that fools, or for a robust image the smallest margin seen
    logits: Tensor  # (B, K) float32 of the attacked classifier at x_adv
    n_forward: int  # images through all attacks and verifications; rows that fill a batch up are not counted
    n_backward: int
    unconfirmed: Tensor  # (B,) bool: fooled once, and right when the same image was judged again
    decided: Tensor  # (B,) bool, False for images whose attacks a keyboard interrupt has cut short
    fooled: FoolingRates | None = None  # of a random classifier: how often `x_adv` fools; `robust` follows from it

    def table(self) -> list[tuple[str, int, float]]:
        """After each step, the clean images first: (its name, how many images are right, in percent)."""
        steps, total = {"clean": self.clean, **self.survived}, max(1, len(self.robust))
        return [(name, int(right.sum()), 100 * float(right.sum()) / total) for name, right in steps.items()]

    def __repr__(self) -> str:
        (_, n_clean, clean), *attacks = self.table()
        left = ", ".join(f"{percent:.1f} % after {name}" for name, _, percent in attacks) or "no attack"
        open_ = f"; {undecided} undecided" if (undecided := int((~self.decided).sum())) else ""
        if self.fooled is not None:
            open_ += f"; random: {int(self.fooled.broken.sum())} broken, {int(self.fooled.undecided.sum())} undecided"
        return (
            f"clean   {clean:.1f} %: {n_clean} of {images_text(len(self.robust))}\n"
            f"robust  {left}: {images_text(int(self.robust.sum()))}{open_}\n"
            f"passes  {self.n_forward:,} forward, {self.n_backward:,} backward"
        )

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th scope='row'>{name}</th><td>{right}</td><td>{percent:.1f} %</td></tr>"
            for name, right, percent in self.table()
        )
        passes = f"{images_text(len(self.robust))}; {self.n_forward:,} passes forward, {self.n_backward:,} backward"
        return (
            f"<table><caption>{passes}</caption><thead><tr><th>after</th><th>right</th><th>share</th></tr></thead>"
            f"<tbody>{rows}</tbody></table>"
        )


def images_text(n: int) -> str:
    return f"{n} image{'s' * (n != 1)}"
