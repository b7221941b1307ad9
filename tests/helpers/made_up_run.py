"""A synthetic run with realistic statistics: `rob` is unsure when wrong, and every attack fools `std`."""

import itertools
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from mixednuts_dist.config.threat import ThreatModel
from mixednuts_dist.mixing.margins import log_one_minus_signed_margin
from mixednuts_dist.mixing.transforms import LogitTransform, layer_norm_logits
from mixednuts_dist.reports.results import RunResults, gather_results, notes_on, stage_costs
from mixednuts_dist.reports.worst_images import Prediction, WorstImage
from mixednuts_dist.selection.choice import Choice
from mixednuts_dist.storage.records import AttackRecords, EvaluateRecords, PartitionSummary, SearchResult, SearchRound

BETAS = (1.0, 0.99, 0.985, 0.98, 0.97, 0.95, 0.93, 0.9, 0.85, 0.8, 0.7, 0.5)
N_CLASSES = 10
ATTACKS = {
    "std": "apgd-ce, apgd-t (100 iterations, 9 targets)",
    "rob": "MMAA by apgd-ce, apgd-t (100 iterations, 9 targets)",
    "mixed": "adaptive AutoAttack",
}
SCALE, POWER, BIAS = 5.0, 4.0, -1.1
NOTES = (
    "Assumption 4.1 does not hold on 9 of 300 clean images: rob is right there and std is not.",
    "The optimum for beta = 1 lies on the grid's edge in scale.",
)


def logits_of(generator: torch.Generator, labels_N: Tensor, *, accuracy: float, confidence: float) -> Tensor:
    """Logits that are right with probability `accuracy`, the surer the likelier right."""
    n_images = labels_N.numel()
    logits_NK = torch.randn(n_images, N_CLASSES, generator=generator)
    right_N = torch.rand(n_images, generator=generator) < accuracy
    highest_N = logits_NK.max(dim=1).values + confidence * torch.rand(n_images, generator=generator)
    own_N = torch.where(right_N, highest_N, logits_NK.min(dim=1).values)
    return logits_NK.index_put((torch.arange(n_images), labels_N), own_N)


def made_up_attack(n_images: int = 300) -> AttackRecords:
    """Attack rows: `std` has 95% clean and 0 robust accuracy, `rob` 78% clean and about 60% robust."""
    generator, ids_N = torch.Generator().manual_seed(0), torch.arange(n_images)
    labels_N = torch.randint(N_CLASSES, (n_images,), generator=generator)
    rob_clean_NK = logits_of(generator, labels_N, accuracy=0.70, confidence=5.0)
    rob_attacked_NK = rob_clean_NK.clone()
    rob_attacked_NK[ids_N, labels_N] -= 1.0
    std_clean_NK = logits_of(generator, labels_N, accuracy=0.95, confidence=12.0)
    std_attacked_NK = std_clean_NK.clone()
    std_attacked_NK[ids_N, labels_N] = std_clean_NK.min(dim=1).values - 1  # never right again
    return AttackRecords(
        sample_ids_N=ids_N,
        labels_N=labels_N,
        std_clean_NK=std_clean_NK,
        std_attacked_NK=std_attacked_NK,
        rob_clean_NK=rob_clean_NK,
        rob_attacked_NK=rob_attacked_NK,
        log_one_minus_margin_N=log_one_minus_signed_margin(layer_norm_logits(rob_attacked_NK), labels_N),
        std_broken_N=torch.ones(n_images, dtype=torch.bool),
        rob_broken_N=rob_attacked_NK.argmax(dim=1) != labels_N,
    )


def mixed_logits(attack: AttackRecords, *, alpha: float, attacked: bool) -> Tensor:
    """The mixed classifier with T = 0; under attack `std` votes for the runner-up of `rob`, its worst vote."""
    rob_NK = attack.rob_attacked_NK if attacked else attack.rob_clean_NK
    std_N = rob_NK.topk(2, dim=1).indices[:, 1] if attacked else attack.std_clean_NK.argmax(dim=1)
    std_NK = torch.nn.functional.one_hot(std_N, N_CLASSES)
    probs_NK = (1 - alpha) * std_NK + alpha * LogitTransform(SCALE, POWER, BIAS)(rob_NK).softmax(dim=1)
    return probs_NK.clamp_min(1e-38).log().float()


def made_up_search(attack: AttackRecords, *, betas: tuple[float, ...] = BETAS) -> SearchResult:
    """One (s, p, c) for all betas, alpha from the order statistic, and predictions from the mixed classifier.

    Two rounds attack the deployed beta and the largest one; the second keeps what beta asks for.
    """
    mapped = LogitTransform(SCALE, POWER, BIAS)(attack.rob_attacked_NK)
    margins_N = -torch.expm1(log_one_minus_signed_margin(mapped, attack.labels_N))
    standing = margins_N[(margins_N > 0) & ~attack.rob_broken_N].sort().values
    entries = []
    for beta in betas:
        keep = math.ceil(beta * len(standing))
        cutoff = float(standing[max(0, len(standing) - keep)]) if len(standing) else 0.0
        alpha = 1 / (1 + cutoff)
        clean_NK = mixed_logits(attack, alpha=alpha, attacked=False)
        entries.append(
            Choice(
                SCALE, POWER, BIAS, alpha, 1 - alpha, beta=beta, objective=0.25, total=len(margins_N),
                clean_correct=int((clean_NK.argmax(dim=1) == attack.labels_N).sum()),
                kept_predicted=int(((margins_N >= cutoff) & ~attack.rob_broken_N).sum()),
                on_grid_edge=("scale",) if beta == 1.0 else (),
                clean_interval=(0.75, 0.9), kept_interval=(0.5, 0.65),
            )
        )  # fmt: skip
    deployed, n_robust = betas[min(5, len(betas) - 1)], int((~attack.rob_broken_N).sum())
    attacked = tuple(entry for entry in entries if entry.beta in (deployed, betas[0]))
    rounds = [
        SearchRound(number, f"0000000{number}", attacked, (max(0, n_robust - lost),) * len(attacked), n_robust,
                    n_forward=70_000, n_backward=60_000)
        for number, lost in ((1, 12), (2, 1))
    ]  # fmt: skip
    return SearchResult(
        criterion="exact", clamp="gelu", ln_k=None, deployed_beta=deployed, surrogate_alpha=0.87,
        entries=tuple(entries), n_candidates=720, n_undeployable=12, notes=NOTES, rounds=tuple(rounds),
    )  # fmt: skip


