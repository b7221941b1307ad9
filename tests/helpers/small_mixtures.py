"""A small mixed classifier, a threat model per norm and a small attack budget."""

from mixednuts_dist.attacks.budget import AttackBudget
from mixednuts_dist.config.threat import ThreatModel
from mixednuts_dist.mixing.classifier import MixedClassifier
from mixednuts_dist.mixing.transforms import LogitTransform
from tests.helpers.small_nets import small_net

SHAPE = (3, 8, 8)
QUICK = AttackBudget(n_iter=10, n_target_classes=2, n_queries=60, joint_starts=1)
LINF, L2, L1 = ThreatModel("Linf", 0.08), ThreatModel("L2", 0.8), ThreatModel("L1", 8.0)


def mixture() -> MixedClassifier:
    std, rob = small_net(10, SHAPE, seed=1, sharpness=8), small_net(10, SHAPE, seed=0, sharpness=3)
    return MixedClassifier(std, rob, LogitTransform(2.0, 2.0, -0.5), 0.6, surrogate_alpha=0.8)
