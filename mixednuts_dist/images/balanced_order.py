"""An order of images in which every stretch has each class in its share: any partition estimates the whole."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable

_RESOLUTION = float(1 << 64)


def balanced_order(labels: Iterable[int], seed: int) -> list[int]:
    """The indices 0 .. N-1, shuffled within each class, the classes spread evenly over the whole length.

    Where the r-th of a class's n images goes is (r + u) / n of the length, u in [0, 1) a constant of the class: a
    stretch of w images holds n w / N of that class, give or take two. Only `seed` and the labels decide; no random
    number generator whose next release could give another order.
    """
    members: dict[int, list[int]] = defaultdict(list)
    for index, label in enumerate(labels):
        members[int(label)].append(index)
    places = []
    for label, indices in members.items():
        shift = _uniform(f"{seed} class {label}")
        shuffled = sorted(indices, key=lambda index: _uniform(f"{seed} image {index}"))
        places += [((rank + shift) / len(indices), index) for rank, index in enumerate(shuffled)]
    return [index for _, index in sorted(places)]


def _uniform(key: str) -> float:
    """A number in [0, 1) that looks random and depends on `key` alone."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) / _RESOLUTION
