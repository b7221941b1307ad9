"""Show the progress of a run as a bar on a terminal, as a line every few seconds in a log file, or as JSON records."""

import logging
import time
from collections.abc import Sequence
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from ..reports.counts import outcome_counts, percent_text, seconds_text
from ..stages.progress import RunProgress
from ..storage.records import PartitionSummary

logger = logging.getLogger(__name__)

_COLUMNS, _STAGE_COLUMNS = 80, 8  # width of a line and of the stage's name; in a log file, the time precedes both
TIME_FORMAT = "%Y-%m-%d %H:%M:%S"
_CHECK = "check"  # the stage in which the unmodified package attacks some of the robust images
LINE_EVERY_SECONDS = 5.0
LINE_AT_LEAST_SECONDS = 60.0  # even if no partition is finished
_SPEED_SECONDS = 24 * 3600.0  # average over the whole stage, because many partitions may finish at the same time


class TerminalProgress(RunProgress):
    """A `RunProgress` that writes to `console`; use it as a context manager."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bar = Progress(
            SpinnerColumn(), TextColumn("{task.description:<8}"), BarColumn(bar_width=24), MofNCompleteColumn(),
            TimeRemainingColumn(), TextColumn("{task.fields[counts]}"), console=console, transient=True,
            disable=not console.is_terminal, speed_estimate_period=_SPEED_SECONDS,
        )  # fmt: skip
        self._task: TaskID | None = None
        self._stage, self._n_images, self._n_reused = "", 0, 0
        self._done: list[PartitionSummary] = []
        self._workers, self._last_line = "", 0.0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _log(self, stage: str, message: str) -> None:
        self._last_line = time.monotonic()
        now = "" if self.console.is_terminal else time.strftime(f"{TIME_FORMAT} ")
        self.console.print(Text.assemble(now, (f"{stage:<{_STAGE_COLUMNS}}", "bold"), f" {message}"), soft_wrap=True)

    def counted(self, stage: str, n_done: int, n_images: int) -> None:
        """Print a count of images, every few seconds and at the end."""
        if n_done == n_images or time.monotonic() - self._last_line >= LINE_EVERY_SECONDS:
            self._log(stage, f"{n_done}/{n_images} images")

    def doing(self, message: str) -> None:
        """Print what happens before a stage begins."""
        self._log("run", message)

    def stage_started(self, stage: str, n_images: int, done: Sequence[PartitionSummary]) -> None:
        self._stage, self._n_images, self._done, self._n_reused = stage, n_images, [*done], len(done)
        self._workers = ""
        self._task = self._bar.add_task(stage, total=n_images, completed=self._n_done, counts="")
        self._show(0.0)

    def partition_done(self, summary: PartitionSummary) -> None:
        self._done.append(summary)
        self._show(0.0 if self._n_done == self._n_images else LINE_EVERY_SECONDS)

    def workers_seen(self, ready: int, asked: int) -> None:
        """Show the workers, so that the log has lines while they compute long partitions or wait for a machine."""
        before, workers = self._workers, f"worker{'s' if max(ready, asked) > 1 else ''}"
        self._workers = f"{ready} of {asked} {workers} ready" if asked > ready else f"{ready} {workers}"
        self._show(LINE_AT_LEAST_SECONDS if self._workers == before else LINE_EVERY_SECONDS)

    def stage_finished(self, stage: str, message: str) -> None:
        if self.console.is_terminal and len(self._done) > self._n_reused:
            message = f"{self.line()} · {message}"
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None
        self._log(stage, message)

    def line(self) -> str:
        """Return the images done, the time left, the running accuracy and the workers, in at most 80 columns."""
        parts = [f"{self._n_done}/{self._n_images} images"]
        seconds = None if self._task is None else self._bar.tasks[-1].time_remaining
        if self._n_done == self._n_images:
            parts.append("done")
        elif seconds:
            parts.append(f"{seconds_text(seconds)} left")
        parts += self._counts()
        while len(" · ".join(parts)) > _COLUMNS - max(len(self._stage), _STAGE_COLUMNS) - 1:
            parts.pop()
        return " · ".join(parts)

    @property
    def _n_done(self) -> int:
        return sum(summary.n_images for summary in self._done)

    def _counts(self) -> list[str]:
        """Return the running accuracy and the workers."""
        clean, robust = outcome_counts(self._done)
        parts = [self._workers] if self._workers and clean.total < self._n_images else []
        if self._stage == _CHECK and clean.total:  # it attacks some images only, so a share of all would mislead
            return [f"{robust.correct} checked images remain robust", *parts]
        if clean.total:
            classifier = self._done[-1].classifier
            return [f"{classifier} {percent_text(clean)} clean, {percent_text(robust)} robust", *parts]
        return parts

    def _show(self, seconds: float) -> None:
        """Update the bar or, without a terminal, print the counts if the last line is at least this old."""
        if self._task is None:
            return
        self._bar.update(self._task, completed=self._n_done, counts=" · ".join(self._counts()))
        if not self.console.is_terminal and time.monotonic() - self._last_line >= seconds:
            self._log(self._stage, self.line())


class LogProgress(TerminalProgress):
    """A `TerminalProgress` that writes its lines to the log."""

    def _log(self, stage: str, message: str) -> None:
        self._last_line = time.monotonic()
        counts = {} if self._task is None else {"images": self._n_images, "images_done": self._n_done}
        logger.info(message, extra={"stage": stage, **counts})
