"""`mixednuts serve`: a run's mixture behind HTTP on Ray Serve, the robust classifier first.

Where rob's class wins against any vote of std, the answer needs rob alone; std has replicas of its own, which get the
other images only. Images of concurrent requests are computed as one batch, in either place.

    POST /   an .npy file, (B, C, H, W) or (C, H, W), floats in [0, 1], or JSON, {"images": [...]} of the same shapes
             -> {"classes": [3, ...], "decided_by": ["rob" | "std and rob", ...]}
    GET /    what is served

This is the one file of the room that imports Ray. Shapes: B images of C x H x W, K classes.
"""

import asyncio
import io
import json
import logging
import math
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from starlette.requests import Request
from starlette.responses import JSONResponse
from torch import Tensor

from ..classifiers.checkpoints import quietly
from ..errors import ClusterError, InvalidInputError
from .loading import read_run

with quietly():  # Ray Serve's import warns of what pydantic will drop
    from ray import serve

ROB, BOTH = "rob", "std and rob"
MOST_IMAGES = 1024  # a request
_LEAST_HELD = 2**28  # bytes of all bodies that a replica holds before they are images; more where one needs more
_JSON_BYTES_A_VALUE = 32  # "0.30000001192092896, " has 21
_NAME = "mixednuts"
_QUEUED_BATCHES = 4  # in a replica: one is computed, others gather, or their bodies are slow
_HEADER_BYTES = 4096  # of an .npy file: 128 as written by NumPy
_CONTROLLER = ("SERVE_CONTROLLER_ACTOR", "serve")  # name and namespace
_SECONDS_TO_END = 30.0


@dataclass(frozen=True)
class ServiceOptions:
    """How a service is laid out."""

    max_batch: int = 64  # requests computed together, in each replica
    wait_seconds: float = 0.001  # how long the first request of a batch waits for others
    replicas: int = 1  # of rob and of std
    num_cpus: float = 1.0  # a replica
    num_gpus: float = 0.0  # a replica
    trust_code: bool = False  # as in `MixedClassifier.from_run`


class _Half:
    """One base classifier of a run in a process of its own."""

    def __init__(self, run: str, beta: float | None, role: str, options: ServiceOptions) -> None:
        torch.set_num_threads(max(1, int(options.num_cpus)))
        self.device = "cuda" if ray.get_gpu_ids() else "cpu"
        self.run = read_run(run, beta=beta, trust_code=options.trust_code)
        self.mixed = self.run.classifier(role).to(self.device)

    def tensor(self, arrays: list[Any]) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays)).to(self.device)


class StdHalf(_Half):
    """Answers the images that rob leaves open: the classes of the mixture."""

    def __init__(self, run: str, beta: float | None, options: ServiceOptions) -> None:
        super().__init__(run, beta, "std", options)
        self._together = _batched(self._of_requests, options)

    async def classes(self, images_BCHW: "np.ndarray[Any, Any]", rob_logits_BK: "np.ndarray[Any, Any]") -> Any:
        """Classes (B,) from images and rob's logits at them."""
        return await self._together(images_BCHW, rob_logits_BK)

    async def _of_requests(self, images: list[Any], rob_logits: list[Any]) -> list[Any]:
        classes_B = await asyncio.to_thread(self._classes, self.tensor(images), self.tensor(rob_logits))
        return _split(classes_B, images)

    @torch.inference_mode()
    def _classes(self, images_BCHW: Tensor, rob_logits_BK: Tensor) -> Tensor:
        return self.mixed.mix_logits(self.mixed.std(images_BCHW), rob_logits_BK).argmax(dim=1)


class Full(Exception):
    """A replica has no room for one more body."""


