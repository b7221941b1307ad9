"""A mixed classifier as graphs that run without this package: `torch.export` programs and ONNX models.

Three graphs of each, all with a dynamic number of images:

    mixed   images (B, C, H, W) -> logits (B, K)
    rob     images (B, C, H, W) -> rob's logits (B, K), classes (B,), decided (B,)
    std     images (B, C, H, W), rob's logits (B, K) -> logits (B, K)

`rob` and `std` are the lazy pair. Run `rob` on everything; where `decided` is true, std cannot change the answer, and
`classes` is that of the mixture. Run `std` on the other images alone, with their rows of rob's logits; the class is the
largest of its logits. Shapes: B images of C x H x W, K classes.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..classifiers.checkpoints import quietly
from ..errors import InvalidInputError
from ..mixing.classifier import MixedClassifier

SUFFIXES = {"torch": ".pt2", "onnx": ".onnx"}
TOLERANCE = 1e-5  # absolute up to logits of 1, relative beyond: float32 itself resolves 6e-8 of a value
_TRACED_IMAGES, _CHECKED_IMAGES = 3, (1, 2, 7)  # a graph that was specialised to the traced number fails the others
_ERFC_DEGREE, _ERFC_SMALLEST_T = 36, 1e-3

Graph = Callable[..., tuple[Tensor, ...]]


class RobPart(nn.Module):
    """Images to rob's logits, its class after the transformation, and whether std could not change it."""

    def __init__(self, mixed: MixedClassifier) -> None:
        super().__init__()
        self.mixed = mixed

    def forward(self, images_BCHW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (B, K), classes (B,), decided (B,)."""
        logits_BK = self.mixed.rob(images_BCHW)
        decided_B, classes_B = self.mixed.decided_by_rob(logits_BK)
        return logits_BK, classes_B, decided_B


class StdPart(nn.Module):
    """Images and rob's logits at them to the mixture's logits."""

    def __init__(self, mixed: MixedClassifier) -> None:
        super().__init__()
        self.mixed = mixed

    def forward(self, images_BCHW: Tensor, rob_logits_BK: Tensor) -> Tensor:
        """f_mix, shape (B, K)."""
        return self.mixed.mix_logits(self.mixed.std(images_BCHW), rob_logits_BK)


def export_graphs(
    mixed: MixedClassifier, image_shape: tuple[int, ...], folder: Path, formats: tuple[str, ...]
) -> dict[str, float]:
    """Write the three graphs in each format; returns file name -> largest difference from the classifier itself.

    Every written file is loaded again and compared on images of random pixels, in batches of other sizes than the one
    that was traced.

    Raises:
        InvalidInputError: where a base classifier cannot be exported, the ONNX packages are missing, or a graph does
            not agree with the classifier to `TOLERANCE`.
    """
    mixed = mixed.cpu().eval()
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(_TRACED_IMAGES, *image_shape, generator=generator)
    checks = [torch.rand(n, *image_shape, generator=generator) for n in _CHECKED_IMAGES]
    differences = {}
    with torch.no_grad():
        for name, module, takes_logits, outputs in _parts(mixed):

            def arguments(x: Tensor, takes_logits: bool = takes_logits) -> tuple[Tensor, ...]:
                return (x, mixed.rob(x)) if takes_logits else (x,)

            program = _exported(name, module, arguments(images))
            for kind in formats:
                path = folder / f"{name}{SUFFIXES[kind]}"
                load = _write_torch(program, path) if kind == "torch" else _write_onnx(program, path, outputs)
                differences[path.name] = _compared(path, module, load, [arguments(x) for x in checks])
    return differences


def _parts(mixed: MixedClassifier) -> Iterator[tuple[str, nn.Module, bool, list[str]]]:
    """Name, module, whether it takes rob's logits too, names of its outputs."""
    yield "mixed", mixed, False, ["logits"]
    yield "rob", RobPart(mixed), False, ["rob_logits", "classes", "decided"]
    yield "std", StdPart(mixed), True, ["logits"]


def _exported(name: str, module: nn.Module, arguments: tuple[Tensor, ...]) -> Any:
    batch = torch.export.Dim("batch", min=1, max=2**31)  # torch 2.6 takes no size without a bound for one
    try:
        with quietly():
            return torch.export.export(module.eval(), arguments, dynamic_shapes=tuple({0: batch} for _ in arguments))
    except Exception as error:  # torch.export has no root of its errors
        reason = " ".join(str(error).split())[:300]
        raise InvalidInputError(
            f"torch.export cannot trace {name} with a dynamic number of images: {type(error).__name__}: {reason}"
        ) from error


def _write_torch(program: Any, path: Path) -> Graph:
    with quietly():
        torch.export.save(program, path)
        loaded = torch.export.load(path).module()
    return lambda *arguments: _as_tuple(loaded(*arguments))


def _write_onnx(program: Any, path: Path, outputs: list[str]) -> Graph:
    runtime = _onnx_runtime()
    inputs = ["images", "rob_logits"][: len(program.graph_signature.user_inputs)]
    with quietly(), _no_progress():
        made = torch.onnx.export(
            program.run_decompositions(_double_precision()), (), dynamo=True, verbose=False,
            input_names=inputs, output_names=outputs,
        )  # fmt: skip
        assert made is not None
        made.save(path)
    session = runtime.InferenceSession(path)
    names = [node.name for node in session.get_inputs()]

    def run(*arguments: Tensor) -> tuple[Tensor, ...]:
        feed = {name: value.numpy() for name, value in zip(names, arguments, strict=True)}
        return tuple(torch.from_numpy(np.asarray(value)) for value in session.run(None, feed))

    return run


def _onnx_runtime() -> Any:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401 - torch.onnx needs it
    except ImportError as error:
        raise InvalidInputError(f"format onnx needs {error.name}: pip install onnx onnxruntime onnxscript") from error
    return onnxruntime


@contextlib.contextmanager
def _no_progress() -> Iterator[None]:
    """The ONNX exporter logs each of its steps."""
    import logging

    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _compared(path: Path, module: nn.Module, graph: Graph, cases: list[tuple[Tensor, ...]]) -> float:
    """The largest difference over all outputs; classes and decisions must be equal."""
    worst = 0.0
    for arguments in cases:
        for found, expected in zip(graph(*arguments), _as_tuple(module(*arguments)), strict=True):
            if found.is_floating_point():
                worst = max(worst, float(((found - expected).abs() / expected.abs().clamp_min(1)).max()))
            elif not torch.equal(found, expected):
                worst = float("inf")
    if not worst <= TOLERANCE:
        raise InvalidInputError(
            f"{path.name} differs from the classifier by {worst:.2g}, more than {TOLERANCE:g}; the parameters may "
            "amplify the rounding of another runtime's kernels: try a smaller scale or power, or the other format"
        )
    return worst


def _as_tuple(values: Any) -> tuple[Tensor, ...]:
    return (values,) if isinstance(values, Tensor) else tuple(values)


def _double_precision() -> Mapping[Any, Callable[..., Tensor]]:
    """Float64 formulas for what ONNX has not in float64 (erfc) or only without care for underflow (logaddexp)."""
    _erfc_coefficients()  # before anything is traced
    return {
        torch.ops.aten.special_erfc.default: erfc_by_polynomial,
        torch.ops.aten.logaddexp.default: lambda a, b: torch.maximum(a, b) + torch.log1p(torch.exp(-(a - b).abs())),
    }


def erfc_by_polynomial(x: Tensor) -> Tensor:
    """`erfc(x)` in float64 from sums, products and one exponential, to 2e-13 relative for |x| <= 25.

    With `z = |x|` and `t = 2 / (2 + z)`, `erfc(z) = t exp(P(t) - z^2)`: `P` is smooth on (0, 1], so its Chebyshev
    interpolation converges fast. Below `t = 1e-3` (z near 2000) erfc is 0 in float64.
    """
    z = x.abs()
    t = (2 / (2 + z)).clamp_min(_ERFC_SMALLEST_T)
    u = (2 * t - (1 + _ERFC_SMALLEST_T)) / (1 - _ERFC_SMALLEST_T)  # t moved to [-1, 1]
    first, *rest = _erfc_coefficients()
    older, newer = torch.zeros_like(u), torch.zeros_like(u)
    for coefficient in reversed(rest):  # Clenshaw's recurrence
        older, newer = newer, 2 * u * newer - older + coefficient
    upper = t * torch.exp(u * newer - older + first - z * z)
    return torch.where(x < 0, 2 - upper, upper)


@functools.cache
def _erfc_coefficients() -> tuple[float, ...]:
    def smooth(t: Any) -> Any:
        scaled = torch.special.erfcx(torch.from_numpy(2 / t - 2))  # erfc(z) exp(z^2)
        return (scaled / torch.from_numpy(t)).log().numpy()

    domain = [_ERFC_SMALLEST_T, 1.0]
    series = np.polynomial.chebyshev.Chebyshev.interpolate(smooth, _ERFC_DEGREE, domain=domain)
    return tuple(float(coefficient) for coefficient in series.coef)
