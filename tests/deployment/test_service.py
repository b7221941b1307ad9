"""`mixednuts serve` on loopback: the classifier's answers, who gave them, and what it refuses."""

import asyncio
import contextlib
import io
import json
import select
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import requests
import torch

from mixednuts_dist import MixedClassifier
from mixednuts_dist.deployment.service import (
    BOTH,
    MOST_IMAGES,
    ROB,
    Bodies,
    Full,
    ServiceOptions,
    application,
    decoded_images,
    serving,
)
from mixednuts_dist.errors import ClusterError, InvalidInputError, MissingArtifact
from mixednuts_dist.images.datasets import open_dataset
from tests.helpers.ports import free_ports

SHAPE = (1, 8, 8)


@pytest.fixture(scope="module")
def url(run_folder: Path, ray_executor: Any) -> Iterator[str]:
    """The run, served."""
    ray_executor.start()
    (port,) = free_ports(1)
    options = ServiceOptions(num_cpus=0.1)
    with serving({"/": application(str(run_folder), None, options)}, host="127.0.0.1", port=port):
        yield f"http://127.0.0.1:{port}/"


def npy(images: Any) -> bytes:
    sink = io.BytesIO()
    np.save(sink, np.asarray(images))
    return sink.getvalue()


@pytest.mark.slow
def test_a_load_of_concurrent_requests_is_answered_as_the_classifier_does(url: str, run_folder: Path) -> None:
    """120 requests of 1 to 3 images on 8 connections; std is asked for the images that rob leaves open, no others."""
    images, _ = open_dataset("digits").read(0, 240)
    parts = list(images.split([1, 2, 3] * 40))
    mixed = MixedClassifier.from_run(str(run_folder))
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda part: requests.post(url, npy(part), timeout=60).json(), parts))
    classes = [found for answer in answers for found in answer["classes"]]
    assert classes == mixed.predict(images).tolist()
    decided_by = [found for answer in answers for found in answer["decided_by"]]
    assert set(decided_by) == {ROB, BOTH}
    assert decided_by.count(ROB) == mixed.std_use.skipped


@pytest.mark.slow
def test_json_and_a_single_image_are_taken_too(url: str, run_folder: Path) -> None:
    images, _ = open_dataset("digits").read(0, 5)
    expected = MixedClassifier.from_run(str(run_folder)).predict(images).tolist()
    assert requests.post(url, json={"images": images.tolist()}, timeout=60).json()["classes"] == expected
    assert requests.post(url, npy(images[3].double()), timeout=60).json()["classes"] == expected[3:4]


@pytest.mark.slow
def test_it_says_what_is_served(url: str, run_folder: Path) -> None:
    told = requests.get(url, timeout=60).json()
    assert told["run"] == run_folder.name
    assert (told["std"], told["rob"], told["beta"]) == ("demo:std", "demo:rob", 0.9)
    assert (told["image_shape"], told["classes"], told["threat"]) == ([1, 8, 8], 10, "Linf, eps = 0.15")


@pytest.mark.slow
def test_a_bad_request_is_refused_and_the_next_one_answered(url: str) -> None:
    refused = requests.post(url, npy(np.full((1, *SHAPE), 255.0)), timeout=60)
    assert refused.status_code == 400
    assert refused.json()["error"] == "pixel values must lie in [0, 1]; divide bytes by 255"
    too_long = requests.post(url, b"{" + b" " * (MOST_IMAGES * 64 * 33), timeout=60)
    assert too_long.status_code == 400
    assert "send at most 1024 images" in too_long.json()["error"]
    assert requests.post(url, npy(np.zeros((1, *SHAPE))), timeout=60).status_code == 200


def begun(url: str, headers: str, body: bytes) -> socket.socket:
    """A POST of which so much is sent."""
    address = urlsplit(url)
    assert address.hostname is not None
    connection = socket.create_connection((address.hostname, address.port or 80), timeout=60)
    connection.sendall(f"POST / HTTP/1.1\r\nHost: {address.netloc}\r\n{headers}\r\n\r\n".encode() + body)
    return connection


def status_of(connection: socket.socket) -> int:
    return int(connection.makefile("rb").readline().split()[1])


@pytest.mark.slow
def test_200_requests_at_once_beside_clients_that_stop_in_mid_body_are_all_answered(url: str, run_folder: Path) -> None:
    images, _ = open_dataset("digits").read(0, 200)
    expected = MixedClassifier.from_run(str(run_folder)).predict(images).tolist()
    body = npy(images[:1])
    slow = [begun(url, f"Content-Length: {len(body)}", body[:100]) for _ in range(50)]
    at_once = threading.Barrier(200)

    def ask(i: int) -> list[int]:
        at_once.wait()
        answer = requests.post(url, npy(images[i : i + 1]), timeout=300)
        assert answer.status_code == 200, answer.text
        classes: list[int] = answer.json()["classes"]
        return classes

    with ThreadPoolExecutor(200) as threads:
        assert [one for classes in threads.map(ask, range(200)) for one in classes] == expected
    for connection in slow:
        connection.sendall(body[100:])
    assert [status_of(connection) for connection in slow] == [200] * 50
    for connection in slow:
        connection.close()


