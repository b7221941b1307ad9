"""Check a GPU step by step before a long run: `python -m benchmarks.gpu FOLDER`.

Each step prints whether it passed and a number. Finished steps are stored in FOLDER and are not repeated for the same
device, torch and release. Without a GPU, the same steps run on the CPU in small shapes, which only tests the steps.
`pytest -m gpu tests/benchmarks` runs them as tests.
"""

import importlib.metadata
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_checks as checks
from benchmarks import gpu_speed as speed
from benchmarks.gpu_checks import Found, Place
from benchmarks.gpu_networks import resnet18, wide_resnet
from mixednuts_dist.attacks.budget import STANDARD_ATTACKS
from mixednuts_dist.benchmarks.attack_benchmark import say
from mixednuts_dist.reports.table import Table

Step = Callable[[Place], Found]
_FAILED = "FAILED"

STEPS: dict[str, Step] = {
    "driver and torch": checks.driver,
    "float32 flags": checks.flags,
    "folding": checks.folding,
    "repeated bits": checks.repeated_bits,
    "verification against float64": checks.verification,
    "out of memory": checks.memory,
    "APGD against pyautoattack": lambda at: speed.against_pyautoattack(at, ("apgd-ce", "apgd-t")),
    "AutoAttack against pyautoattack": lambda at: speed.against_pyautoattack(at, STANDARD_ATTACKS),
    "mixed classifier in three orders": checks.orders,
    "two workers on half a device": checks.two_workers,
}
RATES: dict[str, Step] = {
    "rate of WRN-28-10": lambda at: speed.rate(at, lambda: wide_resnet(28, 10), 32),
    "rate of WRN-70-16": lambda at: speed.rate(at, lambda: wide_resnet(70, 16), 32, speed.LEAST_SHARE),
    "rate of ConvNeXtV2-L": lambda at: speed.rate(at, lambda: speed.timm_network("convnextv2_large"), 224),
    "rate of Swin-L": lambda at: speed.rate(at, lambda: speed.timm_network("swin_large_patch4_window7_224"), 224),
    "rate of BiT-R152x2": lambda at: speed.rate(at, lambda: speed.timm_network("resnetv2_152x2_bit"), 224),
}
ON_CPU_RATES: dict[str, Step] = {
    "rate of ResNet-18": lambda at: speed.rate(at, resnet18, 32),
}


def run(*, data: str = "gpu-benchmark") -> dict[str, Any]:
    """Run all steps, print a table in Markdown, and return the numbers; `data` is the folder of finished steps."""
    at = Place(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    folder = Path(data)
    folder.mkdir(parents=True, exist_ok=True)
    release = importlib.metadata.version("mixednuts_dist")
    stamp = {"device": at.name, "torch": torch.__version__, "mixednuts_dist": release}
    kept = folder / "gpu.json"
    before = json.loads(kept.read_text()) if kept.is_file() else {}
    done = before.get("steps", {}) if before.get("of") == stamp else {}
    for name, step in {**STEPS, **(RATES if at.on_card else ON_CPU_RATES)}.items():
        if name not in done or done[name][0] == _FAILED:
            started = time.perf_counter()
            passed, number = _taken(step, at)
            done[name] = [passed, number, round(time.perf_counter() - started, 1)]
            (folder / "gpu.json.new").write_text(json.dumps({"of": stamp, "steps": done}, indent=2))
            (folder / "gpu.json.new").replace(kept)
        say(f"{name}: {done[name][0]}; {done[name][1]}")
    rows = [[name, *each] for name, each in done.items()]
    say(f"\n{at.name}, torch {torch.__version__}, mixednuts_dist {release}\n")
    say(Table(["step", "passed", "number", "taken, s"], rows).as_markdown())
    return {"of": stamp, "steps": done, "failed": [name for name, each in done.items() if each[0] == _FAILED]}


def _taken(step: Step, at: Place) -> tuple[str, str]:
    try:
        ok, number = step(at)
    except Exception as error:  # a step that fails is a finding, and the other steps continue
        return _FAILED, f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return {True: "ok", False: _FAILED, None: "-"}[ok], number


if __name__ == "__main__":
    raise SystemExit(bool(run(data=sys.argv[1] if len(sys.argv) > 1 else "gpu-benchmark")["failed"]))
