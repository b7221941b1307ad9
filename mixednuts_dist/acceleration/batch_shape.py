"""One batch shape for every pass of a network in a call or a run.

The last bits of an image's logits and gradients depend on the number of rows of its batch, because libraries choose
kernels by size. They do not depend on the position or on the other images. So every pass has the same number of rows,
the package pads short batches, and an image's result has the same bits in any order, partition and batch. A pass with
few images uses fewer rows if a trial shows that they give the same bits.

Shapes: B images of C x H x W.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..errors import InvalidInputError

ON_CPU = 64  # rows of a pass on a CPU; more rows of a large network are hardly faster
MOST_ON_CPU = 128  # rows of a library call with many images on a CPU, which is faster for small networks
SMALLEST = 4  # smaller shapes differ in float32 on every CPU that was measured
LEAST_LIMIT = 128  # limit of the rows that a run may choose on an accelerator, with few images per worker
ON_CARD = 512  # most rows of a library call on an accelerator, by default; runs measure instead
STATE_IMAGES = 64  # image-sized arrays that the attacks keep per row of a pass
FLOAT32_ROWS = 32  # rows of verifications on an accelerator

_SMALL_NETWORK = 4_000_000  # weights
_NEARLY = 0.95  # share of the highest number of images per second
_CUDA_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_NOT_ALLOCATED = ("CUDNN_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_ALLOC_FAILED", "_ALLOCATION_FAILED")  # the last: cuDNN 9

Probe = Callable[[Tensor], Sequence[Tensor]]  # a pass over images -> all its results, with one row per image

_logger = logging.getLogger(__name__)


class BatchShape:
    """The number of rows of every pass.

    Args:
        rows: images per pass. The number is halved when memory runs out, with a warning.
        fixed: use no smaller shape even if it gives the same bits.
        float32_rows: rows of verifications; `rows` by default. On a GPU, an image in full float32 takes about ten times
            as long as one in bfloat16 or TF32, and few images are verified at a time.

    All passes of a call or a worker share one object. `float32` is the shape of verifications; without
    `float32_rows`, it is the object itself.

    Example:
        >>> shape = BatchShape(64)
        >>> [len(filled(torch.rand(n, 3, 8, 8), shape.rows)) for n in (1, 63, 64)]
        [64, 64, 64]
    """

    def __init__(self, rows: int = ON_CPU, *, fixed: bool = False, float32_rows: int | None = None) -> None:
        if not hasattr(rows, "__index__") or rows < 1:
            raise InvalidInputError(f"batch_size={rows!r} must be an integer of at least 1")
        self.rows = rows
        self.fixed = fixed
        apart = float32_rows is not None and float32_rows < rows
        self.float32: BatchShape = BatchShape(float32_rows or rows, fixed=fixed) if apart else self

    @classmethod
    def of(cls, rows: "int | BatchShape", device: torch.device) -> "BatchShape":
        """Return the shape itself, or a new one with these rows, and with fewer float32 rows on an accelerator."""
        if isinstance(rows, BatchShape):
            return rows
        return cls(rows, float32_rows=None if device.type == "cpu" else FLOAT32_ROWS)

    def shrink(self, n_failed: int) -> None:
        """Halve the rows after a pass over `n_failed` rows, more than one, ran out of memory."""
        self.rows = min(self.rows, max(1, n_failed // 2))
        _logger.warning(
            "out of memory with %d images per pass; continuing with %d, which may change the last bits of results",
            n_failed,
            self.rows,
        )
        torch.cuda.empty_cache()


def shape_of(batch_size: int | BatchShape | None, model: Callable[[Tensor], Tensor], x_BCHW: Tensor) -> BatchShape:
    """Return the requested batch shape.

    By default, it has one row per image, rounded up to a power of two, and at least `ON_CPU` rows. The largest default
    is `ON_CARD` on an accelerator, `MOST_ON_CPU` for a small network on a CPU, and `ON_CPU` for any other model.
    """
    if batch_size is None:
        small = isinstance(model, nn.Module) and sum(each.numel() for each in model.parameters()) < _SMALL_NETWORK
        most = ON_CARD if x_BCHW.device.type != "cpu" else MOST_ON_CPU if small else ON_CPU
        batch_size = min(max(ON_CPU, 1 << (len(x_BCHW) - 1).bit_length()), most)
    return BatchShape.of(batch_size, x_BCHW.device)


class PassSizes:
    """The numbers of rows with which one function may be called: those of `shape`, or fewer that give the same bits.

    Smaller numbers are multiples of a sixteenth of the full number, or of 4 if that is larger. The object tries each
    number when it is first needed, and remembers whether it gives the same bits.

    Args:
        shape: the full shape.
        probe: calls the function on images and returns all its results. Without it, only the full shape is used, for
            instance for a compiled function, which would compile again for each shape.
    """

    def __init__(self, shape: BatchShape, probe: Probe | None) -> None:
        self.shape, self._probe = shape, None if shape.fixed else probe
        self._same: dict[tuple[int, int], bool] = {}  # (full rows, fewer) -> whether each image has the same bits

    def rows_for(self, n_images: int, like_BCHW: Tensor) -> int:
        """Return the number of rows for a pass over `n_images`; try smaller numbers on images like `like_BCHW`."""
        rows = self.shape.rows
        step = max(SMALLEST, rows // 16)
        if self._probe is None or not len(like_BCHW):
            return rows
        for fewer in range(-(-n_images // step) * step, rows, step):
            if (rows, fewer) not in self._same:
                self._same[rows, fewer] = self._has_same_bits(self._probe, like_BCHW, fewer)
            if self._same[rows, fewer]:
                return fewer
        return rows

    def _has_same_bits(self, probe: Probe, like_BCHW: Tensor, fewer: int) -> bool:
        """Return whether images have the same bits in `fewer` rows as in a full batch.

        The full batch holds noisy copies of `like_BCHW`. The smaller batch holds a random part of them, so that nearly
        all images change their position.
        """
        rows, generator = self.shape.rows, torch.Generator().manual_seed(self.shape.rows)
        drawn = torch.randperm(rows, generator=generator)[:fewer].to(like_BCHW.device)
        try:
            x_BCHW = repeated(like_BCHW, rows)
            noise_BCHW = torch.rand(x_BCHW.shape, generator=generator).to(x_BCHW)
            x_BCHW = (x_BCHW + 0.1 * (noise_BCHW - 0.5)).clamp(0, 1)
            whole = [values.clone() for values in probe(x_BCHW)]
            pairs = zip(probe(x_BCHW[drawn]), whole, strict=True)
            return all(torch.equal(part, values[drawn]) for part, values in pairs)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return False


def filled(x_BCHW: Tensor, rows: int) -> Tensor:
    """Repeat the last image until there are `rows`."""
    missing = rows - len(x_BCHW) if len(x_BCHW) else 0
    return torch.cat([x_BCHW, x_BCHW[-1:].expand(missing, *x_BCHW.shape[1:])]) if missing > 0 else x_BCHW


def repeated(x_BCHW: Tensor, rows: int) -> Tensor:
    """Repeat the images in order until there are `rows`."""
    return x_BCHW[torch.arange(rows) % len(x_BCHW)]


def in_one_shape(run: Callable[[Tensor], Tensor], x_BCHW: Tensor, sizes: PassSizes) -> Tensor:
    """Run `run` over all images in passes of one shape, padding the last one, and return one row per image.

    Raises:
        torch.OutOfMemoryError: if not even one image fits.
    """
    parts: list[Tensor] = []
    done = 0
    while done < len(x_BCHW):
        part = x_BCHW[done : done + sizes.shape.rows]
        rows = sizes.rows_for(len(part), x_BCHW)
        try:
            # A compiled function reuses the memory of its output in its next pass.
            parts.append(run(filled(part, rows))[: len(part)].clone())
            done += len(part)
            continue
        except torch.OutOfMemoryError:
            if rows == 1:
                raise
        sizes.shape.shrink(rows)  # outside of the handler, whose traceback keeps memory allocated
    return torch.cat(parts)


def largest_rows(probes: Sequence[Probe], x_BCHW: Tensor, *, most: int) -> int:
    """Return the largest power of two of rows, up to `most`, with which probes and attacks fit into memory.

    Raises:
        torch.OutOfMemoryError: if not even one image fits.
    """
    rows = 1
    while rows <= most and _fits(probes, x_BCHW, rows):
        rows *= 2
    if rows == 1:
        raise torch.OutOfMemoryError(f"not even one image of shape {tuple(x_BCHW.shape[1:])} fits on {x_BCHW.device}")
    return rows // 2


def _fits(probes: Sequence[Probe], x_BCHW: Tensor, rows: int) -> bool:
    try:
        state = x_BCHW.new_empty(rows * STATE_IMAGES, *x_BCHW.shape[1:])
        for probe in probes:
            probe(filled(x_BCHW[:rows], rows))
        del state
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        torch.cuda.empty_cache()


def efficient_rows(seconds: Callable[[int], float], most: int) -> int:
    """Return the smallest power of two, up to `most`, with at least 95% of the highest number of images per second.

    More rows would take more memory, and more of them would be padding for the last images of a run.

    Example:
        >>> efficient_rows(lambda rows: 1 + rows / 8, most=1024)  # a pass has a fixed part of 8 rows
        256
    """
    tried = [most >> i for i in range(most.bit_length()) if most >> i >= SMALLEST] or [most]
    per_second = {rows: rows / seconds(rows) for rows in tried}
    return min(rows for rows in tried if per_second[rows] >= _NEARLY * max(per_second.values()))


def fastest_of_three(act: Callable[[], Tensor]) -> float:
    """Return the seconds of the fastest of three calls after a warm-up; CPU time if the result is on a CPU."""
    on_cpu = act().device.type == "cpu"
    clock = time.process_time if on_cpu else time.perf_counter

    def timed() -> float:
        started = clock()
        float(act().flatten()[0])  # waits for an accelerator
        return clock() - started

    return min(timed() for _ in range(3))


@contextmanager
def as_out_of_memory() -> Iterator[None]:
    """Also raise torch.OutOfMemoryError for failed allocations of cuDNN, cuBLAS and the CUDA runtime."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        code, text = getattr(error, "error_code", None), str(error)
        if code == _CUDA_OUT_OF_MEMORY or any(status in text for status in _NOT_ALLOCATED):
            raise torch.OutOfMemoryError(str(error)) from error
        raise
