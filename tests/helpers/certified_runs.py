"""A tiny configuration with a certify stage."""

from pathlib import Path
from typing import Any

SMOOTHING = {"n": 400, "n_choose": 20, "radii": [0.1, 0.25], "alphas": [1, 0.8]}


def content(folder: Path, **changes: Any) -> dict[str, Any]:
    """A run on a few digits."""
    return {
        "name": "certified", "data": {"uri": "digits", "n": 24}, "std": "demo:std", "rob": "demo:rob",
        "threat": {"norm": "Linf", "eps": 0.05}, "precision": "fp32", "partition_size": 12, "storage": str(folder),
        "attack": {"n_iter": 3, "border_restarts": 0},
        "search": {"rounds": 0, "scales": [0.5, 5], "powers": [1, 4], "biases": [0], "betas": [1.0, 0.9]},
        "evaluate": {"attacks": ["apgd-ce"], "n_iter": 3},
        "compute": {"batch_size": 64}, "certify": SMOOTHING, **changes,
    }  # fmt: skip
