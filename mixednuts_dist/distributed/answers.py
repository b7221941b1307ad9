"""What a classifier answers while it is attacked: a run looked at it once, and it may change afterwards.

A card that errs once, a factory that counts its calls, dropout that is switched on later: rows with such an answer are
never written. The piece fails, is tried again and names the classifier.

Shapes: B images of a piece, K classes.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..attacks.red_flags import LOGITS_TOLERANCE
from ..errors import BaseClassifierError, StoreError
from ..storage.tables import unusable_values

_AT_ONCE = 16  # images, when a failed piece is looked at again
_REPEATED = 16  # images of a worker's first piece that are classified once more after each piece


class Answers:
    """The answers of a run's classifiers, watched while pieces are computed.

    Args:
        uris: of "std", where the run has one, and "rob".
        n_classes: as the driver found it; None where it has not looked.
        logits: of a classifier, in float32, as `Workbench.logits`.
        random: whether logits need not repeat (`evaluate.eot`).
    """

    def __init__(
        self,
        networks: Mapping[str, nn.Module],
        uris: Mapping[str, str],
        n_classes: int | None,
        logits: Callable[[nn.Module, Tensor], Tensor],
        *,
        random: bool = False,
    ) -> None:
        self._networks, self._uris, self._n_classes = networks, uris, n_classes
        self._logits, self._random = logits, random
        self._first: tuple[Tensor, dict[str, Tensor]] | None = None  # images, and what was answered when they came
        self._watches = {role: _Watch(network) for role, network in networks.items()}

    @contextmanager
    def checked(self, x_BCHW: Tensor) -> Iterator[Callable[[Mapping[str, Tensor]], None]]:
        """In here a piece is computed from its images; what it gives refuses columns that must not be written.

        Raises:
            BaseClassifierError: naming the classifier that answered NaN, infinity or something else than logits, or
                other logits than before for the same images.
        """
        for watch in self._watches.values():
            watch.take()
        try:
            if self._first is None and not self._random:
                probe_BCHW = x_BCHW[:_REPEATED].clone()
                self._first = probe_BCHW, self._answered(probe_BCHW)
            yield self._require_usable
        except (StoreError, BaseClassifierError):
            raise
        except Exception:
            for role, network in self._networks.items():
                self._raise_if_unusable(role, network, x_BCHW)
            raise

    def _require_usable(self, columns: Mapping[str, Tensor]) -> None:
        seen = [role for role, watch in self._watches.items() if watch.take()]
        bad = next(filter(None, (unusable_values(name, values) for name, values in columns.items())), None)
        if seen or bad:
            named, what = " or ".join(map(self._named, seen or self._uris)), bad or "some answers held NaN or infinity"
            raise BaseClassifierError(f"{named}: {what}; when the run began all of them were finite")
        if self._first is not None:
            self._require_repeated(*self._first)

    def _answered(self, x_BCHW: Tensor) -> dict[str, Tensor]:
        return {role: self._logits(network, x_BCHW) for role, network in self._networks.items()}

    def _require_repeated(self, x_BCHW: Tensor, first: Mapping[str, Tensor]) -> None:
        """The same logits as before the first piece: attacks on one that is random by now, or another, say nothing.

        A black box answers from what it remembers.
        """
        for role, again_BK in self._answered(x_BCHW).items():
            if not torch.allclose(again_BK, first[role], rtol=LOGITS_TOLERANCE, atol=LOGITS_TOLERANCE):
                raise BaseClassifierError(
                    f"{self._named(role)} gives {len(x_BCHW)} images other logits than before its first partition, by "
                    f"up to {float((again_BK - first[role]).abs().max()):.3g}: it has become random, or changed. "
                    "Switch that off; one that is random on purpose is averaged over draws with evaluate.eot=20"
                )

    @torch.no_grad()
    def _raise_if_unusable(self, role: str, network: nn.Module, x_BCHW: Tensor) -> None:
        """After a piece has failed: ask the classifier for its images once more."""
        for part_BCHW in torch.split(x_BCHW, _AT_ONCE):
            try:
                logits = network(part_BCHW)
            except Exception as error:  # its own code may raise anything
                raise BaseClassifierError(f"{self._named(role)} fails: {type(error).__name__}: {error}") from error
            expected = (len(part_BCHW), self._n_classes or logits.shape[-1])
            finite = bool(logits.isfinite().all())
            if tuple(logits.shape) != expected or not logits.is_floating_point() or not finite:
                raise BaseClassifierError(
                    f"{self._named(role)} answers {logits.dtype} of shape {tuple(logits.shape)}"
                    f"{'' if finite else ', some of it NaN or infinite'}; when the run began it was finite "
                    f"floating-point logits of shape {expected}"
                )

    def _named(self, role: str) -> str:
        return f"{role}={self._uris[role]!r}"


class _Watch:
    """A classifier's forward hook that remembers, on its device, whether any answer held NaN or infinity.

    A NaN in the middle of an attack is in no column: the attack only ends at a weaker point. Copies of the network,
    which compute in another precision, are not watched.
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
        """Whether there was one since the last call."""
        seen, self._seen = self._seen, None
        return seen is not None and bool(seen)
