"""The result of an attack on B images of C x H x W with K classes, and the progress of a call."""

import html
import sys
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, repr=False)
class AttackResult:
    """The result of `autoattack` and `minimum_margin_attack`; all entries come from float32 verification.

    `x_adv` of a broken image is misclassified. `x_adv` of a robust image is the verified point with the smallest
    margin, which is rarely the clean image.
    """

    clean: Tensor  # (B,) bool: classified correctly without an attack
    broken: Tensor  # (B,) bool: misclassified under attack or without one
    survived: dict[str, Tensor]  # attack -> (B,) bool: not broken by this attack or by those before it
    x_adv: Tensor  # (B, C, H, W), in the ball and in [0, 1]
    logits: Tensor  # (B, K) float32, at x_adv
    log_one_minus_margin: Tensor  # (B,) float64, at x_adv; it does not saturate for margins near 1
    n_forward: int  # rows passed forward by all attacks and verifications, without padding and cancelled runs
    n_backward: int
    # (B,) bool: `x_adv` was verified as misclassified, which ended the attack, but is correct in the last verification
    unconfirmed: Tensor
    decided: Tensor  # (B,) bool: False for images that a keyboard interrupt left unfinished

    @property
    def robust(self) -> Tensor:
        """(B,) bool: classified correctly without an attack and after every attack."""
        return ~self.broken

    @property
    def margin(self) -> Tensor:
        """(B,) float64, p_y - max_{j != y} p_j at x_adv; negative if misclassified."""
        return -torch.expm1(self.log_one_minus_margin)

    @property
    def clean_accuracy(self) -> float:
        """The share of images that are classified correctly without an attack, in [0, 1]."""
        return float(self.clean.double().mean())

    @property
    def robust_accuracy(self) -> float:
        """The share of robust images, in [0, 1]."""
        return float(self.robust.double().mean())

    def table(self) -> list[tuple[str, int, float]]:
        """Return (step, number of images that are still correct, percent) for the clean images and each attack."""
        steps, total = {"clean": self.clean, **self.survived}, max(1, len(self.broken))
        return [(name, int(right.sum()), 100 * float(right.sum()) / total) for name, right in steps.items()]

    def __repr__(self) -> str:
        (_, n_clean, clean), *attacks = self.table()
        left = ", ".join(f"{percent:.1f}% after {name}" for name, _, percent in attacks) or "no attack"
        undecided = int((~self.decided).sum())
        return (
            f"clean   {clean:.1f}%: {n_clean} of {_images(len(self.broken))}\n"
            f"robust  {left}: {_images(int(self.robust.sum()))}{f'; {undecided} undecided' if undecided else ''}\n"
            f"passes  {self.n_forward:,} forward, {self.n_backward:,} backward"
        )

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th scope='row'>{html.escape(name)}</th><td>{n_correct}</td><td>{percent:.1f}%</td></tr>"
            for name, n_correct, percent in self.table()
        )
        passes = f"{_images(len(self.broken))}; {self.n_forward:,} passes forward, {self.n_backward:,} backward"
        head = "<thead><tr><th>after</th><th>correct</th><th>share</th></tr></thead>"
        return f"<table><caption>{passes}</caption>{head}<tbody>{rows}</tbody></table>"


def _images(n: int) -> str:
    return f"{n} image{'s' * (n != 1)}"


@dataclass(frozen=True)
class Progress:
    """How far a call has come."""

    n_images: int
    n_decided: int
    n_broken: int  # decided images that are broken
    n_forward: int  # passes of real images so far
    n_backward: int


def show_progress(progress: Progress) -> None:
    """Write a bar, the counts and the passes over the last line of stderr."""
    width = 20 * progress.n_decided // max(progress.n_images, 1)
    print(
        f"\r[{'#' * width:<20}] {progress.n_decided} of {progress.n_images} images decided, {progress.n_broken} "
        f"broken; {progress.n_forward:,} forward and {progress.n_backward:,} backward passes",
        end="\n" if progress.n_decided == progress.n_images else "", file=sys.stderr, flush=True,
    )  # fmt: skip
