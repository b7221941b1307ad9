"""What the rounds of the search buy: kept and clean, predicted and measured, round by round, against the paper."""

from ..mixing.mixture import robust_lower_bound
from ..register import STUDIES
from ..reports.counts import Count, count, images_text, share_text
from ..reports.figures import rounds_chart
from ..reports.table import Cell, Table
from .bench import Bench
from .parameters import Question, clean_correct, select
from .study import Outcome

PAPER = "no rounds"


@STUDIES(
    "counterexamples",
    describes="The search's rounds: clean, kept as predicted and kept when measured",
    section="ours; beyond 4.3",
    order=12.5,
)
def counterexamples(bench: Bench) -> Outcome:
    """The choice without rounds and that of each round, attacked alike, and the deployed one under the whole attack.

    Kept counts rob's robust images only, so that both columns have the same total.
    """
    beta, rows_ = bench.beta, bench.first(bench.rows)
    n_robust = int((~rows_.rob_broken_N).sum())
    first = select(bench.rows, Question.of(bench.config.search, bench.search)).for_beta(beta).mixture()
    attacked = [(PAPER, first)]
    for done in bench.search.rounds[1:]:  # the first round attacks the choice that is made without any
        attacked += [(f"round {done.round}", entry.mixture()) for entry in done.attacked if entry.beta == beta]
    if bench.deployed() not in [mixture for _, mixture in attacked]:
        attacked.append(("deployed", bench.deployed()))
    steps: list[tuple[str, Count, Count, Count]] = []
    for name, mixture in attacked:
        held_N = robust_lower_bound(rows_.rob_attacked_NK, rows_.labels_N, mixture) & ~rows_.rob_broken_N
        found = bench.measured(f"the choice of {name}", mixture)
        kept = Count(int((found.robust_N & ~rows_.rob_broken_N).sum()), n_robust)
        steps.append((name, count(clean_correct(mixture, rows_)), Count(int(held_N.sum()), n_robust), kept))
    rows: list[tuple[Cell, ...]] = [(*step, mixture.alpha) for step, (_, mixture) in zip(steps, attacked, strict=True)]
    (_, clean, _, kept), (_, last_clean, _, last_kept) = steps[0], steps[-1]
    passes = sum(done.n_forward + done.n_backward for done in bench.search.rounds)
    n_rounds = len(bench.search.rounds)
    findings = (
        f"Without rounds the mixture keeps {share_text(kept)} of rob's robust images when measured and has "
        f"{share_text(clean)} clean images right; what is deployed keeps {share_text(last_kept)} and has "
        f"{share_text(last_clean)}. beta = {beta:g} asks for {100 * beta:g} %.",
        f"The search took {n_rounds} round{'' if n_rounds == 1 else 's'} and {passes:,} passes of images through the "
        f"networks on {images_text(bench.run.inputs.n_images)}.",
    )
    remarks = (
        "Each choice is attacked alike, with all stored perturbations tried first; predicted is what holds under those "
        "of the attack stage.",
        *bench.reduction,
    )
    columns = ("choice of", "clean", "kept_predicted", "kept_measured", "alpha")
    return Outcome(Table(columns, rows), rounds_chart(steps, beta), findings, remarks)
