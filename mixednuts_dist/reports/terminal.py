"""What one sees while a run works: a bar on a terminal, a line every few seconds in a log file."""

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.text import Text

from ..data.records import Receipt
from .intervals import Count
from .wording import percent_text, seconds_text

LINE_EVERY_SECONDS = 5.0
_SUBJECT = {"attack": "rob", "evaluate": "mixed"}


class StageTally:
    """Running counts of one stage; the rate counts only what this session has computed."""

    def __init__(self, stage: str, n_images: int, done: Sequence[Receipt]) -> None:
        self.stage, self.n_images = stage, n_images
        self.n_done = self.n_fresh = self.clean_correct = self.robust = 0
        self.started = time.monotonic()
        for receipt in done:
            self._count(receipt)

    def add(self, receipt: Receipt) -> None:
        """One more partition, computed just now."""
        self._count(receipt)
        self.n_fresh += receipt.n_images

    def _count(self, receipt: Receipt) -> None:
        self.n_done += receipt.n_images
        self.clean_correct += receipt.clean_correct
        self.robust += receipt.robust

    def images_per_second(self) -> float:
        elapsed = time.monotonic() - self.started
        return self.n_fresh / elapsed if elapsed > 0 else 0.0

    def line(self) -> str:
        """Images done, speed, time left and the running accuracy, in one line."""
        parts = [f"{self.n_done}/{self.n_images} images"]
        rate = self.images_per_second()
        if rate > 0:
            left = seconds_text((self.n_images - self.n_done) / rate)
            parts.append(f"{rate:.2g} images/s" if rate < 10 else f"{rate:.0f} images/s")
            parts.append(f"{left} left" if self.n_done < self.n_images else "done")
        if self.n_done:
            clean = percent_text(Count(self.clean_correct, self.n_done))
            robust = percent_text(Count(self.robust, self.n_done))
            parts.append(f"{_SUBJECT.get(self.stage, 'mixed')} {clean} clean, {robust} robust")
        return " · ".join(parts)


class TerminalProgress:
    """A `stages.progress.Progress` that writes to `console`; use it as a context manager."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._tally: StageTally | None = None
        self._task: TaskID | None = None
        self._last_line = 0.0
        self._bar = Progress(
            SpinnerColumn(), TextColumn("{task.description:<8}"), BarColumn(bar_width=24), _TallyColumn(self),
            console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip

    def __enter__(self) -> "TerminalProgress":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    @property
    def text(self) -> str:
        """The running counts, or that the workers are still starting."""
        if self._tally is None:
            return ""
        waiting = not self._tally.n_fresh and self._tally.n_done < self._tally.n_images
        return self._tally.line() + (" · workers at work" if waiting else "")

    def stage_started(self, stage: str, n_images: int, done: Sequence[Receipt]) -> None:
        self._tally = StageTally(stage, n_images, done)
        self._task = self._bar.add_task(stage, total=n_images, completed=self._tally.n_done)
        if not self.console.is_terminal:
            self._log(stage, self._tally.line())

    def partition_done(self, receipt: Receipt) -> None:
        if self._tally is None or self._task is None:
            return
        self._tally.add(receipt)
        self._bar.update(self._task, completed=self._tally.n_done)
        overdue = time.monotonic() - self._last_line >= LINE_EVERY_SECONDS
        if not self.console.is_terminal and (overdue or self._tally.n_done == self._tally.n_images):
            self._log(receipt.stage, self._tally.line())

    def stage_finished(self, stage: str, message: str) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
        if self.console.is_terminal and self._tally is not None and self._tally.n_fresh:
            message = f"{self._tally.line()} · {message}"
        self._task = self._tally = None
        self._log(stage, message)

    def _log(self, stage: str, message: str) -> None:
        self._last_line = time.monotonic()
        self.console.print(f"[bold]{stage:<8}[/bold] {message}", highlight=False, soft_wrap=True)


class _TallyColumn(ProgressColumn):
    def __init__(self, owner: TerminalProgress) -> None:
        super().__init__()
        self.owner = owner

    def render(self, task: Task) -> Text:  # noqa: ARG002  (the tally belongs to the one task there is)
        return Text(self.owner.text)
