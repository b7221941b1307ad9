"""What an attack passes images through: the classifier itself, or fast copies of its networks.

For one classifier the logits that gradients are taken of are its own. Against the mixed classifier they may differ
(paper, appendix B.2): gradients are those of the surrogate f_aux, and only the mixture decides whether an image is
broken. With an `Arithmetic` the passes go through fast copies; what they show of the classifier is an estimate that the
float32 judge has to verify.

Shapes: B images of C x H x W, K classes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ..acceleration.arithmetic import Arithmetic, PrecisionChoice
from ..acceleration.batch_shape import (
    MOST_ON_CPU,
    ON_CARD,
    ON_CPU,
    SMALLEST,
    BatchShape,
    as_out_of_memory,
    efficient_rows,
    fastest_of_three,
    largest_rows,
    repeated,
)
from ..acceleration.gradient_copy import input_gradient
from ..acceleration.tf32 import tf32_allowed
from ..errors import InvalidInputError
from ..mixing.classifier import MixedClassifier

AttackMode = Literal["transfer", "bypass"]

_SMALL_NETWORK = 4_000_000  # weights


class Outputs:
    """What one forward pass gives, each computed when it is asked for; `model_logits` never has a graph."""

    def __init__(self, logits_BK: Tensor) -> None:
        self.logits = logits_BK  # gradients are taken of these
        self.model_logits = logits_BK.detach()  # the attacked classifier's own

    @property
    def draws(self) -> "Sequence[Outputs]":
        """Of a random classifier several, over which losses are averaged."""
        return (self,)


class MixedOutputs(Outputs):
    """The same of a mixture: beside f_aux and f_mix the logits of which both are made."""

    def __init__(self, mixed: MixedClassifier, mode: AttackMode, std_BK: Tensor, rob_BK: Tensor) -> None:
        self._mixed, self._mode = mixed, mode
        self.std_logits, self.rob_logits = std_BK, rob_BK

    @cached_property
    def logits(self) -> Tensor:  # type: ignore[override]
        """f_aux; in bypass mode with the value of f_mix."""
        surrogate_BK = self._mixed.surrogate_of(self.std_logits, self.rob_logits)
        if self._mode == "transfer":
            return surrogate_BK
        # The value of the second term is exactly 0, so the sum has f_mix's value, and f_aux's gradient.
        return self.model_logits + (surrogate_BK - surrogate_BK.detach())

    @cached_property
    def model_logits(self) -> Tensor:  # type: ignore[override]
        """f_mix."""
        with torch.no_grad():
            return self._mixed.mix_logits(self.std_logits, self.rob_logits)

    @cached_property
    def mapped_logits(self) -> Tensor:
        """Rob's logits behind the transformation, float64."""
        mapped_BK: Tensor = self._mixed.transform(self.rob_logits.double())
        return mapped_BK


