"""The formulas of the paper in NumPy, to check the numbers of reports and studies."""

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def softmax(logits_NK: Array) -> Array:
    shifted = np.exp(logits_NK.astype(np.float64) - logits_NK.max(axis=1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=1, keepdims=True))


def layer_norm(logits_NK: Array) -> Array:
    logits_NK = logits_NK.astype(np.float64)
    centred = logits_NK - logits_NK.mean(axis=1, keepdims=True)
    return np.asarray(centred / np.sqrt(logits_NK.var(axis=1, ddof=1, keepdims=True) + 1e-8))


def gelu(u: Array) -> Array:
    return np.asarray(0.5 * u * np.vectorize(math.erfc)(-u / math.sqrt(2)))


def relu(u: Array) -> Array:
    return np.maximum(u, 0)


def transformed(logits_NK: Array, scale: float, power: float, bias: float, clamp: Any = gelu) -> Array:
    v = clamp(layer_norm(logits_NK) + bias)
    return np.asarray(scale * np.abs(v) ** power * np.sign(v))


def top2_margin(logits_NK: Array) -> Array:
    ordered = np.sort(softmax(logits_NK), axis=1)
    return np.asarray(ordered[:, -1] - ordered[:, -2])


def signed_margin(logits_NK: Array, labels_N: Array) -> Array:
    probs = softmax(logits_NK)
    own = probs[np.arange(len(labels_N)), labels_N].copy()
    probs[np.arange(len(labels_N)), labels_N] = -1
    return np.asarray(own - probs.max(axis=1))


def cutoff(margins: Array, beta: float) -> float:
    """The margin that a share beta of the images reaches."""
    return float(np.sort(margins)[::-1][max(1, math.ceil(beta * len(margins) - 1e-9)) - 1])


def mixed_classes(std_NK: Array, mapped_NK: Array, alpha: float, temperature: float = 0.0) -> Array:
    """The argmax of (1 - alpha) p_std + alpha p_rob, with one-hot p_std at temperature 0."""
    std = np.eye(std_NK.shape[1])[std_NK.argmax(axis=1)] if temperature == 0 else softmax(std_NK / temperature)
    return np.asarray(((1 - alpha) * std + alpha * softmax(mapped_NK)).argmax(axis=1))
