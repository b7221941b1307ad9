"""The benchmarks of certificates: early stops, rivals, and an attack within the certified radius."""

import json

from click.testing import CliRunner

from benchmarks import certified_attack, certified_rivals
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


def test_autoattack_contradicts_no_smoothing_certificate() -> None:
    """The attack is in L2 at the certified radius; 2,000 other draws decide at the adversarial examples."""
    found = certified_attack.run(12, draws=400, n_iter=10, n_queries=30)
    assert found["moved"] == found["certified"] >= 5
    assert found["contradicted"] == 0


def test_certified_rivals_agree_at_the_robust_classifier_alone() -> None:
    table = certified_rivals.run(6, draws=400)
    rows = {tuple(row[:2]): list(row[2:]) for row in table.rows}
    assert len(rows) == 5 + 4 + 5
    for clean, *certified in rows.values():
        assert 0 <= certified[2] <= certified[1] <= certified[0] <= 6 and 0 <= clean <= 6  # type: ignore[operator]
    ours = rows["this package", "alpha 1"]
    assert all(theirs <= own for theirs, own in zip(rows["ACES", "margin 0.99"][1:], ours[1:], strict=True))  # type: ignore[operator]
