"""The straight-through estimator for code that cuts the gradient (BPDA with the identity, Athalye et al. 2018).

Rounded pixels, quantization, JPEG and hard thresholds have no gradient or a gradient of zero. A cut lies between the
last input or output of a module without a gradient and the next one that has a gradient. There, the forward pass does
not change, and the backward pass becomes the identity.

The search finds cuts in modules and in a `forward`, if the tensors before and after the cut have the same shape or
differ only by flattening. It does not find gradients that are small but not zero, thresholds that cut some entries of a
tensor, or a cut with a path around it.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn

from ..acceleration.gradient_copy import frozen_copy
from ..errors import InvalidInputError
from ..mixing.classifier import MixedClassifier

_N_TRIED = 4  # images of random pixels


def straight_through(model: nn.Module) -> nn.Module:
    """Return the model with an identity backward pass through each cut of the gradient; the logits do not change.

    The first pass that takes a gradient searches for the cuts, on a few images of random pixels. The model is a torch
    module, images (B, C, H, W) to logits (B, K). Both base classifiers of a mixed classifier are searched.

    Raises:
        InvalidInputError: if the model is not a torch module.

    Example:
        >>> class Rounded(nn.Module):
        ...     def forward(self, x):
        ...         return (8 * x).round() / 8
        >>> model = straight_through(nn.Sequential(Rounded(), nn.Flatten(), nn.Linear(4, 3)))
        >>> x = torch.rand(2, 1, 2, 2, requires_grad=True)
        >>> model(x)[:, 0].sum().backward()
        >>> bool(x.grad.any()), model.cuts
        (True, {'output of 0': 'input of 0'})
    """
    if not isinstance(model, nn.Module):
        raise InvalidInputError(f"the model is a {type(model).__name__}. Wrap the function in a torch.nn.Module.")
    if isinstance(model, MixedClassifier):
        return MixedClassifier.from_mixture(StraightThrough(model.std), StraightThrough(model.rob), model.mixture)
    return StraightThrough(model)


class StraightThrough(nn.Module):
    """A network whose cuts have an identity backward pass; `cuts` maps the end of each cut to its beginning."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.cuts: dict[str, str] | None = None  # until the first pass that takes a gradient
        self.training = network.training  # `train` would change the mode of the network's modules

    def forward(self, x_BCHW: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and x_BCHW.requires_grad):
            return self.network(x_BCHW)  # type: ignore[no-any-return]
        # The compiler does not support these hooks. As a decorator, `disable` would import it in every process.
        return torch.compiler.disable(self._pass)(x_BCHW)  # type: ignore[no-untyped-call, no-any-return]

    def _pass(self, x_BCHW: Tensor) -> Tensor:
        if self.cuts is None:
            self.cuts = _find_cuts(self.network, x_BCHW)
        return _with_identities(self.network, x_BCHW, self.cuts)


def _find_cuts(network: nn.Module, like_BCHW: Tensor) -> dict[str, str]:
    """Return the cuts (end -> beginning) that a few images of random pixels show, from the logits to the images."""
    pixels_BCHW = torch.rand(_N_TRIED, *like_BCHW.shape[1:], generator=torch.Generator().manual_seed(0)).to(like_BCHW)
    frozen = frozen_copy(network)  # so that a tensor has a gradient only if it depends on the images
    cuts: dict[str, str] = {}
    while True:
        seen: dict[str, Tensor] = {}
        with torch.enable_grad():
            logits_BK = _with_identities(frozen, pixels_BCHW.clone().requires_grad_(), cuts, seen)
            if logits_BK.requires_grad:  # linear weights do not saturate, as a cross-entropy does
                loss = (logits_BK * torch.linspace(1, 2, logits_BK.shape[1]).to(logits_BK)).sum()
                loss.backward()  # type: ignore[no-untyped-call]
        places, values = list(seen), list(seen.values())
        reached = [i for i, each in enumerate(values) if _has_gradient(each)]
        blind = [i for i, each in enumerate(values) if each.requires_grad and i not in reached]
        end = reached[0] if reached else 1 + max(blind, default=-1)
        shape = values[end].shape if end < len(values) else None
        fits = [i for i in blind if i < end and shape in (values[i].shape, values[i].flatten(1).shape)]
        if not fits or places[end] in cuts:
            return cuts  # the images have a gradient, or nothing is left to try
        cuts[places[end]] = places[fits[-1]]


def _with_identities(
    network: nn.Module, x: Tensor, cuts: Mapping[str, str], seen: dict[str, Tensor] | None = None
) -> Tensor:
    """Return the logits, with an identity backward pass through the cuts.

    `seen` receives a copy of the first input and of the output of each module, in the order of the pass.
    """
    beginnings: dict[str, Tensor] = {}

    def replaced(place: str, values: Tensor) -> Tensor:
        beginning = beginnings.pop(cuts.get(place, ""), None)  # None: another caller of the module
        if beginning is not None and beginning.requires_grad:
            values = values.detach() + (beginning - beginning.detach()).reshape(values.shape)
        if place in cuts.values():
            beginnings[place] = values
        if seen is not None and place not in seen and values.is_floating_point():
            values = seen[place] = values.clone()  # has its own gradient, even if two modules share a tensor
            if values.requires_grad:
                values.retain_grad()
        return values

    def enter(name: str, _: nn.Module, args: tuple[object, ...]) -> tuple[object, ...]:
        return (replaced(f"input of {name}", args[0]), *args[1:]) if args and isinstance(args[0], Tensor) else args

    def leave(name: str, _: nn.Module, __: object, out: object) -> object:
        return replaced(f"output of {name}", out) if isinstance(out, Tensor) else out

    with ExitStack() as hooks:
        for name, module in network.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(partial(enter, name)))
            hooks.enter_context(module.register_forward_hook(partial(leave, name)))
        return network(x)  # type: ignore[no-any-return]


def _has_gradient(values: Tensor) -> bool:
    """Return whether the gradient is not zero on at least half of the images."""
    grad = values.grad
    return grad is not None and (grad.dim() < 2 or bool(2 * grad.flatten(1).any(dim=1).sum() >= len(grad)))
