"""A tiny configuration with a certify stage, and a ReLU network that has linear bounds."""

from pathlib import Path
from typing import Any

SMOOTHING = {"n": 400, "n_choose": 20, "radii": [0.1, 0.25], "alphas": [1, 0.8]}


# Random features and a ridge regression on the digits: ReLU, and right on most of them. The demonstration's have SiLU.
RELU_NETWORK = """
import torch
from sklearn.datasets import load_digits
from torch import nn

def network():
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16).float(), nn.functional.one_hot(torch.tensor(digits.target)).float()
    hidden, last = nn.Linear(64, 200), nn.Linear(200, 10)
    hidden.weight.data = torch.randn(200, 64, generator=torch.Generator().manual_seed(0)) / 4
    hidden.bias.data.zero_()
    features = hidden(x).relu()
    last.weight.data = 10 * torch.linalg.solve(features.T @ features + 10 * torch.eye(200), features.T @ y).T
    last.bias.data.zero_()
    return nn.Sequential(nn.Flatten(), hidden, nn.ReLU(), last).eval()
"""


def content(folder: Path, **changes: Any) -> dict[str, Any]:
    """A run on a few digits."""
    return {
        "name": "certified", "data": {"uri": "digits", "n": 24}, "std": "demo:std", "rob": "demo:rob",
        "threat": {"norm": "Linf", "eps": 0.05}, "precision": "fp32", "partition_size": 12, "storage": str(folder),
        "attack": {"n_iter": 3, "border_restarts": 0},
        "search": {"rounds": 0, "scales": [0.5, 5], "powers": [1, 4], "biases": [0], "betas": [1.0, 0.9]},
        "evaluate": {"attacks": ["apgd-ce"], "n_iter": 3, "border_restarts": 0},
        "compute": {"batch_size": 64}, "certify": SMOOTHING, **changes,
    }  # fmt: skip