class Bodies:
    """The bodies that one replica is reading: each read no further than `most` bytes, all together than `most_held`."""

    def __init__(self, most: int, most_held: int) -> None:
        self.most, self.most_held, self.held = most, most_held, 0

    @classmethod
    def of_images(cls, n_values: int) -> "Bodies":
        """With room for an .npy file of `MOST_IMAGES` images of so many values; JSON takes up to four times as much."""
        npy, text = (MOST_IMAGES * n_values * a_value + _HEADER_BYTES for a_value in (8, _JSON_BYTES_A_VALUE))
        held = max(_LEAST_HELD, npy)
        return cls(min(held, text), held)

    async def read(self, stream: AsyncIterator[bytes]) -> bytes:
        """One whole body.

        Raises:
            InvalidInputError: for a longer one, once so much of it is read.
            Full: where the others leave no room.
        """
        body = bytearray()
        try:
            async for chunk in stream:
                body += chunk
                self.held += len(chunk)
                if len(body) > self.most:
                    message = f"the request is longer than {self.most} bytes; send at most {MOST_IMAGES} images as .npy"
                    raise InvalidInputError(message)
                if self.held > self.most_held:
                    raise Full(f"requests of {self.most_held} bytes are being read; send fewer images, or try again")
            return bytes(body)
        finally:
            self.held -= len(body)


