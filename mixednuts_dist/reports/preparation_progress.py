"""What one sees while `mixednuts prepare` works: a bar on a terminal, a line every few seconds in a log file."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from ..distributed.preparation import PartDone
from .terminal import LINE_EVERY_SECONDS


class PreparationProgress:
    """Counts images as their parts are done; call it with each part, use it as a context manager."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.n_done = self.n_kept = 0
        self._last_line = time.monotonic()
        columns = (SpinnerColumn(), TextColumn("prepare"), BarColumn(bar_width=24), MofNCompleteColumn())
        self._bar = Progress(
            *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
        )
        self._task = self._bar.add_task("prepare", total=None)

    def __enter__(self) -> "PreparationProgress":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, done: PartDone, n_images: int) -> None:
        """One more part is in its place."""
        n_part = done.part.stop - done.part.start
        self.n_done += n_part
        self.n_kept += n_part if done.was_there else 0
        self._bar.update(self._task, completed=self.n_done, total=n_images)
        overdue = time.monotonic() - self._last_line >= LINE_EVERY_SECONDS
        if not self.console.is_terminal and (overdue or self.n_done == n_images):
            self._last_line = time.monotonic()
            self.console.print(f"[bold]prepare[/bold]  {self.n_done}/{n_images} images", highlight=False)
