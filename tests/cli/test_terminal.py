"""What is shown while a run works, in a log file and as records."""

import io
import logging
import time
from dataclasses import replace

import pytest
from rich.console import Console

from mixednuts_dist.cli import terminal
from mixednuts_dist.cli.terminal import LogProgress, TerminalProgress
from mixednuts_dist.stages.progress import WatchesWorkers
from mixednuts_dist.storage.records import Receipt

TIME = len("2026-01-31 12:00:00 ")


def receipt(start: int, stop: int) -> Receipt:
    n = stop - start
    return Receipt(
        "attack", 0, start, stop, clean_correct=n, robust=n // 2, seconds=1.0, n_forward=9, n_backward=9, node="a",
        classifier="rob",
    )  # fmt: skip


@pytest.fixture
def shown() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def progress(shown: io.StringIO) -> TerminalProgress:
    return TerminalProgress(Console(file=shown, width=200))


def test_a_log_file_gets_a_line_at_the_start_and_at_the_end(progress: TerminalProgress, shown: io.StringIO) -> None:
    with progress:
        progress.stage_started("attack", 40, [receipt(0, 10)])
        progress.partition_done(receipt(10, 20))
        progress.partition_done(receipt(20, 40))
        progress.stage_finished("attack", "3 partitions computed")
    first, *_, before_last, last = [line[TIME:] for line in shown.getvalue().splitlines()]
    assert time.strptime(shown.getvalue()[: TIME - 1], terminal.TIME_FORMAT)
    assert first.startswith("attack   10/40 images · rob 100.0 clean, 50.0 robust")
    assert before_last.startswith("attack   40/40 images")
    assert "done" in before_last
    assert last == "attack   3 partitions computed"


def test_a_stage_that_finishes_nothing_for_long_says_who_is_at_work(
    progress: TerminalProgress, shown: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(progress, WatchesWorkers)
    progress.stage_started("evaluate", 40, [])
    lines = len(shown.getvalue().splitlines())
    progress.workers_seen(0, 8)
    assert len(shown.getvalue().splitlines()) == lines, "a line just now is sign of life enough"
    monkeypatch.setattr(terminal, "LINE_EVERY_SECONDS", 0.0)
    progress.workers_seen(2, 8)
    assert shown.getvalue().splitlines()[-1][TIME:] == "evaluate 0/40 images · 2 of 8 workers ready"


def test_workers_that_load_are_told_of_within_seconds_and_once(
    progress: TerminalProgress, shown: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "LINE_EVERY_SECONDS", 0.0)
    progress.stage_started("attack", 40, [])
    for ready in (0, 0, 1, 2, 2):
        progress.workers_seen(ready, 2)
    assert [line.split(" · ")[-1] for line in shown.getvalue().splitlines()[1:]] == [
        "0 of 2 workers ready", "1 of 2 workers ready", "2 workers"
    ]  # fmt: skip


def test_a_log_line_has_the_time_left_and_fits_into_80_columns(
    progress: TerminalProgress, shown: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(terminal, "LINE_EVERY_SECONDS", 0.0)
    monkeypatch.setattr(progress._bar, "get_time", lambda: now[0])
    progress.stage_started("attack", 10_000, [receipt(0, 1000)])
    progress.workers_seen(128, 128)
    assert " left" not in shown.getvalue()
    for start in (1000, 2000, 3000):
        now[0] += 10
        progress.partition_done(receipt(start, start + 1000))
    assert (
        shown.getvalue()
        .splitlines()[-1][TIME:]
        .startswith("attack   4000/10000 images · 60.0 s left · rob 100.00 clean")
    )
    assert max(map(len, shown.getvalue().splitlines())) <= TIME + 80


def test_the_same_lines_are_records_with_their_stage(shown: io.StringIO, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), LogProgress(Console(file=shown)) as progress:
        progress.stage_started("attack", 40, [receipt(0, 10)])
        progress.stage_finished("attack", "nothing to do")
    assert shown.getvalue() == ""
    first, last = caplog.records
    assert (first.stage, first.images, first.images_done) == ("attack", 40, 10)  # type: ignore[attr-defined]
    assert last.getMessage() == "nothing to do"


def test_the_check_counts_images_and_gives_no_share(progress: TerminalProgress, shown: io.StringIO) -> None:
    progress.stage_started("check", 16, [])
    progress.partition_done(replace(receipt(0, 16), robust=4))
    assert "4 checked images remain robust" in shown.getvalue()
    assert "25.0" not in shown.getvalue()


def test_a_bar_shows_no_markup(shown: io.StringIO) -> None:
    with TerminalProgress(Console(file=shown, width=200, force_terminal=True, markup=False)) as progress:
        progress.stage_started("attack", 40, [])
        progress.partition_done(receipt(0, 40))
        progress.stage_finished("attack", "1 partition computed")
    assert "40/40 images · done · rob 100.0 clean, 50.0 robust · 1 partition computed" in shown.getvalue()
    assert "[bold]" not in shown.getvalue()
