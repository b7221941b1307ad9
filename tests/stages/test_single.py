"""One classifier alone: AutoAttack over partitions, resumable, with its own report; black-box margins."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mixednuts_dist import pipeline
from mixednuts_dist.attacks.adaptive import autoattack
from mixednuts_dist.attacks.budget import AttackBudget
from mixednuts_dist.classifiers.factories import demo_rob
from mixednuts_dist.cli.status import run_status
from mixednuts_dist.config.run_config import RunConfig, load_config
from mixednuts_dist.config.threat import ThreatModel
from mixednuts_dist.errors import BaseClassifierError, ConfigError
from mixednuts_dist.images.datasets import open_dataset
from mixednuts_dist.reports.results import RunResults
from mixednuts_dist.stages import attack, evaluate, search
from tests.helpers.runs import MakeConfig, NoRay, Watcher, rows
from tests.helpers.touchy_classifiers import table

EXAMPLE = Path(__file__).parents[2] / "jobs" / "configs" / "autoattack.yaml"
SMALL = (
    "data.n=24", "partition_size=8", "compute.num_workers=2", "evaluate.n_iter=5", "evaluate.n_target_classes=2",
    "evaluate.n_queries=20", "attack.n_iter=5", "attack.n_target_classes=2",
)  # fmt: skip
Finished = tuple[RunConfig, Path, RunResults, Watcher]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, local_executor: Any) -> Finished:
    """The example of `jobs/configs`, made small and run; tests leave it as they found it."""
    storage = tmp_path_factory.mktemp("single")
    config, watcher = load_config(EXAMPLE, [*SMALL, f"storage={storage}"]), Watcher()
    results = pipeline.run(config, executor=local_executor, progress=watcher)
    return config, storage / config.place(), results, watcher


def test_the_counts_are_those_of_plain_autoattack(finished) -> None:
    config, folder, results, watcher = finished
    x, y = open_dataset("digits").read(0, 24)
    budget = AttackBudget(n_iter=5, n_target_classes=2, n_queries=20)
    alone = autoattack(demo_rob(), x, y, threat=ThreatModel("Linf", 0.15), seed=config.seed, budget=budget)
    stored = rows(folder, "evaluate", ["robust"])
    assert [stored[i][0] for i in range(24)] == alone.robust.tolist()
    assert results.row("rob").robust.correct == int(alone.robust.sum())
    assert results.row("rob").clean.correct == int((demo_rob()(x).argmax(dim=1) == y).sum())
    assert sorted(watcher.computed) == [("evaluate", i) for i in range(3)]


def test_the_json_and_the_page_know_of_no_mixture(finished) -> None:
    _, folder, results, _ = finished
    content = json.loads((folder / "report" / "results.json").read_text())
    assert content == json.loads(json.dumps(results.to_json()))
    assert list(content["accuracy"]) == ["rob"]
    assert [step["step"] for step in content["survival"]] == ["clean", "apgd-ce", "apgd-t", "fab-t", "square"]
    assert content["survival"][-1]["correct"] == content["accuracy"]["rob"]["robust"]["correct"]
    page = (folder / "report" / "index.html").read_text()
    words = re.sub(r"<(script|style).*?</\1>|<[^>]*>", " ", page, flags=re.DOTALL)
    assert "mixture" not in words.lower().replace("mixednuts", "")
    for step in results.survival:
        assert f"{step.correct}/{step.total}" in page


def test_fast_run_is_not_called_autoattack(tmp_path: Path, local_executor: Any) -> None:
    fast = ["preset=fast", "data.n=8", "partition_size=8", "name=first-look", f"storage={tmp_path}"]
    config = load_config(EXAMPLE, fast)
    results = pipeline.run(config, executor=local_executor)
    (note,) = config.evaluate.notes
    assert results.notes[0] == note == run_status(config).notes[0]
    assert results.row("rob").attack == "apgd-ce, apgd-t (100 iterations, 3 targets)"
    assert [step.step for step in results.survival] == ["clean", "apgd-ce", "apgd-t"]
    page = (tmp_path / config.place() / "report" / "index.html").read_text()
    assert note in page
    assert "AutoAttack" not in page.replace(note, "")
    assert "apgd-ce, apgd-t (100 iterations, 3 targets)" in page.replace(note, "")
    for path in (tmp_path / config.place() / "report").iterdir():
        if path.suffix in (".tex", ".csv", ".md"):
            said = path.read_text().replace(note, "").casefold()
            assert not [word for word in ("autoattack", "fab", "square", "quer") if word in said], path.name


def test_check_stage_attacks_robust_images_again(finished, local_executor: Any) -> None:
    config, folder, results, _ = finished
    asked = load_config(
        EXAMPLE, [*SMALL, f"storage={config.storage}", "evaluate.check=pyautoattack", "evaluate.check_n=7"]
    )
    assert asked.run_id() == config.run_id()
    watcher = Watcher()
    told = pipeline.run(asked, executor=local_executor, progress=watcher)
    assert sorted(watcher.computed) == [("check", i) for i in range(3)]
    robust, checked = rows(folder, "evaluate", ["robust"]), rows(folder, "check", ["tried", "broken"])
    assert sum(tried for tried, _ in checked.values()) == 7
    assert all(robust[i][0] for i, (tried, _) in checked.items() if tried)
    n_broken = sum(broken for _, broken in checked.values())
    standing = results.survival[-1].correct
    assert (told.survival[-1].step, told.survival[-1].correct) == ("pyautoattack", standing - n_broken)
    assert any(f"pyautoattack attacked 7 of the {standing} robust images" in note for note in told.notes)
    assert told.to_json()["accuracy"] == results.to_json()["accuracy"]


def test_check_stage_rejects_too_few_classes(tmp_path: Path) -> None:
    np.savez(tmp_path / "three.npz", images=np.zeros((8, 8, 8, 1), np.uint8), labels=np.arange(8) % 3)
    (tmp_path / "zoo.py").write_text(
        "import torch\n\ndef rob():\n    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))\n"
    )
    uris = [f"data.uri=npz:{tmp_path / 'three.npz'}", "data.n=8", f"rob=py:{tmp_path / 'zoo.py'}:rob"]
    config = load_config(EXAMPLE, [*SMALL, *uris, f"storage={tmp_path}", "evaluate.check=pyautoattack"])
    with pytest.raises(ConfigError, match=r"evaluate\.check=pyautoattack needs 4 classes or more.* has 3; leave"):
        evaluate.run(config, executor=NoRay())
    assert not list(tmp_path.rglob("part-*"))


def test_search_without_std_raises(finished, local_executor: Any) -> None:
    config, folder, _, _ = finished
    attack.run(config, executor=local_executor)
    assert len(rows(folder, "attack", ["margin", "rob_attacked"])) == 24
    with pytest.raises(ConfigError, match=r"digits-autoattack: `std` is missing"):
        search.run(config, executor=NoRay())


NO_GRADIENT = """
import torch
from mixednuts_dist.classifiers.factories import demo_rob