@pytest.mark.slow
@pytest.mark.parametrize("chunked", [False, True], ids=["with its length", "in chunks"])
def test_a_body_of_a_gigabyte_is_refused_before_its_end(url: str, chunked: bool) -> None:
    part, sent = bytes(2**20), 0
    headers, sending = f"Content-Length: {2**30}", part
    if chunked:
        headers, sending = "Transfer-Encoding: chunked", b"100000\r\n" + part + b"\r\n"
    with begun(url, headers, b"") as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while sent < 2**30 and not select.select([connection], [], [], 0)[0]:
                connection.sendall(sending)
                sent += len(part)
        assert status_of(connection) == 400
    assert sent < 2**30
    assert requests.post(url, npy(np.zeros((1, *SHAPE))), timeout=60).status_code == 200


def test_bodies_that_are_being_read_take_bounded_memory() -> None:
    """A gigabyte is left where it is too long; slow ones share the room, and it is free again when they end."""
    asked = 0

    async def chunks(n: int) -> AsyncIterator[bytes]:
        nonlocal asked
        for _ in range(n):
            asked += 1
            await asyncio.sleep(0)
            yield bytes(1000)

    async def at_once(*sizes: int) -> list[bytes | BaseException]:
        return await asyncio.gather(*(bodies.read(chunks(n)) for n in sizes), return_exceptions=True)

    bodies = Bodies(most=10_000, most_held=25_000)
    assert [len(body) for body in asyncio.run(at_once(10, 10)) if isinstance(body, bytes)] == [10_000, 10_000]
    (refused,) = asyncio.run(at_once(1_000_000))
    assert isinstance(refused, InvalidInputError)
    assert asked == 10 + 10 + 11
    found = asyncio.run(at_once(10, 10, 10))
    assert [type(one) for one in found].count(Full) == 1
    assert bodies.held == 0
    imagenet = Bodies.of_images(3 * 224 * 224)
    assert imagenet.most == imagenet.most_held > MOST_IMAGES * 3 * 224 * 224 * 8  # an .npy file of float64
    assert Bodies.of_images(64).most < 10_000_000


def huge_header() -> bytes:
    """Says that 2.9 TiB follow."""
    sink = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        sink, {"descr": "<f4", "fortran_order": False, "shape": (800_000_000_000, 1, 8, 8)}
    )
    return sink.getvalue()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "neither an .npy file nor JSON"),
        (b"hello", "neither an .npy file nor JSON"),
        (b"[" * 100_000, "neither an .npy file nor JSON"),
        (b'{"pictures": []}', "KeyError"),
        (b'{"images": [[1, 2], [3]]}', "ValueError"),
        (b'{"images": []}', r"the images have the shape \(0,\); it must be \(B, 1, 8, 8\)"),
        (json.dumps({"images": [[[[None] * 8] * 8]]}).encode(), r"must lie in \[0, 1\]"),
        (npy(np.zeros((1, 3, 8, 8))), r"the images have the shape \(1, 3, 8, 8\)"),
        (npy(np.zeros((2, *SHAPE), np.uint8)), "says uint8 of shape"),
        (npy(np.full((1, *SHAPE), np.nan)), r"must lie in \[0, 1\]"),
        (npy(np.zeros((1, *SHAPE)))[:-8], "bytes came"),
        (huge_header(), "bytes came"),
        (npy(np.zeros((MOST_IMAGES + 1, *SHAPE), np.float32)), "with 1 to 1024 images"),
        (b"\x93NUMPY\x01\x00\x76\x00" + b"{'descr': __import__('os'), }".ljust(118), "cannot be read as floats"),
    ],
)
def test_what_is_no_batch_of_images_is_told(body: bytes, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        decoded_images(body, SHAPE)


def test_decoded_images_are_float32_batches() -> None:
    images = torch.rand(3, *SHAPE).numpy()
    assert np.array_equal(decoded_images(npy(images), SHAPE), images)
    assert decoded_images(npy(images[0].astype(">f8")), SHAPE).shape == (1, *SHAPE)
    assert decoded_images(json.dumps({"images": images.tolist()}).encode(), SHAPE).dtype == np.float32


def test_a_port_that_is_taken_and_a_run_that_is_not_there_are_told_at_once(run_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingArtifact, match="holds no run"):
        application(str(tmp_path), None, ServiceOptions())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        made = {"/": application(str(run_folder), None, ServiceOptions())}
        with (
            pytest.raises(ClusterError, match=rf"cannot serve on 127\.0\.0\.1:{port}"),
            serving(made, host="127.0.0.1", port=port),
        ):
            pass
