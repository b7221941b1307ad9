"""The switches for TF32: set for a block and put back, whichever of torch's two interfaces the user has used."""

from collections.abc import Callable, Iterator
from operator import attrgetter

import pytest
import torch

from mixednuts_dist.acceleration.tf32 import tf32_allowed

NEWER = hasattr(torch.backends, "fp32_precision")
ON_CUDA, ON_CPU = ("cuda.matmul", "cudnn.conv", "cudnn.rnn"), ("mkldnn.matmul", "mkldnn.conv")
PATHS = ["cudnn.allow_tf32", "cudnn.deterministic", "cudnn.benchmark"]
PATHS += [f"{product}.fp32_precision" for product in (*ON_CUDA, *ON_CPU) if NEWER]
READS: dict[str, Callable[[], object]] = {"matmul": torch.get_float32_matmul_precision}
READS |= {path: lambda path=path: attrgetter(path)(torch.backends) for path in PATHS}


def switches() -> dict[str, object]:
    """Read every switch; torch refuses the older ones while they contradict the newer ones."""
    found = {}
    for name, read in READS.items():
        try:
            found[name] = read()
        except RuntimeError:
            found[name] = "refused"
    return found


def user_of_the_newer() -> None:
    torch.backends.fp32_precision = "tf32"


def user_of_the_older() -> None:
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    benchmark = torch.backends.cudnn.benchmark
    yield
    if NEWER:
        torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = benchmark


@pytest.mark.parametrize(
    "prepare",
    [
        lambda: None,
        user_of_the_older,
        pytest.param(user_of_the_newer, marks=pytest.mark.skipif(not NEWER, reason="torch before 2.9")),
    ],
)
@pytest.mark.parametrize("allowed", [False, True])
def test_every_switch_is_set_inside_and_as_before_after_it(prepare: Callable[[], None], allowed: bool) -> None:
    prepare()
    before = switches()
    with tf32_allowed(allowed):
        inside = switches()
    assert switches() == before
    expected = {"matmul": "high" if allowed else "highest", "cudnn.allow_tf32": allowed}
    expected |= {"cudnn.deterministic": True, "cudnn.benchmark": False}
    if NEWER:
        expected |= {f"{product}.fp32_precision": "tf32" if allowed else "ieee" for product in ON_CUDA}
        expected |= {f"{product}.fp32_precision": "ieee" for product in ON_CPU}
    assert inside == expected
    with tf32_allowed(not allowed):
        torch.nn.functional.conv2d(torch.rand(1, 3, 8, 8), torch.rand(4, 3, 3, 3)) @ torch.rand(6, 5)


def test_tf32_allowed_false_gives_full_float32() -> None:
    """With torch's "medium" products of matrices are bfloat16 on a CPU that has units for it."""
    x, y = (torch.rand(256, 256, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    exact = x @ y
    torch.set_float32_matmul_precision("medium")
    with tf32_allowed(False):
        assert torch.equal(x @ y, exact)
