"""Whether torch can use the GPU that a worker is given, and why not."""

import platform
import re
from pathlib import Path

import torch

_DRIVER = Path("/proc/driver/nvidia/version")


def nvidia_driver() -> str | None:
    """The version of this machine's NVIDIA driver; None where none is loaded."""
    try:
        found = re.search(r"Module\s.*?(\d+\.[\d.]+)", _DRIVER.read_text())
    except OSError:
        return None
    return found[1] if found else "of an unknown version"


def keep_to_share(n_gpus: float) -> None:
    """Bound this process's memory to its share of its GPU, where it has a part of one.

    A GiB of the share stays outside: CUDA's context and libraries take about half of that, uncounted. Memory that ends
    there is an out-of-memory error of this process alone, which halves its batch.
    """
    if 0 < n_gpus < 1:
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(max(n_gpus - (1 << 30) / total, n_gpus / 2))


def unusable_gpu() -> str:
    """What to say where a worker has a GPU and torch cannot use it."""
    wheel = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    driver = nvidia_driver()
    has = f"the NVIDIA driver is {driver}" if driver else "no NVIDIA driver is loaded"
    return (
        f"torch {torch.__version__} is built {wheel} and cannot use the GPU of {platform.node()}, where {has}: install "
        "a newer driver, or a torch for the CUDA that it knows (docs/run-on-a-cluster.md), or set compute.num_gpus=0"
    )
