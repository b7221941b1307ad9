"""One local Ray for the whole suite, and runs that take seconds."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mixednuts_dist.config import RunConfig, parse_config

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ray_session() -> Iterator[Any]:
    """A started session; the stages that get it leave it running."""
    from mixednuts_dist.distributed.cluster import RaySession

    with RaySession("local") as session:
        session.ensure()
        yield session


def tiny_content(storage: Path, **changes: Any) -> dict[str, Any]:
    """24 digits, a few iterations: seconds on one core."""
    content: dict[str, Any] = {
        "name": "tiny",
        "data": {"uri": "digits", "n": 24},
        "std": "demo:std",
        "rob": "demo:rob",
        "threat": {"eps": 0.15},
        "partition_size": 8,
        "attack": {"n_iter": 8, "n_target_classes": 2},
        "search": {
            "beta": 0.9,
            "betas": [1.0, 0.9, 0.5],
            "scales": [0.5, 5.0],
            "powers": [1.0, 3.0],
            "biases": [-0.5, 0.0],
        },
        "evaluate": {"n_iter": 5, "n_target_classes": 2, "n_queries": 20},
        "storage": str(storage),
        "compute": {"num_workers": 2},
    }
    return {**content, **changes}


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., RunConfig]:
    """A factory of tiny configurations under the test's own folder."""
    return lambda **changes: parse_config(tiny_content(tmp_path / "runs", **changes))
