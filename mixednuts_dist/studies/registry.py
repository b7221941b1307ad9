"""How each study of the catalogue is answered, and the paper's numbers for it."""

from collections.abc import Callable

from . import paper_numbers as paper
from .bench import Bench
from .catalogue import CATALOGUE
from .gradients import approximation, bypass, surrogate
from .margins import margin_histograms
from .mixtures import data_size, no_transformation, seen_unseen, temperature, trade_off
from .outcome import Outcome
from .paper_numbers import PaperTable
from .results import base_accuracy, efficiency, error_rates, main_table, parameters
from .robust_classifiers import base_choice, black_box, confidence, parameter_transfer
from .searches import assumptions, clamps, relaxed_objective, resamples, sensitivity
from .simplex import trajectories
from .study import Study

_ANSWERS: dict[str, tuple[Callable[[Bench], Outcome], tuple[PaperTable, ...]]] = {
    "simplex": (trajectories, ()),
    "main": (main_table, paper.MAIN),
    "error-rate": (error_rates, paper.ERROR_RATE),
    "margins": (margin_histograms, ()),
    "confidence": (confidence, ()),
    "trade-off": (trade_off, ()),
    "surrogate": (surrogate, paper.SURROGATE),
    "bypass": (bypass, paper.BYPASS),
    "parameters": (parameters, paper.PARAMETERS),
    "base-accuracy": (base_accuracy, paper.BASE_ACCURACY),
    "efficiency": (efficiency, paper.EFFICIENCY),
    "sensitivity": (sensitivity, ()),
    "no-transform": (no_transformation, paper.NO_TRANSFORM),
    "clamp": (clamps, paper.CLAMP),
    "data-size": (data_size, paper.DATA_SIZE),
    "resamples": (resamples, ()),
    "seen-unseen": (seen_unseen, paper.SEEN),
    "temperature": (temperature, paper.TEMPERATURE),
    "black-box": (black_box, ()),
    "parameter-transfer": (parameter_transfer, paper.PARAMETER_TRANSFER),
    "base-choice": (base_choice, ()),
    "assumptions": (assumptions, ()),
    "relaxed": (relaxed_objective, ()),
    "approximation": (approximation, paper.APPROXIMATION),
}


def find_studies(name: str) -> tuple[Study, ...]:
    """The study of that name in the catalogue, or every one for "all"."""
    return tuple(_study(each) for each in (CATALOGUE if name == "all" else (name,)))


def _study(name: str) -> Study:
    (section, title), (run, printed) = CATALOGUE[name], _ANSWERS[name]
    return Study(name, section, title, run, printed)
