"""Damaged images and weights: whatever the bytes, they are read or rejected in one line, and nothing is written."""

import io
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save

from mixednuts_dist.classifiers.black_box_classifier import decode_answer
from mixednuts_dist.classifiers.checkpoints import read_state_dict
from mixednuts_dist.errors import BaseClassifierError, DatasetError
from mixednuts_dist.images.datasets import check_read, open_dataset

BITS, LABELS = np.arange(2 * 3 * 4 * 4).reshape(2, 3, 4, 4) % 2, np.array([0, 1])
STATE = {"state_dict": {"module.a": torch.ones(3), "module.b": torch.zeros(2, 2)}}


def written(save: Callable[[io.BytesIO], object]) -> bytes:
    sink = io.BytesIO()
    save(sink)
    return sink.getvalue()


WHOLE = {
    "stored.npz": written(lambda file: np.savez(file, images=BITS.astype(np.uint8), labels=LABELS)),
    "packed.npz": written(lambda file: np.savez_compressed(file, images=BITS.astype(np.float32), labels=LABELS)),
    "image.png": written(lambda file: Image.fromarray(np.zeros((6, 5, 3), np.uint8)).save(file, "PNG")),
    "weights.pt": written(lambda file: torch.save(STATE, file)),
    "weights.safetensors": save({"a": torch.ones(3)}),
    "answer.npy": written(lambda file: np.save(file, np.zeros((2, 3), np.float32))),
}


def use(path: Path) -> None:
    """Read the file as a run does; an error has one line."""
    try:
        if path.suffix == ".npz":
            dataset = open_dataset(f"npz:{path}")
            check_read(*dataset.read(0, len(dataset)), str(path))
        elif path.suffix == ".png":
            dataset = open_dataset(f"folder:{path.parents[1]}")
            check_read(*dataset.read(0, 1), str(path))
        elif path.suffix == ".npy":
            decode_answer(path.read_bytes(), "http://host")
        else:
            assert all(isinstance(value, torch.Tensor) for value in read_state_dict(path).values())
    except (DatasetError, BaseClassifierError) as error:
        assert "\n" not in str(error).strip()
        assert len(str(error)) < 1500


@pytest.mark.filterwarnings("ignore")
@settings(
    max_examples=400, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    name=st.sampled_from(sorted(WHOLE)),
    per_mille=st.integers(0, 1000),
    n_left_out=st.sampled_from([0, 1, 4, 20, 1 << 20]),
    inserted=st.one_of(st.binary(max_size=20), st.binary(max_size=200), st.just(b"\xff" * 4), st.just(b"\0" * 4)),
)
def test_damaged_file_is_reported_in_one_line(
    tmp_path: Path, name: str, per_mille: int, n_left_out: int, inserted: bytes
) -> None:
    """At any place, bytes are inserted and others are left out, up to the end of the file."""
    folder, place = tmp_path / "root" / "class", per_mille * len(WHOLE[name]) // 1000
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / name).write_bytes(WHOLE[name][:place] + inserted + WHOLE[name][place + n_left_out :])
    use(folder / name)
    assert list(folder.iterdir()) == [folder / name]
