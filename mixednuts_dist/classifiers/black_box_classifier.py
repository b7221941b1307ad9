"""Base classifiers without gradients: `callable:` functions and `http(s)://` services.

MixedNUTS needs only the predicted class of the standard classifier (T = 0). A robust classifier without gradients must
return logits, and `attack.method: square` searches its minimum margins by queries (paper, appendix D.5).

A service receives POST requests with a batch as an .npy file (float32, (B, C, H, W), in [0, 1]) and returns an .npy
file or JSON, {"logits": [[...], ...]} or {"classes": [...]}. An answer is limited in bytes and in time.
Shapes: B images, K classes.
"""

import hashlib
import io
import json
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import requests
import torch
from requests.adapters import HTTPAdapter
from torch import Tensor, nn
from urllib3 import Retry
from urllib3.exceptions import HTTPError

from ..config.register import CLASSIFIERS
from ..config.uris import ClassifierSource
from ..errors import BaseClassifierError
from .factories import find_function, keyword_arguments

BATCH_SIZE = 64
CERTAIN_LOGIT = 20.0  # logit of a returned class, against 0 for the others: a softmax of 1 in float32
MOST_CLASSES = 25_000  # above ImageNet-21k; bounds answers if the URI has no #classes=K
_MOST_KEPT = 10_000  # answers, which take 40 MB for 1000 classes
_BYTES_A_NUMBER = 32  # the longest JSON number; .npy takes 4 or 8
_BYTES_AROUND = 1 << 16  # the .npy header, JSON's keys and brackets
_BLOCK = 1 << 16
_CONNECT_SECONDS, _ANSWER_SECONDS = 10.0, 120.0  # the second for a whole answer, first byte to last
_RETRIES = Retry(  # the waits are 0, 1, 2, 4, 8 and 16 seconds
    6, read=1, backoff_factor=0.5, status_forcelist=(429, 500, 502, 503, 504), allowed_methods=None,
    raise_on_status=False,
)  # fmt: skip
_HEADERS = {"Content-Type": "application/x-npy", "Accept": "application/x-npy, application/json"}

Array = np.ndarray[Any, Any]


