"""The clamping functions of the nonlinear transformation (paper, section 4.2); each registers itself.

A clamp maps a float64 tensor elementwise. It increases everywhere, or it decreases up to one point (`turns_at=`) and
increases after it. The search relies on this shape: over an interval, the maximum is at one end, and the minimum is at
an end or at that point. `size_at_turn` checks the shape on a sample. Each function has a small relative error even for
small values, because the power that follows would magnify the error.
"""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..config.register import CLAMPS
from ..errors import InvalidInputError

Clamp = str  # the name of a registered clamp

_SAMPLE = (-60.0, 60.0, 4001)  # shifted LayerNormed logits stay within sqrt(K) + |c|
_ROUNDING = 1e-12


@CLAMPS(
    "gelu", describes="u Phi(u), as in the paper; increases from u = -0.75 on", turns_at=-0.7517915246935645, order=1
)
def gelu(u: Tensor) -> Tensor:
    """Return `u Phi(u) = u erfc(-u / sqrt 2) / 2`; torch's own GELU loses its digits by cancellation below u = -5."""
    survival: Tensor = torch.special.erfc(u * -math.sqrt(0.5))
    return survival * (0.5 * u)


@CLAMPS("relu", describes="max(u, 0)", order=2)
def relu(u: Tensor) -> Tensor:
    """Return `max(u, 0)`."""
    return torch.relu(u)


@CLAMPS("elu", describes="u above 0, e^u - 1 below", order=3)
def elu(u: Tensor) -> Tensor:
    """Return `u` above 0 and `e^u - 1` below, without the exponential of a large u, which would overflow."""
    return torch.where(u > 0, u, torch.expm1(u.clamp_max(0)))


@CLAMPS("softplus", describes="log(1 + e^u)", order=4)
def softplus(u: Tensor) -> Tensor:
    """Return `log(1 + e^u)`; torch's own softplus returns `u` itself above 20."""
    return torch.logaddexp(u, torch.zeros_like(u))


@CLAMPS("linear", describes="u, without a clamp", order=5)
def linear(u: Tensor) -> Tensor:
    """Return `u`."""
    return u


def clamp_logits(u: Tensor, clamp: Clamp) -> Tensor:
    """Return the clamp of shifted logits, elementwise, for any shape, in the dtype of `u`.

    >>> clamp_logits(torch.tensor([-1.0, 0.0, 2.0]), "relu").tolist()
    [0.0, 0.0, 2.0]
    """
    function: Callable[[Tensor], Tensor] = CLAMPS.get(clamp)
    return function(u)


@functools.cache
def size_at_turn(clamp: Clamp) -> float:
    """Return |Clamp(u)| at the point after which a registered clamp increases; 0 if it increases everywhere.

    Raises:
        InvalidInputError: if the name is unknown, or if the function does not have the registered shape.
    """
    CLAMPS.check(clamp)
    turns_at = CLAMPS.entries()[clamp].facts.get("turns_at")
    u = torch.linspace(*_SAMPLE, dtype=torch.float64)
    values = clamp_logits(u, clamp)
    steps, rounding = values.diff(), _ROUNDING * values.abs().max()
    rises = torch.ones_like(steps, dtype=torch.bool) if turns_at is None else u[:-1] >= turns_at
    falls = torch.zeros_like(rises) if turns_at is None else u[1:] <= turns_at
    wrong = ~values.isfinite()[1:] | (rises & (steps < -rounding)) | (falls & (steps > rounding))
    if bool(wrong.any()):
        where = float(u[1:][wrong][0])
        raise InvalidInputError(
            f"clamp {clamp!r} near u = {where:.4g} is not finite or not monotone. A clamp must increase everywhere, or "
            "decrease up to the point that it registers as turns_at= and increase after it"
        )
    if turns_at is None:
        return 0.0
    size = abs(float(clamp_logits(torch.tensor([turns_at], dtype=torch.float64), clamp)))
    # The function is flat at its turn: an error of 1e-5 in turns_at moves the value by about 1e-10.
    return size + 1e-9 * (1 + size)
