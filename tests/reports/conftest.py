"""One gathered run and its rendered page, shared by the tests that only look."""

import pytest

from mixednuts_dist.reports.page import report_files
from mixednuts_dist.reports.results import RunResults
from tests.helpers.made_up_run import made_up_results
from tests.helpers.pictures import draw


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
