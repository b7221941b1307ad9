"""GPU acceptance: every step on a GPU with `-m gpu`, and on a CPU in small shapes."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu


@pytest.mark.slow
@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="half an hour on a GPU")
def test_every_step_has_a_result_and_a_number(tmp_path: Path, capfd) -> None:
    found = gpu.run(data=str(tmp_path))
    assert found["failed"] == []
    assert list(found["steps"]) == [*gpu.STEPS, *gpu.ON_CPU_RATES]
    assert all(number for _, number, _ in found["steps"].values())
    assert "| mixed classifier in three orders |" in capfd.readouterr().err


def test_gpu_benchmark_resumes_with_the_same_torch(tmp_path: Path, monkeypatch) -> None:
    taken: list[str] = []

    def step(name: str, *, fails: bool = False) -> gpu.Step:
        def act(_: gpu.Place) -> gpu.Found:
            taken.append(name)
            if fails:
                raise RuntimeError("no kernel image\nis available")
            return True, "1.0"

        return act

    monkeypatch.setattr(gpu, "STEPS", {"one": step("one"), "two": step("two", fails=True)})
    monkeypatch.setattr(gpu, "ON_CPU_RATES", {"three": step("three")})
    first = gpu.run(data=str(tmp_path))
    assert first["failed"] == ["two"]
    assert first["steps"]["two"][1] == "RuntimeError: no kernel image"
    assert gpu.run(data=str(tmp_path))["failed"] == ["two"]
    assert taken == ["one", "two", "three", "two"]
    content = json.loads((tmp_path / "gpu.json").read_text())
    (tmp_path / "gpu.json").write_text(json.dumps({**content, "of": {**content["of"], "torch": "1.0"}}))
    gpu.run(data=str(tmp_path))
    assert taken[4:] == ["one", "two", "three"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*gpu.STEPS, *gpu.RATES])
def test_a_gpu_passes_every_step(name: str) -> None:
    ok, number = {**gpu.STEPS, **gpu.RATES}[name](gpu.Place(torch.device("cuda")))
    assert ok is not False, number
