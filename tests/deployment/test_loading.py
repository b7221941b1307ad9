"""A run's folder loads as its classifier in one line; missing, different or damaged parts raise."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mixednuts_dist import load_run
from mixednuts_dist.cli.options import Invocation
from mixednuts_dist.deployment import loading
from mixednuts_dist.errors import ConfigError, ContentHashMismatch, DamagedFile, InvalidInputError, MissingArtifact
from mixednuts_dist.images.datasets import open_dataset
from mixednuts_dist.storage.partitions import Partition
from mixednuts_dist.storage.store import Store
from mixednuts_dist.storage.tables import read_columns
from tests.helpers.runs import Finished, rows_in

Edit = Callable[[Callable[[dict[str, Any]], object]], Path]


def test_the_loaded_mixture_gives_the_logits_that_the_run_stored(run_folder: Path) -> None:
    mixed = load_run(str(run_folder))
    part, content_hash = Partition(0, 0, 8), rows_in(run_folder, "evaluate").name
    store = Store(str(run_folder.parents[1]))
    stored = read_columns(store, "evaluate", [part], content_hash, ["mixed_clean", "mixed_attacked", "x_adv"])
    images, _ = open_dataset("digits").read(0, 8)
    with torch.no_grad():
        torch.testing.assert_close(mixed(images), stored["mixed_clean"], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mixed(stored["x_adv"]), stored["mixed_attacked"], rtol=1e-4, atol=1e-4)


def test_another_beta_gives_its_own_parameters(run_folder: Path) -> None:
    entries = json.loads((run_folder / "search/selected.json").read_text())["result"]["entries"]
    for entry in entries:
        mixed = load_run(str(run_folder), beta=entry["beta"])
        assert (mixed.alpha, mixed.mixture.one_minus_alpha) == (entry["alpha"], entry["one_minus_alpha"])
        assert mixed.transform.settings()["bias"] == entry["bias"]
    with pytest.raises(
        InvalidInputError, match=r"beta=0\.95 was not searched in run tiny-\w+; these were: 1, 0\.9, 0\.5"
    ):
        load_run(str(run_folder), beta=0.95)


def test_a_run_in_a_bucket_loads_like_one_in_a_folder(run_folder: Path, object_store: object) -> None:
    uri = object_store.uri(f"deployed/{run_folder.name}")  # type: ignore[attr-defined]
    bucket = Store(uri)
    for name in ("run.yaml", "search/selected.json"):
        bucket.write(name, (run_folder / name).read_bytes())
    images, _ = open_dataset("digits").read(0, 4)
    there, here = load_run(uri), load_run(str(run_folder))
    assert torch.equal(there(images), here(images))


def test_a_run_of_another_release_is_refused_in_one_line(edited: Edit) -> None:
    folder = edited(lambda content: (content.pop("version"), content["versions"].update({"mixednuts-dist": "0.3.0"})))
    for reads in (load_run, lambda run: Invocation(run).config):
        with pytest.raises(ConfigError, match=r"release 0\.3\.0") as refused:
            reads(str(folder))
        assert len(str(refused.value).splitlines()) == 1


def test_a_folder_without_a_run_names_those_below_it(run_folder: Path) -> None:
    with pytest.raises(MissingArtifact, match=rf"holds no run .*below it do: .*{run_folder.name}"):
        load_run(str(run_folder.parent))
    with pytest.raises(MissingArtifact, match=r"holds no run \(no run\.yaml\)\. Give the folder"):
        load_run(str(run_folder / "nothing"))


def test_a_run_without_a_search_says_so(copied_run: Finished) -> None:
    folder = copied_run.folder
    (folder / "search/selected.json").unlink()
    with pytest.raises(MissingArtifact, match=r"has not been searched yet: .*Run: mixednuts search"):
        load_run(str(folder))


def test_a_run_of_rob_alone_has_no_mixture(edited: Edit) -> None:
    folder = edited(lambda content: content["config"].update(std=None))
    with pytest.raises(InvalidInputError, match="without `std` there is no mixed classifier"):
        load_run(str(folder))


def test_other_weights_than_the_runs_are_refused(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = loading.classifier_checksum
    monkeypatch.setattr(loading, "classifier_checksum", lambda net, uri: real(net, uri)[::-1])
    with pytest.raises(ContentHashMismatch, match=r"std='demo:std': its weights are not those .*was \w{12} and is"):
        load_run(str(run_folder))


def test_the_choice_of_another_run_is_refused(edited: Edit) -> None:
    folder = edited(lambda content: content["config"]["search"].update(scales=[1, 2]))
    with pytest.raises(ContentHashMismatch, match=r"selected\.json has the content hash \w+, this run has"):
        load_run(str(folder))


@pytest.mark.parametrize("damage", [lambda text: text[:100], lambda text: text.replace('"scale": 5', '"scale": 4', 1)])
def test_a_damaged_choice_is_refused_and_kept(copied_run: Finished, damage: Callable[[str], str]) -> None:
    folder = copied_run.folder
    path = folder / "search/selected.json"
    damaged = damage(path.read_text())
    assert damaged != path.read_text()
    path.write_text(damaged)
    with pytest.raises(DamagedFile, match=r"selected\.json is damaged"):
        load_run(str(folder))
    assert path.read_text() == damaged
