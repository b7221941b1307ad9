"""A run on a random classifier: averaged gradients, and equal rows if the noise has seeds."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from mixednuts_dist import pipeline
from mixednuts_dist.config.run_config import parse_config
from mixednuts_dist.distributed.debug import DebugExecutor
from tests.helpers.runs import rows_of

NOISY = """
import torch
from mixednuts_dist import load_classifier

class Noisy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = load_classifier("demo:rob", "rob")

    def forward(self, x):
        return self.net(x + 0.2 * torch.randn_like(x))

    def forward_with_seeds(self, x, seeds):
        noise = [torch.randn(x.shape[1:], generator=torch.Generator().manual_seed(int(seed))) for seed in seeds]
        return self.net(x + 0.2 * torch.stack(noise))

def network():
    return Noisy()
"""


def content(folder: Path, **changes: Any) -> dict[str, Any]:
    (folder / "noisy.py").write_text(NOISY)
    return {
        "name": "random", "data": {"uri": "digits", "n": 12}, "rob": f"py:{folder}/noisy.py:network",
        "threat": {"norm": "Linf", "eps": 0.1}, "precision": "fp32", "partition_size": 6,
        "storage": str(folder / "runs"),
        "evaluate": {"version": "rand", "n_iter": 4, "eot": 4}, "compute": {"batch_size": 64}, **changes,
    }  # fmt: skip


def test_a_lost_partition_of_a_random_run_comes_back(tmp_path: Path) -> None:
    config = parse_config(content(tmp_path))
    results = pipeline.run(config, executor=DebugExecutor())
    assert 0 < results.accuracy[0].robust.correct < 12
    assert not any("not to be trusted" in note for note in results.notes)
    lost = rows_of(config, "evaluate") / "part-00001.parquet"
    before = pq.read_table(lost)
    lost.unlink()
    pipeline.run(config, executor=DebugExecutor())
    columns = ["robust", "x_adv"]
    assert pq.read_table(lost).select(columns).equals(before.select(columns))


def test_run_takes_a_random_rob(tmp_path: Path) -> None:
    search = {"beta": 0.5, "betas": [0.5], "scales": [1.0, 5.0], "powers": [1.0], "biases": [0.0], "rounds": 1}
    evaluate = {"attacks": ["apgd-ce"], "n_iter": 3, "eot": 3, "joint_starts": 0}
    attack = {"n_iter": 3, "n_target_classes": 1}
    config = parse_config(content(tmp_path, std="demo:std", attack=attack, search=search, evaluate=evaluate))
    results = pipeline.run(config, executor=DebugExecutor())
    robust = results.row("mixed").robust.correct
    assert robust > 0
    first = results.search.rounds[0]
    assert 3 * first.tried[0] <= first.n_backward, "the choice was attacked with averaged gradients too"
    assert results.row("mixed").clean.correct >= robust
    assert results.row("rob").clean.correct >= results.row("rob").robust.correct
    stored = pq.read_table(rows_of(config, "evaluate"), columns=["clean", "robust"]).to_pydict()
    assert sum(stored["clean"]) == results.row("mixed").clean.correct
    assert all(clean >= robust for clean, robust in zip(*stored.values(), strict=True))


def test_draws_of_a_deterministic_classifier_are_a_note(tmp_path: Path) -> None:
    config = parse_config(content(tmp_path, rob="demo:rob", evaluate={"attacks": ["apgd-ce"], "n_iter": 2, "eot": 2}))
    results = pipeline.run(config, executor=DebugExecutor())
    assert any("evaluate.eot = 2 changed only the cost" in note for note in results.notes)
