"""A run is self-contained: it loads and exports from other folders and without its Python file."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from click.testing import CliRunner

from mixednuts_dist import load_classifier, load_pretrained, load_run
from mixednuts_dist.classifiers.factories import demo_rob, demo_std
from mixednuts_dist.cli import main
from mixednuts_dist.config.run_config import load_config
from mixednuts_dist.config.uris import ClassifierSource, DatasetSource, beside, travelled
from mixednuts_dist.errors import BaseClassifierError, InvalidInputError
from mixednuts_dist.images.datasets import open_dataset

NETS = """
from pathlib import Path
import torch
from mixednuts_dist.classifiers.factories import DigitsNet

def std(weights="std.pth"):
    return made(weights)

def rob(weights="rob.pth"):
    return made(weights)

def made(weights):
    net = DigitsNet((16, 32))
    if weights is not None:
        net.load_state_dict(torch.load(Path(__file__).parent / weights))
    return net
"""
FEW = {"n_iter": 3, "n_target_classes": 1}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with a configuration, its classifiers and images, and the run that was made from another folder."""
    home, storage = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("storage")
    (home / "nets.py").write_text(NETS)
    torch.save(demo_std().state_dict(), home / "std.pth")
    torch.save(demo_rob().state_dict(), home / "rob.pth")
    images, labels = open_dataset("digits").read(0, 24)
    np.savez(home / "images.npz", images=images.numpy(), labels=labels.numpy())
    (home / "mine.yaml").write_text(
        yaml.safe_dump({
            "name": "mine", "std": "py:nets.py:std", "rob": "py:nets.py:rob",
            "threat": {"norm": "Linf", "eps": 0.1}, "storage": str(storage), "compute": {"executor": "debug"},
            "attack": {**FEW, "border_restarts": 0}, "precision": "fp32", "data": {"uri": "npz:images.npz", "n": 8},
            "search": {"rounds": 0, "beta": 0.5, "scales": [1], "powers": [1, 2], "biases": [0]},
            "evaluate": {**FEW, "attacks": ["apgd-ce"], "joint_starts": 0},
        })
    )  # fmt: skip
    answer = CliRunner().invoke(main, ["run", str(home / "mine.yaml")], catch_exceptions=False)
    assert answer.exit_code == 0, answer.output
    return home, next((storage / "mine" / "runs").iterdir())


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "elsewhere"


@pytest.mark.usefixtures("elsewhere")
def test_paths_are_relative_to_the_configuration_file(project, monkeypatch):
    home, run = project
    from_elsewhere = load_config(home / "mine.yaml")
    assert from_elsewhere.rob == f"py:{home}/nets.py:rob"
    assert from_elsewhere.model_dump(mode="json")["rob"] == "py:nets.py:rob"
    monkeypatch.chdir(home)
    assert load_config("mine.yaml").run_id() == from_elsewhere.run_id() == run.name
    described = yaml.safe_load((run / "run.yaml").read_text())
    assert described["folder"] == str(home)
    assert described["config"]["data"]["uri"] == "npz:images.npz"


def test_a_run_is_loaded_and_exported_from_any_folder(project, elsewhere):
    home, run = project
    mixed = load_run(str(run), trust_code=True)
    answer = CliRunner().invoke(main, ["export", str(run), "--to", "mixture", "--trust-code"], catch_exceptions=False)
    assert answer.exit_code == 0, answer.output
    assert 'load_pretrained("mixture", trust_code=True)' in answer.output
    assert "writing weights, parameters and card" in answer.output, "it takes a while, and says what it does"
    assert (elsewhere / "mixture" / "nets.py").read_text() == NETS

    (home / "std.pth").rename(home / "moved.pth")  # the weights are in the exported folder
    try:
        with pytest.raises(InvalidInputError, match=r"nets.py of mixture, which is run only if you ask"):
            load_pretrained("mixture")
        loaded = load_pretrained("mixture", trust_code=True)
    finally:
        (home / "moved.pth").rename(home / "std.pth")
    images, _ = open_dataset("digits").read(0, 24)
    assert torch.equal(loaded(images), mixed(images))


