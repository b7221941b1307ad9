"""Check the classifiers' outputs during attacks: no NaN or infinity, and the same logits as at the start.

These checks fail, for example, if a GPU makes an error, if a classifier counts its calls, or if dropout is switched on
during the run. Rows with such outputs are never written. The partition fails with an error that names the classifier,
and is tried again.

Shapes: B images of a partition, K classes.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..attacks.entry import LOGITS_TOLERANCE
from ..errors import BaseClassifierError, StoreError
from ..storage.tables import unusable_values
from .workbench import Workbench

_AT_ONCE = 16  # images per pass after a partition has failed
_REPEATED = 16  # images of a worker's first partition, which are classified again after each partition


class OutputChecks:
    """Checks the outputs of a run's classifiers on one worker."""

    def __init__(self, bench: Workbench) -> None:
        self._bench = bench
        self._first: tuple[Tensor, dict[str, Tensor]] | None = None  # the first images and their logits
        self._watches = {role: _Watch(network) for role, network in bench.networks.items()}

    @contextmanager
    def checked(self, x_BCHW: Tensor) -> Iterator[Callable[[Mapping[str, Tensor]], None]]:
        """Check the outputs while the block computes a partition; yields a function that rejects unusable columns.

        Raises:
            BaseClassifierError: naming the classifier whose outputs were not finite logits, or have changed for the
                same images.
        """
        for watch in self._watches.values():
            watch.take()
        try:
            if self._first is None and not self._bench.spec.random:
                probe_BCHW = x_BCHW[:_REPEATED].clone()
                self._first = probe_BCHW, self._all_logits(probe_BCHW)
            yield self._require_usable
        except (StoreError, BaseClassifierError):
            raise
        except Exception:
            for role, network in self._bench.networks.items():
                self._raise_if_unusable(role, network, x_BCHW)
            raise

    def _require_usable(self, columns: Mapping[str, Tensor]) -> None:
        """Reject columns or outputs with NaN or infinity, and logits that have changed since the first partition."""
        seen = [role for role, watch in self._watches.items() if watch.take()]
        bad = next(filter(None, (unusable_values(name, values) for name, values in columns.items())), None)
        if seen or bad:
            named = " or ".join(map(self._named, seen or self._watches))
            what = bad or "some outputs held NaN or infinity"
            raise BaseClassifierError(f"{named}: {what}; when the run began all of them were finite")
        if self._first is None:
            return
        x_BCHW, first = self._first
        for role, again_BK in self._all_logits(x_BCHW).items():  # a black box returns remembered logits here
            if not torch.allclose(again_BK, first[role], rtol=LOGITS_TOLERANCE, atol=LOGITS_TOLERANCE):
                raise BaseClassifierError(
                    f"{self._named(role)} returns other logits for {len(x_BCHW)} images than before its first "
                    f"partition, by up to {float((again_BK - first[role]).abs().max()):.3g}. It has become random, or "
                    "changed. Correct that, or set evaluate.eot=20 if it is random on purpose"
                )

    def _all_logits(self, x_BCHW: Tensor) -> dict[str, Tensor]:
        return {role: self._bench.logits(network, x_BCHW) for role, network in self._bench.networks.items()}

    @torch.no_grad()
    def _raise_if_unusable(self, role: str, network: nn.Module, x_BCHW: Tensor) -> None:
        """Run a classifier once more on the images of a partition that has failed."""
        for part_BCHW in torch.split(x_BCHW, _AT_ONCE):
            try:
                logits = network(part_BCHW)
            except Exception as error:  # the classifier's code may raise anything
                raise BaseClassifierError(f"{self._named(role)} fails: {type(error).__name__}: {error}") from error
            expected = (len(part_BCHW), self._bench.spec.n_classes or logits.shape[-1])
            finite = bool(logits.isfinite().all())
            if tuple(logits.shape) != expected or not logits.is_floating_point() or not finite:
                raise BaseClassifierError(
                    f"{self._named(role)} returns {logits.dtype} of shape {tuple(logits.shape)}"
                    f"{'' if finite else ', some of it NaN or infinite'}; when the run began it was finite "
                    f"floating-point logits of shape {expected}"
                )

    def _named(self, role: str) -> str:
        return f"{role}={self._bench.spec.classifiers[role]!r}"


class _Watch:
    """A forward hook that remembers, on the device, whether any output held NaN or infinity.

    NaN in the middle of an attack appears in no column, because the attack only returns a weaker adversarial example.
    Copies of the network in another precision are not watched.
    """

    def __init__(self, network: nn.Module) -> None:
        self._seen: Tensor | None = None
        network.register_forward_hook(self)

    def __call__(self, _network: nn.Module, _given: object, logits: object) -> None:
        if isinstance(logits, Tensor) and not torch.compiler.is_compiling():
            bad = logits.detach().isfinite().all().logical_not()
            self._seen = bad if self._seen is None else self._seen.logical_or_(bad)

    def __deepcopy__(self, _memo: object) -> "_Watch":
        return _Watch(nn.Identity())

    def take(self) -> bool:
        """Return whether any output since the last call of `take` held NaN or infinity."""
        seen, self._seen = self._seen, None
        return seen is not None and bool(seen)
