"""Damaged images and weights: whatever the bytes, they are read or refused in one line, and nothing is written.

300 fixed cases of bits turned, cut and inserted, then bytes that hypothesis makes up.
"""

import io
import random
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
from mixednuts_dist.images.datasets import check_images, open_dataset

N_CASES = 50  # per kind of file


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


def damaged(content: bytes, seed: int) -> bytes:
    """One kind of damage, chosen by the seed."""
    chance, changed = random.Random(seed), bytearray(content)
    place = chance.randrange(len(changed))
    kind = seed % 5
    if kind == 0:
        changed[place] ^= 1 << chance.randrange(8)
    elif kind == 1:
        del changed[place:]
    elif kind == 2:
        changed[place:place] = chance.randbytes(chance.randrange(1, 20))
    elif kind == 3:
        del changed[place : place + chance.randrange(1, 20)]
    else:
        changed[place : place + 4] = chance.choice([b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", b"\x80\x02.."])
    return bytes(changed)


def use(path: Path) -> None:
    """Read the file as a run does; an error has one line."""
    try:
        if path.suffix == ".npz":
            dataset = open_dataset(f"npz:{path}")
            check_images(*dataset.read(0, len(dataset)), str(path))
        elif path.suffix == ".png":
            dataset = open_dataset(f"folder:{path.parents[1]}")
            check_images(*dataset.read(0, 1), str(path))
        elif path.suffix == ".npy":
            decode_answer(path.read_bytes(), "http://host")
        else:
            assert all(isinstance(value, torch.Tensor) for value in read_state_dict(path).values())
    except (DatasetError, BaseClassifierError) as error:
        assert "\n" not in str(error).strip()
        assert len(str(error)) < 1500


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WHOLE)
def test_fixed_damages_are_told_in_one_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / "root" / "class" / name
    path.parent.mkdir(parents=True)
    for content in (WHOLE[name], *(damaged(WHOLE[name], seed) for seed in range(N_CASES))):
        path.write_bytes(content)
        use(path)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(sorted(WHOLE)), head=st.integers(0, 40), tail=st.binary(max_size=200))
def test_made_up_bytes_are_told_in_one_line(tmp_path: Path, name: str, head: int, tail: bytes) -> None:
    folder = tmp_path / "root" / "class"
    folder.mkdir(parents=True, exist_ok=True)
    for other in folder.iterdir():
        other.unlink()
    path = folder / name
    path.write_bytes(WHOLE[name][:head] + tail)
    use(path)
