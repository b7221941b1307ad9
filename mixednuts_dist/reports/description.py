"""`mixednuts describe CONFIG`: what a configuration is made of, from the URIs alone, without weights or images."""

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from ..classifiers.model_size import ModelSize, measure_uri
from ..config import RunConfig
from ..images.datasets import open_dataset
from ..uris import known_image_shape


@dataclass(frozen=True)
class Description:
    """The sizes of what there is of `std`, `rob` and `mixed`; None where a black box leaves them unknown."""

    run_id: str
    image_shape: tuple[int, ...]
    sizes: dict[str, ModelSize | None]

    def to_json(self) -> dict[str, Any]:
        """`run_id`, `image_shape`, and for each classifier `parameters` and `flops` of one image, or None."""
        sizes = {name: None if size is None else asdict(size) for name, size in self.sizes.items()}
        return {"run_id": self.run_id, "image_shape": list(self.image_shape), **sizes}


def describe(config: RunConfig) -> Description:
    """Measure the base classifiers on one image of the configuration's data.

    Raises:
        BaseClassifierError, DatasetError: where a classifier cannot be built, or the image size cannot be told.
    """
    known = known_image_shape(config.data.uri)
    shape = tuple(open_dataset(config.data.uri).read(0, 1)[0].shape[1:]) if known is None else known
    rob = measure_uri(config.rob, "rob", shape)
    if config.std is None:
        return Description(config.run_id(), shape, {"rob": rob})
    std = measure_uri(config.std, "std", shape)
    return Description(config.run_id(), shape, {"std": std, "rob": rob, "mixed": _sum(std, rob)})


def _sum(std: ModelSize | None, rob: ModelSize | None) -> ModelSize | None:
    """The mixture: the transformation and the mixing add four numbers and nothing that counts."""
    if std is None or rob is None:
        return None
    return ModelSize(std.parameters + rob.parameters, std.flops + rob.flops)


def print_description(found: Description, config: RunConfig, console: Console) -> None:
    """The table, with what its numbers count."""
    size = " x ".join(map(str, found.image_shape))
    table = Table(title=f"{found.run_id}: {config.data.uri}, images {size}", title_justify="left", box=None)
    for name in ("", "parameters", "GFLOPs"):
        table.add_column(name, justify="right" if name else "left")
    for name, model in found.sizes.items():
        numbers = ("?", "?") if model is None else (f"{model.parameters / 1e6:,.4g} M", f"{model.flops / 1e9:,.4g}")
        table.add_row(name, *numbers)
    console.print(table, highlight=False)
    std = "" if config.std is None else f"std: {config.std}\n"
    console.print(f"{std}rob: {config.rob}", highlight=False, markup=False, soft_wrap=True)
    console.print("GFLOPs: one image, one pass; a multiply-accumulate counts as two (torch.utils.flop_counter).")
