"""The first steps of a newcomer: the file of two checkpoints and the student's page."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchvision

import mixednuts_dist as mn
from tests.helpers.pages import BLOCKS

HERE = "tests/root/test_paths.py"


def blocks_here(page: str, language: str) -> list[str]:
    return [b.text for b in BLOCKS if (b.page, b.language, b.reason) == (page, language, HERE)]


def test_the_file_of_two_checkpoints_loads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's lines, on weights that a training script has saved by `torch.save(model.state_dict(), ...)`."""
    (factories,) = blocks_here("README.md", "python")
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text(factories)
    saved = torchvision.models.resnet18(num_classes=10).eval()
    torch.save(saved.state_dict(), "std.pth")
    std = mn.load_classifier("py:nets.py:std", "std")
    x = torch.rand(2, 3, 32, 32)
    mean, deviation = (torch.tensor(v).view(1, 3, 1, 1) for v in ((0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)))
    torch.testing.assert_close(std(x), saved((x - mean) / deviation))


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_the_students_path_ends_in_the_papers_table(tmp_path: Path) -> None:
    """The page's files and commands in order, in an empty folder."""
    stand_ins, factories = blocks_here("mix-your-models.md", "python")
    (configuration,) = blocks_here("mix-your-models.md", "yaml")
    (commands,) = blocks_here("mix-your-models.md", "sh")
    (tmp_path / "nets.py").write_text(factories)
    (tmp_path / "mine.yaml").write_text(configuration)
    bin_folder = Path(sys.executable).parent
    for command in ([sys.executable, "-c", stand_ins], *([*line.split()] for line in commands.splitlines())):
        program = [str(bin_folder / command[0]), *command[1:]]
        shown = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert shown.returncode == 0, f"{command}\n{shown.stderr}"
    (report,) = tmp_path.glob("runs/mine/runs/mine-*/report")
    assert "ResNet-18" in (report / "table.tex").read_text()
    assert list(report.glob("tradeoff*.pdf"))
