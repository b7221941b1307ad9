"""Before a run: a configuration to start from, what it lacks, and what there is to choose from."""

import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from mixednuts_dist.cli import REPLACED, SECTIONS, main
from mixednuts_dist.config.run_config import load_config
from mixednuts_dist.config.uris import TWO_CHECKPOINTS, ClassifierSource
from mixednuts_dist.errors import BaseClassifierError
from tests.helpers.object_store import ObjectStore
from tests.helpers.runs import tiny_file


def mixednuts(*arguments: str) -> tuple[int, str]:
    shown = CliRunner().invoke(main, arguments)
    return shown.exit_code, shown.output


def test_init_writes_a_valid_configuration(tmp_path: Path) -> None:
    file = str(tmp_path / "my photos.yaml")
    status, shown = mixednuts("init", file)
    assert status == 0, shown
    config = load_config(file)
    assert (config.name, config.data.uri) == ("my-photos", "npz:images.npz")
    assert (config.std.written, config.rob.written) == ("py:nets.py:std", "py:nets.py:rob")
    status, shown = mixednuts("init", file)
    assert status == 1
    assert "exists already" in shown


def test_file_of_weights_names_the_missing_function() -> None:
    with pytest.raises(BaseClassifierError, match=r"give std: py:nets\.py:std") as refused:
        ClassifierSource("std.pth").check("std")
    assert TWO_CHECKPOINTS in str(refused.value)


def test_check_reports_all_problems_together(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    file = tiny_file(tmp_path, rob="demo:bor", storage=str(tmp_path / "file" / "runs"))
    status, shown = mixednuts("check", str(file))
    assert status == 1
    assert "rob='demo:bor'" in shown
    assert f"storage: {tmp_path / 'file'} is a file, not a folder" in shown


def test_check_asks_for_the_bucket_before_anything_is_loaded(tmp_path: Path, object_store: ObjectStore) -> None:
    file = str(tiny_file(tmp_path, storage="s3://no-such-bucket/runs"))
    status, shown = mixednuts("check", file)
    assert status == 1
    assert "storage: s3://no-such-bucket: there is no such place" in shown
    assert "Create the bucket or folder, or correct `storage`" in shown
    assert "trying the classifiers" not in shown
    status, shown = mixednuts("check", file, "--set", f"storage={object_store.uri('empty')}")
    assert status == 0, shown


def test_check_reports_a_valid_configuration_and_writes_nothing(tmp_path: Path) -> None:
    file = str(tiny_file(tmp_path))
    status, shown = mixednuts("check", file, "--local", "--set", "seed=3")
    assert status == 0, shown
    assert "24 images of 1 x 8 x 8, 10 classes" in shown
    assert f"Next: mixednuts run {file} --set seed=3 --local\n" in shown
    assert not (tmp_path / "runs").exists()


def test_check_reports_a_file_of_images_that_is_missing(tmp_path: Path) -> None:
    file = tiny_file(tmp_path, adv_images={"file": str(tmp_path / "absent.pt")})
    status, shown = mixednuts("check", str(file))
    assert status == 1
    assert "absent.pt: there is no such file" in shown


COMMANDS = [command for commands in SECTIONS.values() for command in commands]
EXAMPLES = [
    example
    for command in [*COMMANDS, *main.commands["benchmark"].commands.values()]
    for example in getattr(command, "examples", ())
]


def test_help_lists_the_commands_on_one_screen() -> None:
    status, shown = mixednuts("--help")
    assert (status, len(COMMANDS)) == (0, 16)
    assert len(shown.splitlines()) <= 40
    assert shown.count("...") == 1  # in the usage line
    assert {command.name for command in COMMANDS} <= {line.split()[0] for line in shown.splitlines() if line.strip()}


@pytest.mark.parametrize("name", [str(command.name) for command in COMMANDS if command.name != "benchmark"])
def test_a_help_explains_its_arguments_and_has_examples(name: str) -> None:
    status, shown = mixednuts(name, "--help")
    usage, text = shown.splitlines()[0], " ".join(shown.split())
    assert status == 0
    assert f"mixednuts {name}" in shown.split("Examples:")[1]
    for argument, words in {"CONFIG": "is a YAML file", "RUN": "is the folder or URI of a run"}.items():
        assert (f"{argument} {words}" in text) == (argument in usage.split("[OPTIONS]")[1])


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_of_a_help_is_a_valid_command_line(example: str) -> None:
    name, *rest = shlex.split(example)
    command: click.Command = main.commands[name]
    if isinstance(command, click.Group):
        command, rest = command.commands[rest[0]], rest[1:]
    with command.make_context(name, rest):
        pass


@pytest.mark.parametrize("name", REPLACED)
def test_a_removed_command_names_its_replacement(name: str) -> None:
    status, shown = mixednuts(name, "runs/mine-0af3c2d1")
    assert status == 2
    assert REPLACED[name] in " ".join(shown.split())


@pytest.mark.parametrize("command", [["status"], ["report"], ["run"], ["compare"], ["export", "--to", "there"]])
def test_a_mistyped_run_has_one_answer(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine-0af3c2d1").mkdir(parents=True)
    status, shown = mixednuts(*command, "runs/mine-0af3c2d2")
    assert status == 1
    answer = "runs/mine-0af3c2d2 is neither a run nor a configuration file; did you mean 'mine-0af3c2d1'?"
    assert answer in " ".join(shown.split())


@pytest.mark.parametrize("command", ["estimate", "attack", "search", "evaluate"])
def test_a_stage_command_names_run_for_a_stored_run(command: str, tmp_path: Path) -> None:
    (tmp_path / "mine-0af3c2d1").mkdir()
    status, shown = mixednuts(command, str(tmp_path / "mine-0af3c2d1"))
    assert status == 1
    assert f"mixednuts run {tmp_path / 'mine-0af3c2d1'}" in " ".join(shown.split()).replace("- ", "-")


def test_init_for_one_classifier_writes_no_mixture(tmp_path: Path) -> None:
    file = str(tmp_path / "mine.yaml")
    status, shown = mixednuts("init", file, "--model", "demo:rob")
    assert status == 0, shown
    config = load_config(file)
    assert (config.std, config.rob, config.names) == (None, "demo:rob", {"rob": "mine"})
    assert not (tmp_path / "nets.py").exists()
    assert "attacks `rob` with AutoAttack" in " ".join(mixednuts("evaluate", "--help")[1].split())


def test_local_changes_what_check_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster's workers need no memory of this machine; those of --local do."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.7:6379")
    file = str(tiny_file(tmp_path, compute={"num_workers": 100_000}))
    assert mixednuts("check", file)[0] == 0
    status, shown = mixednuts("check", file, "--local")
    assert status == 1
    assert "compute: 100000 workers on this machine" in shown


def test_local_excludes_address(tmp_path: Path) -> None:
    status, shown = mixednuts("run", str(tiny_file(tmp_path)), "--local", "--address", "127.0.0.1:6379")
    assert status == 2
    assert "--local does not use a Ray cluster; drop --address" in shown
