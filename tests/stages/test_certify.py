"""The certify stage from the configuration to the report."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mixednuts_dist import pipeline
from mixednuts_dist.certification.smoothing import ROB_ALONE
from mixednuts_dist.config.run_config import parse_config
from mixednuts_dist.distributed.debug import DebugExecutor
from mixednuts_dist.errors import ConfigError
from mixednuts_dist.reports.counts import Count
from mixednuts_dist.reports.results import RunResults
from mixednuts_dist.stages.runs import Run, reopen_run
from mixednuts_dist.stages.stage import stage_of
from tests.helpers.runs import certified_content
from tests.helpers.touchy_classifiers import BLACK_BOXES

Finished = tuple[RunResults, Any, Run]


def certified(folder: Path, **changes: Any) -> tuple[Any, Run]:
    """The stage, complete, and its opened run."""
    config = parse_config(certified_content(folder, **changes))
    stage = stage_of(config, "certify")
    return stage, stage.run(config, executor=DebugExecutor())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A finished run with its stage; tests leave it as they found it."""
    config = parse_config(certified_content(tmp_path_factory.mktemp("certified")))
    results = pipeline.run(config, executor=DebugExecutor())
    return results, stage_of(config, "certify"), reopen_run(config)


def test_a_run_reports_what_is_certified(finished: Finished) -> None:
    results, _, opened = finished
    rows = {row.classifier: row for row in results.stages}
    assert list(rows) == [f"{name}, certified at {radius}" for name in ("rob", "mixed") for radius in (0.1, 0.25)]
    assert rows["rob, certified at 0.1"].robust.correct >= rows["rob, certified at 0.25"].robust.correct > 0
    assert rows["mixed, certified at 0.1"].robust.correct <= rows["rob, certified at 0.1"].robust.correct
    ((title, table),) = results.tables.items()
    assert "Subtract" in title and "smoothed mixed classifier" in title
    assert [row[0] for row in table.rows] == ["rob alone", "1", "0.9", "0.5"]
    deployed = results.parameters
    assert next(row for row in table.rows if row[0] == f"{deployed.beta:g}")[1] == deployed.alpha
    shares, settled = (list(table.columns).index(name) for name in ("clean", "clean, abstentions as errors"))
    assert all(row[settled].correct <= row[shares].correct for row in table.rows)  # type: ignore[union-attr]
    found, at = results.certified, list(table.columns).index("certified at 0.1")
    assert found is not None
    assert sum(reach > 0.1 for reach in found.reach) == rows["mixed, certified at 0.1"].robust.correct
    for row in table.rows[1:]:
        shown = row[at]
        assert isinstance(shown, Count) and found.by_beta[float(str(row[0]))][0] == shown.correct
    for _, steps in found.by_radius.items():
        counts = [n for _, n in steps]
        assert counts == sorted(counts, reverse=True) and counts[0] > 0
    report = Path(opened.store.uri) / "report"
    assert (report / "certified.csv").read_text().startswith("beta,alpha,clean_correct")
    assert (report / "certified.pdf").is_file()
    page = (report / "index.html").read_text()
    for said in ("certified at 0.25", 'id="certified"', "Bounds: ", "not for the deployed mixed classifier"):
        assert said in page


def test_any_alpha_and_radius_is_answered_later(finished: Finished) -> None:
    _, stage, opened = finished
    answers = stage.answers(opened)
    counts = [
        int(answers.certified(replace(ROB_ALONE, alpha=alpha, one_minus_alpha=1 - alpha), radius).sum())
        for alpha, radius in ((1.0, 0.05), (0.95, 0.05), (0.85, 0.17), (0.6, 0.3))
    ]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]
    assert stage.passes(opened) == {"rob": (420, 0)}


def test_rob_alone_is_certified_too(tmp_path: Path) -> None:
    stage, opened = certified(tmp_path, std=None)
    assert [*stage.outcomes(opened)] == ["rob, certified at 0.1", "rob, certified at 0.25"]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"sigma": 0}, "sigma"),
        ({"alphas": [0.5]}, "`std` alone decides"),
        ({"n": 10}, "Give n of at least"),
        ({"confidence": 1}, "confidence"),
        ({"method": "smoothing"}, "method"),
    ],
)
def test_bad_keys_are_refused(tmp_path: Path, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_config(certified_content(tmp_path, certify=keys))


def test_a_black_box_std_is_asked_for_nothing_but_its_class(finished: Finished, tmp_path: Path) -> None:
    (tmp_path / "answers.py").write_text(BLACK_BOXES)
    black_box, opened = certified(tmp_path, std=f"callable:{tmp_path / 'answers.py'}:classes#classes=10")
    ours, theirs = black_box.answers(opened), finished[1].answers(finished[2])
    mixture = replace(ROB_ALONE, alpha=0.8, one_minus_alpha=0.2)
    assert torch.equal(ours.clean(mixture), theirs.clean(mixture))
    assert torch.equal(ours.certified(mixture, 0.1), theirs.certified(mixture, 0.1))


def test_a_run_that_admits_random_classifiers_has_no_certificates(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="admits a random"):
        parse_config(certified_content(tmp_path, evaluate={"attacks": ["apgd-ce"], "eot": 4}))
