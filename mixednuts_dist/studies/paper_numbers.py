"""The numbers that the MixedNUTS paper (TMLR 2024) prints, by the label of their table or figure.

Transcribed as printed. Percentages are in percent, row and column names are those of our own tables, so that they can
stand beside ours where the set-up is the same.
"""

from dataclasses import dataclass

from ..config import RunConfig
from ..reports.table import Table

PaperCell = str | float | None

_EPS_8, _EPS_4 = 8 / 255, 4 / 255


@dataclass(frozen=True)
class SetUp:
    """Data, threat and base classifiers of an experiment of the paper."""

    name: str
    words: str
    data: str  # scheme of the dataset's URI
    eps: float  # Linf
    robs: tuple[str, ...]  # names one of which rob's URI must contain
    stds: tuple[str, ...]

    def is_of(self, config: RunConfig) -> bool:
        """Whether a run has the same data, threat and base classifiers."""
        return (
            config.data.uri.partition(":")[0] == self.data
            and config.threat.norm == "Linf"
            and abs(config.threat.eps - self.eps) < 1e-9
            and any(name in config.rob for name in self.robs)
            and any(name in str(config.std) for name in self.stds)
        )


_MAIN_10 = SetUp(
    "CIFAR-10", "CIFAR-10 at 8/255, rob RaWideResNet-70-16 [Peng23], std ResNet-152 [Kolesnikov20]",
    "cifar10", _EPS_8, ("Peng2023Robust", "Bai2024MixedNUTS"), ("Bai2024MixedNUTS", "resnetv2_152", "BiT", "bit"),
)  # fmt: skip
_MAIN_100 = SetUp(
    "CIFAR-100", "CIFAR-100 at 8/255, rob WideResNet-70-16 [Wang23], std ResNet-152 [Kolesnikov20]",
    "cifar100", _EPS_8, ("Wang2023Better_WRN-70-16", "Bai2024MixedNUTS"),
    ("Bai2024MixedNUTS", "resnetv2_152", "BiT", "bit"),
)  # fmt: skip
_MAIN_IMAGENET = SetUp(
    "ImageNet", "ImageNet at 4/255, rob Swin-L [Liu23], std ConvNeXt V2-L [Woo23]",
    "imagenet", _EPS_4, ("Liu2023Comprehensive_Swin-L", "Bai2024MixedNUTS"),
    ("Bai2024MixedNUTS", "convnextv2_large", "ConvNeXtV2-L"),
)  # fmt: skip
_CLAMPS_10 = SetUp("CIFAR-10", "CIFAR-10, rob ResNet-18 [Na20]", "cifar10", _EPS_8, (), ())


@dataclass(frozen=True)
class PaperTable:
    """One table of the paper for one set-up; the first column names the row as ours does."""

    label: str
    set_up: SetUp
    columns: tuple[str, ...]
    rows: tuple[tuple[PaperCell, ...], ...]
    note: str = ""

    def table(self) -> Table:
        """The table in the form of ours."""
        return Table(self.columns, self.rows)

    def value(self, row: str, column: str) -> PaperCell:
        """One printed number, None where the paper has none."""
        found = next((cells for cells in self.rows if cells[0] == row), None)
        return found[self.columns.index(column)] if found and column in self.columns else None


_ACCURACY = ("classifier", "clean", "robust")
MAIN = (
    PaperTable(
        "tab:efficiency", _MAIN_10, _ACCURACY, (("std", 98.50, 0.0), ("rob", 93.27, 71.07), ("mixed", 95.19, 69.71))
    ),
    PaperTable(
        "tab:efficiency", _MAIN_100, _ACCURACY, (("std", 91.38, 0.0), ("rob", 75.22, 42.67), ("mixed", 83.08, 41.80))
    ),
    PaperTable(
        "tab:efficiency", _MAIN_IMAGENET, _ACCURACY,
        (("std", 86.18, 0.0), ("rob", 78.92, 59.56), ("mixed", 81.48, 58.50)),
        "tab:base_acc prints 78.75 % clean for rob on the whole validation set.",
    ),
)  # fmt: skip

