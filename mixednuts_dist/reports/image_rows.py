"""Reduce the logits of every image to classes and margins, batch by batch; reports count the reduced rows.

Shapes: N images, K classes.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidInputError
from ..mixing.margins import log_one_minus_signed_margin
from ..storage.records import AttackRecords, EvaluateRecords, SearchResult
from .margins import Margins, stored_margins


def read_batches(
    batches: Iterable[tuple[AttackRecords | None, EvaluateRecords]], search: SearchResult | None
) -> tuple[dict[str, Tensor], Margins]:
    """Return the reduced rows of all images, and the margins of the images of the attack stage by group.

    Returns:
        The columns `sample_id`, `label`, `clean` (correct without an attack), `robust` and `after STEP` (still correct
        after this step of the attack); the classes `mixed, clean` and `mixed, attacked` with their signed margins
        `margin: mixed, clean` and so on, which are those of `rob` in a run without `std`. For the images of the attack
        stage, which come first, also `std broken`, `rob broken`, the classes `std, clean`, `rob, clean` and
        `rob+M, clean`, and the signed margins of the first two.

    Raises:
        InvalidInputError: if the rows of a batch are about different images.
    """
    rows, margins = dict[str, Tensor](), dict[Any, Tensor]()
    for attack, evaluate in batches:
        _append(rows, _evaluated(evaluate))
        if attack is not None and search is not None:
            ids_N, transform = evaluate.sample_ids_N[: len(attack.sample_ids_N)], search.deployed().transform()
            if attack.sample_ids_N.tolist() != ids_N.tolist():
                raise InvalidInputError(
                    f"a batch of {attack.sample_ids_N.numel()} attack rows and {ids_N.numel()} evaluate "
                    "rows is not about the same images. Run: mixednuts evaluate CONFIG"
                )
            mapped_N = transform(attack.rob_clean_NK.double()).argmax(dim=1)
            _append(rows, {**_attacked(attack), "rob+M, clean": mapped_N})
            _append(margins, stored_margins(attack, transform, search.ln_k))
    return rows, margins


def _evaluated(rows: EvaluateRecords) -> dict[str, Tensor]:
    return {
        "sample_id": rows.sample_ids_N,
        "label": rows.labels_N,
        "clean": rows.clean_N,
        "robust": rows.robust_N,
        **{f"after {step}": alive_N for step, alive_N in rows.survived.items()},
        **_answers("mixed, clean", rows.mixed_clean_NK, rows.labels_N),
        **_answers("mixed, attacked", rows.mixed_attacked_NK, rows.labels_N),
    }


def _attacked(rows: AttackRecords) -> dict[str, Tensor]:
    return {
        "std broken": rows.std_broken_N,
        "rob broken": rows.rob_broken_N,
        **_answers("std, clean", rows.std_clean_NK, rows.labels_N),
        **_answers("rob, clean", rows.rob_clean_NK, rows.labels_N),
    }


def _answers(name: str, logits_NK: Tensor, labels_N: Tensor) -> dict[str, Tensor]:
    margins_N = -torch.expm1(log_one_minus_signed_margin(logits_NK, labels_N))
    return {name: logits_NK.argmax(dim=1), f"margin: {name}": margins_N}


def _append(held: dict[Any, Tensor], new: Mapping[Any, Tensor]) -> None:
    """Append the values of a batch. The old ones are freed, so that they do not fragment the memory."""
    for name, values_N in new.items():
        held[name] = torch.cat([held[name], values_N]) if name in held else values_N
