"""Whole standard AutoAttack here beside pyautoattack's, attack by attack: `mixednuts benchmark attack --whole`.

Same classifier, images, radius, published budgets (no extra restarts), threads and process. The contestants take turns,
and each attack begins with what the contestant's own attacks before it have left standing.
"""

from typing import Any

import torch
from pyautoattack import AutoAttack
from torch import Tensor

from ..acceleration.arithmetic import Arithmetic, tf32_allowed
from ..attacks.adaptive import STANDARD_ATTACKS, AttackOutcome, autoattack
from ..attacks.budget import AttackBudget
from ..threat import ThreatModel
from .attack import Timed, say
from .attack_subjects import Subject, subject

BUDGET = AttackBudget(border_restarts=0)


def run(
    *, data: str | None = None, model: str | None = None, eps: float | None = None, n_images: int = 40, rounds: int = 1
) -> dict[str, Any]:
    """Prints what it finds line by line and returns the numbers; ratios above 1 are in favour of this package."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    attacked = subject(model or "resnet-18", data, n_images, device, eps)
    say(f"{attacked.description}; standard AutoAttack, {torch.get_num_threads()} threads")
    arithmetic = Arithmetic("auto")
    _ours(attacked, arithmetic, STANDARD_ATTACKS[0], torch.arange(2))  # copies are made and tried before the clock runs
    per_attack: list[dict[str, Any]] = []
    lost: list[int] = []
    gained: list[int] = []
    for number in range(rounds):
        left = {"theirs": torch.arange(len(attacked.y)), "ours": torch.arange(len(attacked.y))}
        for attack in STANDARD_ATTACKS:
            theirs, ours = Timed([], []), Timed([], [])
            n_theirs, n_ours = len(left["theirs"]), len(left["ours"])
            with theirs.taken():
                left["theirs"] = _standing_theirs(attacked, attack, left["theirs"])
            with ours.taken():
                outcome = _ours(attacked, arithmetic, attack, left["ours"])
            left["ours"] = left["ours"][outcome.robust.cpu()] if outcome else left["ours"]
            per_attack.append({
                "round": number, "attack": attack, "pyautoattack_s": theirs.wall_s[0], "here_s": ours.wall_s[0],
                "broken_by_pyautoattack": n_theirs - len(left["theirs"]), "broken_here": n_ours - len(left["ours"]),
            })  # fmt: skip
            say(
                f"{attack}: pyautoattack {theirs.wall_s[0]:.1f} s, {len(left['theirs'])} stand; here "
                f"{ours.wall_s[0]:.1f} s, {len(left['ours'])} stand; {theirs.wall_s[0] / ours.wall_s[0]:.2f} times"
            )
        stands = {who: set(rows.tolist()) for who, rows in left.items()}
        lost += sorted(stands["ours"] - stands["theirs"])
        gained += sorted(stands["theirs"] - stands["ours"])
    ratio = sum(row["pyautoattack_s"] for row in per_attack) / sum(row["here_s"] for row in per_attack)
    say(f"whole AutoAttack: {ratio:.2f} times; broken by pyautoattack only: {lost}, here only: {gained}")
    return {
        "subject": attacked.description, "ratio": ratio, "attacks": per_attack,
        "broken_by_pyautoattack_only": lost, "broken_here_only": gained,
    }  # fmt: skip


def _ours(attacked: Subject, arithmetic: Arithmetic, attack: str, rows: Tensor) -> AttackOutcome | None:
    if not len(rows):
        return None
    return autoattack(
        attacked.network, attacked.x[rows], attacked.y[rows], threat=ThreatModel("Linf", attacked.eps),
        attacks=(attack,), sample_ids=rows.tolist(), budget=BUDGET, batch_size=len(attacked.y), arithmetic=arithmetic,
    )  # fmt: skip


def _standing_theirs(attacked: Subject, attack: str, rows: Tensor) -> Tensor:
    """Which of `rows` pyautoattack leaves standing, in full float32."""
    if not len(rows):
        return rows
    x, y = attacked.x[rows], attacked.y[rows]
    ensemble = AutoAttack(attacked.network, norm="Linf", eps=attacked.eps, seed=0, device=x.device)
    ensemble.attacks_to_run = [attack]  # of the standard version, with its budgets
    with tf32_allowed(False), torch.random.fork_rng():
        x_adv = ensemble.run_standard_evaluation(x, y, batch_size=len(x))[0].to(x.device)
        with torch.no_grad():
            return rows[(attacked.network(x_adv).argmax(dim=1) == y).cpu()]