def test_import_of_a_sibling_file_names_pythonpath(project, tmp_path, monkeypatch):
    (tmp_path / "sibling_nets.py").write_text(NETS)
    (tmp_path / "both.py").write_text("from sibling_nets import rob, std\n")
    (tmp_path / "absent.py").write_text("import no_such_module_anywhere\n")
    with pytest.raises(BaseClassifierError, match=f"is next to both.py: export PYTHONPATH={tmp_path}, or move"):
        load_classifier(f"py:{tmp_path}/both.py:rob?weights={project[0]}/rob.pth", "rob")
    searched = f"'no_such_module_anywhere', which is neither installed nor in {tmp_path}. Set PYTHONPATH"
    with pytest.raises(BaseClassifierError, match=searched):
        load_classifier(f"py:{tmp_path}/absent.py:rob", "rob")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_classifier(f"py:{tmp_path}/both.py:rob?weights={project[0]}/rob.pth", "rob")


@pytest.mark.usefixtures("elsewhere")
def test_the_runs_copy_stands_for_a_file_that_was_edited(project):
    home, run = project
    before = load_run(str(run), trust_code=True)
    here = home / "std.pth", home / "rob.pth"
    try:
        (home / "nets.py").write_text("raise RuntimeError('edited')\n")
        copy = next(run.glob("code/*/nets.py"))
        for weights in here:
            os.link(weights, copy.parent / weights.name)
        after = load_run(str(run), trust_code=True)
    finally:
        (home / "nets.py").write_text(NETS)
        for weights in here:
            (copy.parent / weights.name).unlink(missing_ok=True)
    images, _ = open_dataset("digits").read(0, 24)
    assert torch.equal(after(images), before(images))


def test_located_finds_files_of_the_driver_or_the_job(tmp_path, elsewhere):
    driver = tmp_path / "driver"
    driver.mkdir()
    (driver / "nets.py").write_text(NETS)
    assert ClassifierSource("py:nets.py:rob").located(travelled(str(driver))) == f"py:{driver}/nets.py:rob"
    (driver / "nets.py").rename(elsewhere / "nets.py")
    assert ClassifierSource(f"py:{driver}/nets.py:rob").located(travelled(str(driver))) == "py:nets.py:rob"
    assert DatasetSource("npz:a.npz").located(travelled(str(elsewhere))) == "npz:a.npz"


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("source", "there"),
    [
        (ClassifierSource("timm:resnet18?checkpoint=a.pth"), "timm:resnet18?checkpoint={}/a.pth"),
        (DatasetSource("npz:a.npz"), "npz:{}/a.npz"),
        (DatasetSource("parquet:a.npz"), "parquet:{}/a.npz"),
        (DatasetSource("parquet:s3://bucket/a.npz"), "parquet:s3://bucket/a.npz"),
        (ClassifierSource("callable:a.py:f"), "callable:a.py:f"),
        (DatasetSource("digits"), "digits"),
        (DatasetSource("npz:not-there.npz"), "npz:not-there.npz"),
    ],
)
def test_located_resolves_only_existing_files(source, there, tmp_path):
    for name in ("a.pth", "a.npz", "a.py"):
        Path(tmp_path, name).touch()
    assert source.located(beside(tmp_path)) == there.format(tmp_path)


@pytest.mark.parametrize("command", ["status", "report"])
def test_command_takes_a_run_folder(project, command):
    _, run = project
    answer = CliRunner().invoke(main, [command, str(run)], catch_exceptions=False)
    assert answer.exit_code == 0, answer.output
    changed = CliRunner().invoke(main, ["status", str(run), "--set", "seed=1"], catch_exceptions=False)
    assert changed.exit_code == 1
    assert "the configuration of a run cannot be changed. Drop seed=1" in " ".join(changed.output.split())


def test_a_renamed_run_is_refused_with_its_name(project, tmp_path):
    _, run = project
    (tmp_path / "other").symlink_to(run)
    answer = CliRunner().invoke(main, ["status", str(tmp_path / "other")], catch_exceptions=False)
    assert answer.exit_code == 1
    assert f"contains run {run.name}, but its address does not end in" in " ".join(answer.output.split())
