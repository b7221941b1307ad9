"""The benchmarks of the service and of many images run to their end and count what they say they count."""

import pytest

from mixednuts_dist.benchmarks import scale, serve


@pytest.mark.slow
def test_the_scale_benchmark_measures_every_command_that_reads_a_run() -> None:
    result = scale.run(n_images=250)
    assert result["partitions"] == 3
    for command in ("status", "search", "status_of_all", "report", "resume"):
        assert result[command]["seconds"] > 0
        assert result[command]["peak_mib"] > 50


@pytest.mark.slow
def test_the_service_benchmark_sends_the_images_that_rob_decides_to_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_REQUESTS", 50)
    monkeypatch.setattr(serve, "_WARM_UP", 5)
    result = serve.run()
    assert 0 < result["share_of_images_that_need_std"] < 0.5
    assert result["p50_ratio_where_rob_decides"] > 0
