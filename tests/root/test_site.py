"""The examples draw their figures, and the site builds without a warning."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mixednuts_dist
from mixednuts_dist.config.register import STUDIES
from tests.helpers.runs import Finished

ROOT = Path(mixednuts_dist.__file__).parents[1]
WITHOUT_PICTURE = {"corruptions.py", "pgd.py", "serve.py"}  # an extension, an attack and a server
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.name not in WITHOUT_PICTURE)
SHOWN = ROOT / "docs" / "figures" / "examples"


@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_ends_in_a_picture(example: Path, tmp_path: Path) -> None:
    shown = subprocess.run([sys.executable, example], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    (shown_picture,) = SHOWN.glob(f"{example.stem}.*")
    assert (tmp_path / shown_picture.name).stat().st_size > 500


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_site_builds_without_warnings(tiny_run: Finished, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", ROOT / "docs", tmp_path / "site"]
    environment = {**os.environ, "MIXEDNUTS_DEMO": str(tiny_run.folder)}
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    assert (tmp_path / "site" / "demo-run" / "index.html").is_file()
    assert "demo-run/index.html" in (tmp_path / "site" / "quickstart.html").read_text()
    gallery = (tmp_path / "site" / "studies.html").read_text()
    assert not [
        name for name in STUDIES.names() if f"mixednuts study {name} CONFIG" not in re.sub("<[^>]+>", "", gallery)
    ]
    reference = (tmp_path / "site" / "api.html").read_text()
    assert not [name for name in mixednuts_dist.__all__ if f'id="mixednuts_dist.{name}"' not in reference]
