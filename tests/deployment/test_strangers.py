"""An untrusted run folder: nothing that it names runs, and no other file is read or written, without `--trust-code`."""

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner

from mixednuts_dist import load_run, pipeline
from mixednuts_dist.cli import main
from mixednuts_dist.config.run_config import digest, parse_config
from mixednuts_dist.errors import DamagedFile, InvalidInputError
from mixednuts_dist.images.datasets import open_dataset
from tests.helpers.runs import Finished, tiny_content

LOOKS = [["status"], ["report"], ["status", "--verify"], ["compare", "RUN"], ["status", ".."]]
USES = [["export", "--to", "given"], ["run", "--local"], ["study", "margins", "--local"]]


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the untrusted code makes; a working folder, and no browser."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr("webbrowser.open", lambda _: True)
    return tmp_path / "canary"


def described(at: Path, **changes: Any) -> Path:
    """The folder with changes in its `run.yaml`, under the name that its configuration has now."""
    content = yaml.safe_load((at / "run.yaml").read_text())
    content |= changes
    (at / "run.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    if content["config"].get("extensions"):  # loading refuses them before the name matters
        return at
    return at.rename(at.with_name(parse_config(content["config"]).run_id()))


def shown(command: list[str], run: Path) -> tuple[int, str]:
    places = {"RUN": str(run), "..": str(run.parents[2])}
    name, *rest = [places.get(word, word) for word in command]
    given = rest if ".." in command else [*rest[:1], str(run), *rest[1:]] if name == "study" else [str(run), *rest]
    told = CliRunner().invoke(main, [name, *given])
    assert told.exception is None or isinstance(told.exception, SystemExit), told.exception
    return told.exit_code, " ".join(told.output.split())


@pytest.mark.parametrize("command", [*LOOKS, *USES], ids=lambda command: command[0])
@pytest.mark.parametrize("place", ["the run's copy", "an absolute path", "a path below the working folder"])
def test_untrusted_extension_is_not_run(copied_run: Finished, canary: Path, place: str, command: list[str]) -> None:
    code = f"from pathlib import Path\nPath({str(canary)!r}).touch()\n".encode()
    copy = f"code/{hashlib.sha256(code).hexdigest()[:12]}/evil.py"
    (copied_run.folder / copy).parent.mkdir(parents=True)
    (copied_run.folder / copy).write_bytes(code)
    Path("evil.py").write_bytes(code)
    named = str(copied_run.folder / copy) if place == "an absolute path" else "evil.py"
    there = {"code": {"evil.py": copy}, "folder": "/nonexistent"} if place == "the run's copy" else {"code": {}}
    run = described(
        copied_run.folder, config={**copied_run.config.model_dump(mode="json"), "extensions": [named]}, **there
    )
    status, told = shown(command, run)
    assert not canary.exists()
    if "--verify" not in command:  # which reads files as they are
        assert "references resources outside its folder (extensions: " in told
        assert status == (0 if ".." in command else 1)
    if command == ["status"]:
        shown(["status", "--trust-code"], run)
        assert canary.exists()


@pytest.mark.parametrize("command", USES, ids=lambda command: command[0])
@pytest.mark.parametrize(
    ("role", "uri"), [("std", "py:os:system"), ("rob", "py:os:system"), ("std", "http://127.0.0.1:9/classify")]
)
def test_code_and_services_of_an_untrusted_run_are_not_used(
    copied_run: Finished, canary: Path, role: str, uri: str, command: list[str]
) -> None:
    call = f"?command=touch+{canary}" if uri.startswith("py:") else ""
    run = described(copied_run.folder, config={**copied_run.config.model_dump(mode="json"), role: uri + call})
    status, told = shown(command, run)
    assert status == 1
    assert uri in told
    assert "--trust-code" in told
    with pytest.raises(InvalidInputError, match=rf"{re.escape(uri)}.*trust_code=True"):
        load_run(str(run))
    assert not canary.exists()


@pytest.mark.slow
def test_images_of_an_untrusted_run_are_not_shown(
    tmp_path: Path, canary: Path, local_executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, labels = open_dataset("digits").read(0, 8)
    np.savez(tmp_path / "private.npz", images=images.numpy(), labels=labels.numpy())
    data = {"uri": f"npz:{tmp_path}/private.npz", "n": 8}
    config = parse_config(tiny_content(tmp_path / "runs", data=data))
    pipeline.run(config, executor=local_executor, drawn=False)
    run = tmp_path / "runs" / config.place()
    assert "--trust-code" in shown(["run", "--local"], run)[1]
    monkeypatch.setattr("mixednuts_dist.reports.report.report_files", lambda results: pages.append(results) or {})
    pages: list[Any] = []
    assert shown(["report"], run)[0] == shown(["report", "--trust-code"], run)[0] == 0
    assert [bool(results.worst) for results in pages] == [False, True]
    assert "If it is yours, pass --trust-code" in pages[0].notes[-1]
    assert not canary.exists()


@pytest.mark.parametrize("link", ["report", "attack", "run.yaml", "report/tradeoff.svg"])
def test_a_link_in_a_run_is_not_followed_out_of_it(copied_run: Finished, canary: Path, link: str) -> None:
    outside = canary.parent / "outside"
    place = copied_run.folder.parents[1] / link if link == "attack" else copied_run.folder / link
    if place.is_dir():
        shutil.copytree(place, outside)
        shutil.rmtree(place)
    else:
        outside.write_text("secret")
        place.unlink()
    place.symlink_to(outside)
    before = {path: path.read_bytes() for path in [outside, *outside.rglob("*")] if path.is_file()}
    commands = USES[:1] if link.endswith(".svg") else [*LOOKS, USES[0]]
    told = [shown(command, copied_run.folder) for command in commands]
    assert any("leads out of the storage root" in text for _, text in told)
    assert {path: path.read_bytes() for path in [outside, *outside.rglob("*")] if path.is_file()} == before
    assert not any(path.read_text(errors="ignore") == "secret" for path in Path().rglob("*") if path.is_file())


BOMB = "x0: &x0 [a, a, a, a, a, a, a, a, a]\n" + "".join(
    f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9)}]\n" for i in range(1, 12)
)  # 31 billion letters


