"""Energy is read from the kernel's powercap folder, in the files that it has, and billed by the share that is held."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mixednuts_dist.distributed import energy
from mixednuts_dist.distributed.energy import EnergyMeter, energy_meter

RANGE = 262_143_328_850  # of an Intel package: it begins again after 262 kJ


def powercap(folder: Path, zones: dict[str, int]) -> Path:
    """Files as Linux has them: a package, its cores within it, and a second package."""
    for name, microjoules in zones.items():
        zone = folder / name
        zone.mkdir(exist_ok=True, parents=True)
        (zone / "energy_uj").write_text(f"{microjoules}\n")
        (zone / "max_energy_range_uj").write_text(f"{RANGE}\n")
        (zone / "name").write_text("package-0\n")
    (folder / "intel-rapl").mkdir(exist_ok=True)  # the control type, without a counter
    return folder


def meter(folder: Path, cores: float) -> EnergyMeter:
    found = energy_meter(torch.device("cpu"), cores, folder)
    assert found is not None
    return found


def test_packages_are_added_up_parts_of_them_are_not_and_a_worker_pays_for_its_cores(tmp_path: Path) -> None:
    folder = powercap(tmp_path, {"intel-rapl:0": 5_000_000, "intel-rapl:0:0": 1_000_000, "intel-rapl:1": 0})
    half = meter(folder, (os.cpu_count() or 1) / 2)
    powercap(folder, {"intel-rapl:0": 25_000_000, "intel-rapl:0:0": 9_000_000, "intel-rapl:1": 4_000_000})
    assert half.joules() == pytest.approx(12.0)
    assert half.joules() == 0.0


def test_a_counter_that_begins_again_loses_nothing(tmp_path: Path) -> None:
    whole = meter(powercap(tmp_path, {"intel-rapl:0": RANGE - 3_000_000}), os.cpu_count() or 1)
    powercap(tmp_path, {"intel-rapl:0": 2_000_000})
    assert whole.joules() == pytest.approx(5.0)


def test_a_gpu_says_millijoules_through_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([1_000.0, 1_000.0, 1_000.0, 4_000.0])
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: {"GPU-1a2b": next(readings)}[handle],
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="1a2b"))
    half = energy_meter(torch.device("cuda"), 0.5)
    assert half is not None
    assert half.joules() == pytest.approx(1.5)


def test_a_machine_that_does_not_say_has_no_meter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert energy_meter(torch.device("cpu"), 1, tmp_path) is None
    folder = powercap(tmp_path, {"intel-rapl:0": 1})
    (folder / "intel-rapl:0" / "energy_uj").write_text("")
    assert energy_meter(torch.device("cpu"), 1, folder) is None
    monkeypatch.setattr(energy, "_nvml", lambda _: None)
    assert energy_meter(torch.device("cuda"), 1, folder) is None
