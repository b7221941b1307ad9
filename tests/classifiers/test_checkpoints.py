"""Local weights: every usual wrapping opens, a wrong file raises a clear error, and no code runs."""

import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from mixednuts_dist.classifiers.checkpoints import load_weights, read_state_dict, tensors_only
from mixednuts_dist.errors import BaseClassifierError


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))


WRAPPINGS: dict[str, Any] = {
    "bare": lambda state: state,
    "state_dict": lambda state: {"state_dict": state, "epoch": 3},
    "model": lambda state: {"model": state},
    "parallel": lambda state: {f"module.{name}": value for name, value in state.items()},
    "compiled and parallel": lambda state: {"model": {f"module._orig_mod.{k}": v for k, v in state.items()}},
}


@pytest.mark.parametrize("wrap", [*WRAPPINGS.values(), None], ids=[*WRAPPINGS, "safetensors"])
def test_every_wrapping_gives_the_same_weights(tmp_path: Path, wrap: Any) -> None:
    saved, path = net(1), tmp_path / ("w.pt" if wrap else "w.safetensors")
    torch.save(wrap(saved.state_dict()), path) if wrap else save_file(saved.state_dict(), path)
    loaded = load_weights(net(2), path)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in saved.state_dict().items())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<!DOCTYPE html><html>Google Drive - Quota exceeded</html>", "web page, not a checkpoint.*download the file"),
        (b"\n<html><body>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "Git LFS pointer.*git lfs pull"),
        (b"", "is empty"),
        (b"PK\x03\x04 cut short", "is damaged"),
        ({"a": 1}, r"holds \['a'\]"),
        ([1.0], "holds no state dict: .*'list' object"),
        (nn.Conv2d(3, 8, 3).state_dict(), r"w\.pt does not fit Sequential: .*Missing key"),
    ],
    ids=["page", "page without type", "pointer", "empty", "cut", "no tensors", "list", "another architecture"],
)
def test_files_that_are_not_the_weights_raise(tmp_path: Path, content: object, message: str) -> None:
    path = tmp_path / "w.pt"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(BaseClassifierError, match=message):
        load_weights(net(1), path)


def test_pickled_objects_are_refused_and_not_built(tmp_path: Path) -> None:
    torch.save({"state_dict": net(1).state_dict(), "made": datetime.date(2024, 1, 1)}, tmp_path / "w.pt")
    with pytest.raises(BaseClassifierError, match="more than tensors"):
        read_state_dict(tmp_path / "w.pt")
    with tensors_only(), pytest.raises(Exception, match=r"datetime\.date"):
        torch.load(tmp_path / "w.pt", weights_only=False)  # as some libraries ask for
