"""A finished run's page, against the same numbers recomputed from its Parquet files with NumPy alone."""

import base64
import io
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import pytest
from bs4 import BeautifulSoup
from PIL import Image

from mixednuts_dist import pipeline
from mixednuts_dist.config.run_config import RunConfig, parse_config
from mixednuts_dist.images.arrays import load_digits_split
from mixednuts_dist.reports.counts import seconds_text
from mixednuts_dist.reports.page import report_files
from mixednuts_dist.reports.report import collect
from mixednuts_dist.stages import attack, evaluate, search
from mixednuts_dist.stages.runs import reopen_run
from tests.helpers.plain import signed_margin, softmax, transformed
from tests.helpers.runs import rows_of, tiny_content


class Stored(NamedTuple):
    """A finished run, its folder, and the columns of its rows."""

    config: RunConfig
    folder: Path
    attacked: dict[str, np.ndarray]
    evaluated: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, local_executor: Any) -> Stored:
    """24 digits at beta 0.9; an earlier run at beta 0.5 has the same attack rows."""
    content = tiny_content(tmp_path_factory.mktemp("reported"))
    content["search"]["rounds"] = 0  # so that both choose from the same rows
    for stage in (attack, search, evaluate):
        stage.run(parse_config({**content, "search": {**content["search"], "beta": 0.5}}), executor=local_executor)
    config = parse_config(content)
    pipeline.run(config, executor=local_executor)
    folder = Path(config.storage) / config.place()
    return Stored(config, folder, columns(config, "attack"), columns(config, "evaluate"))


def columns(config: RunConfig, stage: str) -> dict[str, np.ndarray]:
    """Every column of a stage as one array, rows in the order of the sample ids."""
    tables = [pq.read_table(path).to_pydict() for path in sorted(rows_of(config, stage).glob("part-*.parquet"))]
    return {name: np.array([row for table in tables for row in table[name]]) for name in tables[0]}


def mapped(logits: np.ndarray, chosen: dict[str, Any]) -> np.ndarray:
    return transformed(logits, chosen["scale"], chosen["power"], chosen["bias"])


def predicted(stored: Stored, chosen: dict[str, Any]) -> tuple[int, int]:
    """(clean images that the mixed classifier gets right, attacked images that it keeps whatever `std` votes)."""
    labels = stored.attacked["label"]
    std = np.eye(10)[stored.attacked["std_clean"].argmax(axis=1)]
    mixture = chosen["one_minus_alpha"] * std + chosen["alpha"] * softmax(mapped(stored.attacked["rob_clean"], chosen))
    margins = signed_margin(mapped(stored.attacked["rob_attacked"], chosen), labels)
    threshold = chosen["one_minus_alpha"] / chosen["alpha"]
    return int((mixture.argmax(axis=1) == labels).sum()), int((margins >= threshold - 1e-12).sum())


@pytest.fixture
def page(stored: Stored) -> BeautifulSoup:
    return BeautifulSoup((stored.folder / "report/index.html").read_bytes(), "html.parser")


def cells(page: BeautifulSoup, section: str) -> dict[str, list[str]]:
    """Row heading -> the texts of the row's cells."""
    rows = [
        [" ".join(cell.get_text(" ").split()) for cell in row.find_all(["th", "td"])]
        for row in page.select(f"section[aria-labelledby={section}] tbody tr")
    ]
    return {row[0]: row[1:] for row in rows if row}


def test_accuracy_and_survival_are_the_rows(stored: Stored, page: BeautifulSoup) -> None:
    attacked, mixture, labels = stored.attacked, stored.evaluated, stored.attacked["label"]
    counted = {
        "std": (attacked["std_clean"].argmax(1) == labels, ~attacked["std_broken"]),
        "rob": (attacked["rob_clean"].argmax(1) == labels, ~attacked["rob_broken"]),
        "mixed": (mixture["mixed_clean"].argmax(1) == labels, mixture["robust"]),
    }
    shown = cells(page, "accuracy")
    for classifier, (clean, robust) in counted.items():
        for cell, hits in zip(shown[classifier], (clean, robust), strict=False):
            assert cell.startswith(f"{100 * hits.mean():.1f} [")
            assert cell.endswith(f"{hits.sum()}/24")
    survived = cells(page, "survival")
    for step in ("warm-start", "apgd-ce", "apgd-t", "fab-t", "square"):
        assert survived[step][0].endswith(f"{mixture[f'survived_{step}'].sum()}/24")


