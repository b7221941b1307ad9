"""A wheel and a source distribution of this tree, installed by plain pip, run the pipeline."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import mixednuts_dist

ROOT = Path(mixednuts_dist.__file__).parents[1]


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    shown = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert shown.returncode == 0, shown.stdout[-3000:] + shown.stderr[-3000:]
    return shown.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", pytest.param("sdist", marks=pytest.mark.soak)])
def test_what_is_built_installs_and_runs(kind: str, tmp_path: Path) -> None:
    """The new environment uses the dependencies of this one, because torch alone is 5 GB."""
    run(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", tmp_path / "dist", cwd=ROOT)
    (built,) = (tmp_path / "dist").iterdir()
    assert mixednuts_dist.__version__ in built.name
    venv.create(tmp_path / "fresh", with_pip=True)
    python = tmp_path / "fresh" / "bin" / "python"
    own = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
    (Path(own) / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed")
    run(python, "-m", "pip", "install", *options, built, cwd=tmp_path)
    where = run(python, "-c", "import mixednuts_dist as m; print(m.__file__, m.__version__)", cwd=tmp_path).split()
    assert where == [f"{own}/mixednuts_dist/__init__.py", mixednuts_dist.__version__]
    command = tmp_path / "fresh" / "bin" / "mixednuts"
    assert mixednuts_dist.__version__ in run(command, "--version", cwd=tmp_path)
    small = ("data.n=8", "partition_size=8", "attack.n_iter=2", "evaluate.n_iter=2", "evaluate.n_queries=2")
    changed = [part for value in small for part in ("--set", value)]
    run(command, "run", "--local", ROOT / "jobs" / "configs" / "digits.yaml", *changed, cwd=tmp_path)
    assert list(tmp_path.glob("runs/*/runs/*/report/index.html"))
