"""The passes of an attack: through the classifier itself or through fast copies of its networks.

A single classifier's gradients are those of its logits. A mixed classifier's gradients are those of the surrogate
f_aux, but only the outputs of the mixed classifier itself decide whether an image is broken (paper, appendix B.2).
Results of fast copies are estimates, which float32 verification confirms or rejects.

Shapes: B images of C x H x W, K classes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..acceleration import batch_shape
from ..acceleration.batch_shape import LEAST_LIMIT, ON_CPU, SMALLEST, as_out_of_memory, repeated
from ..acceleration.gradient_copy import input_gradient
from ..acceleration.precision import FastCopies, PrecisionChoice
from ..acceleration.tf32 import tf32_allowed
from ..errors import InvalidInputError
from ..mixing.classifier import MixedClassifier

AttackMode = Literal["transfer", "bypass"]


class Outputs:
    """The results of one forward pass."""

    draws: "Sequence[Outputs]" = ()  # losses of a random classifier are averaged over its draws

    def __init__(self, logits_BK: Tensor) -> None:
        self.logits = logits_BK  # losses use these, and gradients flow through them
        self.model_logits = logits_BK.detach()  # the attacked classifier's outputs, without a graph


class MixedOutputs(Outputs):
    """The outputs of a mixed classifier and of its base classifiers; f_aux and f_mix are computed when first used."""

    def __init__(self, mixed: MixedClassifier, mode: AttackMode, std_BK: Tensor, rob_BK: Tensor) -> None:
        self.mixed, self._mode = mixed, mode
        self.std_logits, self.rob_logits = std_BK, rob_BK

    @cached_property
    def logits(self) -> Tensor:  # type: ignore[override]
        """f_aux; in bypass mode with the value of f_mix."""
        surrogate_BK = self.mixed.surrogate_of(self.std_logits, self.rob_logits)
        if self._mode == "transfer":
            return surrogate_BK
        # The second term is exactly 0, so the sum has the value of f_mix and the gradient of f_aux.
        return self.model_logits + (surrogate_BK - surrogate_BK.detach())

    @cached_property
    def model_logits(self) -> Tensor:  # type: ignore[override]
        """f_mix."""
        with torch.no_grad():
            return self.mixed.mix_logits(self.std_logits, self.rob_logits)


@dataclass(frozen=True)
class GradientModel:
    """Passes through one set of networks."""

    run: Callable[[Tensor], Outputs]  # builds a graph if autograd is enabled
    tf32: bool = False
    compiled: bool = False

    def evaluate(self, x_BCHW: Tensor, loss_of: Callable[[Outputs], Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the classifier's logits, the losses and the input gradient of their sum, without graphs.

        Without `loss_of` there is no backward pass, and losses and gradient are empty.
        """
        if self.compiled:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        with tf32_allowed(self.tf32), as_out_of_memory(), torch.set_grad_enabled(loss_of is not None):
            leaf = x_BCHW.detach().requires_grad_(loss_of is not None)
            outputs = self.run(leaf)
            if loss_of is None:
                return outputs.model_logits.detach(), leaf.new_zeros(0), leaf.new_zeros(0)
            loss = torch.stack([loss_of(each) for each in outputs.draws or [outputs]]).mean(dim=0)
            return outputs.model_logits.detach(), loss.detach(), input_gradient(loss, leaf)

    def probe(self, x_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits and the gradient of a cross-entropy, to compare the bits of batch shapes."""
        logits, _, grad = self.evaluate(x_BCHW, lambda outputs: outputs.logits.logsumexp(dim=1) - outputs.logits[:, 0])
        return logits, grad


@dataclass(frozen=True)
class AttackedModel:
    """A classifier under attack."""

    model: Callable[[Tensor], Tensor]  # the classifier itself, for float32 verification
    fast: GradientModel  # for the passes of the attacks
    float32: GradientModel | None = None  # for float32 runs; None if `fast` computes in float32 or TF32 anyway

    @classmethod
    def of(
        cls, model: Callable[[Tensor], Tensor], *, copies: FastCopies | None = None, like_BCHW: Tensor | None = None,
        rows: int = ON_CPU, mode: AttackMode = "transfer",
    ) -> "AttackedModel":  # fmt: skip
        """Return a classifier's attacked model; `copies` are tried on images like `like_BCHW`, `rows` at a time."""
        if mode not in get_args(AttackMode):
            raise InvalidInputError(f"mode={mode!r} is not one of the modes {', '.join(get_args(AttackMode))}")
        if copies is None or like_BCHW is None:
            return cls(model, GradientModel(_passes_through(model, mode)))
        copied = copies.of_model(model, like_BCHW, rows)
        fast = GradientModel(_passes_through(copied.fast, mode), "tf32" in copied.precisions, copies.compile)
        if "bf16" not in copied.precisions:  # TF32 is precise enough to replace float32
            return cls(model, fast)
        return cls(model, fast, GradientModel(_passes_through(copied.float32, mode), tf32=like_BCHW.is_cuda))


def _passes_through(model: Any, mode: AttackMode) -> Callable[[Tensor], Outputs]:
    if not isinstance(model, MixedClassifier):
        return lambda x_BCHW: Outputs(model(x_BCHW))
    return lambda x_BCHW: MixedOutputs(model, mode, model.std(x_BCHW), model.rob(x_BCHW))


def measured_rows(
    model: Callable[[Tensor], Tensor], x_BCHW: Tensor, precision: PrecisionChoice = "auto", *, n_images: int
) -> int:
    """Return the smallest number of rows that is nearly as fast as any that fits into memory; on a CPU `ON_CPU`.

    With more rows than `n_images`, the images that a worker attacks at a time, Square would pad most of them.
    """
    if x_BCHW.device.type == "cpu":
        return ON_CPU
    fast, *float32 = _gradient_models(model, x_BCHW, precision)
    exact = GradientModel(_passes_through(model, "transfer"))
    limit = 1 << (max(n_images, LEAST_LIMIT) - 1).bit_length()
    most = batch_shape.largest_rows([each.probe for each in (fast, *float32, exact)], x_BCHW, most=limit)

    def seconds(rows: int) -> float:
        return batch_shape.fastest_of_three(lambda: fast.probe(repeated(x_BCHW, rows))[1])

    return batch_shape.efficient_rows(seconds, most)


def repeats_its_bits(
    model: Callable[[Tensor], Tensor], x_BCHW: Tensor, rows: int, precision: PrecisionChoice = "auto"
) -> bool:
    """Return whether two passes over the same images give the same logits and gradients; on a CPU they always do."""
    if x_BCHW.device.type == "cpu":
        return True
    x_BCHW = repeated(x_BCHW, rows)
    return all(
        torch.equal(first, second)
        for each in _gradient_models(model, x_BCHW, precision)
        for first, second in zip(each.probe(x_BCHW), each.probe(x_BCHW), strict=True)
    )


def _gradient_models(model: Callable[[Tensor], Tensor], x: Tensor, precision: PrecisionChoice) -> list[GradientModel]:
    attacked = AttackedModel.of(model, copies=FastCopies(precision), like_BCHW=x, rows=SMALLEST)
    return [each for each in (attacked.fast, attacked.float32) if each is not None]
