"""How far a call has come, and a line on stderr that shows it."""

import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """How far a call has come."""

    n_images: int
    n_decided: int
    n_broken: int  # decided images that are broken
    n_forward: int  # passes of real images so far
    n_backward: int


def show(progress: Progress) -> None:
    """Write a bar, the counts and the passes over the last line of stderr."""
    width = 20 * progress.n_decided // max(progress.n_images, 1)
    print(
        f"\r[{'#' * width:<20}] {progress.n_decided} of {progress.n_images} images decided, {progress.n_broken} "
        f"broken; {progress.n_forward:,} forward and {progress.n_backward:,} backward passes",
        end="\n" if progress.n_decided == progress.n_images else "", file=sys.stderr, flush=True,
    )  # fmt: skip
