"""One gathered run, its rendered page and one browser, shared by the tests that only look."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mixednuts_dist.reports.page import report_files
from mixednuts_dist.reports.results import RunResults
from tests.helpers.browser import Browser, Tab
from tests.helpers.made_up_run import made_up_results
from tests.helpers.pictures import draw

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="session")
def results() -> RunResults:
    """A run of 300 images."""
    return made_up_results()


@pytest.fixture(scope="session")
def page(results: RunResults) -> dict[str, bytes]:
    """The files of its report, with real figures."""
    with pytest.MonkeyPatch.context() as patch:
        draw(patch)
        return report_files(results)


@pytest.fixture(scope="session")
def browsers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Browser]]:
    """The headless Chromium that all share, which finds no host; a new one where the last has died or hangs."""
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    with contextlib.ExitStack() as started:
        running: list[Browser] = []

        def browser() -> Browser:
            if not running or not running[-1].answers():
                running.append(started.enter_context(Browser(CHROMIUM, tmp_path_factory.mktemp("profile"))))
            return running[-1]

        yield browser


@pytest.fixture
def open_tab(browsers: Callable[[], Browser], tmp_path: Path) -> Iterator[Callable[..., Tab]]:
    """Open a page as a file in an empty folder, and close it after the test."""
    tabs: list[Tab] = []

    def opened(page: bytes, **options: Any) -> Tab:
        file = tmp_path / "page.html"
        file.write_bytes(page)
        tabs.append(Tab(browsers(), file, **options))
        return tabs[-1]

    yield opened
    with contextlib.suppress(AssertionError, OSError):  # a Chromium that is gone has failed its test already
        for tab in tabs:
            tab.close()
