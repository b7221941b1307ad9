"""One batch shape for every pass of a network in a call or a run.

The last bits of an image's logits and gradients depend on the number of rows of its batch: libraries choose other
kernels, which round differently, for other sizes. They do not depend on the image's position or on its company in a
batch of one fixed size. So every pass has the same number of rows, short batches are filled up, and an image's result
is the same bits in any order, partition and company. Where few images are left, a smaller shape is used if a probe has
shown that it gives the same bits as the full one, here and for this function.

Shapes: B images of C x H x W.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..errors import InvalidInputError

ON_CPU = 64  # rows of a pass on a CPU, where more rows of a large network are hardly faster
MOST_ON_CPU = 128  # rows in a library call with many images, which is faster for small networks
SMALLEST = 4  # smaller shapes are not even tried: in float32 they differ on every CPU that was measured
MOST = 4096
ON_CARD = 256  # rows of a call on an accelerator, where 64 leave it idle; a run measures its own
STATE_IMAGES = 64  # arrays of an image's size that the attacks keep for each row of a pass; a test counts them
FLOAT32_ROWS = 16  # of float32 passes on an accelerator; with 32 they took twice the share of the time

_NEARLY = 0.95  # of the most images a second
_CUDA_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_NOT_ALLOCATED = ("CUDNN_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_ALLOC_FAILED", "_ALLOCATION_FAILED")  # of cuDNN 9 too

Probe = Callable[[Tensor], Sequence[Tensor]]  # a pass over images: all that it gives, each with the rows first

_logger = logging.getLogger(__name__)


class BatchShape:
    """The number of rows of every pass.

    Args:
        rows: images per pass. The number is halved when memory runs out, with a warning.
        fixed: pass no smaller shape even where one gives the same bits.
        float32_rows: of the judge's passes, and of gradients in float32 beside coarser ones; `rows` by default.

    On a GPU a float32 row takes about ten times a bfloat16 one, and few images need it: its passes have a shape of
    their own there, `float32`, which is small. On a CPU both are one object.

    One object serves all passes of a call, or of a worker; it may be reused from call to call.

    Example:
        >>> shape = BatchShape(64)
        >>> [len(filled(torch.rand(n, 3, 8, 8), shape.rows)) for n in (1, 63, 64)]
        [64, 64, 64]
    """

    def __init__(self, rows: int = ON_CPU, *, fixed: bool = False, float32_rows: int | None = None) -> None:
        if rows < 1:
            raise InvalidInputError(f"batch_size={rows} must be at least 1 image")
        self.rows = rows
        self.fixed = fixed
        apart = float32_rows is not None and float32_rows < rows
        self.float32: BatchShape = BatchShape(float32_rows or rows, fixed=fixed) if apart else self

    @classmethod
    def of(cls, rows: "int | BatchShape", device: torch.device) -> "BatchShape":
        """The shape itself, or a new one of so many rows, with one for float32 beside it on an accelerator."""
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
        release_memory()


class Passes:
    """The batch shapes in which one function may be called: the rows of `shape`, and fewer that give the same bits.

    Fewer rows are multiples of a sixteenth of the rows, at least of 4. Each number is tried when it is first needed,
    and the answer is kept on this object.

    Args:
        shape: the full shape.
        probe: calls the function on images and returns everything that it gives.
        fixed: use only the full shape, for compiled functions, which compile again for each shape.
    """

    def __init__(self, shape: BatchShape, probe: Probe, *, fixed: bool = False) -> None:
        self.shape, self._probe, self._fixed = shape, probe, fixed
        self._same: dict[tuple[int, int], bool] = {}  # (full rows, fewer) -> whether each image has the same bits
        self._whole: tuple[Tensor, list[Tensor]] | None = None  # a full batch, and what the probe gives for it

    def rows_for(self, n_images: int, like_BCHW: Tensor) -> int:
        """Return the rows in which to pass `n_images`, at most those of the shape; try them on images like these."""
        rows = self.shape.rows
        step = max(SMALLEST, rows // 16)
        fewer = -(-n_images // step) * step
        if self._fixed or self.shape.fixed or not len(like_BCHW):
            return rows
        while fewer < rows:
            if (rows, fewer) not in self._same:
                self._same[rows, fewer] = self._has_same_bits(like_BCHW, fewer)
            if self._same[rows, fewer]:
                return fewer
            fewer += step
        return rows

    def _has_same_bits(self, like_BCHW: Tensor, fewer: int) -> bool:
        """Whether the probe gives each image among `fewer` images the bits that it has in a full batch.

        Tried on noisy copies of `like_BCHW`, drawn from all over the full batch: nearly each comes to another position,
        and every position of the smaller batch is looked at. Memory that runs out proves nothing.
        """
        rows = self.shape.rows
        try:
            if self._whole is None or len(self._whole[0]) != rows:
                repeated_BCHW = repeated(like_BCHW, rows)
                noise_BCHW = torch.rand(repeated_BCHW.shape, generator=torch.Generator().manual_seed(rows))
                x_BCHW = (repeated_BCHW + 0.1 * (noise_BCHW.to(repeated_BCHW) - 0.5)).clamp(0, 1)
                self._whole = x_BCHW, [values.clone() for values in self._probe(x_BCHW)]
            x_BCHW, whole = self._whole
            drawn = torch.randperm(rows, generator=torch.Generator().manual_seed(rows))[:fewer].to(x_BCHW.device)
            pairs = zip(self._probe(x_BCHW[drawn]), whole, strict=True)
            return all(torch.equal(part, values[drawn]) for part, values in pairs)
        except torch.OutOfMemoryError:
            self._whole = None
            release_memory()
            return False


def filled(x_BCHW: Tensor, rows: int) -> Tensor:
    """`x` with its last image repeated until there are `rows`; no image stays none."""
    missing = rows - len(x_BCHW) if len(x_BCHW) else 0
    return torch.cat([x_BCHW, x_BCHW[-1:].expand(missing, *x_BCHW.shape[1:])]) if missing > 0 else x_BCHW


def repeated(x_BCHW: Tensor, rows: int) -> Tensor:
    """So many rows of these images, which come again from the first on."""
    return x_BCHW[torch.arange(rows) % len(x_BCHW)]


def in_one_shape(run: Callable[[Tensor], Tensor], x_BCHW: Tensor, passes: Passes) -> Tensor:
    """`run` over all images in passes of one shape, an eventual short one filled up; the rows of the images.

    Raises:
        torch.OutOfMemoryError: where not even one image fits.
    """
    parts: list[Tensor] = []
    done = 0
    while done < len(x_BCHW):
        part = x_BCHW[done : done + passes.shape.rows]
        rows = passes.rows_for(len(part), x_BCHW)
        try:
            # A copy, because the memory of a compiled function's output is used again by its next pass.
            parts.append(run(filled(part, rows))[: len(part)].clone())
            done += len(part)
            continue
        except torch.OutOfMemoryError:
            if rows == 1:
                raise
        passes.shape.shrink(rows)  # outside of the handler, whose traceback holds on to memory
    return torch.cat(parts)


def largest_rows(probes: Sequence[Probe], x_BCHW: Tensor, *, most: int = MOST) -> int:
    """The largest power of two of rows in which every probe fits where the images `x_BCHW` are, by trying.

    Each probe is tried, because float32 graphs take twice the memory of bfloat16 ones; so many rows of the attacks'
    state lie beside it.

    Raises:
        torch.OutOfMemoryError: where not even one image fits.
    """
    rows = SMALLEST
    while not _fits(probes, x_BCHW, rows):
        if rows == 1:
            raise torch.OutOfMemoryError(
                f"not even one image of shape {tuple(x_BCHW.shape[1:])} fits on {x_BCHW.device}"
            )
        rows //= 2
    while 2 * rows <= most and _fits(probes, x_BCHW, 2 * rows):
        rows *= 2
    return rows


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
        release_memory()


def efficient_rows(seconds: Callable[[int], float], most: int) -> int:
    """The smallest power of two of rows, up to `most`, whose images a second are within 5 % of the best.

    More rows than that fill memory, and leave more of them empty where a run's last images are attacked.

    Example:
        >>> efficient_rows(lambda rows: 1 + rows / 8, most=1024)  # a pass has a fixed part of 8 rows
        256
    """
    tried = [most >> i for i in range(most.bit_length()) if most >> i >= SMALLEST] or [most]
    per_second = {rows: rows / seconds(rows) for rows in tried}
    return min(rows for rows in tried if per_second[rows] >= _NEARLY * max(per_second.values()))


def fastest_of_three(act: Callable[[], Tensor]) -> float:
    """Seconds of the fastest of three calls, after one that warms up; in CPU time where its result is on a CPU.

    Reading a value of the result waits for an accelerator. Other processes may use a CPU at the same time.
    """
    on_cpu = act().device.type == "cpu"
    clock = time.process_time if on_cpu else time.perf_counter

    def timed() -> float:
        started = clock()
        float(act().flatten()[0])
        return clock() - started

    return min(timed() for _ in range(3))


@contextmanager
def as_out_of_memory() -> Iterator[None]:
    """In here an allocation that cuDNN, cuBLAS or the CUDA runtime could not make is torch.OutOfMemoryError too.

    torch raises that for its own allocator alone; the libraries' statuses come as other RuntimeErrors.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if getattr(error, "error_code", None) == _CUDA_OUT_OF_MEMORY or any(
            status in str(error) for status in _NOT_ALLOCATED
        ):
            raise torch.OutOfMemoryError(str(error)) from error
        raise


def release_memory() -> None:
    """Give the accelerator's cached blocks back, after it ran out of memory."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
