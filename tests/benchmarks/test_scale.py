"""The benchmark of many images runs to its end and measures what it says it measures."""

import pytest

from tests.benchmarks import scale


@pytest.mark.soak
def test_the_scale_benchmark_measures_every_command_that_reads_a_run() -> None:
    result = scale.run(n_images=250)
    assert result["partitions"] == 3
    for command in ("status", "search", "status_of_all", "report", "resume"):
        assert result[command]["seconds"] > 0
        assert result[command]["peak_mib"] > 50
