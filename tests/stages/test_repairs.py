"""A finished run whose files are damaged afterwards: all of it is found, and that alone is computed again."""

import errno
import logging
import os
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner

from mixednuts_dist import pipeline
from mixednuts_dist.cli import main
from mixednuts_dist.cli.status import run_status
from mixednuts_dist.errors import MissingArtifact, ReadOnlyStorage
from mixednuts_dist.reports import report
from mixednuts_dist.stages import runs
from mixednuts_dist.storage import store as store_module
from mixednuts_dist.storage.damage import verify
from mixednuts_dist.storage.store import Store
from tests.helpers.runs import ATTACK, EVALUATE, Finished, Watcher, rows, rows_in

RESULTS = ("accuracy", "parameters", "tradeoff", "survival", "margins")


def flip(path: Path, column: str) -> None:
    """One bit in the middle of the column's pages, as a failing disk does it."""
    chunks = pq.ParquetFile(path).metadata.row_group(0)
    chunk = next(c for c in map(chunks.column, range(chunks.num_columns)) if c.path_in_schema.split(".")[0] == column)
    content = bytearray(path.read_bytes())
    begins = min(chunk.dictionary_page_offset or chunk.data_page_offset, chunk.data_page_offset)
    content[begins + chunk.total_compressed_size // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("damage", ["delete", "truncate"])
def test_each_file_of_a_finished_run_is_made_again(copied_run, local_executor: Any, damage: str) -> None:
    """One after the other."""
    config, folder, content = copied_run
    before = rows(folder, "attack", ATTACK), rows(folder, "evaluate", EVALUATE)
    root = folder.parents[1]
    every = sorted(root.rglob("*"), key=lambda path: (not path.is_relative_to(folder), path))
    files = [path for path in every if path.is_file() and path.parent.name != "report"]
    files = [path for path in files if path.name not in ("seconds.json", "current.json")]  # a driver's notes
    assert len(files) >= 11
    for path in files:
        name = str(path.relative_to(root))
        whole, watcher = path.read_bytes(), Watcher()
        if damage == "delete":
            path.unlink()
        else:
            path.write_bytes(whole[: len(whole) // 10])
        again = pipeline.run(config, executor=local_executor, progress=watcher).to_json()
        if path.parent.name != "acceleration":  # which is for those who attack
            assert path.exists(), name
        assert {key: again[key] for key in RESULTS} == {key: content[key] for key in RESULTS}, name
        stage, _, number = name.removesuffix(".parquet").partition("/part-")
        assert watcher.computed == ([(stage.partition("/")[0], int(number))] if number else []), name
    assert (rows(folder, "attack", ATTACK), rows(folder, "evaluate", EVALUATE)) == before
    assert verify(Store(str(root)))[0] == {}


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    ("attacked", "evaluated"), [(("rob_attacked", 1), ("mixed_attacked", 2)), (("x_adv", 1), (None, 1))]
)
def test_a_flipped_bit_in_what_a_stage_reads_is_found(
    copied_run, local_executor: Any, attacked: tuple[str, int], evaluated: tuple[str | None, int]
) -> None:
    """The driver finds damaged logits, and a worker finds damaged images when it evaluates a lost partition."""
    config, folder, content = copied_run
    before = rows(folder, "attack", ATTACK), rows(folder, "evaluate", EVALUATE)
    flip(rows_in(folder, "attack") / f"part-0000{attacked[1]}.parquet", attacked[0])
    other = rows_in(folder, "evaluate") / f"part-0000{evaluated[1]}.parquet"
    if evaluated[0]:
        flip(other, evaluated[0])
    else:
        other.unlink()
    watcher = Watcher()
    again = pipeline.run(config, executor=local_executor, progress=watcher).to_json()
    assert sorted(watcher.computed) == [("attack", attacked[1]), ("evaluate", evaluated[1])]
    assert (rows(folder, "attack", ATTACK), rows(folder, "evaluate", EVALUATE)) == before
    assert {key: again[key] for key in RESULTS} == {key: content[key] for key in RESULTS}


@pytest.mark.usefixtures("no_pictures")
def test_drafts_of_killed_workers_are_removed(copied_run, local_executor: Any) -> None:
    """A worker was killed two hours ago, between the first and the last byte of a draft."""
    config, folder, content = copied_run
    draft = folder.parents[1] / ".tmp-0123"
    draft.write_bytes(b"half")
    os.utime(draft, (time.time() - 7200,) * 2)
    assert pipeline.run(config, executor=local_executor).to_json()["accuracy"] == content["accuracy"]
    assert list(folder.parents[1].rglob("*.tmp-*")) == []


def test_a_look_at_a_run_with_damaged_files_changes_none_of_them(copied_run) -> None:
    config, folder, _ = copied_run
    for path in (rows_in(folder, "attack") / "part-00000.parquet", rows_in(folder, "evaluate") / "part-00001.parquet"):
        path.write_bytes(path.read_bytes()[:-100])
    before = {path: path.read_bytes() for path in folder.parents[1].rglob("*") if path.is_file()}
    assert {stage.stage: stage.partitions_done for stage in run_status(config).stages} == {"attack": 2, "evaluate": 2}
    with pytest.raises(MissingArtifact, match="attack: 2 of 3 partitions"):
        report.run(config)
    assert {path: path.read_bytes() for path in folder.parents[1].rglob("*") if path.is_file()} == before


def test_verify_lists_and_repair_quarantines_damage(copied_run, tmp_path: Path) -> None:
    config, folder, _ = copied_run
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))

    def verify(*options: str) -> tuple[int, str]:
        shown = CliRunner().invoke(main, ["status", "--verify", str(tmp_path / "tiny.yaml"), *options])
        return shown.exit_code, shown.output

    assert verify()[0] == 0
    damaged = [rows_in(folder, "attack") / "part-00002.parquet", folder / "search" / "candidates.parquet"]
    flip(damaged[0], "std_attacked")
    flip(damaged[1], "objective")
    before = {path: path.read_bytes() for path in folder.parents[1].rglob("*") if path.is_file()}
    status, shown = verify()
    assert status == 1
    assert [line.partition(": ")[0] for line in shown.splitlines()[:2]] == [str(path) for path in damaged]
    assert "2 of " in shown
    assert "--repair" in shown
    assert {path: path.read_bytes() for path in folder.parents[1].rglob("*") if path.is_file()} == before
    status, shown = verify("--repair")
    assert status == 0
    assert f"Next: mixednuts run {tmp_path / 'tiny.yaml'}" in shown
    assert not any(path.exists() for path in damaged)
    kept = {path.read_bytes() for path in folder.parents[1].rglob("*") if path.is_file()}
    assert {before[path] for path in damaged} <= kept


def test_finished_run_on_read_only_storage_is_reported(
    copied_run: Finished, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = {path: path.read_bytes() for path in copied_run.folder.parents[1].rglob("*") if path.is_file()}
    refuse_files(monkeypatch)
    for command in (pipeline.run, report.run):
        caplog.clear()
        assert command(copied_run.config).to_json()["accuracy"] == copied_run.results["accuracy"]
        (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert line.startswith(f"the page is not written: {copied_run.folder}: access denied")
    assert {path: path.read_bytes() for path in copied_run.folder.parents[1].rglob("*") if path.is_file()} == before


def test_unfinished_run_on_read_only_storage_raises_at_once(
    copied_run: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    next(rows_in(copied_run.folder, "evaluate").glob("*.parquet")).unlink()
    refuse_files(monkeypatch)
    monkeypatch.setattr(runs, "inspect_inputs", lambda _config: pytest.fail("the inputs were loaded"))
    with pytest.raises(ReadOnlyStorage, match="access denied"):
        pipeline.run(copied_run.config)


def refuse_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a disk that is mounted read-only does."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(store_module.Folder, "_put", refuse)
    monkeypatch.setattr(store_module.tempfile, "TemporaryFile", refuse)
