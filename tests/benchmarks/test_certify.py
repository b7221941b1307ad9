"""The benchmark of certificates: stopping early loses no certificate there."""

import json

from click.testing import CliRunner

from benchmarks.certify import main


def test_certify_benchmark_reports_what_early_stops_save() -> None:
    result = CliRunner().invoke(main, ["-n", "20", "--draws", "400"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    by_alpha = {row["alpha"]: row for row in found["certified"]}
    assert list(by_alpha) == [1.0, 0.9, 0.8, 0.7]
    assert by_alpha[1.0]["at 0.1"] == by_alpha[1.0]["published 0.1"] > 0
    assert all(0 < row["abstentions as errors"] <= row["clean"] for row in found["certified"])
    assert all(row[f"at {radius}"] >= row[f"published {radius}"] for row in found["certified"] for radius in (0.1, 0.5))
    fixed, every_question, one_question = found["draws"]
    passes = [row["passes per image"] for row in (fixed, every_question, one_question)]
    assert passes[0] == 500 > passes[1] > passes[2]
    hours = list(found["imagenet_gpu_hours"].values())
    assert hours[0] > hours[1] > hours[2] > 0
    assert "GPU-hours" in result.stderr