def test_table_of_betas_says_what_the_logits_say(stored: Stored, page: BeautifulSoup) -> None:
    selected = json.loads((stored.folder / "search/selected.json").read_text())["result"]["entries"]
    shown = cells(page, "tradeoff")
    assert [float(beta) for beta in shown] == [entry["beta"] for entry in selected]
    for row, chosen in zip(shown.values(), selected, strict=True):
        *values, clean, robust = row
        assert [clean.split()[-1], robust.split()[-1]] == [f"{n}/24" for n in predicted(stored, chosen)]
        for value, key in zip(values, ("scale", "power", "bias", "alpha", "one_minus_alpha"), strict=True):
            assert float(value.replace("−", "-")) == pytest.approx(chosen[key], rel=1e-3, abs=1e-4)


def test_cost_is_the_footers(stored: Stored, page: BeautifulSoup) -> None:
    shown = cells(page, "cost")
    for stage in ("attack", "evaluate"):
        files = sorted(rows_of(stored.config, stage).glob("part-*.parquet"))
        summaries = [json.loads(pq.read_metadata(file).metadata[b"mixednuts"])["summary"] for file in files]
        held = sum(summary["seconds"] * summary["n_devices"] for summary in summaries)
        passes = [f"{sum(summary[key] for summary in summaries):,}" for key in ("n_forward", "n_backward")]
        assert shown[stage][:2] == ["24", str(len(summaries))]
        assert shown[stage][3] == seconds_text(held)
        assert shown[stage][6:] == passes
    assert shown["attack"][5] == "–"


def test_summary_counts_decisions_of_std(stored: Stored) -> None:
    content = json.loads((stored.folder / "report/results.json").read_text())
    (chosen,) = (
        entry
        for entry in json.loads((stored.folder / "search/selected.json").read_text())["result"]["entries"]
        if entry["beta"] == content["parameters"]["beta"]
    )
    mixed, labels = stored.evaluated["mixed_clean"].argmax(1), stored.attacked["label"]
    decided = int((mixed != mapped(stored.attacked["rob_clean"], chosen).argmax(1)).sum())
    difference = (mixed == labels).astype(float) - (stored.attacked["rob_clean"].argmax(1) == labels)
    spread = 1.959964 * difference.std() / math.sqrt(24)
    expected = [100 * difference.mean(), 100 * (difference.mean() - spread), 100 * (difference.mean() + spread)]
    assert content["std_decides"] == decided
    assert content["clean_difference"] == pytest.approx(expected, abs=1e-4)
    assert content["summary"].startswith(f"The standard classifier decides {decided} of 24 clean images.")


def test_pictures_are_the_stored_images(stored: Stored, page: BeautifulSoup) -> None:
    images, _ = load_digits_split("test")
    cards = [[card.h4.get_text(), *(image["src"] for image in card.find_all("img"))] for card in page.select(".card")]
    assert cards
    for title, *pictures in cards:
        sample_id, label = (int(word) for word in title.replace("Image ", "").split(", class "))
        assert label == stored.attacked["label"][sample_id]
        clean, attacked = images[sample_id].numpy()[0], stored.evaluated["x_adv"][sample_id].reshape(8, 8)
        change = attacked - clean
        around_grey = 0.5 + 0.5 * change / np.abs(change).max()
        for picture, expected in zip(pictures, (clean, around_grey, attacked), strict=True):
            pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(picture.partition("base64,")[2]))))
            assert np.abs(pixels / 255 - expected).max() < 0.003
    ids = [int(card[0].split(",")[0].removeprefix("Image ")) for card in cards]
    robust = stored.evaluated["robust"]
    narrowest = np.argsort(
        np.where(robust, signed_margin(stored.evaluated["mixed_attacked"], stored.attacked["label"]), 9)
    )
    assert set(narrowest[: min(4, robust.sum())]) <= set(ids)


def test_the_report_reads_every_candidate(stored: Stored) -> None:
    table = pq.read_table(stored.folder / "search/candidates.parquet").to_pylist()
    assert list(collect(reopen_run(stored.config)).candidates) == [row for row in table if row["beta"] == 0.9]


def test_the_report_publishes_no_password(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["mixednuts", "report", "run.yaml", "--set", "storage=s3://key:s3cr3t@bucket/runs?token=t0ps"]
    monkeypatch.setattr("sys.argv", arguments)
    files = report_files(collect(reopen_run(stored.config)))
    for name in ("index.html", "results.json"):
        text = files[name].decode()
        assert "storage=s3://...@bucket/runs?token=..." in text
        assert "s3cr3t" not in text and "t0ps" not in text