_CHANGE = ("images", "relative change (%)")
ERROR_RATE = (
    PaperTable("tab:err_rate", _MAIN_10, _CHANGE, (("clean", -28.53), ("robust", 4.70))),
    PaperTable("tab:err_rate", _MAIN_100, _CHANGE, (("clean", -31.72), ("robust", 1.52))),
    PaperTable("tab:err_rate", _MAIN_IMAGENET, _CHANGE, (("clean", -12.14), ("robust", 2.62))),
)

_FORMS = ("classifier", "clean", "attacked")
_FORMS_NOTE = "Clean on the full data set, attacked on 1000 images."
BASE_ACCURACY = (
    PaperTable(
        "tab:base_acc", _MAIN_10, _FORMS, (("h", 93.27, 71.4), ("h-LN", 93.27, 71.4), ("h-M", 93.25, 71.4)), _FORMS_NOTE
    ),
    PaperTable(
        "tab:base_acc", _MAIN_100, _FORMS,
        (("h", 75.22, 43.0), ("h-LN", 75.22, 42.9), ("h-M", 75.22, 43.3)), _FORMS_NOTE,
    ),
    PaperTable(
        "tab:base_acc", _MAIN_IMAGENET, _FORMS,
        (("h", 78.75, 57.5), ("h-LN", 78.75, 57.5), ("h-M", 78.75, 57.5)), _FORMS_NOTE,
    ),
)  # fmt: skip

_PARAMETERS = ("beta", "s", "c", "p", "alpha")
PARAMETERS = (
    PaperTable("tab:spc_candidate", _MAIN_10, _PARAMETERS, (("0.985", 5.00, -1.10, 4.00, 0.999),)),
    PaperTable(
        "tab:spc_candidate", _MAIN_100, _PARAMETERS, (("0.985", 0.612, -2.14, 3.57, 0.986),),
        "The printed grid of c, [-2.5, -0.4], has no -2.14; the grid [-2.5, 0] has.",
    ),
    PaperTable("tab:spc_candidate", _MAIN_IMAGENET, _PARAMETERS, (("0.99", 0.0235, -0.286, 2.71, 0.997),)),
)  # fmt: skip

_CLAMP = ("clamp", "s", "c", "p", "alpha", "beta", "objective")
CLAMP = (
    PaperTable(
        "tab:clamp_abla", _CLAMPS_10, _CLAMP,
        (
            ("linear", 0.050, None, 9.14, 0.963, 0.985, 0.671),
            ("relu", 10.4, -0.750, 4.00, 0.934, 0.985, 0.671),
            ("gelu", 2.59, -0.750, 4.00, 0.997, 0.985, 0.671),
        ),
    ),
    PaperTable(
        "tab:clamp_abla", _MAIN_100, _CLAMP,
        (
            ("linear", 0.000005, None, 10.5, 0.880, 0.985, 0.504),
            ("relu", 0.612, -2.29, 4.00, 0.972, 0.985, 0.500),
            ("gelu", 0.612, -2.14, 3.57, 0.986, 0.985, 0.500),
        ),
    ),
)  # fmt: skip

