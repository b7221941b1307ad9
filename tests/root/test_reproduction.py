"""Every command of the page on the paper is valid: options, configuration, and classifiers that it names."""

import re
import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from mixednuts_dist.cli import main
from mixednuts_dist.config.register import STUDIES
from mixednuts_dist.config.uris import ClassifierSource
from tests.helpers.pages import ROOT

PAGE = (ROOT / "docs" / "reproduce-the-paper.md").read_text()
DATA_SETS = ("cifar10", "cifar100", "imagenet")


def commands() -> list[str]:
    """The lines of the page's shell blocks, and the commands that its table of studies stands for."""
    found = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
    for cells in re.findall(r"^\|[^|]*\|(.*`.*)\| (each|cifar100?|imagenet|digits) \|$", PAGE, re.MULTILINE):
        for study in re.findall(r"`([a-z][^`]*)`", cells[0]):
            for name in DATA_SETS if cells[1] == "each" else (cells[1],):
                found.append(f"mixednuts study {study} jobs/configs/{name}.yaml --full")
    return [line.partition(" #")[0] for line in found if line.startswith("mixednuts ")]


def test_page_names_every_study_of_the_paper() -> None:
    named = {shlex.split(line)[2] for line in commands() if line.startswith("mixednuts study")}
    assert named == set(STUDIES.names())
    assert len(commands()) > 40


@pytest.mark.parametrize("line", sorted(set(commands())))
def test_command_is_valid(line: str) -> None:
    _, name, *arguments = shlex.split(line)
    command = main.get_command(click.Context(main), name)
    assert command is not None
    context = command.make_context(name, list(arguments))
    for uri in context.params.get("robs", ()):
        if uri != "FILE.txt":
            ClassifierSource(uri).missing("--rob")  # raises for a model that the zoo does not have
    if name == "study":
        STUDIES.check(context.params["name"])


@pytest.mark.parametrize(
    "path", sorted({word for line in commands() for word in line.split() if "jobs/configs" in word})
)
def test_check_lists_missing_files_alone(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jobs").symlink_to(ROOT / "jobs")
    (tmp_path / "data" / "imagenet").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(main, ["check", path])
    problems = [text for text in shown.stdout.splitlines() if not text.startswith(" ")]
    if path == "jobs/configs/digits.yaml":
        assert "nothing is missing" in problems[-1]
        return
    assert shown.exit_code == 1, shown.output
    kinds = {problem.partition(":")[0] for problem in problems}
    assert kinds <= {"data.uri", "std", "rob"} and "rob" in kinds
    assert all(re.search(r" (is|are) missing: /", problem) for problem in problems), problems
