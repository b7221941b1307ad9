"""The words and number formats that terminal, page and LaTeX share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..threat import ThreatModel
from .intervals import Count

if TYPE_CHECKING:
    from .results import RunResults

_LATEX_ESCAPES = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}  # fmt: skip


def percent_text(count: Count) -> str:
    """`77.3`: one decimal, and two from 1000 images on, where the first no longer holds all that was measured."""
    return f"{count.percent:.{_decimals(count)}f}"


def interval_text(count: Count) -> str:
    """`[74.6, 79.8]`, in percent, with the decimals of `percent_text`."""
    low, high = count.interval
    return f"[{low:.{_decimals(count)}f}, {high:.{_decimals(count)}f}]"


def share_text(count: Count) -> str:
    """`773 of 1000 (77.3 %)`."""
    return f"{count.correct} of {count.total} ({percent_text(count)} %)"


def percent_first(count: Count) -> str:
    """`77.3 % (773 of 1000)`, which breaks before the bracket and nowhere else."""
    return f"{percent_text(count)}\u00a0% ({count.correct}\u00a0of\u00a0{count.total})"


def bootstrap_text(interval: tuple[float, float]) -> str:
    """`75.0 to 90.0 %` of a pair of shares."""
    return f"{100 * interval[0]:.1f} to {100 * interval[1]:.1f}\u00a0%"


def threat_text(threat: ThreatModel) -> str:
    """`Linf, eps = 8/255`, or the plain radius where it is no whole number of grey levels."""
    levels = threat.eps * 255
    whole = threat.norm == "Linf" and abs(levels - round(levels)) < 1e-6
    return f"{threat.norm}, eps = {f'{round(levels)}/255' if whole else f'{threat.eps:g}'}"


def seconds_text(seconds: float) -> str:
    """`41.3 s`, `12 min 05 s`, `3 h 20 min`."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    if round(seconds) < 3600:
        return f"{round(seconds) // 60} min {round(seconds) % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def weight_text(alpha: float, one_minus_alpha: float) -> str:
    """`0.9987`, with as many decimals as it takes to tell alpha from 1, as far as a float can."""
    decimals = 4
    while decimals < 12 and one_minus_alpha > 0 and one_minus_alpha < 10 ** (2 - decimals):
        decimals += 1
    return f"{alpha:.{decimals}f}"


def layer_norm_text(ln_k: int | None) -> str:
    """Which logits LayerNorm's mean and variance are taken over."""
    return (
        "LayerNorm over all logits (the top 250 of more)" if ln_k is None else f"LayerNorm over the top {ln_k} logits"
    )


def latex_text(text: str) -> str:
    """The text with LaTeX's own characters made harmless."""
    return "".join(_LATEX_ESCAPES.get(character, character) for character in text)


def summary_sentence(results: RunResults) -> str:
    """What came out, in two plain sentences for somebody who reads nothing else."""
    std, rob, mixed = (results.row(name) for name in ("std", "rob", "mixed"))
    clean = (
        f"The mixture is right on {share_text(mixed.clean)} clean images; rob alone on {share_text(rob.clean)}, "
        f"std alone on {share_text(std.clean)}."
    )
    return f"{clean} {_under_attack(mixed.robust, rob.robust, std.robust)}"


def _under_attack(mixed: Count, rob: Count, std: Count) -> str:
    if rob.correct == 0:
        return f"Under attack rob is right on none of {rob.total}, so there is no robustness to keep."
    kept = f"{100 * mixed.correct / rob.correct:.1f} %"
    return (
        f"Under attack it keeps {share_text(mixed)}, which is {kept} of what rob keeps ({rob.correct}); "
        f"std keeps {std.correct}."
    )


def _decimals(count: Count) -> int:
    return 1 if count.total < 1000 else 2
