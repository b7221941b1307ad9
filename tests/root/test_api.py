"""MixedNUTS in one call: the parameters and counts of a run, and nothing of the caller's changed."""

import contextlib
import copy
import io
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import mixednuts_dist as mn
from mixednuts_dist.api import MixResult
from mixednuts_dist.config.run_config import parse_config
from mixednuts_dist.errors import DatasetError, InvalidInputError
from tests.helpers.runs import tiny_content

THREAT = mn.ThreatModel("Linf", 0.15)
FEW = {"n_iter": 5, "n_target_classes": 2}
SETTINGS: dict[str, Any] = {
    "beta": 0.9, "preset": "fast", "attack": FEW, "evaluate": FEW,
    "search": {"betas": [0.9, 0.5], "scales": [0.5, 5.0], "powers": [1.0, 3.0], "biases": [-0.5, 0.0], "rounds": 1},
}  # fmt: skip


def networks() -> tuple[torch.nn.Module, torch.nn.Module]:
    return mn.load_classifier("demo:std"), mn.load_classifier("demo:rob")


@pytest.fixture(scope="module")
def mixed_in_one_call(tmp_path_factory: pytest.TempPathFactory) -> tuple[MixResult, Path]:
    folder, (std, rob) = tmp_path_factory.mktemp("mix"), networks()
    std.train()
    before, threads = copy.deepcopy(std.state_dict()), torch.get_num_threads()
    images, labels = mn.open_dataset("digits").read(0, 24)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        result = mn.mix(std, rob, images, labels, threat=THREAT, folder=folder, verbose=True, **SETTINGS)
    assert re.search(r"attack +24/24 images.*\n(.*\n)*.*evaluate +24/24 images", said.getvalue())
    assert std.training and torch.get_num_threads() == threads
    assert all(torch.equal(value, before[name]) for name, value in std.state_dict().items())
    return result, folder


def test_mixture_and_report_are_those_of_the_run(mixed_in_one_call: tuple[MixResult, Path], tmp_path: Path) -> None:
    result, folder = mixed_in_one_call
    mixed, report = result.classifier, result.report
    assert not list(folder.glob("*/report/*.svg"))  # figures are drawn on demand
    chosen = report.search.deployed()
    assert mixed.mixture.settings() == chosen.settings()
    images, labels = mn.open_dataset("digits").read(0, 24)
    right = int((mixed(images).argmax(dim=1) == labels).sum())
    assert right == report.row("mixed").clean.correct
    assert report.search.rounds
    assert "mixed" in repr(report) and "<svg" in report.curve and "<table" in report._repr_html_()
    page = report.save(tmp_path / "report").read_bytes()
    assert page == report.files["index.html"] and page.startswith(b"<!DOCTYPE html")
    assert (tmp_path / "report" / "table.csv").is_file()


def test_what_cannot_be_mixed_is_refused_in_a_line() -> None:
    std, rob = networks()
    images, labels = mn.open_dataset("digits").read(0, 8)
    with pytest.raises(InvalidInputError, match=r"std is a function, not a torch module"):
        mn.mix(lambda x: x, rob, images, labels, threat=THREAT)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match=r"threat='Linf' is str; give ThreatModel\('Linf', 8 / 255\)"):
        mn.mix(std, rob, images, labels, threat="Linf")  # type: ignore[arg-type]
    for wrong, given in {
        r"^mix: images \(8, 1, 8, 8\) and labels \(3,\) are not N images with N labels": (images, labels[:3]),
        r"^mix: images range over \[0, 255\]": (images * 255, labels),
        r"^mix: labels must be integers, 0 or more; found float32": (images, labels.float()),
    }.items():
        with pytest.raises(DatasetError, match=wrong):  # and no file that the caller has never seen
            mn.mix(std, rob, *given, threat=THREAT)


def test_the_classifier_pickles_without_the_report(mixed_in_one_call: tuple[MixResult, Path]) -> None:
    result, _ = mixed_in_one_call
    images, _ = mn.open_dataset("digits").read(0, 4)
    copied = pickle.loads(pickle.dumps(result.classifier))
    assert torch.equal(copied(images), result.classifier(images))
    assert not hasattr(result.classifier, "report")


def test_a_stored_run_of_modules_says_that_they_are_not_in_it(mixed_in_one_call: tuple[MixResult, Path]) -> None:
    result, folder = mixed_in_one_call
    (run,) = folder.glob("*/runs/mix-*")
    assert not list(folder.glob("*.npz")), "the images are passed as they are"
    with pytest.raises(InvalidInputError, match="was a module that the caller passed to `run` or `mix`"):
        mn.load_run(str(run))
    assert b"load_run(" not in result.report.files["index.html"]


def test_run_takes_modules_and_images_in_place_of_uris(tmp_path: Path) -> None:
    """The rows equal those of a run whose URIs name the modules; the run id differs."""
    std, rob = networks()
    content = tiny_content(tmp_path / "runs", compute={"executor": "debug", "batch_size": 8})
    named = parse_config(content)
    given = parse_config({**content, "std": "given", "rob": "given", "data": {"uri": "given", "n": 24}})
    results = [
        mn.run(named, drawn=False),
        mn.run(given, classifiers={"std": std, "rob": rob}, images=mn.open_dataset("digits"), drawn=False),
    ]
    first, second = ([(row.clean, row.robust) for row in each.accuracy] for each in results)
    assert first == second
    assert results[0].search.deployed().settings() == results[1].search.deployed().settings()
    assert results[0].run_id != results[1].run_id


def test_a_dataset_feeds_a_data_loader() -> None:
    dataset = mn.open_dataset("digits")
    images, labels = next(iter(torch.utils.data.DataLoader(dataset, batch_size=8)))  # type: ignore[arg-type]
    expected_images, expected_labels = dataset.read(0, 8)
    assert torch.equal(images, expected_images) and torch.equal(labels, expected_labels)
    assert sum(1 for _ in dataset) == len(dataset)  # type: ignore[attr-defined]
