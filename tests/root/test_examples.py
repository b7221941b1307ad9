"""The examples that other tests do not run."""

import io
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import requests

from mixednuts_dist import load_run
from mixednuts_dist.images.datasets import open_dataset
from tests.helpers.ports import free_ports
from tests.helpers.runs import Finished

EXAMPLES = Path(__file__).parents[2] / "examples"
SECONDS_TO_START = 240


def npy(images: object) -> bytes:
    sink = io.BytesIO()
    np.save(sink, np.asarray(images))
    return sink.getvalue()


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_serve_example_equals_the_classifier(tiny_run: Finished) -> None:
    (port,) = free_ports(1)
    url, run = f"http://127.0.0.1:{port}/", str(tiny_run.folder)
    command = [sys.executable, str(EXAMPLES / "serve.py"), run, str(port)]
    on_its_own_ray = {**os.environ, "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_ADDRESS": "local"}
    with subprocess.Popen(command, env=on_its_own_ray) as server:
        try:
            images, _ = open_dataset("digits").read(0, 24)
            answer = answered(url, npy(images), server)
            assert answer.json() == {"classes": load_run(run).predict(images).tolist()}
            for bad in (npy(images[:, :, :4]), npy(255 * images), b"hello"):
                assert requests.post(url, bad, timeout=60).status_code == 400
            assert requests.post(url, npy(images[:1]), timeout=60).status_code == 200
        finally:
            server.terminate()  # a background job ignores SIGINT, and so does what it starts
            server.wait(60)


def answered(url: str, body: bytes, server: "subprocess.Popen[bytes]") -> requests.Response:
    until = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < until and server.poll() is None:
        try:
            if (answer := requests.post(url, body, timeout=60)).status_code == 200:
                return answer
        except requests.ConnectionError:
            time.sleep(1)
    raise AssertionError("examples/serve.py did not answer")
