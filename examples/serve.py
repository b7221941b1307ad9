"""Serve the mixed classifier of a run over HTTP with Ray Serve.

    pip install "mixednuts-dist" "ray[serve]"
    python examples/serve.py runs/digits/runs/digits-5fd247dd 8000
    curl --data-binary @images.npy http://127.0.0.1:8000/

The body is an .npy file of floats in [0, 1] with shape (B, C, H, W). The response is {"classes": [3, 8, ...]}. Requests
that arrive together are computed as one batch. Ray Serve's own documentation covers replicas, GPUs and autoscaling.
Under `uv run`, set RAY_ENABLE_UV_RUN_RUNTIME_ENV=0, because Ray otherwise builds another environment for each of its
processes.
"""

import io
import sys
import time
from typing import Any

import numpy as np
import torch
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse

from mixednuts_dist.deployment.loading import read_run

MOST_BYTES = 2**28


@serve.deployment(max_ongoing_requests=256)
class Mixture:
    """One replica of the mixed classifier, as Ray Serve creates it."""

    def __init__(self, run: str) -> None:
        found = read_run(run)  # trust_code=True if the run was created elsewhere and you reviewed its code
        self.mixed, self.shape = found.classifier(), found.stored.inputs.image_shape

    @serve.batch(max_batch_size=64, batch_wait_timeout_s=0.002)
    async def classes(self, requests: list[Any]) -> list[Any]:
        classes_B = self.mixed.predict(torch.from_numpy(np.concatenate(requests))).tolist()
        ends = np.cumsum([len(images) for images in requests]).tolist()
        return [classes_B[end - len(images) : end] for end, images in zip(ends, requests, strict=True)]

    async def __call__(self, request: Request) -> JSONResponse:
        try:
            if int(request.headers.get("content-length", MOST_BYTES + 1)) > MOST_BYTES:
                raise ValueError(f"The body must state its length and be at most {MOST_BYTES} bytes.")
            images = np.load(io.BytesIO(await request.body()), allow_pickle=False).astype(np.float32)
            if images.shape[1:] != self.shape or not (images.min() >= 0 and images.max() <= 1):
                raise ValueError(f"The images must be (B, {self.shape}) in [0, 1]; these are {images.shape}.")
        except ValueError as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        return JSONResponse({"classes": await self.classes(images)})


if __name__ == "__main__":
    port = int(sys.argv[2]) if len(sys.argv) > 2 else 8000
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(Mixture.bind(sys.argv[1]))
    print(f"http://127.0.0.1:{port}/", flush=True)
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        serve.shutdown()
