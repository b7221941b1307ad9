"""Progress lines in a terminal, in a log file and as records."""

import io
import logging
import time

import pytest
from rich.console import Console

from mixednuts_dist.cli import terminal
from mixednuts_dist.cli.terminal import LogProgress, TerminalProgress
from mixednuts_dist.storage.records import PartitionSummary

TIME = len("2026-01-31 12:00:00 ")


def summary(start: int, stop: int) -> PartitionSummary:
    n = stop - start
    return PartitionSummary("attack", 0, start, stop, n, n // 2, 1.0, 9, 9, node="a", classifier="rob")


@pytest.fixture
def shown() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def progress(shown: io.StringIO) -> TerminalProgress:
    return TerminalProgress(Console(file=shown, width=200))


def test_a_log_file_gets_a_line_at_the_start_and_at_the_end(progress: TerminalProgress, shown: io.StringIO) -> None:
    with progress:
        progress.stage_started("attack", 40, [summary(0, 10)])
        progress.partition_done(summary(10, 20))
        progress.partition_done(summary(20, 40))
        progress.stage_finished("attack", "3 partitions computed")
    first, *_, before_last, last = [line[TIME:] for line in shown.getvalue().splitlines()]
    assert time.strptime(shown.getvalue()[: TIME - 1], terminal.TIME_FORMAT)
    assert first.startswith("attack   10/40 images · rob 100.0 clean, 50.0 robust")
    assert before_last.startswith("attack   40/40 images")
    assert "done" in before_last
    assert last == "attack   3 partitions computed"


def test_idle_stage_reports_ready_workers(
    progress: TerminalProgress, shown: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress.stage_started("evaluate", 40, [])
    lines = len(shown.getvalue().splitlines())
    progress.workers_seen(0, 8)
    assert len(shown.getvalue().splitlines()) == lines, "a line just now is sign of life enough"
    monkeypatch.setattr(terminal, "LINE_EVERY_SECONDS", 0.0)
    progress.workers_seen(2, 8)
    assert shown.getvalue().splitlines()[-1][TIME:] == "evaluate 0/40 images · 2 of 8 workers ready"


def test_the_same_lines_are_records_with_their_stage(shown: io.StringIO, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), LogProgress(Console(file=shown)) as progress:
        progress.stage_started("attack", 40, [summary(0, 10)])
        progress.stage_finished("attack", "nothing to do")
    assert shown.getvalue() == ""
    first, last = caplog.records
    assert (first.stage, first.images, first.images_done) == ("attack", 40, 10)  # type: ignore[attr-defined]
    assert last.getMessage() == "nothing to do"
