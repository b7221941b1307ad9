"""The README's main command does what the README says."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import MAIN_JOB, MainJob

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_first_screen_has_the_two_commands() -> None:
    first_screen = "\n".join(README.splitlines()[:30])
    assert f"pip install uv && {MAIN_JOB}" in first_screen
    assert "uv run pytest" in first_screen
    assert "uv run pytest" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_main_job_meets_its_bars(main_job: MainJob) -> None:
    """At beta = .95: 3 points more accurate than rob when clean, and beta times rob's robust accuracy but 2 points."""
    results = main_job.results
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


BLOCK = re.compile(r"(?:<!-- (tested|not run in CI): (.+?) -->\n)?```sh\n(.*?)```", re.DOTALL)


def test_every_block_of_commands_is_run_by_a_test_or_says_why_not() -> None:
    blocks = BLOCK.findall(README)
    assert len(blocks) == README.count("```sh")
    for state, reason, commands in blocks:
        assert state, f"this block has no comment above it:\n{commands}"
        if state == "tested":
            assert (ROOT / reason).is_file()
        for test in re.findall(r"tests/\w+/\w+\.py", reason):
            assert (ROOT / test).is_file(), test


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("object_store")
def test_the_blocks_of_this_test_run(main_job: MainJob) -> None:
    """Each as it stands there, on what the main job has left."""
    commands = [
        line
        for state, reason, block in BLOCK.findall(README)
        if state == "tested" and reason == "tests/root/test_readme.py"
        for line in block.splitlines()
    ]
    assert len(commands) >= 7
    for command in commands:
        arguments = shlex.split(command.removeprefix("uv run mixednuts "))
        if "jobs/configs/digits.yaml" in arguments:
            arguments += ["--set", f"storage={main_job.storage}"]
        program = str(Path(sys.executable).with_name("mixednuts"))
        shown = subprocess.run([program, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        assert shown.returncode == 0, f"{command}\n{shown.stderr}"
        assert shown.stdout.strip(), command
