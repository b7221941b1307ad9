"""`mixednuts export`: a folder that others can load and read, and what RobustBench takes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner, Result

from mixednuts_dist import load_pretrained, load_run
from mixednuts_dist.cli import main
from mixednuts_dist.config.versions import FAST
from mixednuts_dist.images.datasets import open_dataset
from tests.helpers.runs import rows_in


def export(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["export", *arguments])


def test_exported_folder_has_the_classifier_and_its_counts(run_folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "mixture"
    shown = export(str(run_folder), "--to", str(target))
    assert shown.exit_code == 0, shown.output
    images, _ = open_dataset("digits").read(0, 32)
    loaded = eval(shown.stdout.strip(), {"load_pretrained": load_pretrained})
    assert torch.equal(loaded(images), load_run(str(run_folder))(images))
    assert sorted(path.name for path in target.iterdir()) == [
        "README.md", "mixed_classifier.json", "rob.safetensors", "std.safetensors", "tradeoff.svg",
    ]  # fmt: skip
    _, front, text = (target / "README.md").read_text().split("---\n", 2)
    accuracy = yaml.safe_load((run_folder / "report/results.json").read_text())["accuracy"]
    (result,) = yaml.safe_load(front)["model-index"][0]["results"]
    assert [metric["value"] for metric in result["metrics"]] == [
        round(accuracy["mixed"][images]["percent"], 2) for images in ("clean", "robust")
    ]
    assert result["metrics"][1]["name"] == "robust accuracy (Linf, eps = 0.15)"
    for name, row in accuracy.items():
        assert f"| {name} | {row['clean']['percent']:.2f} [" in text
        assert row["attack"] in text
    assert "| 0.9 (this one) |" in text
    assert "![Clean against robust accuracy](tradeoff.svg)" in text


def test_another_beta_is_said_not_to_have_been_attacked(run_folder: Path, tmp_path: Path) -> None:
    assert export(str(run_folder), "--to", str(tmp_path), "--beta", "0.5").exit_code == 0
    text = (tmp_path / "README.md").read_text()
    assert "This beta has not been attacked" in text and "Robustness at this beta was not measured" in text
    assert "| 0.5 (this one) |" in text
    assert not (tmp_path / "tradeoff.svg").exists()
    assert load_pretrained(tmp_path).alpha == load_run(str(run_folder), beta=0.5).alpha


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUN", "--to", __file__], "test_export.py is a file; give the name of a folder"),
        (["RUN", "--to", "hf:org/name"], "hf:org/name: there is no token to upload with; run `hf auth login`"),
        (["RUN", "--to", "hf:name"], "--to hf:name is not of the form hf:ORG/NAME"),
        (["RUN", "--to", "hf:org/name", "--robustbench"], "--robustbench writes a folder"),
    ],
)
def test_what_cannot_be_exported_is_refused_in_a_line(
    arguments: list[str], message: str, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    shown = export(*(str(run_folder) if word == "RUN" else word for word in arguments))
    assert shown.exit_code != 0
    assert message in " ".join(shown.output.split())
    assert list(tmp_path.iterdir()) == []


def test_robustbench_export_keeps_the_order_of_the_test_set(run_folder: Path, tmp_path: Path) -> None:
    shown = export(str(run_folder), "--to", str(tmp_path), "--robustbench")
    assert shown.exit_code == 0, shown.output
    x_adv = torch.load(tmp_path / "x_adv.pt", weights_only=True)
    images, labels = open_dataset("digits").read(0, 24)
    assert x_adv.shape == images.shape
    assert x_adv.dtype == torch.float32
    assert float((x_adv - images).abs().max()) <= 0.15 + 1e-6
    robust = json.loads((run_folder / "report/results.json").read_text())["accuracy"]["mixed"]["robust"]["correct"]
    recounted = int((load_run(str(run_folder)).predict(x_adv) == labels).sum())
    assert abs(recounted - robust) <= 1  # a borderline image may change in another batch
    form = (tmp_path / "new_evaluation.md").read_text()
    assert f"**Robust accuracy:** {100 * robust / 24:.2f} % ({robust} of 24 images)" in form
    assert "**Leaderboard(s):** digits, Linf, eps = 0.15" in form
    assert "apgd-ce, apgd-t, fab-t, square (5 iterations, 2 targets, 20 queries)" in form
    assert "- **eps**: 0.15" in (tmp_path / "new_model.md").read_text()


def test_the_forms_name_no_attack_that_has_not_run(
    edited: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`preset: fast` has neither FAB nor Square."""
    folder = edited(lambda content: content["config"]["evaluate"].update(FAST))
    keep_rows(folder, monkeypatch)
    assert export(str(folder), "--to", str(tmp_path), "--robustbench").exit_code == 0
    for name in ("new_evaluation.md", "new_model.md"):
        form = (tmp_path / name).read_text()
        assert "apgd-ce, apgd-t (100 iterations, 3 targets), a joint attack (1 start)" in form
        assert not [word for word in ("quer", "fab") if word in form.casefold()]


def keep_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the run have its rows and its choice whatever its configuration becomes."""
    rows, selected = rows_in(folder, "evaluate").name, json.loads((folder / "search/selected.json").read_text())
    submission = "mixednuts_dist.deployment.robustbench_submission"
    monkeypatch.setattr(f"{submission}.evaluate_content_hash", lambda *_: rows)
    search = "mixednuts_dist.stages.search_result"
    monkeypatch.setattr(f"{search}.search_content_hash", lambda _: selected["content_hash"])


def test_images_that_break_the_threat_model_are_not_handed_in(
    edited: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they would after the data set's files were exchanged, or with a smaller radius."""
    folder = edited(lambda content: content["config"]["threat"].update(eps=0.1))
    keep_rows(folder, monkeypatch)
    shown = export(str(folder), "--to", str(tmp_path / "there"), "--robustbench")
    assert shown.exit_code == 1
    assert "partition 0 (images 0-7): a stored image is 0.15 away from the clean one" in " ".join(shown.output.split())
