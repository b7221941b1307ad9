"""One gathered run and its rendered page, shared by the tests that only look."""

import pytest

from mixednuts_dist.reports.page import render_page
from mixednuts_dist.reports.results import RunResults

from .made_up_run import made_up_results


@pytest.fixture(scope="session")
def results() -> RunResults:
    """A run of 300 images."""
    return made_up_results()


@pytest.fixture(scope="session")
def page(results: RunResults) -> dict[str, bytes]:
    """Its report files."""
    return render_page(results)
