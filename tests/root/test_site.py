"""The examples draw their figures or serve, and the site builds without a warning."""

import io
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import requests

import mixednuts_dist as mn
from mixednuts_dist.config.register import STUDIES
from tests.helpers.ports import free_ports
from tests.helpers.runs import Finished

ROOT = Path(mn.__file__).parents[1]
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
    assert not [name for name in mn.__all__ if f'id="mixednuts_dist.{name}"' not in reference]


def npy(images: object) -> bytes:
    sink = io.BytesIO()
    np.save(sink, np.asarray(images))
    return sink.getvalue()


def answered(url: str, body: bytes, server: "subprocess.Popen[bytes]") -> requests.Response:
    """Return the first answer of a server that is starting."""
    until = time.monotonic() + 240
    while time.monotonic() < until and server.poll() is None:
        try:
            if (answer := requests.post(url, body, timeout=60)).status_code == 200:
                return answer
        except requests.ConnectionError:
            time.sleep(1)
    raise AssertionError("examples/serve.py did not answer")


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_serve_example_equals_the_classifier(tiny_run: Finished) -> None:
    (port,) = free_ports(1)
    url, run = f"http://127.0.0.1:{port}/", str(tiny_run.folder)
    own_ray = {**os.environ, "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_ADDRESS": "local"}
    with subprocess.Popen([sys.executable, ROOT / "examples" / "serve.py", run, str(port)], env=own_ray) as server:
        try:
            images, _ = mn.open_dataset("digits").read(0, 24)
            answer = answered(url, npy(images), server)
            assert answer.json() == {"classes": mn.load_run(run).predict(images).tolist()}
            for bad in (npy(images[:, :, :4]), npy(255 * images), b"hello"):
                assert requests.post(url, bad, timeout=60).status_code == 400
            assert requests.post(url, npy(images[:1]), timeout=60).status_code == 200
        finally:
            server.terminate()  # a background job ignores SIGINT, and so does what it starts
            server.wait(60)
