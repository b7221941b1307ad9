"""One batch shape: an image's bits depend on nothing but the shape, and memory that ends costs nothing but rows."""

import logging
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from mixednuts_dist.acceleration.batch_shape import (
    BatchShape,
    PassSizes,
    as_out_of_memory,
    efficient_rows,
    in_one_shape,
    largest_rows,
    shape_of,
)
from mixednuts_dist.attacks.gradient_model import AttackedModel
from mixednuts_dist.attacks.verification import Verifier
from mixednuts_dist.classifiers.base_classifiers import load_classifier
from mixednuts_dist.errors import InvalidInputError
from mixednuts_dist.images.arrays import load_digits_split
from tests.helpers.small_nets import images, small_net

KERNELS = {
    "AVX2 in oneDNN": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "AVX2 in ATen and MKL": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "COMPATIBLE"},
}


@pytest.mark.parametrize("role", ["std", "rob"])
@pytest.mark.parametrize("rows", [7, 32])
def test_image_bits_ignore_position_and_batch(role: str, rows: int) -> None:
    probe = AttackedModel.of(load_classifier(f"demo:{role}", role)).fast.probe
    x = load_digits_split("test")[0][: 2 * rows]
    logits, grads = probe(x[:rows])
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    for permuted, values in zip(probe(x[:rows][order]), (logits, grads), strict=True):
        assert torch.equal(permuted, values[order])
    company = torch.cat([x[:3], x[rows : 2 * rows - 3]])
    for beside_others, values in zip(probe(company), (logits, grads), strict=True):
        assert torch.equal(beside_others[:3], values[:3])


@pytest.mark.parametrize("n", [1, 5, 8, 20, 33, 64])
def test_few_images_have_the_bits_that_they_have_in_a_full_batch(n: int) -> None:
    """Whatever smaller shape the probe allows."""
    model = load_classifier("demo:rob", "rob")
    x = load_digits_split("test")[0][:64]
    sizes = PassSizes(BatchShape(64), lambda images: (model(images),))
    assert torch.equal(in_one_shape(model, x[:n], sizes), in_one_shape(model, x, sizes)[:n])


class DiffersBelow(nn.Module):
    """A network that rounds differently below a number of rows, and whose other bits no CPU changes."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.sizes = rows, []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        return x[:, 0, 0, :3] * (1 + (1e-6 if len(x) < self.rows else 0.0))


@pytest.mark.parametrize(
    ("differs_below", "n", "passed"), [(0, 1, 4), (0, 9, 12), (16, 3, 16), (16, 40, 40), (48, 41, 48), (61, 50, 64)]
)
def test_smaller_shape_needs_the_same_bits(differs_below: int, n: int, passed: int) -> None:
    """A fixed shape is never made smaller."""
    model, x = DiffersBelow(differs_below), images(64, (1, 4, 4))
    sizes = PassSizes(BatchShape(64), lambda images: (model(images),))
    assert torch.equal(in_one_shape(model, x[:n], sizes), in_one_shape(model, x, sizes)[:n])
    model.sizes.clear()
    in_one_shape(model, x[:n], sizes)
    in_one_shape(model, x[:n], PassSizes(BatchShape(64, fixed=True), lambda images: (model(images),)))
    assert model.sizes == [passed, 64]


@pytest.mark.parametrize("row", [0, 20, 39])
def test_smaller_shape_needs_equal_bits_in_every_row(row: int) -> None:
    net, x, seen = small_net(3, (1, 4, 4)), images(64, (1, 4, 4)), []

    def model(images: Tensor) -> Tensor:
        seen.append(len(images))
        differs = torch.arange(len(images)) == row if len(images) < 64 else torch.zeros(64, dtype=torch.bool)
        return net(images) * (1 + 1e-6 * differs)[:, None]

    sizes = PassSizes(BatchShape(64), lambda images: (model(images),))
    in_one_shape(model, x[:40], sizes)
    assert 40 in seen
    seen.clear()
    in_one_shape(model, x[:40], sizes)
    assert 40 not in seen


@pytest.mark.parametrize("room", [1, 3, 10, 40, 100, 10_000])
def test_the_largest_shape_fits_and_twice_of_it_does_not(room: int) -> None:
    def wide(x: Tensor) -> tuple[Tensor]:
        return (x,)

    def narrow(x: Tensor) -> tuple[Tensor]:
        if len(x) > room:
            raise torch.OutOfMemoryError
        return (x,)

    found = largest_rows([wide, narrow], images(5, (1, 4, 4)), most=256)
    assert found <= room
    assert found == 256 or 2 * found > room


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
)
def test_failed_allocations_halve_the_rows(error: RuntimeError, caplog: pytest.LogCaptureFixture) -> None:
    net, x, sizes = small_net(3, (1, 4, 4)), images(40, (1, 4, 4)), []

    def short(images: Tensor) -> Tensor:
        sizes.append(len(images))
        if len(images) > 10:
            raise error
        return net(images)

    verifier = Verifier(short, BatchShape(32))
    with caplog.at_level(logging.WARNING):
        assert torch.allclose(verifier.logits(x), net(x), atol=1e-5)
    assert verifier.sizes.shape.rows == 8
    assert sizes == [32, 16, 8, 8, 8, 8, 8]
    assert "out of memory with 32 images per pass; continuing with 16" in caplog.text
    with pytest.raises(RuntimeError, match="CUDNN_STATUS_BAD_PARAM"), as_out_of_memory():
        raise RuntimeError("cuDNN error: CUDNN_STATUS_BAD_PARAM")


def test_efficient_rows_takes_the_smallest_fast_enough() -> None:
    assert efficient_rows(lambda rows: max(1.0, rows / 128), most=4096) == 128, "full from 128 rows on"
    assert efficient_rows(lambda rows: rows / 100, most=512) == 4, "no fixed part: rows gain nothing"
    assert efficient_rows(lambda rows: float(rows > 0), most=2) == 2


def test_no_room_at_all_is_an_error() -> None:
    def never(_: Tensor) -> tuple[Tensor]:
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError, match=r"one image of shape \(1, 4, 4\)"):
        largest_rows([never], images(5, (1, 4, 4)), most=256)
    with pytest.raises(InvalidInputError, match="batch_size=0 must be an integer of at least 1"):
        BatchShape(0)


def test_small_networks_get_more_rows_on_a_cpu() -> None:
    x = images(65, (1, 8, 8))
    large = nn.Sequential(nn.Flatten(), nn.Linear(64, 80_000))
    assert shape_of(None, nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), x).rows == 128
    assert shape_of(None, nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), x[:64]).rows == 64
    assert shape_of(None, large, x).rows == shape_of(None, large.forward, x).rows == 64


@pytest.mark.parametrize("kernels", KERNELS)
def test_bits_ignore_order_and_batch_under_other_kernels(kernels: str) -> None:
    """The nearest thing to another CPU that one machine can give."""
    laws = ["tests/acceleration/test_batch_shape.py", "tests/attacks/test_laws.py"]
    chosen = ["-k", "image_bits or same_bits and Linf and apgd"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *laws, *chosen]
    environment = {**os.environ, **KERNELS[kernels]}
    shown = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert shown.returncode == 0, shown.stdout
    assert "passed" in shown.stdout
