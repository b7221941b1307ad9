"""Limit the memory of workers that share a GPU, and explain why torch cannot use a GPU."""

import platform
import re
from pathlib import Path

import torch

_DRIVER = Path("/proc/driver/nvidia/version")


def nvidia_driver() -> str | None:
    """Return the version of this machine's NVIDIA driver, or None if none is loaded."""
    try:
        found = re.search(r"Module\s.*?(\d+\.[\d.]+)", _DRIVER.read_text())
    except OSError:
        return None
    return found[1] if found else "of an unknown version"


def keep_to_share(n_gpus: float) -> None:
    """Limit this process to its share of the GPU's memory, if it has only a part of a GPU.

    One GiB of the share remains free, because CUDA's context and libraries take about half a GiB that torch does not
    count. If the memory runs out, only this process gets an error, after which it halves its batch.
    """
    if 0 < n_gpus < 1:
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(max(n_gpus - (1 << 30) / total, n_gpus / 2))


def unusable_gpu() -> str:
    """Return the message for a worker whose GPU torch cannot use."""
    wheel = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    driver = nvidia_driver()
    has = f"the NVIDIA driver is {driver}" if driver else "no NVIDIA driver is loaded"
    return (
        f"torch {torch.__version__} is built {wheel} and cannot use the GPU of {platform.node()}, where {has}: install "
        "a newer driver, or a torch for the CUDA that it knows (docs/run-on-a-cluster.md), or set compute.num_gpus=0"
    )
