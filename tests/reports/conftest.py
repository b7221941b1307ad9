"""One gathered run, its rendered page and one browser, shared by the tests that only look."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mixednuts_dist.reports.page import report_files
from mixednuts_dist.reports.results import RunResults

from .browser import Browser, Tab
from .made_up_run import made_up_results

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="session")
def results() -> RunResults:
    """A run of 300 images."""
    return made_up_results()


@pytest.fixture(scope="session")
def page(results: RunResults) -> dict[str, bytes]:
    """Its report files."""
    return report_files(results)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A headless Chromium that finds no host."""
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    with Browser(CHROMIUM, tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture
def open_tab(browser: Browser, tmp_path: Path) -> Callable[..., Tab]:
    """Open a page as a file that lies in a folder of its own."""

    def opened(page: bytes, **options: Any) -> Tab:
        file = tmp_path / "page.html"
        file.write_bytes(page)
        return Tab(browser, file, **options)

    return opened
