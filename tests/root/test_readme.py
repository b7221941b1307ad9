"""The README's main command does what the README says."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
MAIN_JOB = "uv run mixednuts run jobs/configs/digits.yaml"


def test_the_first_screen_has_the_two_commands() -> None:
    first_screen = "\n".join(README.splitlines()[:30])
    assert f"pip install uv && {MAIN_JOB}" in first_screen
    assert "uv run pytest" in first_screen
    assert "uv run pytest" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.timeout(1500)
def test_the_main_job_meets_its_bars(tmp_path: Path) -> None:
    """At beta = .95: 3 points more accurate than rob when clean, and beta times rob's robust accuracy but 2 points."""
    arguments = MAIN_JOB.removeprefix("uv run mixednuts ").split()
    shown = subprocess.run(
        [str(Path(sys.executable).with_name("mixednuts")), *arguments, "--json", "--set", f"storage={tmp_path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    results = json.loads(shown.stdout)
    std, rob, mixed = (results["accuracy"][name] for name in ("std", "rob", "mixed"))
    beta = results["parameters"]["beta"]
    assert beta == 0.95
    assert std["clean"]["percent"] > 97
    assert std["robust"]["percent"] < 3
    assert mixed["clean"]["percent"] >= rob["clean"]["percent"] + 3
    assert mixed["robust"]["percent"] >= beta * rob["robust"]["percent"] - 2
    for name, row in results["accuracy"].items():
        printed = re.search(rf"^ +{name} +(\d+)/899 .* (\d+)/899", README, re.MULTILINE)
        assert printed is not None
        for kind, count in zip(("clean", "robust"), printed.groups(), strict=True):
            assert abs(row[kind]["correct"] - int(count)) <= 9, f"{name} {kind}: the README says {count}"