class RobHalf(_Half):
    """Takes the requests; answers what rob decides and asks `std` for the rest."""

    def __init__(self, run: str, beta: float | None, options: ServiceOptions, std: Any) -> None:
        super().__init__(run, beta, "rob", options)
        self.std = std  # a handle
        self._bodies = Bodies.of_images(math.prod(self.run.image_shape))
        self._together = _batched(self._of_requests, options)

    async def __call__(self, request: Request) -> JSONResponse:
        if request.method == "GET":
            return JSONResponse(self.description())
        try:
            images_BCHW = decoded_images(await self._bodies.read(request.stream()), self.run.image_shape)
        except InvalidInputError as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        except Full as error:
            return JSONResponse({"error": str(error)}, status_code=503)
        logits_BK, classes_B, decided_B = await self._together(images_BCHW)
        open_B = ~decided_B
        if open_B.any():
            classes_B[open_B] = await self.std.classes.remote(images_BCHW[open_B], logits_BK[open_B])
        decided_by = [ROB if decided else BOTH for decided in decided_B.tolist()]
        return JSONResponse({"classes": classes_B.tolist(), "decided_by": decided_by})

    def description(self) -> dict[str, Any]:
        """What a GET answers."""
        run = self.run
        return {
            "run": run.run_id, "beta": run.chosen.beta, "threat": str(run.threat),
            "image_shape": list(run.image_shape), "classes": run.n_classes,
            "std": run.config["std"], "rob": run.config["rob"],
        }  # fmt: skip

    async def _of_requests(self, images: list[Any]) -> list[tuple[Any, Any, Any]]:
        """Of each request: rob's logits (B, K), its classes (B,) and which of them are decided (B,)."""
        logits_BK, classes_B, decided_B = await asyncio.to_thread(self._logits, self.tensor(images))
        return list(zip(*(_split(values, images) for values in (logits_BK, classes_B, decided_B)), strict=True))

    @torch.inference_mode()
    def _logits(self, images_BCHW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_BK = self.mixed.rob(images_BCHW)
        decided_B, classes_B = self.mixed.decided_by_rob(logits_BK)
        return logits_BK, classes_B, decided_B


def _batched(compute: Callable[..., Any], options: ServiceOptions) -> Any:
    """An awaitable function of one request, whose calls at about the same time become one call of `compute`."""
    batch: Any = serve.batch
    return batch(max_batch_size=options.max_batch, batch_wait_timeout_s=options.wait_seconds)(compute)


def decoded_images(body: bytes, image_shape: tuple[int, ...]) -> "np.ndarray[Any, Any]":
    """The images of a request, float32 of shape (B, C, H, W).

    Raises:
        InvalidInputError: for a body that is neither .npy nor JSON, another shape, or values outside [0, 1].
    """
    array = _npy(body) if body.startswith(b"\x93NUMPY") else _json(body)
    if array.ndim == len(image_shape):
        array = array[None]
    if array.shape[1:] != image_shape or not 1 <= len(array) <= MOST_IMAGES:
        raise InvalidInputError(
            f"the images have the shape {array.shape}; it must be (B, {', '.join(map(str, image_shape))}) with 1 to "
            f"{MOST_IMAGES} images"
        )
    images_BCHW = array.astype(np.float32)
    if not (images_BCHW.min() >= 0 and images_BCHW.max() <= 1):  # NaN fails both
        raise InvalidInputError("pixel values must lie in [0, 1]; divide bytes by 255")
    return images_BCHW


def _npy(body: bytes) -> "np.ndarray[Any, Any]":
    """An array whose header promises no more than the body holds."""
    file = io.BytesIO(body)
    try:
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(file, max_header_size=_HEADER_BYTES)
        if dtype.kind != "f" or math.prod(shape) * dtype.itemsize != len(body) - file.tell():
            raise ValueError(f"it says {dtype} of shape {shape}, and {len(body)} bytes came")
        file.seek(0)
        array: np.ndarray[Any, Any] = np.load(file, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise InvalidInputError(f"the .npy file cannot be read as floats: {str(error)[:200]}") from error
    return array


def _json(body: bytes) -> "np.ndarray[Any, Any]":
    try:
        return np.asarray(json.loads(body)["images"], np.float32)
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise InvalidInputError(
            f'the body is neither an .npy file nor JSON, {{"images": [...]}} with one nested list of numbers '
            f"({type(error).__name__}: {str(error)[:100]})"
        ) from error


def _split(values_B: Tensor, images: list[Any]) -> list[Any]:
    """Rows of a batch back to the requests that they came from; arrays that may be written to."""
    ends = np.cumsum([len(part) for part in images])[:-1]
    return [part.copy() for part in np.split(values_B.cpu().numpy(), ends)]


def application(run: str, beta: float | None, options: ServiceOptions) -> serve.Application:
    """The service of a run.

    Raises:
        MissingArtifact, InvalidInputError, DamagedFile: as in `read_run`.
    """
    read_run(
        run, beta=beta, trust_code=options.trust_code
    )  # what is wrong with the run is told here, not in a replica's log
    layout = {
        "num_replicas": options.replicas,
        "max_ongoing_requests": _QUEUED_BATCHES * options.max_batch,  # with Ray's 5 no batch has more than 5 requests
        "ray_actor_options": {"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
    }
    deployment: Any = serve.deployment
    std = deployment(StdHalf).options(**layout).bind(run, beta, options)
    made: serve.Application = deployment(RobHalf).options(**layout).bind(run, beta, options, std)
    return made


@contextmanager
def serving(applications: dict[str, serve.Application], *, host: str, port: int) -> Iterator[None]:
    """Applications by route, each ready to answer, for the time of the block; needs Ray.

    Raises:
        ClusterError: where the port is taken, or a replica does not start.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ClusterError(f"cannot serve on {host}:{port} ({error}); choose another --host or --port") from error
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # its handlers are its own
    try:
        try:
            serve.start(http_options={"host": host, "port": port})
        except (ray.exceptions.RayError, TimeoutError) as error:
            reason = " ".join(str(error).split())
            raise ClusterError(
                f"Ray Serve's proxy does not start: {reason}. Try again on a less busy machine"
            ) from error
        for i, (route, made) in enumerate(applications.items()):
            try:
                serve.run(made, name=f"{_NAME}-{i}", route_prefix=route)
            except RuntimeError as error:
                raise ClusterError(f"a replica does not start: {error}") from error
        yield
    finally:
        _end()


def _end() -> None:
    """End Ray Serve and wait until it is gone.

    `serve.shutdown` alone waits in a call to the controller that only its death ends, and Ray prints that call as a
    task that failed; so the controller is told to end, and its name is watched until it is free.
    """
    try:
        controller: Any = ray.get_actor(*_CONTROLLER)
        ray.get(controller.graceful_shutdown.remote(wait=False), timeout=_SECONDS_TO_END)
        until = time.monotonic() + _SECONDS_TO_END
        while time.monotonic() < until:
            time.sleep(0.1)
            ray.get_actor(*_CONTROLLER)
    except (ValueError, ray.exceptions.RayError):  # no such name, or it was gone before it could answer
        pass
    serve.shutdown()  # type: ignore[no-untyped-call]
