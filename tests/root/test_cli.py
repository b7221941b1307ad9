"""The command as a user types it: real processes and exit codes. Ctrl-C is in tests/system/test_survival.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mixednuts_dist.cli import main
from tests.helpers.runs import tiny_file

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "overrides", "parts"),
    [
        ("run", ["threat.eps=8"], ["did you mean 8/255?"]),
        ("run", ["data.uri=npz:nowhere.npz"], ["there is no file"]),
        ("run", ["std=resnet50"], ["valid forms: demo:std, demo:rob, demo:rob_light, demo:noisy, robustbench:"]),
        (
            "check",
            ["data.uri=npz:nowhere.npz", "std=timm:resnet18?checkpoint=gone.pt", "rob=py:gone.py:rob"],
            ["data.uri: file is missing", "nowhere.npz", "std: ", "gone.pt", "rob: ", "gone.py"],
        ),
    ],
)
def test_bad_configuration_needs_no_torch(tmp_path: Path, name: str, overrides: list[str], parts: list[str]) -> None:
    code = (
        "import sys\nfrom mixednuts_dist.cli import main\n"
        "try:\n    main()\nfinally:\n    print([m for m in ('ray', 'torch') if m in sys.modules])\n"
    )
    options = [name, str(tiny_file(tmp_path)), *(f"--set={override}" for override in overrides)]
    shown = subprocess.run(
        [sys.executable, "-c", code, *options], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert shown.returncode == 1
    assert not [part for part in parts if part not in shown.stderr + shown.stdout]
    assert "Traceback" not in shown.stderr
    assert shown.stdout.splitlines()[-1] == "[]"
    assert not (tmp_path / "runs").exists()


@pytest.mark.soak
def test_the_search_benchmark_compares_the_same_numbers() -> None:
    found = json.loads(CliRunner().invoke(main, ["benchmark", "search"]).stdout)
    for case in found.values():
        assert case["ratio"] > 0
        assert case["objectives_that_differ"] == 0
        assert case["largest_difference"] < 1e-6


@pytest.mark.parametrize("arguments", [["attack"], ["run"], ["study", "main"]], ids=lambda arguments: arguments[0])
def test_each_job_script_is_its_command(arguments: list[str]) -> None:
    script = [sys.executable, str(ROOT / "jobs" / f"{arguments[0]}.py"), *arguments[1:], "nowhere.yaml"]
    shown = subprocess.run(script, capture_output=True, text=True, check=False)
    assert shown.returncode == 1
    assert "nowhere.yaml: no configuration file can be read" in shown.stderr
