"""A classifier that was usable when the run began and answers something else afterwards: nothing of it is written."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from mixednuts_dist import pipeline
from mixednuts_dist.errors import BaseClassifierError
from mixednuts_dist.stages import attack
from mixednuts_dist.stages.runs import open_run
from mixednuts_dist.storage.index import IndexWriter
from mixednuts_dist.storage.tables import encode_table, finished_rows, read_columns
from tests.helpers.runs import MakeConfig
from tests.helpers.stored_rows import quarantined
from tests.helpers.touchy_classifiers import MarksTheStart, table

FACTORY = """
import pathlib

from torch import nn
from mixednuts_dist.classifiers.factories import {base}
MARK = pathlib.Path(__file__).with_name("mark")


class Changes(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = {base}()

    def forward(self, x):
        logits = self.base(x)
        if MARK.exists() and x.requires_grad:
            MARK.write_text("in the attack")
        if MARK.exists() and MARK.read_text():
            {change}
        return logits
"""
NAN = "logits = logits * float('nan')"
DROPOUT = "logits = nn.functional.dropout(logits, 0.3)"


def factory(folder: Path, change: str, base: str = "demo_rob") -> str:
    path = folder / f"{base}_changes.py"
    path.write_text(FACTORY.format(base=base, change=change))
    return f"py:{path}:Changes"


@pytest.mark.parametrize(
    ("change", "base", "told"),
    [
        (NAN, "demo_rob", r"rob='py:.*:Changes'.* NaN or infinit"),
        (NAN, "demo_std", r"std='py:.*:Changes': .* NaN or infinity"),
        ("logits = logits[:, :9]", "demo_rob", r"rob='py:.*:Changes' returns torch.float32 of shape \(\d+, 9\); when"),
        ("logits = logits.long()", "demo_std", r"std='py:.*:Changes' returns torch.int64 of shape"),
        ("raise SystemError('gone')", "demo_std", r"std='py:.*:Changes' fails: SystemError: gone"),
        (DROPOUT, "demo_std", r"std='py:.*:Changes' returns other logits for 8 images .* become random, or changed"),
        (
            "logits = 2 * logits",
            "demo_rob",
            r"rob='py:.*:Changes' returns other logits for 8 images .* random, or changed",
        ),
    ],
)
def test_unusable_output_names_the_classifier(
    tiny: MakeConfig, tmp_path: Path, local_executor: Any, change: str, base: str, told: str
) -> None:
    config = tiny(**{base.removeprefix("demo_"): factory(tmp_path, change, base=base)})
    with pytest.raises(BaseClassifierError, match=told):
        attack.run(config, executor=local_executor, progress=MarksTheStart(tmp_path / "mark"))
    assert (tmp_path / "mark").read_text() == "in the attack"
    assert not list(Path(config.storage).rglob("part-*.parquet"))


def test_an_answer_that_errs_once_heals_with_the_next_try(
    tiny: MakeConfig, tmp_path: Path, local_executor: Any
) -> None:
    """The rows are those of a classifier that never erred."""
    config = tiny(rob=factory(tmp_path, NAN))
    with pytest.raises(BaseClassifierError, match="NaN or infinit"):
        attack.run(config, executor=local_executor, progress=MarksTheStart(tmp_path / "mark"))
    (tmp_path / "mark").unlink()
    undisturbed = tiny(name="undisturbed")
    for each in (config, undisturbed):
        attack.run(each, executor=local_executor)
    assert table(config)["rob_attacked"] == table(undisturbed)["rob_attacked"]
    assert sorted(table(config)["sample_id"]) == list(range(24))


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("column", ["rob_clean", "std_clean", "log_one_minus_margin"])
def test_run_recomputes_rows_with_nan(copied_run: Any, local_executor: Any, column: str) -> None:
    """NaN among the rows of a file that is whole, with its entry in the index."""
    opened = open_run(copied_run.config)
    part, content_hash = opened.partitions[1], opened.attack_content_hash
    path = f"attack/{content_hash}/{part.file_name}"
    summary = finished_rows(opened.rows, path, content_hash, part)
    assert summary is not None
    names = pq.ParquetFile(opened.rows.address(path)).schema_arrow.names
    columns = read_columns(opened.rows, "attack", [part], content_hash, names)
    columns[column][2] = float("nan")
    content = encode_table(columns, content_hash, summary)
    opened.rows.write(path, content)
    writer = IndexWriter(opened.rows, "attack", content_hash, {})
    writer.add(replace(summary, n_bytes=len(content)))
    writer.flush()
    again = pipeline.run(copied_run.config, executor=local_executor).to_json()
    assert again["accuracy"] == copied_run.results["accuracy"]
    assert opened.rows.exists(quarantined(path, content))
    assert bool(read_columns(opened.rows, "attack", [part], content_hash, [column])[column].isfinite().all())


def test_integers_are_refused_before_anything_runs(tiny: MakeConfig, tmp_path: Path) -> None:
    config = tiny(std=factory(tmp_path, "logits = logits.long()", base="demo_std"))
    (tmp_path / "mark").write_text("from the start")
    with pytest.raises(BaseClassifierError, match=r"std: the output is torch.int64; it must be finite floating-point"):
        open_run(config)
