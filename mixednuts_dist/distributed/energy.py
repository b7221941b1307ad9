"""Energy that a device has used, where it says so: a GPU through NVML, a CPU through the powercap folder (RAPL).

Both are counters that only grow (RAPL's begins again at its range); what is read is the difference of two readings.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

POWERCAP = Path("/sys/class/powercap")
_MICRO, _MILLI = 1e-6, 1e-3

Counters = dict[str, tuple[float, float]]  # name -> joules so far, and at which number it begins again (0: never)


def energy_meter(device: torch.device, n_devices: float, powercap: Path = POWERCAP) -> "EnergyMeter | None":
    """A meter of this share of the device's energy; None where the device does not report any, or not to us.

    Args:
        n_devices: cores that are held, or accelerators (below 1: a share of one).
    """
    if device.type == "cuda":
        read, share = _nvml(device), min(1.0, n_devices)
    else:
        read, share = partial(_packages, powercap), n_devices / (os.cpu_count() or 1)
    return EnergyMeter(read, share) if read is not None and read() else None


class EnergyMeter:
    """Joules since it was last asked."""

    def __init__(self, read: Callable[[], Counters], share: float) -> None:
        self._read, self._share, self._last = read, share, read()

    def joules(self) -> float:
        """Of the share that is held."""
        now = self._read()
        used = 0.0
        for name, (joules, wraps_at) in now.items():
            grown = joules - self._last.get(name, (joules, 0.0))[0]
            used += grown + wraps_at if grown < 0 else grown
        self._last = now
        return self._share * max(0.0, used)


def _packages(powercap: Path) -> Counters:
    """Of each CPU package, `intel-rapl:0` and so on (AMD's too); its parts, `intel-rapl:0:0`, are within it."""
    found = {}
    for zone in powercap.glob("intel-rapl:*"):
        if zone.name.count(":") == 1:
            try:
                microjoules = (int((zone / name).read_text()) for name in ("energy_uj", "max_energy_range_uj"))
                joules, wraps_at = (_MICRO * each for each in microjoules)
            except (OSError, ValueError):  # only root may read it on most machines
                continue
            found[zone.name] = joules, wraps_at
    return found


def _nvml(device: torch.device) -> Callable[[], Counters] | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception:  # no such package, an old torch or card, a driver that does not say
        return None
    return lambda: {"gpu": (_MILLI * pynvml.nvmlDeviceGetTotalEnergyConsumption(handle), 0.0)}