class Detach(torch.nn.Module):
    def forward(self, x):
        return x.detach()

def rob():
    return torch.nn.Sequential(Detach(), demo_rob())
"""


def test_a_rob_without_gradient_gets_real_margins_by_queries(
    tiny: MakeConfig, tmp_path: Path, local_executor: Any
) -> None:
    (tmp_path / "zoo.py").write_text(NO_GRADIENT)
    changes = {"rob": f"py:{tmp_path / 'zoo.py'}:rob", "data": {"uri": "digits", "n": 8}, "std": None}
    with pytest.raises(BaseClassifierError, match=r"zoo.py:rob' has no gradient. Wrap it in .*straight_through"):
        attack.run(tiny(**changes), executor=NoRay())
    config = tiny(**changes, attack={"method": "square", "n_queries": 150})
    opened = attack.run(config, executor=local_executor)
    margins = table(config)["margin"]
    x, y = open_dataset("digits").read(0, 8)
    clean = autoattack(demo_rob(), x, y, threat=ThreatModel("Linf", 0.15), attacks=()).logits.softmax(dim=1)
    clean_right = clean.argmax(dim=1) == y
    assert any(margin < 0 for margin in margins)
    assert all(margin < 0.999 * float(clean[i].max()) for i, margin in enumerate(margins) if clean_right[i])
    assert opened.inputs.n_images == 8