@pytest.mark.parametrize("head", ["a: " + "[" * 3000 + "\n", BOMB], ids=["brackets", "shared values"])
def test_nested_run_yaml_raises_in_one_line(copied_run: Finished, head: str) -> None:
    path = copied_run.folder / "run.yaml"
    path.write_text(head + path.read_text().replace("names: {}", "names: *x11" if head == BOMB else "names: {}"))
    for command in (["status"], ["report"], ["export", "--to", "given"]):
        status, told = shown(command, copied_run.folder)
        assert status == 1
        assert "run.yaml is damaged" in told
    with pytest.raises(DamagedFile, match=r"run\.yaml is damaged"):
        load_run(str(copied_run.folder))


@pytest.mark.parametrize(
    "change", [{"clean_correct": "<b>"}, {"seconds": float("inf")}, {"partition": [1]}, None], ids=str
)
def test_an_index_of_anything_is_not_used(copied_run: Finished, change: Any) -> None:
    expected = shown(["status"], copied_run.folder)
    for path in copied_run.folder.parents[1].glob("*/*/_index.json"):
        content = json.loads(path.read_text())
        del content["digest"]
        content["entries"] = [entry | (change or {}) for entry in content["entries"]]
        text = json.dumps({**content, "digest": digest(content)})
        path.write_text("[" * 100_000 if change is None else text)
    status, told = shown(["status"], copied_run.folder)
    assert status == expected[0] == 0
    assert "attack 3/3" in told
    assert "evaluate 3/3" in told
