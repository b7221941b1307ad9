"""Tables of tensors with one row a slot, so that examples can be taken out, set aside and put together again."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Self, cast

import torch
from torch import Tensor


class Rows:
    """Base of dataclasses whose every field is a tensor, or again `Rows`, with the slots on its first axis."""

    def take(self, index: Tensor) -> Self:
        """The rows of `index` (on the host), in that order."""
        return self._map(lambda values: values.take(index) if isinstance(values, Rows) else values[index])

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """The rows of all parts, one after the other."""
        columns = {
            field.name: _joined([getattr(part, field.name) for part in parts]) for field in fields(cast(Any, parts[0]))
        }
        return cls(**columns)

    def _map(self, change: Any) -> Self:
        return type(self)(**{field.name: change(getattr(self, field.name)) for field in fields(cast(Any, self))})


def _joined(values: list[Any]) -> Any:
    return values[0].join(values) if isinstance(values[0], Rows) else torch.cat(values)


def anyone(mask: Tensor) -> bool:
    """Whether any entry is set; simply True on an accelerator, where the host would have to wait for the answer."""
    return mask.device.type != "cpu" or bool(mask.any())
