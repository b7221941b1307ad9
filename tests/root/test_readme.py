"""The README and docs/ are true: a test runs every block, or the block gives the reason why none does."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from mixednuts_dist import pipeline
from mixednuts_dist.cli import main
from mixednuts_dist.config.run_config import load_config, parse_config
from tests.helpers.pages import BLOCKS, PAGES, README, ROOT, Block, blocks_of, without_directives
from tests.helpers.runs import MainJob, tiny_content

HERE = "tests/root/test_readme.py"
TESTS = "uv run pytest -n 2 --dist loadfile"


def run_here(language: str) -> list[Block]:
    return [block for block in BLOCKS if (block.language, block.state, block.reason) == (language, "tested", HERE)]


@pytest.mark.alone
@pytest.mark.timeout(420)
def test_the_main_job_meets_its_bars(main_job: MainJob) -> None:
    """At beta = 0.95, clean accuracy rises by 3 points and robust accuracy is beta times that of `rob`, less 2 points.

    Two images less are allowed, because another processor may choose other parameters.
    """
    results = main_job.results
    std, rob, mixed = (results["accuracy"][name] for name in ("std", "rob", "mixed"))
    beta = results["parameters"]["beta"]
    assert beta == 0.95
    assert std["clean"]["percent"] > 97
    assert std["robust"]["percent"] < 3
    assert mixed["clean"]["percent"] >= rob["clean"]["percent"] + 3 - 100 * 2 / 450
    assert mixed["robust"]["percent"] >= beta * rob["robust"]["percent"] - 2
    for name, row in results["accuracy"].items():
        printed = re.search(rf"^ +{name} +(\d+)/450 .* (\d+)/450", README, re.MULTILINE)
        assert printed is not None
        for kind, count in zip(("clean", "robust"), printed.groups(), strict=True):
            assert abs(row[kind]["correct"] - int(count)) <= 9, f"{name} {kind}: the README says {count}"


def test_every_block_is_run_by_a_test_or_states_why_not() -> None:
    offenders = [f"{block.page}: no comment above\n{block.text}" for block in BLOCKS if not block.state]
    for page in PAGES:
        fences = re.findall(r"^```", without_directives(page), re.MULTILINE)
        offenders += [f"{page.name}: an open fence"] * (len(fences) != 2 * len(blocks_of(page)))
    for block in BLOCKS:
        named = [block.reason] if block.state == "tested" else re.findall(r"tests/\w+/\w+\.py", block.reason)
        offenders += [f"{block.page}: {test} does not exist" for test in named if not (ROOT / test).is_file()]
    assert offenders == []


def test_every_link_and_every_test_that_a_page_names_exists() -> None:
    offenders = []
    for page in PAGES:
        text = page.read_text()
        paths = [page.parent / link for link in re.findall(r'(?:\]\(|src=")(?!https?:)([^)#"]+)', text)]
        paths += [ROOT / "tests" / test for test in re.findall(r"`(\w+/test_\w+\.py)`", text)]
        offenders += [f"{page.name}: {path} does not exist" for path in paths if not path.exists()]
    assert offenders == []


@pytest.mark.parametrize("block", run_here("yaml"), ids=lambda block: block.page)
def test_a_configuration_that_is_shown_is_valid(block: Block) -> None:
    parse_config(yaml.safe_load(block.text))


@pytest.mark.parametrize("page", sorted({block.page for block in run_here("python")}))
def test_the_python_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks in order, as one program in an empty folder."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": page}
    for block in run_here("python"):
        if block.page == page:
            exec(compile(block.text, page, "exec"), names)


@pytest.mark.slow
def test_the_commands_of_the_pages_run(tmp_path: Path, local_executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each command in this process, unchanged except for settings that make the run of the demo tiny."""
    monkeypatch.chdir(ROOT)
    tiny = tiny_content(tmp_path)
    settings = {
        f"{part}.{key}": value for part in ("attack", "search", "evaluate") for key, value in tiny[part].items()
    }
    settings |= {"data.n": 24, "partition_size": 8, "storage": str(tmp_path), "compute": {"executor": "debug"}}
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    pipeline.run(load_config("jobs/configs/digits.yaml", overrides), executor=local_executor)
    commands = [line for block in run_here("sh") for line in block.text.splitlines()]
    assert {command.split()[3] for command in commands} >= {"status", "search", "report", "study", "estimate", "schema"}
    for command in commands:
        arguments = shlex.split(command.removeprefix("uv run mixednuts "))
        if "jobs/configs/digits.yaml" in arguments:
            arguments[1:1] = [f"--set={override}" for override in overrides]
        shown = CliRunner().invoke(main, arguments)
        assert shown.exit_code == 0, f"{command}\n{shown.output}"
        assert shown.stdout.strip(), command
