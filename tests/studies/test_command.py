"""`mixednuts study`: its names, its files, and the paper's numbers next to ours."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mixednuts_dist.attacks.adaptive import autoattack
from mixednuts_dist.attacks.budget import AttackBudget
from mixednuts_dist.classifiers.factories import demo_rob, demo_std
from mixednuts_dist.cli import main
from mixednuts_dist.config.register import STUDIES
from mixednuts_dist.config.run_config import RunConfig, load_config, parse_config
from mixednuts_dist.config.threat import ThreatModel
from mixednuts_dist.errors import BaseClassifierError, ConfigError, InvalidInputError
from mixednuts_dist.images.datasets import open_dataset
from mixednuts_dist.mixing.classifier import MixedClassifier
from mixednuts_dist.storage.tables import read_columns
from mixednuts_dist.studies import study as studies
from mixednuts_dist.studies.bench import Bench
from mixednuts_dist.studies.study import Outcome, paper_tables, rob_uris, same_set_up
from tests.helpers.runs import tiny_content

ROOT = Path(__file__).parents[2]
FILES = {"table.csv", "table.tex", "study.json", "figure.svg", "figure.pdf"}


def test_an_unknown_study_is_answered_with_the_valid_names() -> None:
    shown = CliRunner().invoke(main, ["study", "tradeof", str(ROOT / "jobs" / "configs" / "digits.yaml")])
    assert shown.exit_code != 0
    assert "'trade-off'" in shown.output


def test_the_page_lists_every_study() -> None:
    page = (ROOT / "docs" / "studies.md").read_text()
    for entry in STUDIES.entries().values():
        if entry.home.startswith("mixednuts_dist"):
            assert f"| `{entry.name}` | {entry.facts['section']} | {entry.describes} |" in page


def test_rob_takes_a_list_of_zoo_models(tmp_path: Path) -> None:
    content = {**tiny_content(tmp_path), "data": {"uri": "cifar10", "n": 24}}
    listed = tmp_path / "zoo.txt"
    listed.write_text("# the zoo\ndemo:rob_light\n\nCarmon2019Unlabeled\n")
    with pytest.raises(InvalidInputError, match=r"--rob: 1 missing(.|\n)*Carmon2019Unlabeled.pt\n.*gdown"):
        rob_uris([str(listed)], parse_config(content))
    listed.write_text("Carmon2019Unlabelled")
    with pytest.raises(BaseClassifierError, match=r"has no model 'Carmon2019Unlabelled'.*Carmon2019Unlabeled"):
        rob_uris([str(listed)], parse_config(content))
    listed.write_text("demo:rob_light\n")
    assert rob_uris(["demo:noisy", str(listed)], parse_config(content)) == ["demo:noisy", "demo:rob_light"]


@pytest.mark.slow
def test_every_study_leaves_its_files(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(studies, "Bench", lambda *_, **__: bench)
    done = studies.run(bench.config, "all")
    shown = capsys.readouterr().out
    assert list(done) == list(STUDIES.names())
    for name, outcome in done.items():
        assert set(bench.run.store.names(f"studies/{name}")) == FILES
        content = json.loads(bench.run.store.read(f"studies/{name}/study.json"))
        assert content["findings"] == list(outcome.findings) != []
        assert not content["same_set_up_as_the_paper"]
        lines = list(csv.reader(io.StringIO(bench.run.store.read(f"studies/{name}/table.csv").decode())))
        assert len(lines) == 1 + len(outcome.table.rows)
        assert len({len(line) for line in lines}) == 1
        assert bench.run.store.read(f"studies/{name}/figure.pdf").startswith(b"%PDF")
        assert name in shown


def test_failed_study_does_not_end_the_others(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(_bench: Bench) -> Outcome:
        raise InvalidInputError("these rows hold no attacked image")

    made = {"margins": STUDIES.get("margins"), "approximation": refuses}
    monkeypatch.setattr(studies, "Bench", lambda *_, **__: bench)
    monkeypatch.setattr(STUDIES, "names", lambda: tuple(made))
    monkeypatch.setattr(STUDIES, "get", made.__getitem__)
    assert list(studies.run(bench.config, "all")) == ["margins"]
    shown = capsys.readouterr().out
    assert "approximation is left out: these rows hold no attacked image" in shown
    assert "1 study done; 1 left out" in shown
    with pytest.raises(InvalidInputError, match="no attacked image"):
        studies.run(bench.config, "approximation")
    page = bench.run.store.read("studies/index.html").decode()
    assert 'href="margins/figure.svg"' in page and "<svg" in page
    assert "approximation" not in page


def test_pooled_variant_equals_a_plain_attack(bench: Bench, ray_executor: Any) -> None:
    pooled = Bench(bench.config, executor=ray_executor).measured("through the pool", attacks=("apgd-ce",))
    x, y = open_dataset("digits").read(0, 24)
    chosen = bench.deployed()
    mixed = MixedClassifier(
        demo_std(), demo_rob(), chosen.transform, chosen.alpha, one_minus_alpha=chosen.one_minus_alpha,
        surrogate_alpha=bench.search.surrogate_alpha,
    )  # fmt: skip
    stored = read_columns(bench.run.rows, "attack", bench.run.partitions, bench.run.attack_content_hash, ["x_adv"])
    plain = autoattack(
        mixed, x, y, threat=ThreatModel("Linf", 0.15), attacks=("apgd-ce",), cached_BCHW=stored["x_adv"],
        budget=AttackBudget(n_iter=5, n_target_classes=2), precision="fp32",
    )  # fmt: skip
    assert pooled.robust_N.tolist() == plain.robust.tolist()
    assert pooled.survived["warm-start"].tolist() == plain.survived["warm-start"].tolist()


def test_a_configuration_without_std_has_no_mixture_to_study(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="std: null"):
        Bench(parse_config(tiny_content(tmp_path, std=None)))


def cifar100(tmp_path: Path, **changes: Any) -> RunConfig:
    content = {
        "data": {"uri": "cifar100"},
        "rob": "robustbench:Wang2023Better_WRN-70-16?dataset=cifar100",
        "std": "robustbench:Bai2024MixedNUTS?dataset=cifar100&part=std",
        "threat": {"eps": "8/255"},
    }
    return parse_config(tiny_content(tmp_path, **{**content, **changes}))


def test_paper_numbers_are_shown_for_the_same_settings_only(bench: Bench, tmp_path: Path) -> None:
    outcome = STUDIES.get("temperature")(bench)
    same = studies.study_files("temperature", outcome, cifar100(tmp_path))["study.json"]
    content = json.loads(same)
    assert content["same_set_up_as_the_paper"]
    column = content["columns"].index("paper: robust")
    assert [row[column] for row in content["rows"]] == [41.6, 41.4, 41.3]
    for other in ({"threat": {"eps": "4/255"}}, {"data": {"uri": "cifar10"}}, {"rob": "demo:rob"}, {"std": "demo:std"}):
        apart = studies.study_files("temperature", outcome, cifar100(tmp_path, **other))["study.json"]
        assert not json.loads(apart)["same_set_up_as_the_paper"]


@pytest.mark.parametrize(
    ("name", "set_up"), [("cifar10", "CIFAR-10"), ("cifar100", "CIFAR-100"), ("imagenet", "ImageNet")]
)
def test_the_shipped_configurations_are_the_papers(name: str, set_up: str) -> None:
    printed = same_set_up(paper_tables("main"), load_config(ROOT / "jobs" / "configs" / f"{name}.yaml"))
    assert printed is not None
    assert printed.set_up["words"].startswith(f"{set_up} at ")


def test_the_papers_error_rates_follow_from_its_accuracies() -> None:
    for accuracy, change in zip(paper_tables("main"), paper_tables("error-rate"), strict=True):
        assert accuracy.set_up == change.set_up
        for column in ("clean", "robust"):
            rob, mixed = (100 - float(str(accuracy.table.row(name)[column])) for name in ("rob", "mixed"))
            printed = float(str(change.table.row(column)["relative change (%)"]))
            assert 100 * (mixed / rob - 1) == pytest.approx(printed, abs=0.03)


def test_the_papers_mixture_costs_the_sum_of_its_parts() -> None:
    for printed in paper_tables("efficiency"):
        for column in ("parameters (M)", "GFLOPs"):
            parts = [float(str(printed.table.row(name)[column])) for name in ("std", "rob", "mixed")]
            assert parts[0] + parts[1] == pytest.approx(parts[2], abs=0.11)