@dataclass(frozen=True)
class GradientModel:
    """Passes through one set of networks."""

    run: Callable[[Tensor], Outputs]  # with or without a graph, as autograd is set
    tf32: bool = False
    compiled: bool = False

    def probe(self, x_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """All that a pass gives, logits and an input gradient, to compare shapes by their bits."""
        with tf32_allowed(self.tf32), as_out_of_memory(), torch.enable_grad():
            x_BCHW = x_BCHW.detach().clone().requires_grad_()
            outputs = self.run(x_BCHW)
            # Cross-entropy towards one class: its gradient passes through every logit with a different weight.
            loss = outputs.logits.logsumexp(dim=1).sum() - outputs.logits[:, 0].sum()
            return outputs.model_logits, input_gradient(loss, x_BCHW)


@dataclass(frozen=True)
class AttackedModel:
    """A classifier under attack."""

    model: Callable[[Tensor], Tensor]  # itself: what the judge asks; images (B, C, H, W) -> logits (B, K)
    fast: GradientModel  # what the attacks' passes go through
    float32: GradientModel | None = None  # for the last steps, where `fast` computes below float32
    subject: Any = None  # of a random classifier, where `model` is its mean over draws: the classifier

    @property
    def in_float32(self) -> GradientModel:
        """What phases in float32 go through."""
        return self.float32 or self.fast

    @classmethod
    def of(
        cls,
        model: Callable[[Tensor], Tensor],
        *,
        arithmetic: Arithmetic | None = None,
        like_BCHW: Tensor | None = None,
        rows: int = ON_CPU,
        mode: AttackMode = "transfer",
    ) -> "AttackedModel":
        """Any classifier; a `MixedClassifier` is attacked through its surrogate, as `mode` says.

        An `arithmetic` makes fast copies, and tries them on some of the images `like_BCHW`, `rows` at a time. A
        function that is no torch module is attacked as it is, in float32, where the arithmetic may choose that.
        """
        if mode not in get_args(AttackMode):
            raise InvalidInputError(
                f"mode={mode!r} is not an attack mode; valid modes: {', '.join(get_args(AttackMode))}"
            )

        def through(made: Any, tf32: bool = False, compiled: bool = False) -> GradientModel:
            return GradientModel(_passes_through(made, mode), tf32, compiled)

        as_it_is = (
            not isinstance(model, nn.Module) and arithmetic is not None and arithmetic.precision in ("auto", "fp32")
        )
        if arithmetic is None or as_it_is:
            return cls(model, through(model))
        if like_BCHW is None:
            raise InvalidInputError("an arithmetic needs images to try its copies of the networks on: give like_BCHW")
        copied = arithmetic.copy_of(model, like_BCHW, rows)
        fast = through(copied.model, copied.tf32, arithmetic.compile)
        return cls(model, fast, through(copied.finer) if copied.coarse else None)


def _passes_through(model: Any, mode: AttackMode) -> Callable[[Tensor], Outputs]:
    if not isinstance(model, MixedClassifier):
        return lambda x_BCHW: Outputs(model(x_BCHW))
    return lambda x_BCHW: MixedOutputs(model, mode, model.std(x_BCHW), model.rob(x_BCHW))


def measured_rows(model: Callable[[Tensor], Tensor], x_BCHW: Tensor, precision: PrecisionChoice = "auto") -> int:
    """The fewest rows that are nearly as fast as any for which memory suffices, in every arithmetic of an attack.

    Tried on copies that are not compiled, so that no graphs of other shapes stay behind. On a CPU, where memory is
    swapped before it ends, `ON_CPU`.
    """
    if x_BCHW.device.type == "cpu":
        return ON_CPU
    fast, *finer = _gradient_models(model, x_BCHW, precision)
    exact = GradientModel(_passes_through(model, "transfer"))
    most = largest_rows([each.probe for each in (fast, *finer, exact)], x_BCHW)
    return efficient_rows(lambda rows: fastest_of_three(lambda: fast.probe(repeated(x_BCHW, rows))[1]), most)


def repeats_its_bits(
    model: Callable[[Tensor], Tensor], x_BCHW: Tensor, rows: int, precision: PrecisionChoice = "auto"
) -> bool:
    """Whether two passes over the same images give the same logits and gradients in the arithmetics of an attack.

    Some backward operations of CUDA add up in any order: bilinear resizing, fused attention. On a CPU none does.
    """
    if x_BCHW.device.type == "cpu":
        return True
    x_BCHW = repeated(x_BCHW, rows)
    return all(
        torch.equal(first, second)
        for each in _gradient_models(model, x_BCHW, precision)
        for first, second in zip(each.probe(x_BCHW), each.probe(x_BCHW), strict=True)
    )


def _gradient_models(model: Callable[[Tensor], Tensor], x: Tensor, precision: PrecisionChoice) -> list[GradientModel]:
    attacked = AttackedModel.of(model, arithmetic=Arithmetic(precision), like_BCHW=x, rows=SMALLEST)
    return [each for each in (attacked.fast, attacked.float32) if each is not None]


def shape_of(batch_size: int | BatchShape | None, model: Callable[[Tensor], Tensor], x_BCHW: Tensor) -> BatchShape:
    """Return the batch shape that was asked for.

    The default has as many rows as there are images, rounded up to a power of two, at least `ON_CPU` and at most
    `ON_CARD` on an accelerator, `MOST_ON_CPU` for a small network on a CPU, and `ON_CPU` for any other model.
    """
    if batch_size is None:
        needed = max(ON_CPU, 1 << (len(x_BCHW) - 1).bit_length())
        on_cpu = x_BCHW.device.type == "cpu"
        batch_size = min(needed, ON_CARD if not on_cpu else MOST_ON_CPU if _is_small(model) else ON_CPU)
    return BatchShape.of(batch_size, x_BCHW.device)


def _is_small(model: Callable[[Tensor], Tensor]) -> bool:
    """Return whether so much of a pass is calls and not products that more rows make an image cheaper."""
    return isinstance(model, nn.Module) and sum(each.numel() for each in model.parameters()) < _SMALL_NETWORK