class BlackBoxClassifier(nn.Module):
    """A classifier without gradients, which stores its latest answers, because a run asks for most of them again.

    Args:
        ask: images (B, C, H, W), float32 in [0, 1] -> logits (B, K), or classes (B,).
        n_classes: needed if `ask` returns classes.
    """

    def __init__(self, ask: Callable[[Array], Any], n_classes: int | None = None) -> None:
        super().__init__()
        self.ask, self.n_classes = ask, n_classes
        self.kept: OrderedDict[bytes, Array] = OrderedDict()  # hash of an image -> its row of logits

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Return logits (B, K), float32, without a gradient. A returned class has the logit CERTAIN_LOGIT.

        Raises:
            BaseClassifierError: if the answer does not have one row or class per image, or if the service fails.
        """
        images = images_BCHW.detach().cpu().float().contiguous().numpy()
        keys = [hashlib.blake2b(image.tobytes(), digest_size=16).digest() for image in images]
        new = [i for i, key in enumerate(keys) if key not in self.kept]
        for start in range(0, len(new), BATCH_SIZE):
            part = new[start : start + BATCH_SIZE]
            self.kept.update(zip((keys[i] for i in part), self._logits(images[part]), strict=True))
        rows = [self.kept[key] for key in keys]
        while len(self.kept) > _MOST_KEPT:
            self.kept.popitem(last=False)
        return torch.from_numpy(np.stack(rows)).to(images_BCHW.device)

    def _logits(self, images: Array) -> Array:
        answer = self.ask(images)
        rows = np.asarray(answer.detach().cpu() if isinstance(answer, Tensor) else answer)
        if rows.shape == (len(images),) and np.issubdtype(rows.dtype, np.integer):
            if self.n_classes is None:
                raise BaseClassifierError("the black box returns classes. Add their number to the URI: #classes=K")
            if rows.min() < 0 or rows.max() >= self.n_classes:
                raise BaseClassifierError(
                    f"the black box answered classes {rows.min()} to {rows.max()} of {self.n_classes}"
                )
            return np.asarray(np.eye(self.n_classes, dtype=np.float32)[rows] * CERTAIN_LOGIT)
        if rows.ndim != 2 or len(rows) != len(images) or rows.dtype.kind not in "fiu":
            raise BaseClassifierError(
                f"the black box answered {rows.dtype} of shape {rows.shape} for {len(images)} images; it must be "
                "logits (images, classes) or integer classes (images,)"
            )
        return rows.astype(np.float32)


@CLASSIFIERS("callable", describes="your function, which returns logits or classes", order=9,
             forms=("callable:package.module:function[#classes=K]",), target="factory", any_option=True,
             gradients=False)  # fmt: skip
def load_callable(uri: ClassifierSource) -> BlackBoxClassifier:
    """Wrap a function of numpy arrays; the options of the URI are its keyword arguments."""
    function, options = find_function(uri.target), keyword_arguments(uri)
    return BlackBoxClassifier(lambda images: function(images, **options), _n_classes(uri))


@CLASSIFIERS("http", describes="a service that returns logits or classes", order=10,
             forms=("http://HOST/PATH[#classes=K]",), target="host", any_option=True, gradients=False)  # fmt: skip
@CLASSIFIERS("https", describes="the same, encrypted", order=11, forms=("https://...",), target="host",
             any_option=True, gradients=False)  # fmt: skip
def load_service(uri: ClassifierSource) -> BlackBoxClassifier:
    """Return a classifier that sends images to the service at the URI, together with the query of the URI."""
    return BlackBoxClassifier(HttpService(uri.partition("#")[0], _n_classes(uri)), _n_classes(uri))


def _n_classes(uri: ClassifierSource) -> int | None:
    match = re.fullmatch(r"(classes=([0-9]{1,5}))?", uri.fragment)
    if not match or (match[1] and not 2 <= int(match[2]) <= MOST_CLASSES):
        raise BaseClassifierError(f"after # only classes=K may follow, K a whole number from 2 to {MOST_CLASSES}")
    return int(match[2]) if match[1] else None


class HttpService:
    """A service at `url` that receives batches by POST; `n_classes` bounds the bytes of an answer."""

    def __init__(self, url: str, n_classes: int | None = None) -> None:
        self.url, self.n_classes, self._session = url, n_classes or MOST_CLASSES, requests.Session()
        self._session.mount(url, HTTPAdapter(max_retries=_RETRIES))

    def __call__(self, images: Array) -> Array:
        """Return the logits or classes of the service for a batch.

        Raises:
            BaseClassifierError: if the service cannot be reached or rejects the request, or for an answer that is too
                long, too slow, or neither an .npy file nor JSON with logits or classes.
        """
        sink = io.BytesIO()
        np.save(sink, images, allow_pickle=False)
        try:
            with self._session.post(
                self.url, sink.getvalue(), headers=_HEADERS, timeout=(_CONNECT_SECONDS, _ANSWER_SECONDS),
                stream=True, allow_redirects=False,
            ) as response:  # fmt: skip
                if response.status_code != 200:
                    raise BaseClassifierError(f"{self.url} does not answer: {response.status_code} {response.reason}")
                content = b"".join(self._within_limits(response.raw, len(images)))
        except (OSError, HTTPError) as error:  # OSError includes the errors of requests
            raise BaseClassifierError(f"{self.url} does not answer: {type(error).__name__}: {error}") from error
        return decode_answer(content, self.url)

    def _within_limits(self, raw: Any, n_images: int) -> Iterator[bytes]:
        """Yield the answer block by block, and raise if it is longer or slower than any answer to that many images."""
        most = _BYTES_AROUND + n_images * self.n_classes * _BYTES_A_NUMBER
        started, length = time.monotonic(), 0
        while block := raw.read1(_BLOCK, decode_content=True):  # what has arrived, not a full block
            length += len(block)
            if length > most:
                raise BaseClassifierError(
                    f"{self.url} answered with more than {most} bytes to {n_images} images; logits need fewer"
                )
            if time.monotonic() - started > _ANSWER_SECONDS:
                raise BaseClassifierError(f"{self.url} has sent {length} bytes in {_ANSWER_SECONDS:.0f} s without end")
            yield block


def decode_answer(content: bytes, url: str) -> Array:
    """Read logits or classes from .npy or JSON. Raises BaseClassifierError for anything else."""
    try:
        if content.startswith(b"\x93NUMPY"):
            array: Array = np.load(io.BytesIO(content), allow_pickle=False)
            return array
        answer = json.loads(content)
        if "logits" in answer:
            return np.asarray(answer["logits"], np.float32)
        return np.asarray(answer["classes"], np.int64)
    except Exception as error:  # at damaged bytes the two parsers raise almost any of Python's errors
        raise BaseClassifierError(
            f"{url} answered {content[:80]!r}; it must be an .npy array or JSON with logits or classes"
        ) from error
