"""The report's counts equal those of the stored rows."""

import dataclasses
import json
import math
from collections.abc import Callable

import pytest
import torch

from mixednuts_dist.config.run_config import RunConfig
from mixednuts_dist.config.threat import ThreatModel
from mixednuts_dist.errors import InvalidInputError
from mixednuts_dist.mixing.margins import top2_margin
from mixednuts_dist.mixing.transforms import layer_norm_logits
from mixednuts_dist.reports.counts import Count
from mixednuts_dist.reports.report import attacks_said
from mixednuts_dist.reports.results import RunResults, gather_results, notes_on, stage_costs
from mixednuts_dist.storage.records import AttackRecords, EvaluateRecords, SearchResult
from tests.helpers.made_up_run import (
    ATTACKS,
    in_batches,
    made_up_attack,
    made_up_evaluate,
    made_up_search,
    made_up_summaries,
)


def made_up() -> tuple[AttackRecords, SearchResult, EvaluateRecords]:
    attack = made_up_attack()
    search = made_up_search(attack)
    return attack, search, made_up_evaluate(attack, alpha=search.deployed().alpha)


def gather(attack: AttackRecords, search: SearchResult, evaluate: EvaluateRecords, size: int = 70) -> RunResults:
    return gather_results(
        in_batches(attack, evaluate, size), search=search, attacks=ATTACKS, run_id="r-00000000", name="r",
        dataset="digits", std="demo:std", rob="demo:rob", threat=ThreatModel("Linf", 0.1), seconds={"attack": 1.0},
    )  # fmt: skip


@pytest.mark.parametrize("size", [1, 70, 300])
def test_the_cut_into_batches_changes_nothing(size: int) -> None:
    assert gather(*made_up(), size).to_json() == gather(*made_up()).to_json()


def test_kept_is_counted_among_robs_robust_images() -> None:
    attack, search, evaluate = made_up()
    results = gather(attack, search, evaluate)
    kept = [bool(r) and not bool(b) for r, b in zip(evaluate.robust_N, attack.rob_broken_N, strict=True)]
    assert results.kept == Count(sum(kept), int((~attack.rob_broken_N).sum()))
    assert results.n_only_mixed == int(evaluate.robust_N.sum()) - sum(kept)
    words = results.to_json()["summary"]
    assert f"remains robust on {sum(kept)} of the {results.kept.total} images on which the robust classifier" in words
    assert f"requires {math.ceil(0.95 * results.kept.total)}" in words


def test_refuses_rows_about_other_images() -> None:
    _, search, _ = made_up()
    other = made_up_evaluate(made_up_attack(250), alpha=0.9)
    shuffled = dataclasses.replace(other, sample_ids_N=other.sample_ids_N.flip(0))
    for n, rows, words in (
        (300, other, "300 attack rows and 250 evaluate rows"),
        (250, shuffled, "not about the same"),
    ):
        with pytest.raises(InvalidInputError, match=words):
            gather(made_up_attack(n), search, rows, size=300)


def test_json_is_strict_and_has_the_documented_fields(results: RunResults) -> None:
    entry = json.loads(json.dumps(results.to_json(), allow_nan=False))
    assert entry["accuracy"]["mixed"]["clean"]["correct"] == results.row("mixed").clean.correct
    assert entry["accuracy"]["rob"]["attack"] == ATTACKS["rob"]
    assert {"s", "p", "c", "alpha", "one_minus_alpha", "beta", "criterion", "clamp", "ln_k"} <= set(entry["parameters"])
    assert [point["beta"] for point in entry["tradeoff"]["predicted"]] == [e.beta for e in results.search.entries]
    assert entry["seconds"] == {"attack": 163.4, "search": 21.07, "evaluate": 412.9}
    assert entry["seconds_total"] == pytest.approx(597.37)
    assert entry["survival"][-1]["step"] == "square"
    assert entry["notes"] == list(results.notes)
    assert (entry["format"], entry["n_images"]) == ("mixednuts-results/3", 300)
    assert set(entry["survival"][0]) == {"correct", "total", "percent", "low", "high", "step", "lost"}
    assert set(entry) == {
        "accuracy", "clean_difference", "costs", "format", "kept", "margins", "n_images", "notes", "parameters",
        "provenance", "rounds", "run", "seconds", "seconds_total", "stages", "std_decides", "summary", "survival",
        "tables", "tradeoff", "worst_images",
    }  # fmt: skip


