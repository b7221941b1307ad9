"""A study: a question of the paper with a name, and how to answer it on a run."""

from collections.abc import Callable
from dataclasses import dataclass

from .bench import Bench
from .outcome import Outcome
from .paper_numbers import PaperTable


@dataclass(frozen=True)
class Study:
    """One entry of `mixednuts study --list`."""

    name: str
    section: str  # of the paper, with the label of its table or figure
    title: str  # one line: what it shows
    run: Callable[[Bench], Outcome]
    paper: tuple[PaperTable, ...] = ()
