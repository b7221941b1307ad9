"""How large a base classifier is and what one image costs: no weights needed, nothing computed.

GFLOPs are PyTorch's own count (`torch.utils.flop_counter`: two for every multiply-accumulate of a convolution, matrix
product or attention, nothing for element-wise work) of one forward pass on one image. It gives the paper's efficiency
table within 1.3 % (30.0, 121.0, 77.6, 68.1 and 68.8 GFLOPs there), which another counter made.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from ..errors import BaseClassifierError
from ..uris import is_black_box, without_weights
from .base_classifiers import load_classifier


@dataclass(frozen=True)
class ModelSize:
    """Learned parameters, and floating-point operations of one forward pass on one image."""

    parameters: int
    flops: int


class _ConstantsOnCpu(TorchFunctionMode):
    """Inside `torch.device("meta")`: constructors that look at numbers of a `linspace` (drop-path rates) still can."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.linspace:
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def measure_uri(uri: str, role: str, image_shape: tuple[int, ...]) -> ModelSize | None:
    """The size of the classifier that `uri` names; None for a black box. Library models are built without memory.

    Raises:
        BaseClassifierError: where it cannot be built, or does not take images of that shape.
    """
    if is_black_box(uri):
        return None
    bare = without_weights(uri)
    try:
        if bare is None:
            return measure(load_classifier(uri, role), image_shape)
        with torch.device("meta"), _ConstantsOnCpu():
            return measure(load_classifier(bare, role), image_shape)
    except (NotImplementedError, RuntimeError) as error:
        raise BaseClassifierError(f"{role}={uri!r} does not take images of shape {image_shape}: {error}") from error


@torch.no_grad()
def measure(model: nn.Module, image_shape: tuple[int, ...]) -> ModelSize:
    """Count a module's parameters and the operations of one image; the module ends on the meta device."""
    counter = FlopCounterMode(display=False)
    model = model.to("meta").eval()
    with counter:
        model(torch.empty(1, *image_shape, device="meta"))
    return ModelSize(sum(parameter.numel() for parameter in model.parameters()), int(counter.get_total_flops()))
