"""A base checkpoint that changes by one bit is another classifier: the margins that were paid for are not its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mixednuts_dist.classifiers.base_classifiers import load_classifier
from mixednuts_dist.config.run_config import RunConfig
from mixednuts_dist.errors import ContentHashMismatch
from mixednuts_dist.stages import attack, search

TINY = "timm:test_byobnet"


def test_one_bit_of_a_checkpoint_refuses_the_cached_margins(
    tiny: Callable[..., RunConfig], tmp_path: Path, local_executor: Any
) -> None:
    weights = tmp_path / "rob.pt"
    torch.save(load_classifier(f"{TINY}?weights=none&num_classes=4", "rob").net.state_dict(), weights)  # type: ignore[union-attr]
    pixels = np.random.default_rng(0).integers(0, 256, (4, 3, 32, 32), np.uint8)
    np.savez(tmp_path / "images.npz", images=pixels, labels=np.arange(4))
    config = tiny(
        data={"uri": f"npz:{tmp_path / 'images.npz'}"},
        std=f"{TINY}?weights=none&num_classes=4&seed=1",
        rob=f"{TINY}?checkpoint={weights}&num_classes=4",
        attack={"n_iter": 1, "n_target_classes": 1},
        compute={"num_workers": 1},
    )
    attack.run(config, executor=local_executor)
    state = torch.load(weights, weights_only=True)
    state["head.fc.weight"].view(torch.int32).view(-1)[0] ^= 1
    torch.save(state, weights)
    with pytest.raises(ContentHashMismatch, match=r"rob was \w+ and is \w+.*its stored rows belong to other inputs"):
        search.run(config, executor=local_executor)
    with pytest.raises(ContentHashMismatch, match="rob was"):
        attack.run(config, executor=local_executor)
