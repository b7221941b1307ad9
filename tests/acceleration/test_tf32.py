"""The switches for TF32: set for a block and put back, whichever of torch's two interfaces the user has used."""

from collections.abc import Callable, Iterator

import pytest
import torch

from mixednuts_dist.acceleration.tf32 import tf32_allowed

NEWER = hasattr(torch.backends, "fp32_precision")
READS: dict[str, Callable[[], object]] = {
    "matmul": torch.get_float32_matmul_precision,
    "cudnn": lambda: torch.backends.cudnn.allow_tf32,
    "deterministic": lambda: torch.backends.cudnn.deterministic,
    "benchmark": lambda: torch.backends.cudnn.benchmark,
}
if NEWER:
    READS |= {
        "cuda.matmul": lambda: torch.backends.cuda.matmul.fp32_precision,
        "cudnn.conv": lambda: torch.backends.cudnn.conv.fp32_precision,
        "cudnn.rnn": lambda: torch.backends.cudnn.rnn.fp32_precision,
        "mkldnn.matmul": lambda: torch.backends.mkldnn.matmul.fp32_precision,
        "mkldnn.conv": lambda: torch.backends.mkldnn.conv.fp32_precision,
    }


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
    expected = {"matmul": "high" if allowed else "highest", "cudnn": allowed, "deterministic": True, "benchmark": False}
    if NEWER:
        on_cuda = "tf32" if allowed else "ieee"
        expected |= {"cuda.matmul": on_cuda, "cudnn.conv": on_cuda, "cudnn.rnn": on_cuda}
        expected |= {"mkldnn.matmul": "ieee", "mkldnn.conv": "ieee"}
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
