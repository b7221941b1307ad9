"""Standard classifiers that only answer: `callable:` functions and `http(s)://` services.

MixedNUTS needs std's predicted class alone (T = 0), so std may be anything that classifies. What needs its gradients is
then not measured but said: std's own robustness is that against rob's attacked images, and the mixture is attacked
through rob's gradient, while every verdict is the real mixture's.

A service gets POST requests with a batch as an .npy file (float32, (B, C, H, W), in [0, 1]) and answers with an .npy
file or JSON, {"logits": [[...], ...]} or {"classes": [...]}. Shapes: B images, K classes.
"""

import hashlib
import io
import json
import urllib.parse
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import BaseClassifierError
from ..uris import ResourceUri
from .factories import find_function

BATCH_SIZE = 64
CERTAIN_LOGIT = 20.0  # of an answered class, against 0 for the others: a softmax of 1 in float32
_CACHED_ANSWERS = 100_000
_RETRIES = 6
_RETRIED_STATUS = (429, 500, 502, 503, 504)
_TIMEOUT_SECONDS = (10, 300)  # to connect, to answer

Answer = Callable[[np.ndarray[Any, Any]], Any]


class BlackBoxClassifier(nn.Module):
    """A classifier without gradients: asked in batches, and for each image once.

    Args:
        ask: images (B, C, H, W), float32 in [0, 1] -> logits (B, K), or classes (B,).
        n_classes: needed where `ask` answers with classes.
    """

    def __init__(self, ask: Answer, n_classes: int | None = None) -> None:
        super().__init__()
        self.ask, self.n_classes = ask, n_classes
        self._known: OrderedDict[bytes, np.ndarray[Any, Any]] = OrderedDict()

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Logits (B, K), float32, without a gradient; a class answer counts as CERTAIN_LOGIT for that class.

        Raises:
            BaseClassifierError: where the answer is not one row or class an image, or the service fails.
        """
        images = images_BCHW.detach().cpu().float().contiguous().numpy()
        keys = [hashlib.blake2b(image.tobytes(), digest_size=16).digest() for image in images]
        new = [i for i, key in enumerate(keys) if key not in self._known]
        for start in range(0, len(new), BATCH_SIZE):
            part = new[start : start + BATCH_SIZE]
            for i, row in zip(part, self._asked(images[part]), strict=True):
                self._known[keys[i]] = row
        logits_BK = np.stack([self._known[key] for key in keys])
        while len(self._known) > _CACHED_ANSWERS:
            self._known.popitem(last=False)
        return torch.from_numpy(logits_BK).to(images_BCHW.device)

    def forget(self) -> None:
        """Ask again for images that were answered before."""
        self._known.clear()

    def _asked(self, images: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        answer = self.ask(images)
        rows = np.asarray(answer.detach().cpu() if isinstance(answer, Tensor) else answer)
        if rows.ndim == 1 and np.issubdtype(rows.dtype, np.integer) and len(rows) == len(images):
            return self._certain(rows)
        if rows.ndim != 2 or len(rows) != len(images) or not np.issubdtype(rows.dtype, np.number):
            raise BaseClassifierError(
                f"the black box answered {rows.dtype} of shape {rows.shape} for {len(images)} images; it must be "
                "logits (images, classes) or integer classes (images,)"
            )
        return rows.astype(np.float32)

    def _certain(self, classes_B: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if self.n_classes is None:
            raise BaseClassifierError("the black box answers with classes: say how many there are, #classes=K")
        if classes_B.min() < 0 or classes_B.max() >= self.n_classes:
            raise BaseClassifierError(f"the black box answered class {classes_B.max()} of {self.n_classes}")
        one_hot_BK: np.ndarray[Any, Any] = np.eye(self.n_classes, dtype=np.float32)[classes_B] * CERTAIN_LOGIT
        return one_hot_BK


def load_black_box(uri: str, parsed: ResourceUri, options: dict[str, Any]) -> BlackBoxClassifier:
    """The black box that a URI names; `options` become keyword arguments of a callable.

    Raises:
        BaseClassifierError: for an unknown fragment or function.
    """
    settings = dict(urllib.parse.parse_qsl(parsed.fragment))
    written = settings.pop("classes", None)
    if settings or (written is not None and not written.isdecimal()):
        raise BaseClassifierError(f"std={uri!r}: after # only classes=K may follow, K a whole number")
    n_classes = None if written is None else int(written)
    if parsed.scheme == "callable":
        function = find_function(parsed.target, "std")
        return BlackBoxClassifier(lambda images: function(images, **options), n_classes)
    return BlackBoxClassifier(HttpService(uri.partition("#")[0]), n_classes)


class HttpService:
    """POSTs batches to `url`, patiently: overload and lost connections are tried again with growing pauses."""

    def __init__(self, url: str) -> None:
        import requests
        from requests.adapters import HTTPAdapter
        from urllib3.util.retry import Retry

        patience = Retry(
            _RETRIES, backoff_factor=0.5, status_forcelist=_RETRIED_STATUS, allowed_methods=["POST"], redirect=0
        )
        self.url, self._failure, self._session = url, requests.RequestException, requests.Session()
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, HTTPAdapter(max_retries=patience))

    def __call__(self, images: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The service's logits or classes for a batch.

        Raises:
            BaseClassifierError: where it cannot be reached, refuses, or answers with neither .npy nor such JSON.
        """
        sink = io.BytesIO()
        np.save(sink, images, allow_pickle=False)
        headers = {"Content-Type": "application/x-npy", "Accept": "application/x-npy, application/json"}
        try:
            response = self._session.post(self.url, sink.getvalue(), headers=headers, timeout=_TIMEOUT_SECONDS)
            response.raise_for_status()
        except self._failure as error:
            raise BaseClassifierError(f"std: {self.url} does not answer: {error}") from error
        try:
            return _decoded(response.content)
        except (ValueError, KeyError, TypeError) as error:
            start = response.content[:80]
            raise BaseClassifierError(
                f"std: {self.url} answered {start!r}; it must be an .npy array or JSON with logits or classes"
            ) from error


def _decoded(content: bytes) -> np.ndarray[Any, Any]:
    if content.startswith(b"\x93NUMPY"):
        array: np.ndarray[Any, Any] = np.load(io.BytesIO(content), allow_pickle=False)
        return array
    answer = json.loads(content)
    return np.asarray(answer["logits"], np.float32) if "logits" in answer else np.asarray(answer["classes"], np.int64)