DATA_SIZE = (
    PaperTable(
        "tab:datasize_abla", _MAIN_100, ("images searched", "clean", "robust"),
        (("1000", 82.8, 41.6), ("300", 83.0, 41.5), ("100", 85.1, 39.5)),
    ),
)  # fmt: skip
TEMPERATURE = (
    PaperTable(
        "tab:ts_abla", _MAIN_100, ("std", "clean", "robust"),
        (("T = 0", 82.8, 41.6), ("T = 0.5", 82.8, 41.4), ("T = 1", 82.8, 41.3)),
    ),
)  # fmt: skip
SURROGATE = (
    PaperTable(
        "sec:transfer_attack", _MAIN_100, ("surrogate", "robust", "Square's extra finds"),
        (("r_d = 0.9", 41.80, 0.0), ("r_d = 0", 42.97, 12.0)), "On all 10,000 images.",
    ),
)  # fmt: skip
_MODES = ("mode", "robust")
BYPASS = (
    PaperTable("sec:adap_attack", _MAIN_10, _MODES, (("transfer", 69.71), ("bypass", 70.08))),
    PaperTable("sec:adap_attack", _MAIN_100, _MODES, (("transfer", 41.80), ("bypass", 41.91))),
    PaperTable("sec:adap_attack", _MAIN_IMAGENET, _MODES, (("transfer", 58.50), ("bypass", 58.62))),
)
NO_TRANSFORM = (
    PaperTable(
        "sec:sensitivity", _MAIN_100, ("transformation of rob", "clean", "robust"),
        (("none (Mixed)", 77.6, 39.9), ("GELU only", 77.9, 40.4), ("M(s, p, c)", 82.8, 41.6)),
        "On 1000 images.",
    ),
)  # fmt: skip
PARAMETER_TRANSFER = (
    PaperTable(
        "tab:param_trans", _MAIN_10, ("rob", "s", "c", "p"),
        (("[Peng23]", 5.0, -1.1, 4.0), ("[Pang22]", 5.0, -1.1, 4.0), ("[Wang23]", 5.0, -1.1, 2.71)),
    ),
)  # fmt: skip
APPROXIMATION = (
    PaperTable(
        "sec:approx_err", _MAIN_100, ("perturbations against", "objective (%)"), (("h-LN", 50.0), ("h-M", 66.7))
    ),
)
_SEEN = ("images", "clean", "robust")
SEEN = (
    PaperTable("tab:overfit", _MAIN_10, _SEEN, (("seen", 95.20, 69.20), ("unseen", 95.18, 69.77))),
    PaperTable("tab:overfit", _MAIN_100, _SEEN, (("seen", 82.80, 41.60), ("unseen", 83.11, 41.82))),
    PaperTable("tab:overfit", _MAIN_IMAGENET, _SEEN, (("seen", 82.60, 60.80), ("unseen", 81.20, 57.93))),
)

_COST = ("classifier", "parameters (M)", "GFLOPs", "clean", "robust")
EFFICIENCY = (
    PaperTable(
        "tab:efficiency", _MAIN_10, _COST,
        (
            ("std", 232.3, 30.00, 98.50, 0.0),
            ("rob", 267.2, 121.02, 93.27, 71.07),
            ("mixed", 499.5, 151.02, 95.19, 69.71),
            ("[Bai24], with mixing net", 566.9, 117.31, 95.23, 68.06),
            ("[Rebuffi21]", 266.8, 77.55, 92.23, 66.58),
        ),
    ),
    PaperTable(
        "tab:efficiency", _MAIN_100, _COST,
        (
            ("std", 232.6, 30.00, 91.38, 0.0),
            ("rob", 266.9, 77.56, 75.22, 42.67),
            ("mixed", 499.5, 107.56, 83.08, 41.80),
            ("[Bai24], with mixing net", 567.4, 117.31, 85.21, 38.72),
            ("[Gowal20]", 266.9, 77.55, 69.15, 36.88),
        ),
    ),
    PaperTable(
        "tab:efficiency", _MAIN_IMAGENET, _COST,
        (
            ("std", 196.5, 68.79, 86.18, 0.0),
            ("rob", 198.0, 68.12, 78.92, 59.56),
            ("mixed", 394.5, 136.91, 81.48, 58.50),
            ("[Singh23]", 198.1, 71.16, 77.00, 57.70),
            ("[Peng23]", 104.1, 51.14, 73.44, 48.94),
        ),
        "As printed; the parameter counts of std and rob are swapped there: Swin-L has 196.5 M, ConvNeXt V2-L 198.0 M.",
    ),
)  # fmt: skip
