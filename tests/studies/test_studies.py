"""Each study of the paper on one tiny run, with at least one number of it computed again by other means."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mixednuts_dist.classifiers.factories import demo_rob, demo_std
from mixednuts_dist.config.register import STUDIES
from mixednuts_dist.config.run_config import parse_config
from mixednuts_dist.images.datasets import open_dataset
from mixednuts_dist.mixing.classifier import MixedClassifier
from mixednuts_dist.mixing.transforms import IdentityTransform
from mixednuts_dist.reports.counts import Count
from mixednuts_dist.storage.records import AttackRecords
from mixednuts_dist.storage.tables import read_columns
from mixednuts_dist.studies.bench import Bench
from mixednuts_dist.studies.searches import CLOSE
from mixednuts_dist.studies.study import Outcome, paper_tables, printed_for
from tests.helpers import plain
from tests.helpers.runs import tiny_content


class Rows:
    """The stored rows as numpy arrays."""

    def __init__(self, records: AttackRecords) -> None:
        self.labels, self.std = records.labels_N.numpy(), records.std_clean_NK.numpy()
        self.std_pred = self.std.argmax(axis=1)
        self.clean, self.attacked = records.rob_clean_NK.numpy(), records.rob_attacked_NK.numpy()
        self.survived = self.attacked.argmax(axis=1) == self.labels
        self.wrong = self.clean.argmax(axis=1) != self.labels


@pytest.fixture(scope="session")
def rows(bench: Bench) -> Rows:
    return Rows(bench.rows)


def outcome(bench: Bench, name: str) -> Outcome:
    return STUDIES.get(name)(bench)


def number(cell: Any) -> float:
    return float(cell)


def correct(cell: Any) -> int:
    return cell.correct


def mixed_model(bench: Bench) -> MixedClassifier:
    mixture = replace(bench.deployed(), surrogate_alpha=bench.search.surrogate_alpha)
    return MixedClassifier.from_mixture(demo_std(), demo_rob(), mixture)


def test_main_counts_what_the_files_hold(bench: Bench) -> None:
    table = outcome(bench, "main").table
    stored = read_columns(bench.run.rows, "attack", bench.run.partitions, bench.run.attack_content_hash, ["rob_broken"])
    assert correct(table.row("rob")["robust"]) == int((~stored["rob_broken"]).sum())
    x, y = open_dataset("digits").read(0, 24)
    assert correct(table.row("mixed")["clean"]) == int((mixed_model(bench)(x).argmax(1) == y).sum())
    assert correct(table.row("mixed")["robust"]) == bench.results.row("mixed").robust.correct


def test_study_reads_the_sample_of_the_search(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    config = bench.config
    sampled = Bench(
        config.with_changes(search=config.search.model_copy(update={"sample": 12})), executor=bench.executor, full=True
    )
    assert sampled.rows.sample_ids_N.tolist() == sampled.run.sample_ids.tolist()  # type: ignore[union-attr]
    assert sampled.sampling == ('"All images" are the 12 of 24 that the search read, drawn at random.',)
    assert len(sampled.first_rows.labels_N) == sampled.n_images == 24
    monkeypatch.setattr("mixednuts_dist.studies.bench.MOST_LOGITS", 170)  # two partitions of 8 at 10 classes
    assert Bench(sampled.config, executor=bench.executor, full=True).n_images == 16
    assert sampled.reduction == ("Attacked on the first 16 of 24 images: more rows do not fit in memory.",)


def test_the_error_rate_is_relative_to_robs(bench: Bench, rows: Rows) -> None:
    table = outcome(bench, "error-rate").table
    rob_errors = int(rows.wrong.sum())
    mixed_errors = 24 - correct(outcome(bench, "main").table.row("mixed")["clean"])
    assert table.row("clean")["relative change (%)"] == pytest.approx(100 * (mixed_errors - rob_errors) / rob_errors)


def test_each_form_has_the_margins_of_its_own_attack(bench: Bench, rows: Rows) -> None:
    table = outcome(bench, "margins").table
    layer_normed = plain.top2_margin(plain.layer_norm(rows.clean))
    assert table.row("rob+LN")["clean, right"] == pytest.approx(np.median(layer_normed[~rows.wrong]), rel=1e-6)
    end: Any = {"stop_when_broken": False}
    identity = IdentityTransform()
    rob = Rows(bench.attacked("again", identity, **end))
    right = np.median(plain.top2_margin(rob.attacked)[rob.survived])
    row, wrong = table.row("rob"), np.median(plain.top2_margin(rows.clean)[rows.wrong])
    found = [row[name] for name in ("attacked, right", "ratio", "gap")]
    assert found == pytest.approx([right, right / wrong, right - wrong], rel=1e-5)
    std = Rows(bench.attacked("again", identity, rob=bench.config.std, **end))
    assert np.array_equal(std.clean, rows.std)
    broken = plain.top2_margin(std.attacked)[~std.survived]
    assert table.row("std")["attacked, wrong"] == pytest.approx(np.median(broken), rel=1e-5)
    assert table.row("std")["attacked, right"] is table.row("std")["ratio"] is None, "std is right on no attacked image"
    to_the_end = Rows(bench.attacked("again", **end))
    assert (plain.signed_margin(to_the_end.attacked, rows.labels) < 0).sum() == (~rows.survived).sum()


def test_every_beta_has_a_cutoff_that_keeps_its_share(bench: Bench, rows: Rows) -> None:
    for beta, scale, power, bias, alpha, *_ in outcome(bench, "parameters").table.rows:
        mapped = plain.transformed(rows.attacked[rows.survived], number(scale), number(power), number(bias))
        q = plain.cutoff(plain.signed_margin(mapped, rows.labels[rows.survived]), float(str(beta)))
        assert number(alpha) >= 1 / (1 + q) - 1e-9, "no cutoff above the order statistic keeps beta"


def test_three_forms_of_rob(bench: Bench, rows: Rows) -> None:
    table = outcome(bench, "base-accuracy").table
    chosen = bench.search.deployed()
    mapped = plain.transformed(rows.clean, chosen.scale, chosen.power, chosen.bias)
    assert correct(table.row("h-M")["clean"]) == int((mapped.argmax(axis=1) == rows.labels).sum())
    # The raw form's attack, evaluated again on its own images by the classifier itself.
    records = bench.attacked("MMAA on h", IdentityTransform())
    assert correct(table.row("h")["attacked"]) == int((records.rob_attacked_NK.argmax(1) == records.labels_N).sum())
    assert not torch.equal(records.rob_attacked_NK, bench.rows.rob_attacked_NK)


def test_operations_are_those_of_the_layers(bench: Bench) -> None:
    table = outcome(bench, "efficiency").table
    # Output places x weights of each layer, a multiplication and an addition each.
    layers = 64 * 9 * 16 + 16 * 9 * 16 * 32 + 4 * 9 * 32 * 32 + 128 * 10
    assert number(table.row("rob")["GFLOPs"]) == pytest.approx(2 * layers / 1e9)
    assert number(table.row("mixed")["parameters (M)"]) == pytest.approx(2 * 15_338 / 1e6)


def paper_objective(rows: Rows, scale: float, power: float, bias: float, beta: float, clamp: Any = plain.gelu) -> float:
    kept = plain.top2_margin(plain.transformed(rows.attacked[rows.survived], scale, power, bias, clamp))
    wrong = plain.top2_margin(plain.transformed(rows.clean[rows.wrong], scale, power, bias, clamp))
    return float((wrong >= plain.cutoff(kept, beta)).mean())


def test_the_sensitivity_is_the_grids(bench: Bench, rows: Rows) -> None:
    table = outcome(bench, "sensitivity").table
    values = {
        power: [paper_objective(rows, s, power, c, bench.beta) for s in (0.5, 5.0) for c in (-0.5, 0.0)]
        for power in (1.0, 3.0)
    }
    best = min(min(found) for found in values.values())
    for power, found in values.items():
        row = table.row(f"{power:g}")
        assert number(row["best objective"]) == pytest.approx(min(found))
        assert row[f"candidates within {CLOSE:g} of the best"] == sum(value <= best + CLOSE for value in found)


def test_a_clamp_has_the_objective_of_its_own_formula(bench: Bench, rows: Rows) -> None:
    table = outcome(bench, "clamp").table
    for name, clamp in (("relu", plain.relu), ("gelu", plain.gelu)):
        row = table.row(name)
        s, p, c = (number(row[key]) for key in ("s", "p", "c"))
        assert number(row["objective"]) == pytest.approx(paper_objective(rows, s, p, c, bench.beta, clamp))


def test_mixed_is_equation_1_at_surrogate_beta(bench: Bench, rows: Rows) -> None:
    table = outcome(bench, "no-transform").table
    raw = plain.signed_margin(rows.attacked[rows.survived].astype(np.float64), rows.labels[rows.survived])
    beta = bench.config.search.surrogate_beta or bench.beta
    alpha = 1 / (1 + plain.cutoff(raw, beta))
    row = table.row("none (Mixed)")
    assert number(row["alpha"]) == pytest.approx(alpha)
    expected = int((plain.mixed_classes(rows.std, rows.clean, alpha, temperature=1) == rows.labels).sum())
    assert correct(row["clean on all images, exact"]) == correct(row["clean"]) == expected
    main = outcome(bench, "main").table
    assert correct(main.row("Mixed")["clean"]) == expected
    assert correct(table.row("M(s, p, c)")["clean"]) == correct(main.row("mixed")["clean"])


def test_the_relaxed_objective_counts_fewer_images(bench: Bench, rows: Rows) -> None:
    table = outcome(bench, "relaxed").table
    assert table.row("paper")["images it counts"] == int(rows.wrong.sum())
    assert table.row("relaxed")["images it counts"] == int((rows.wrong & (rows.std_pred == rows.labels)).sum())
    assert number(table.row("exact")["value"]) == pytest.approx(correct(table.row("exact")["clean, exact"]) / 24)


def test_assumptions_are_counted_image_by_image(bench: Bench, rows: Rows) -> None:
    table = outcome(bench, "assumptions").table
    for entry in bench.search.entries:
        row = table.row(f"{entry.beta:g}")
        clean, attacked = (
            plain.transformed(logits, entry.scale, entry.power, entry.bias).argmax(axis=1)
            for logits in (rows.clean, rows.attacked)
        )
        assert row["4.1, clean"] == int(((clean == rows.labels) & (rows.std_pred != rows.labels)).sum())
        assert row["4.2, clean"] == int((clean != rows.clean.argmax(axis=1)).sum())
        assert row["4.2, attacked"] == int((attacked != rows.attacked.argmax(axis=1)).sum())


def test_fewer_images_choose_by_themselves_alone(bench: Bench, rows: Rows) -> None:
    table = outcome(bench, "data-size").table
    everything, fewer = table.rows[0], table.rows[1]
    chosen = bench.search.deployed()
    assert everything[3:6] == (chosen.scale, chosen.bias, chosen.power)
    assert number(everything[6]) <= chosen.alpha, "what is deployed lies in the middle of the cutoff's step"
    size, scale, bias, power, alpha = int(str(fewer[0])), *(number(cell) for cell in fewer[3:7])
    survived = rows.survived[:size]
    mapped = plain.transformed(rows.attacked[:size][survived], scale, power, bias)
    q = plain.cutoff(plain.signed_margin(mapped, rows.labels[:size][survived]), bench.beta)
    assert alpha >= 1 / (1 + q) - 1e-9


def test_seen_and_unseen_are_the_two_halves(bench: Bench, rows: Rows) -> None:
    table = outcome(bench, "seen-unseen").table
    clean = [table.row(name)["clean"] for name in ("seen", "unseen")]
    assert [count.total for count in clean if isinstance(count, Count)] == [12, 12]
    half = rows.survived[:12]
    margins = {
        (s, p, c): plain.signed_margin(plain.transformed(rows.attacked[:12][half], s, p, c), rows.labels[:12][half])
        for s in (0.5, 5.0) for p in (1.0, 3.0) for c in (-0.5, 0.0)
    }  # fmt: skip
    right = {}
    for (s, p, c), margin in margins.items():
        alpha = 1 / (1 + plain.cutoff(margin, bench.beta))
        classes = plain.mixed_classes(rows.std, plain.transformed(rows.clean, s, p, c), alpha)
        right[s, p, c] = classes == rows.labels
    best = max(int(hits[:12].sum()) for hits in right.values())
    assert correct(clean[0]) == best
    assert correct(clean[1]) in {int(hits[12:].sum()) for hits in right.values() if int(hits[:12].sum()) == best}


def test_a_softer_std_is_as_accurate(bench: Bench, rows: Rows) -> None:
    table = outcome(bench, "temperature").table
    chosen = bench.search.deployed()
    mapped = plain.transformed(rows.clean, chosen.scale, chosen.power, chosen.bias)
    for name, temperature in (("T = 0", 0.0), ("T = 0.5", 0.5), ("T = 1", 1.0)):
        row = table.row(name)
        classes = plain.mixed_classes(rows.std, mapped, number(row["alpha"]), temperature)
        assert correct(row["clean on all images, exact"]) == int((classes == rows.labels).sum())
        assert correct(row["clean on all images, exact"]) >= chosen.clean_correct
        assert correct(row["clean"]) == correct(row["clean on all images, exact"])


@pytest.mark.parametrize(
    ("study", "row", "changes"),
    [
        ("surrogate", "r_d = 0", {"attacks": ("apgd-ce", "apgd-t", "square"), "rd": 0.0}),
        ("bypass", "transfer", {"mode": "transfer"}),
        ("bypass", "bypass", {"mode": "bypass"}),
    ],
)
def test_robust_images_withstand_their_stored_perturbation(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, study: str, row: str, changes: dict[str, Any]
) -> None:
    table, tasks = outcome(bench, study).table, list[Any]()
    monkeypatch.setattr("mixednuts_dist.studies.bench.run_partitions", lambda _, task, *__, **___: tasks.append(task))
    bench.measured("again", **changes, joint_starts=0)  # finds its rows finished
    (task,) = tasks
    stored = read_columns(bench.run.rows, task.stage, bench.run.partitions, task.content_hash, ["x_adv", "label"])
    x, _ = open_dataset("digits").read(0, 24)
    assert float((stored["x_adv"] - x).abs().max()) <= bench.config.threat.eps + 1e-6
    right = mixed_model(bench)(stored["x_adv"]).argmax(1) == stored["label"]
    assert correct(table.row(row)["robust"]) == int(right.sum())


def test_square_runs_after_the_white_box_attacks(bench: Bench) -> None:
    for _, robust, extra, before in outcome(bench, "surrogate").table.rows:
        assert correct(before) - number(extra) == correct(robust)


def test_the_objective_with_perturbations_against_h_m(bench: Bench) -> None:
    table = outcome(bench, "approximation").table
    chosen = bench.search.deployed()
    sources = {"h-LN": bench.rows, "h-M": bench.attacked("MMAA on h-M", bench.deployed().transform)}
    for name, records in sources.items():
        expected = paper_objective(Rows(records), chosen.scale, chosen.power, chosen.bias, bench.beta)
        assert number(table.row(name)["objective (%)"]) == pytest.approx(100 * expected)


def test_the_trade_off_measures_what_the_mixture_answers(bench: Bench, rows: Rows) -> None:
    table = outcome(bench, "trade-off").table
    assert [str(row[0]) for row in table.rows[:5]] == [
        f"MixedNUTS, beta = {beta}" for beta in ("1", "0.96", "0.93", "0.8", "0")
    ]
    raw = plain.signed_margin(rows.attacked[rows.survived].astype(np.float64), rows.labels[rows.survived])
    for beta in (1.0, 0.8):
        row = table.row(f"Mixed, beta = {beta:g}")
        alpha = 1 / (1 + plain.cutoff(raw, beta))
        assert number(row["alpha"]) == pytest.approx(alpha)
        classes = plain.mixed_classes(rows.std, rows.clean, alpha, temperature=1)
        assert correct(row["clean"]) == int((classes == rows.labels).sum())
    assert correct(table.row("rob")["robust"]) == int(rows.survived.sum())


def test_a_margin_is_that_of_the_stored_perturbation(bench: Bench, rows: Rows) -> None:
    table = outcome(bench, "base-choice").table
    margins = plain.signed_margin(plain.layer_norm(rows.attacked), rows.labels)
    row = table.row("rob")
    assert correct(row["margin 0"]) == int(rows.survived.sum())
    assert correct(row["margin 0.05"]) == int((margins >= 0.05).sum())
    assert len(table.rows) == 2


def test_confidence_is_the_median_behind_layer_norm(bench: Bench, rows: Rows) -> None:
    table = outcome(bench, "confidence").table
    margins = torch.from_numpy(plain.top2_margin(plain.layer_norm(rows.attacked))[rows.survived])
    assert number(table.row("rob")["attacked, right"]) == pytest.approx(float(margins.median()), rel=1e-6)
    assert correct(table.row("std (std)")["clean accuracy"]) == int((rows.std_pred == rows.labels).sum())


def test_parameters_travel_without_their_alpha(bench: Bench, rows: Rows) -> None:
    table = outcome(bench, "parameter-transfer").table
    own, other = table.rows
    chosen = bench.search.deployed()
    assert own[1:4] == (chosen.scale, chosen.bias, chosen.power)
    s, c, p = (number(cell) for cell in other[1:4])
    margins = plain.signed_margin(plain.transformed(rows.attacked[rows.survived], s, p, c), rows.labels[rows.survived])
    classes = plain.mixed_classes(
        rows.std, plain.transformed(rows.clean, s, p, c), 1 / (1 + plain.cutoff(margins, bench.beta))
    )
    assert correct(other[5]) == int((classes == rows.labels).sum())


def test_a_guess_needs_no_attack(bench: Bench, rows: Rows) -> None:
    table = outcome(bench, "black-box").table
    row = table.row("educated guess")
    assert (row["s"], row["c"], row["p"]) == (5.0, -1.1, 4.0)
    classes = plain.mixed_classes(rows.std, plain.transformed(rows.clean, 5, 4, -1.1), 0.9987500602493457)
    assert correct(row["clean"]) == int((classes == rows.labels).sum())
    assert {"Square as MMAA", "transfer from rob_light"} <= {str(cells[0]) for cells in table.rows}


def test_the_simplex_has_the_papers_vectors_and_needs_no_run(tmp_path: Path) -> None:
    unused = Bench(parse_config(tiny_content(tmp_path)))
    table = outcome(unused, "simplex").table
    assert not list(tmp_path.iterdir()), "no run has begun"
    for name in ("h", "h-M"):
        for example, logits in (("A preferred", [1.0, -1.1, -1.0]), ("B and C compete", [-1.0, 1.1, 1.0])):
            row = table.row(f"{example}, {name}, A at 0.9")
            h = np.array([logits])
            three = (plain.layer_norm(h) if name == "h" else plain.transformed(h, 3.0, 2.0, -0.5))[0] / number(
                row["tau"]
            )
            shares = np.exp(three - three.max()) / np.exp(three - three.max()).sum()
            assert [number(row[letter]) for letter in "ABC"] == pytest.approx(shares.tolist())
        assert number(table.row(f"A preferred, {name}, A at 0.9")["A"]) == pytest.approx(0.9)


def test_different_study_shows_no_paper_numbers(bench: Bench) -> None:
    found = outcome(bench, "seen-unseen")
    assert "saw 12 of 24" in found.differs
    assert printed_for("seen-unseen", found, bench.config) == ((), None)
    same, _ = printed_for("seen-unseen", replace(found, differs=""), bench.config)
    assert same == paper_tables("seen-unseen") != ()
