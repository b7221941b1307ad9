"""What one sees while a run works: a bar on a terminal, a line every few seconds in a log file, or JSON records."""

import logging
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from ..reports.counts import Count, percent_text, seconds_text
from ..storage.records import Receipt

if TYPE_CHECKING:  # it imports PyTorch
    from ..distributed.preparation import PartDone

logger = logging.getLogger(__name__)

_COLUMNS, _STAGE_COLUMNS = 80, 8
_CHECK = "check"  # the stage in which the unmodified package attacks some of the robust images
LINE_EVERY_SECONDS = 5.0
LINE_AT_LEAST_SECONDS = 60.0  # even if no partition is finished
_SHARE_OF_ESTIMATE = 0.05  # of what is to be done: the images that break first say too little of the time of the others


class StageTally:
    """Running counts of one stage; the rate counts only what this session has computed."""

    def __init__(self, stage: str, n_images: int, done: Sequence[Receipt]) -> None:
        self.stage, self.n_images = stage, n_images
        self.n_done = self.n_fresh = self.clean_correct = self.robust = 0
        self.began: float | None = None  # when the first worker of this session did
        self.workers: tuple[int, int] | None = None  # there, asked for
        self.shown: tuple[int, int] | None = None  # of these, in the last line
        self.classifier = ""  # whose accuracy it is
        self._last_added = self._longest_pause = 0.0  # when a partition was last finished; between two such moments
        for receipt in done:
            self._count(receipt)
        self._n_to_do = n_images - self.n_done

    def add(self, receipt: Receipt) -> None:
        """One more partition, computed just now."""
        now = time.monotonic()
        self.began = self.began or now - receipt.seconds
        self._count(receipt)
        self.n_fresh += receipt.n_images
        self._longest_pause = max(self._longest_pause, now - (self._last_added or self.began))
        self._last_added = now

    def _count(self, receipt: Receipt) -> None:
        self.n_done += receipt.n_images
        self.clean_correct += receipt.clean_correct
        self.robust += receipt.robust
        self.classifier = receipt.classifier

    def images_per_second(self) -> float:
        """Since the first worker began, as Ray's and PyTorch's start says nothing of what is left; 0 as yet unknown."""
        if self.began is None or self.n_fresh < _SHARE_OF_ESTIMATE * self._n_to_do:
            return 0.0
        return self.n_fresh / max(time.monotonic() - self._pause() - self.began, 1e-9)

    def _pause(self) -> float:
        """Seconds since the last partition, up to the longest such pause: several workers finish at once."""
        return min(time.monotonic() - self._last_added, self._longest_pause)

    def line(self) -> str:
        """Images done, time left, speed, running accuracy and workers: what of it fits into one line of 80 columns."""
        parts = [f"{self.n_done}/{self.n_images} images"]
        rate = self.images_per_second()
        if rate > 0:
            left = seconds_text(max(1.0, (self.n_images - self.n_done) / rate - self._pause()))
            parts.append(f"{left} left" if self.n_done < self.n_images else "done")
            parts.append(f"{rate:.2g} a second" if rate < 10 else f"{rate:.0f} a second")
        if self.n_done and self.stage == _CHECK:  # it attacks some images only, so a share of all would mislead
            parts.append(f"{self.robust} checked images remain robust")
        elif self.n_done:
            clean = percent_text(Count(self.clean_correct, self.n_done))
            robust = percent_text(Count(self.robust, self.n_done))
            parts.append(f"{self.classifier} {clean} clean, {robust} robust")
        if self.n_done < self.n_images:
            parts.extend(self._workers_text())
        while len(" · ".join(parts)) > _COLUMNS - max(len(self.stage), _STAGE_COLUMNS) - 1:
            parts.pop()
        return " · ".join(parts)

    def _workers_text(self) -> list[str]:
        if self.workers is None:
            return []
        there, asked = self.workers
        workers = f"worker{'s' if max(there, asked) > 1 else ''}"
        return [f"{there} of {asked} {workers} ready" if asked > there else f"{there} {workers}"]


