"""A finished run whose files are damaged afterwards: all of it is found, and that alone is computed again."""

import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from mixednuts_dist import pipeline
from mixednuts_dist.errors import DamagedFile
from mixednuts_dist.stages import search
from mixednuts_dist.stages.attack import adopt_attack
from mixednuts_dist.stages.runs import finished_partitions, open_run, reopen_run
from mixednuts_dist.storage.store import Store
from tests.object_store import ObjectStore
from tests.stages.test_pipeline import ATTACK, EVALUATE, Watcher, rows

RESULTS = ("accuracy", "parameters", "tradeoff", "survival", "margins")


def flip(path: Path, column: str) -> None:
    """One bit in the middle of the column's pages, as a failing disk does it."""
    chunks = pq.ParquetFile(path).metadata.row_group(0)
    chunk = next(c for c in map(chunks.column, range(chunks.num_columns)) if c.path_in_schema.split(".")[0] == column)
    content = bytearray(path.read_bytes())
    begins = min(chunk.dictionary_page_offset or chunk.data_page_offset, chunk.data_page_offset)
    content[begins + chunk.total_compressed_size // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", ["delete", "truncate", "flip"])
def test_only_what_is_missing_or_damaged_is_computed_again(finished, ray_session: Any, damage: str) -> None:
    config, folder, content = finished
    before = rows(folder, "attack", ATTACK), rows(folder, "evaluate", EVALUATE)
    for stage, index in (("attack", 1), ("evaluate", 2)):
        path = folder / stage / f"part-{index:05d}.parquet"
        if damage == "delete":
            path.unlink()
        elif damage == "flip":
            flip(path, {"attack": "rob_attacked", "evaluate": "mixed_attacked"}[stage])
        else:
            path.write_bytes(path.read_bytes()[:-50])
    watcher = Watcher()
    again = pipeline.run(config, session=ray_session, progress=watcher).to_json()
    assert watcher.computed == [("attack", 1), ("evaluate", 2)]
    assert (rows(folder, "attack", ATTACK), rows(folder, "evaluate", EVALUATE)) == before
    assert {key: again[key] for key in RESULTS} == {key: content[key] for key in RESULTS}


def test_images_that_only_a_worker_reads_are_repaired_when_it_finds_them_damaged(finished, ray_session: Any) -> None:
    config, folder, content = finished
    before = rows(folder, "attack", ATTACK), rows(folder, "evaluate", EVALUATE)
    (folder / "evaluate" / "part-00001.parquet").unlink()
    flip(folder / "attack" / "part-00001.parquet", "x_adv")
    watcher = Watcher()
    again = pipeline.run(config, session=ray_session, progress=watcher).to_json()
    assert watcher.computed == [("attack", 1), ("evaluate", 1)]
    assert (rows(folder, "attack", ATTACK), rows(folder, "evaluate", EVALUATE)) == before
    assert again["accuracy"] == content["accuracy"]


@pytest.mark.parametrize("name", ["run.yaml", "search/selected.json", "attack/seconds.json"])
def test_damaged_small_files_are_written_anew(
    finished, ray_session: Any, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    config, folder, content = finished
    path = folder / name
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 10])
    again = pipeline.run(config, session=ray_session).to_json()
    assert f"{name} is damaged" in caplog.text
    assert again["accuracy"] == content["accuracy"]
    assert again["parameters"] == content["parameters"]


def test_changed_parameters_are_not_deployed(finished, ray_session: Any) -> None:
    config, folder, content = finished
    path = folder / "search" / "selected.json"
    original = path.read_text()
    path.write_text(re.sub(r'"scale": [\d.]+', '"scale": 0.75', original))
    assert path.read_text() != original
    with pytest.raises(DamagedFile, match=r"selected\.json is damaged .*its content has changed"):
        search.read_search_result(reopen_run(config))
    assert pipeline.run(config, session=ray_session).to_json()["parameters"] == content["parameters"]
    assert path.read_text() == original


def test_a_damaged_partition_is_not_taken_over(finished, tmp_path: Path, object_store: ObjectStore) -> None:
    """From one prefix of an object store to another; what is whole is copied to the bit, the rest is left."""
    config, folder, _ = finished
    storage = object_store.uri(f"adoption-{tmp_path.name}")
    damaged = tmp_path / "part-00001.parquet"
    shutil.copy(folder / "attack" / damaged.name, damaged)
    flip(damaged, "x_adv")
    sibling = Store(storage).child(config.run_id())
    for path in (folder / "run.yaml", folder / "attack" / "part-00000.parquet", damaged):
        sibling.write(f"attack/{path.name}" if path.suffix == ".parquet" else path.name, path.read_bytes())
    changed = config.search.model_copy(update={"beta": 0.5})
    opened = open_run(config.model_copy(update={"search": changed, "storage": storage}))
    adopt_attack(opened)
    assert opened.store.names("attack") == ["part-00000.parquet"]
    assert opened.store.read("attack/part-00000.parquet") == sibling.read("attack/part-00000.parquet")
    done = finished_partitions(opened, "attack", opened.attack_fingerprint)
    assert [partition.index for partition in done] == [0]
