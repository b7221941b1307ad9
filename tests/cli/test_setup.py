"""Before a run: a configuration to start from, what it lacks, and what there is to choose from."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchvision
import yaml
from click.testing import CliRunner

from mixednuts_dist.classifiers.base_classifiers import load_classifier
from mixednuts_dist.cli import SECTIONS, main
from mixednuts_dist.config.run_config import load_config
from mixednuts_dist.config.uris import TWO_CHECKPOINTS, check_classifier_uri
from mixednuts_dist.errors import BaseClassifierError
from tests.helpers.object_store import ObjectStore
from tests.helpers.runs import tiny_content


def mixednuts(*arguments: str) -> tuple[int, str]:
    shown = CliRunner().invoke(main, arguments)
    return shown.exit_code, shown.output


def test_init_writes_a_configuration_that_is_valid_and_names_what_it_was_given(tmp_path: Path) -> None:
    file = str(tmp_path / "my photos.yaml")
    status, shown = mixednuts("init", file, "--images", "digits", "--std", "demo:std", "--rob", "demo:rob")
    assert status == 0, shown
    config = load_config(file)
    assert (config.name, config.data.uri, config.std, config.rob) == ("my-photos", "digits", "demo:std", "demo:rob")
    status, shown = mixednuts("init", file)
    assert status == 1
    assert "exists already" in shown


def test_init_writes_the_file_of_two_checkpoints_which_loads_them_and_gives_bare_networks(tmp_path: Path) -> None:
    status, shown = mixednuts("init", str(tmp_path / "mine.yaml"), "--images", "digits")
    assert status == 0, shown
    assert "nets.py are written" in " ".join(shown.split())
    saved = torchvision.models.resnet18(num_classes=10).eval()
    for name in ("std", "rob"):
        torch.save(saved.state_dict(), tmp_path / f"{name}.pth")
    config = load_config(tmp_path / "mine.yaml")
    std = load_classifier(str(config.std), "std")
    x_BCHW = torch.rand(2, 3, 32, 32)
    mean, deviation = (torch.tensor(v).view(3, 1, 1) for v in ((0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)))
    torch.testing.assert_close(std(x_BCHW), saved((x_BCHW - mean) / deviation))
    (tmp_path / "rob.pth").unlink()
    load_classifier(f"{config.rob}?weights=null", "rob")  # as an exported folder builds it


def test_a_file_of_weights_is_answered_with_the_function_that_it_lacks() -> None:
    with pytest.raises(BaseClassifierError, match=r"give std: py:nets\.py:std") as refused:
        check_classifier_uri("std.pth", "std")
    assert TWO_CHECKPOINTS in str(refused.value)


def test_check_names_everything_that_is_missing_with_a_command_and_imports_no_torch(tmp_path: Path) -> None:
    content = tiny_content(
        tmp_path / "runs", data={"uri": "npz:nowhere.npz"}, std="timm:resnet18?checkpoint=gone.pt",
        rob="robustbench:Carmon2019Unlabeled?dataset=cifar10",
    )  # fmt: skip
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(content))
    code = (
        "import sys\nfrom mixednuts_dist.cli import main\n"
        f"sys.argv = ['mixednuts', 'check', {str(tmp_path / 'mine.yaml')!r}]\n"
        "try:\n    main()\nfinally:\n    print([m for m in ('ray', 'torch') if m in sys.modules])\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert shown.returncode == 1
    for part in ("data.uri: file is missing", "nowhere.npz", "gone.pt", "Carmon2019Unlabeled", "[]"):
        assert part in shown.stdout, shown.stdout + shown.stderr
    assert not (tmp_path / "runs").exists()


def test_check_tells_a_wrong_uri_and_a_storage_that_is_no_folder_together(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    content = tiny_content(tmp_path / "file" / "runs", rob="demo:bor")
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(content))
    status, shown = mixednuts("check", str(tmp_path / "mine.yaml"))
    assert status == 1
    assert "rob='demo:bor'" in shown
    assert f"storage: {tmp_path / 'file'} is a file, not a folder" in shown


def test_check_asks_for_the_bucket_before_anything_is_loaded(tmp_path: Path, object_store: ObjectStore) -> None:
    content = tiny_content(tmp_path) | {"storage": "s3://no-such-bucket/runs"}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(content))
    status, shown = mixednuts("check", str(tmp_path / "mine.yaml"))
    assert status == 1
    assert "storage: s3://no-such-bucket: there is no such place" in shown
    assert "Create the bucket or folder, or correct `storage`" in shown
    assert "trying the classifiers" not in shown
    status, shown = mixednuts("check", str(tmp_path / "mine.yaml"), "--set", f"storage={object_store.uri('empty')}")
    assert status == 0, shown


def test_check_of_a_sound_configuration_says_what_it_saw_and_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(tiny_content(tmp_path / "runs")))
    status, shown = mixednuts("check", str(tmp_path / "mine.yaml"), "--local", "--set", "seed=3")
    assert status == 0, shown
    assert "24 images of 1 x 8 x 8, 10 classes" in shown
    assert f"Next: mixednuts run {tmp_path / 'mine.yaml'} --set seed=3 --local\n" in shown
    assert not (tmp_path / "runs").exists()


def test_list_shows_the_entries_of_the_package_and_of_your_files(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from mixednuts_dist.config.register import CLAMPS\n"
        "@CLAMPS('cube', describes='the third power')\n"
        "def cube(u_BK): return u_BK**3\n"
    )
    content = tiny_content(tmp_path / "runs", extensions=[str(tmp_path / "mine.py")])
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(content))
    assert "the third power" not in mixednuts("list")[1]
    status, shown = mixednuts("list", str(tmp_path / "mine.yaml"))
    assert status == 0, shown
    assert "datasets\n  digits " in shown
    assert "the third power  (yours)" in shown


@pytest.mark.parametrize("name", [str(command.name) for commands in SECTIONS.values() for command in commands])
def test_every_command_has_a_line_in_the_help_and_examples_of_its_own(name: str) -> None:
    status, shown = mixednuts(name, "--help")
    assert status == 0
    assert f"mixednuts {name}" in shown.split("Examples:")[1]
    line = next(line for line in mixednuts("--help")[1].splitlines() if line.split()[:1] == [name])
    assert len(line.split()) > 3


def test_local_and_a_cluster_exclude_each_other_and_every_stage_offers_both(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(tiny_content(tmp_path / "runs")))
    status, shown = mixednuts("run", str(tmp_path / "mine.yaml"), "--local", "--address", "127.0.0.1:6379")
    assert status == 2
    assert "--local uses no Ray cluster; leave --address out" in shown
    for command in ("run", "attack", "search", "evaluate", "study"):
        shown = mixednuts(command, "--help")[1]
        assert "--local" in shown
        assert "--address" in shown
        assert "Examples:" in shown