class _Bar:
    """A bar on `console` while the context is open; none where that is no terminal."""

    def __init__(self, console: Console, *columns: ProgressColumn) -> None:
        self.console = console
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


class TerminalProgress(_Bar):
    """A `stages.progress.Progress` that writes to `console`; use it as a context manager."""

    def __init__(self, console: Console) -> None:
        text = TextColumn("{task.description:<8}")
        super().__init__(console, SpinnerColumn(), text, BarColumn(bar_width=24), _TallyColumn(self))
        self._tally: StageTally | None = None
        self._task: TaskID | None = None
        self._last_line = 0.0

    def doing(self, message: str) -> None:
        """What happens now, before a stage begins."""
        self._log("run", message)

    @property
    def text(self) -> str:
        """The running counts."""
        return self._tally.line() if self._tally else ""

    def stage_started(self, stage: str, n_images: int, done: Sequence[Receipt]) -> None:
        self._tally = StageTally(stage, n_images, done)
        self._task = self._bar.add_task(stage, total=n_images, completed=self._tally.n_done)
        self._line_after(0.0)

    def partition_done(self, receipt: Receipt) -> None:
        if self._tally is None or self._task is None:
            return
        self._tally.add(receipt)
        self._bar.update(self._task, completed=self._tally.n_done)
        self._line_after(0.0 if self._tally.n_done == self._tally.n_images else LINE_EVERY_SECONDS)

    def workers_seen(self, ready: int, asked: int) -> None:
        """Also a sign of life while all workers are busy with long pieces, or wait for a machine."""
        if self._tally is None:
            return
        self._tally.workers = ready, asked
        if ready and self._tally.began is None:
            self._tally.began = time.monotonic()
        self._line_after(LINE_AT_LEAST_SECONDS if self._tally.workers == self._tally.shown else LINE_EVERY_SECONDS)

    def stage_finished(self, stage: str, message: str) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
        if self.console.is_terminal and self._tally is not None and self._tally.n_fresh:
            message = f"{self._tally.line()} · {message}"
        self._task = self._tally = None
        self._log(stage, message)

    def _line_after(self, seconds: float) -> None:
        """The running counts, where there is no bar and the last line is at least so old."""
        if self._tally and not self.console.is_terminal and time.monotonic() - self._last_line >= seconds:
            self._tally.shown = self._tally.workers
            self._log(self._tally.stage, self._tally.line())

    def _log(self, stage: str, message: str) -> None:
        self._last_line = time.monotonic()
        self.console.print(f"[bold]{stage:<{_STAGE_COLUMNS}}[/bold] {message}", highlight=False, soft_wrap=True)


class LogProgress(TerminalProgress):
    """The same lines as records of the log."""

    def _log(self, stage: str, message: str) -> None:
        self._last_line = time.monotonic()
        counts = {"images": self._tally.n_images, "images_done": self._tally.n_done} if self._tally else {}
        logger.info(message, extra={"stage": stage, **counts})


class _TallyColumn(ProgressColumn):
    def __init__(self, owner: TerminalProgress) -> None:
        super().__init__()
        self.owner = owner

    def render(self, task: Task) -> Text:  # noqa: ARG002  (the tally belongs to the one task there is)
        return Text(self.owner.text)


class PreparationProgress(_Bar):
    """Counts images as their parts are done; call it with each part, use it as a context manager."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("prepare"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
        super().__init__(console, SpinnerColumn(), *columns)
        self.n_done = self.n_kept = 0
        self._last_line = time.monotonic()
        self._task = self._bar.add_task("prepare", total=None)

    def __call__(self, done: "PartDone", n_images: int) -> None:
        """One more part is in its place."""
        n_part = done.part.stop - done.part.start
        self.n_done += n_part
        self.n_kept += n_part if done.was_there else 0
        self._bar.update(self._task, completed=self.n_done, total=n_images)
        overdue = time.monotonic() - self._last_line >= LINE_EVERY_SECONDS
        if not self.console.is_terminal and (overdue or self.n_done == n_images):
            self._last_line = time.monotonic()
            line = f"[bold]prepare[/bold]  {self.n_done}/{n_images} images"
            self.console.print(line, highlight=False, soft_wrap=True)
