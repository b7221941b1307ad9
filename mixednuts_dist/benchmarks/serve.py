"""What the lazy pair costs a request: the served mixture beside rob alone, in one process, one cluster and one proxy.

Run: `mixednuts benchmark serve`. Single-image requests go to the two services in turn, so that what else the machine
does falls on both alike. Where rob decides, the mixture should cost what rob alone costs; elsewhere std and one
more hop come on top.
"""

import io
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import requests
from torch import Tensor

from ..config import parse_config
from ..deployment.loading import load_run
from ..deployment.service import ServiceOptions, application, serving
from ..distributed.cluster import RaySession
from ..images.datasets import open_dataset
from ..stages import attack, search

_REQUESTS, _WARM_UP = 500, 50
_CONFIG = {
    "name": "served", "data": {"uri": "digits", "n": 64}, "std": "demo:std", "rob": "demo:rob",
    "threat": {"eps": 0.15}, "partition_size": 32, "attack": {"n_iter": 20, "n_target_classes": 3},
    "search": {"beta": 0.95, "betas": [0.95]}, "compute": {"num_workers": 2},
}  # fmt: skip


def run() -> dict[str, Any]:
    """Prints the times to stderr and returns them, in milliseconds."""
    with tempfile.TemporaryDirectory() as folder, RaySession() as session:
        config = parse_config({**_CONFIG, "storage": folder})
        attack.run(config, session=session)
        search.run(config, session=session)
        run_folder = f"{folder}/{config.run_id()}"
        images, _ = open_dataset("digits").read(0, 899)
        mixed = load_run(run_folder)
        decided_B, _ = mixed.decided_by_rob(mixed.rob(images))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        services = {
            "/": application(run_folder, None, ServiceOptions(num_cpus=0.5)),
            "/rob": application(run_folder, None, ServiceOptions(num_cpus=0.5), rob_alone=True),
        }
        with serving(services, host="127.0.0.1", port=port):
            address = f"http://127.0.0.1:{port}"
            pair, alone = _in_turn([f"{address}/", f"{address}/rob"], images[decided_B])
            (both,) = _in_turn([f"{address}/"], images[~decided_B])
    result = {
        "requests": _REQUESTS,
        "share_of_images_that_need_std": float((~decided_B).float().mean()),
        "rob_alone": _summary(alone),
        "mixture_where_rob_decides": _summary(pair),
        "mixture_where_std_is_asked": _summary(both),
        "p50_ratio_where_rob_decides": _summary(pair)["p50_ms"] / _summary(alone)["p50_ms"],
    }
    sys.stderr.write(f"{result}\n")
    return result


def _in_turn(addresses: Sequence[str], images_BCHW: Tensor) -> list[list[float]]:
    """Seconds of each request to each address, after a warm-up; the images are asked for over and over."""
    seconds: list[list[float]] = [[] for _ in addresses]
    with requests.Session() as connection:
        for i in range(_WARM_UP + _REQUESTS):
            sink = io.BytesIO()
            np.save(sink, images_BCHW[i % len(images_BCHW)].numpy())
            for taken, address in zip(seconds, addresses, strict=True):
                started = time.perf_counter()
                connection.post(address, sink.getvalue(), timeout=60).raise_for_status()
                taken.append(time.perf_counter() - started)
    return [taken[_WARM_UP:] for taken in seconds]


def _summary(seconds: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(seconds, n=100)
    return {"p50_ms": 1000 * cuts[49], "p90_ms": 1000 * cuts[89], "p99_ms": 1000 * cuts[98]}
