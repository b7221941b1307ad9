"""A black-box standard classifier: a real service on loopback, plain functions, and unusable answers."""

import io
import itertools
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import numpy as np
import pytest
import torch

from mixednuts_dist.classifiers import black_box_classifier as black_box
from mixednuts_dist.classifiers.base_classifiers import check_classifier, classifier_checksum, load_classifier
from mixednuts_dist.classifiers.black_box_classifier import BlackBoxClassifier
from mixednuts_dist.errors import BaseClassifierError
from tests.helpers.loopback import serving

FUNCTIONS = """
import numpy as np

def brightest(images, flip=False):
    logits = images.mean(axis=(2, 3))
    return -logits if flip else logits

def classes(images):
    return images.mean(axis=(2, 3)).argmax(axis=1)

def noisy(images):
    return np.random.rand(len(images), 3)
"""


def npy(images: np.ndarray) -> list[bytes]:
    sink = io.BytesIO()
    np.save(sink, images.mean(axis=(2, 3)))
    return [sink.getvalue()]


@dataclass
class Service:
    """Refuses some batches of images, then sends `head` and the blocks of `answer`, and records what it did."""

    answer: Callable[[np.ndarray], Iterable[bytes]] = npy
    head: str = "HTTP/1.1 200 OK"
    n_refused: int = 0
    n_images: list[int] = field(default_factory=list)  # per request
    sent: int = 0

    def __call__(self, request: BaseHTTPRequestHandler) -> None:
        images = np.load(io.BytesIO(request.rfile.read(int(request.headers["Content-Length"]))), allow_pickle=False)
        self.n_images.append(len(images))
        request.close_connection = True
        refuses = len(self.n_images) <= self.n_refused
        head = "HTTP/1.1 503 Busy\nContent-Length: 0" if refuses else self.head
        request.wfile.write(f"{head}\nConnection: close\n\n".replace("\n", "\r\n").encode())
        for block in () if refuses else self.answer(images):
            request.wfile.write(block)
            self.sent += len(block)


def error_of(service: Service, fragment: str = "#classes=3") -> str:
    """Return the message about an answer to two images."""
    with serving(service) as url, pytest.raises(BaseClassifierError) as caught:
        load_classifier(f"{url}{fragment}", "std")(torch.rand(2, 3, 4, 4))
    return str(caught.value)


@pytest.fixture
def functions(tmp_path: Path) -> str:
    (tmp_path / "answers.py").write_text(FUNCTIONS)
    return f"callable:{tmp_path / 'answers.py'}"


def logits_of(x: torch.Tensor) -> torch.Tensor:
    return x.mean(dim=(2, 3))


def test_a_service_answers_in_batches_and_is_asked_once_an_image() -> None:
    service, x = Service(n_refused=2), torch.rand(150, 3, 4, 4)  # refused as if it were overloaded
    with serving(service) as url:
        model = load_classifier(url, "std")
        assert torch.allclose(model(x), logits_of(x), atol=1e-6)
        assert torch.equal(model(x[:70]), model(x)[:70])
        assert service.n_images == [64, 64, 64, 64, 22]
        assert check_classifier(model, x[:8], "std") == 3
        assert not model(x.requires_grad_()).requires_grad


@pytest.mark.parametrize("answer", ["logits", "classes"])
def test_json_answers(answer: str) -> None:
    rows = {"logits": lambda logits: logits, "classes": lambda logits: logits.argmax(axis=1)}[answer]
    service = Service(lambda images: [json.dumps({answer: rows(images.mean(axis=(2, 3))).tolist()}).encode()])
    x = torch.rand(5, 3, 4, 4)
    with serving(service) as url:
        logits = load_classifier(f"{url}#classes=3", "std")(x)
    assert torch.equal(logits.argmax(dim=1), logits_of(x).argmax(dim=1))
    assert logits.shape == (5, 3)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"<html>login</html>", "answered b'<html>login"),
        (b'{"label": 3}', "JSON with logits or classes"),
        (b'{"classes": [0, 1]}', "#classes=K"),
        (b'{"logits": [[1, 2]]}', "shape (1, 2) for 2 images"),
        (b"[" * 20_000, "answered b"),
        (b'{"logits": [[1, 2], [3]]}', "answered b"),
        (b'{"classes": [1e400]}', "answered b"),
    ],
)
def test_answers_that_are_none_are_quoted(body: bytes, message: str) -> None:
    assert message in error_of(Service(lambda _: [body]), fragment="")