def test_numbers_that_json_cannot_hold_become_null(results: RunResults) -> None:
    entries = tuple(
        dataclasses.replace(e, objective=float("nan"), one_minus_alpha=math.inf) for e in results.search.entries
    )
    search = dataclasses.replace(results.search, entries=entries)
    entry = dataclasses.replace(results, found=search).to_json()
    json.dumps(entry, allow_nan=False)
    assert entry["parameters"]["objective"] is None
    assert entry["parameters"]["cutoff"] is None


def test_surprises_become_notes() -> None:
    attack, search, evaluate = made_up()

    def notes(search: SearchResult = search, **changes: object) -> str:
        return "\n".join(notes_on(gather(attack, search, dataclasses.replace(evaluate, **changes))))

    assert "Square" not in notes()
    fooled_N = evaluate.survived["fab-t"] & (evaluate.sample_ids_N != evaluate.sample_ids_N[evaluate.robust_N][0])
    assert "Square broke 1 of the images" in notes(survived={**evaluate.survived, "square": fooled_N})
    assert "perturbations that the search had not seen" in notes(robust_N=torch.zeros(300, dtype=torch.bool))
    other = tuple(dataclasses.replace(e, clean_correct=e.clean_correct - 1) for e in search.entries)
    assert "The search predicted" in notes(dataclasses.replace(search, entries=other))


def test_splits_count_both_groups_at_equal_retention(results: RunResults) -> None:
    attack, chosen = made_up_attack(), results.parameters
    maps = {"rob": lambda h: h, "rob+LN": layer_norm_logits, "rob+M": chosen.transform()}
    kept = [split.kept.correct for split in results.splits]
    for split in results.splits:
        attacked_NK, clean_NK = (maps[split.form](h.double()) for h in (attack.rob_attacked_NK, attack.rob_clean_NK))
        right_N = top2_margin(attacked_NK.softmax(1))[attacked_NK.argmax(1) == attack.labels_N]
        wrong_N = top2_margin(clean_NK.softmax(1))[clean_NK.argmax(1) != attack.labels_N]
        cutoff = 1 - math.exp(split.log_cutoff)
        assert split.kept.total == len(right_N) and split.left_to_std.total == len(wrong_N)
        assert split.kept.correct == int((right_N >= cutoff - 1e-6).sum())
        assert split.left_to_std.correct == int((wrong_N < cutoff - 1e-6).sum())
    assert results.splits[-1].log_cutoff == pytest.approx(math.log1p(-chosen.one_minus_alpha / chosen.alpha), rel=1e-6)
    assert kept[0] == kept[1] == kept[2]


@pytest.mark.parametrize(
    ("method", "on_rob"),
    [("apgd", "MMAA by apgd-ce, apgd-t (8 iterations, 2 targets)"), ("square", "MMAA by square (30 queries)")],
)
def test_row_names_the_attack_that_ran_and_its_budget(tiny: Callable[..., RunConfig], method: str, on_rob: str) -> None:
    said = attacks_said(tiny(attack={"method": method, "n_iter": 8, "n_target_classes": 2, "n_queries": 30}))
    assert said == {
        "std": "apgd-ce, apgd-t (8 iterations, 2 targets)",
        "rob": on_rob,
        "mixed": "adaptive apgd-ce, apgd-t, fab-t, square (5 iterations, 2 targets, 20 queries)",
    }
    fast = attacks_said(tiny(preset="fast", attack={}, evaluate={}))
    assert fast["mixed"] == "adaptive apgd-ce, apgd-t (100 iterations, 3 targets)"
    assert fast["std"] == "apgd-ce, apgd-t (100 iterations, 3 targets)"
    assert attacks_said(tiny(std="http://127.0.0.1:1/"))["std"].endswith("examples of rob (std is a black box)")


def test_devices_are_billed_by_what_was_held() -> None:
    summaries = {"attack": made_up_summaries("attack"), "evaluate": []}
    (cost,) = stage_costs(summaries, {"attack": 600.0})
    assert cost.gpu_hours == pytest.approx((0.5 * 1800 + 0.5 * 900) / 3600)
    assert cost.core_hours == pytest.approx(4 * 360 / 3600)
    assert (cost.images, cost.partitions, cost.nodes) == (300, 3, 2)
    assert cost.devices == ("NVIDIA H200", "cpu")
    assert (cost.n_forward, cost.n_backward) == (11_700, 9_600)
    (reused,) = stage_costs(summaries, {})  # from another run, so it took no time of this one
    assert (cost.images_per_second, reused.images_per_second, reused.wall_seconds) == (0.5, None, None)
