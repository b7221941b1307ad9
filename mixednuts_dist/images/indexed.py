"""Single images by index, so that a dataset feeds a `torch.utils.data.DataLoader`."""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Indexed(Protocol):
    """Adds `dataset[i]` to a class with `__len__` and `read`."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> "tuple[Tensor, Tensor]":
        """Images `start` .. `stop - 1` and their labels."""

    def __getitem__(self, index: int) -> "tuple[Tensor, int]":
        """One image, float32 (C, H, W) in [0, 1], and its label.

        Raises:
            IndexError: beyond the last image.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} images")
        start = range(len(self))[index]
        images, labels = self.read(start, start + 1)
        return images[0], int(labels[0])