def test_a_service_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(black_box, "_RETRIES", black_box._RETRIES.new(total=1))
    with pytest.raises(BaseClassifierError, match=r"http://127.0.0.1:9/x does not answer"):
        load_classifier("http://127.0.0.1:9/x", "std")(torch.rand(1, 3, 4, 4))


def test_callable_takes_options_and_hashes_its_source(functions: str, tmp_path: Path) -> None:
    x = torch.rand(4, 3, 5, 5)
    uri = f"{functions}:brightest?flip=true"
    model = load_classifier(uri, "std")
    assert torch.allclose(model(x), -logits_of(x), atol=1e-6)
    before = classifier_checksum(model, uri)
    assert before != classifier_checksum(model, f"{functions}:brightest")
    (tmp_path / "answers.py").write_text(FUNCTIONS + "\n# changed\n")
    assert classifier_checksum(model, uri) != before


def test_answered_classes_become_certain_logits(functions: str) -> None:
    x = torch.rand(6, 3, 5, 5)
    logits = load_classifier(f"{functions}:classes#classes=3", "std")(x)
    assert torch.equal(logits.argmax(dim=1), logits_of(x).argmax(dim=1))
    assert logits.softmax(dim=1).max(dim=1).values == pytest.approx(1)
    with pytest.raises(BaseClassifierError, match="classes 2 to 2 of 2"):
        BlackBoxClassifier(lambda images: np.full(len(images), 2), 2)(x)


def test_a_random_answer_is_told_although_answers_are_kept(functions: str) -> None:
    with pytest.raises(BaseClassifierError, match="the forward is random"):
        check_classifier(load_classifier(f"{functions}:noisy", "std"), torch.rand(4, 3, 5, 5), "std")


@pytest.mark.parametrize("fragment", ["class=3", "classes=x", "classes=3&more=1", "classes="])
def test_a_wrong_fragment_is_refused(fragment: str) -> None:
    with pytest.raises(BaseClassifierError, match="only classes=K may follow"):
        load_classifier(f"http://host/x#{fragment}", "std")


def test_the_answers_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(black_box, "_MOST_KEPT", 4)
    asked: list[int] = []

    def ask(images: np.ndarray) -> np.ndarray:
        asked.append(len(images))
        return images.reshape(len(images), -1)[:, :3]

    model, x = BlackBoxClassifier(ask), torch.rand(10, 1, 2, 2)
    model(x)
    model(x[-4:])
    model(x[:1])
    assert asked == [10, 1]


def test_no_more_is_read_than_an_answer_can_need() -> None:
    service = Service(lambda _: itertools.repeat(bytes(1 << 16)))
    assert "answered with more than 65728 bytes to 2 images" in error_of(service)
    assert service.sent < 64 << 20, "the rest was left with the server and in the sockets"


def test_an_answer_that_drips_ends_at_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def drip(_: np.ndarray) -> Iterator[bytes]:
        while True:
            threading.Event().wait(0.05)
            yield b" "

    monkeypatch.setattr(black_box, "_ANSWER_SECONDS", 0.5)
    assert "without end" in error_of(Service(drip))


@pytest.mark.parametrize(
    ("head", "message", "n_requests"),
    [
        ("HTTP/1.1 302 Found\nLocation: http://127.0.0.1:9/", "does not answer: 302 Found", 1),
        ("HTTP/1.1 500 Bug\nContent-Length: 0", "does not answer: 500 Bug", 7),
        ("HTTP/1.1 403 No\nContent-Length: 0", "does not answer: 403 No", 1),
    ],
)
def test_what_is_no_answer_is_refused_in_few_requests(
    head: str, message: str, n_requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(black_box, "_RETRIES", black_box._RETRIES.new(backoff_factor=0))
    service = Service(lambda _: (), head)
    assert message in error_of(service)
    assert len(service.n_images) == n_requests