def made_up_evaluate(attack: AttackRecords, *, alpha: float) -> EvaluateRecords:
    """Evaluate rows about the same images."""
    clean_NK, attacked_NK = (mixed_logits(attack, alpha=alpha, attacked=attacked) for attacked in (False, True))
    right_N = clean_NK.argmax(dim=1) == attack.labels_N
    warm_N = right_N & (attacked_NK.argmax(dim=1) == attack.labels_N)
    ce_N = warm_N & (attack.sample_ids_N % 50 != 7)
    t_N = ce_N & (attack.sample_ids_N % 60 != 11)
    survived = {"warm-start": warm_N, "apgd-ce": ce_N, "apgd-t": t_N, "fab-t": t_N, "square": t_N}
    return EvaluateRecords(attack.sample_ids_N, attack.labels_N, clean_NK, attacked_NK, right_N, t_N, survived)


def made_up_candidates(beta: float) -> tuple[dict[str, Any], ...]:
    """Rows as `search/candidates.parquet` holds them: one infeasible, one that float32 could not deploy."""
    grid = itertools.product((0.5, SCALE, 50.0), (1.0, POWER), (-2.0, BIAS, -0.5))
    return tuple(
        {"beta": beta, "scale": scale, "power": power, "bias": bias, "objective": 0.8 + 0.01 * i,
         "feasible": i != 1, "deployable": i != 4}
        for i, (scale, power, bias) in enumerate(grid)
    )  # fmt: skip


def made_up_summaries(stage: str) -> list[PartitionSummary]:
    """Three partitions of 100 images on two nodes, two of them with half a GPU each."""
    return [
        PartitionSummary(stage, 0, 0, 100, 80, 60, 1800.0, 5000, 4000, "a", "NVIDIA H200", 0.5),
        PartitionSummary(stage, 1, 100, 200, 80, 60, 900.0, 6000, 5000, "a", "NVIDIA H200", 0.5),
        PartitionSummary(stage, 2, 200, 300, 80, 60, 360.0, 700, 600, "b", "cpu", 4.0),
    ]


def made_up_worst() -> tuple[WorstImage, ...]:
    """One lost and one narrow image of random pixels."""
    generator = torch.Generator().manual_seed(5)
    clean_CHW = torch.rand(1, 8, 8, generator=generator)
    change_CHW = 0.1 * torch.rand(1, 8, 8, generator=generator).sub(0.5).sign()
    margins = {"std": 0.9, "rob": 0.4, "mixed": 0.6}
    predictions = tuple(Prediction(name, "clean", 3, margin) for name, margin in margins.items())
    lost = (*predictions, Prediction("mixed", "attacked", 7, -0.2))
    held = (*predictions, Prediction("mixed", "attacked", 3, 0.01))
    pixels = clean_CHW, (clean_CHW + change_CHW).clamp(0, 1)
    return WorstImage(17, 3, "lost", True, lost, pixels), WorstImage(23, 3, "narrow", True, held, pixels)


def in_batches(
    attack: AttackRecords, evaluate: EvaluateRecords, size: int = 70
) -> list[tuple[AttackRecords, EvaluateRecords]]:
    """The same rows, some at a time, as the report reads them."""

    def part(records: Any, rows: slice) -> Any:
        return type(records)(**tree_map(lambda values_N: values_N[rows], vars(records)))

    cuts = [slice(start, start + size) for start in range(0, len(attack.labels_N), size)]
    return [(part(attack, rows), part(evaluate, rows)) for rows in cuts]


def made_up_results(n_images: int = 300, *, name: str = "made-up", betas: tuple[float, ...] = BETAS) -> RunResults:
    """All of the above, gathered; the attack stage is another run's."""
    run_id, attack = f"{name}-3f2a1c9e", made_up_attack(n_images)
    search = made_up_search(attack, betas=betas)
    results = gather_results(
        in_batches(attack, made_up_evaluate(attack, alpha=search.deployed().alpha)), search=search, attacks=ATTACKS,
        run_id=run_id, name=name, dataset="npz:cifar10_first_2048.npz", std="py:zoo.py:std_c10_resnet18",
        rob="py:zoo.py:rob_c10_resnet4b", threat=ThreatModel("Linf", 2 / 255),
        seconds={"attack": 163.4, "search": 21.07, "evaluate": 412.9},
    )  # fmt: skip
    summaries = {stage: made_up_summaries(stage) for stage in ("attack", "evaluate")}
    return replace(
        results,
        notes=tuple(notes_on(results)),
        candidates=made_up_candidates(search.deployed_beta),
        costs=stage_costs(summaries, {"evaluate": results.seconds["evaluate"]}),
        worst=made_up_worst(),
        provenance={"run": run_id, "seed": "0", "versions": "mixednuts-dist 0.1, torch 2.9"},
    )
