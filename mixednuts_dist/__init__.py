"""MixedNUTS (Bai et al., TMLR 2024) on a Ray cluster: minimum-margin attacks, Algorithm 1, adaptive AutoAttack.

Names are imported on first use, so that importing the package costs nothing and never starts or imports Ray.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .acceleration.arithmetic import Arithmetic as Arithmetic
    from .acceleration.batch_shape import BatchShape as BatchShape
    from .api import mix as mix
    from .attacks.adaptive import autoattack as autoattack
    from .attacks.budget import AttackBudget as AttackBudget
    from .attacks.drop_in import AutoAttack as AutoAttack
    from .attacks.minimum_margin import minimum_margin_attack as minimum_margin_attack
    from .attacks.result import AttackResult as AttackResult
    from .attacks.straight_through import straight_through as straight_through
    from .certification.smoothed_mixture import SmoothedMixture as SmoothedMixture
    from .classifiers.base_classifiers import load_classifier as load_classifier
    from .config.run_config import RunConfig as RunConfig
    from .config.run_config import load_config as load_config
    from .config.threat import ThreatModel as ThreatModel
    from .deployment.loading import load_pretrained as load_pretrained
    from .deployment.loading import load_run as load_run
    from .deployment.loading import load_smoothed as load_smoothed
    from .deployment.loading import save_pretrained as save_pretrained
    from .errors import MixedNutsError as MixedNutsError
    from .images.datasets import open_dataset as open_dataset
    from .mixing.classifier import MixedClassifier as MixedClassifier
    from .mixing.margins import signed_margin as signed_margin
    from .mixing.margins import top2_margin as top2_margin
    from .mixing.transforms import LogitTransform as LogitTransform
    from .selection.choice import MixedNUTSParameters as MixedNUTSParameters
    from .selection.selection import (
        Selection as Selection,
    )
    from .selection.selection import (
        select_parameters as select_parameters,
    )
    from .selection.selection import (
        select_parameters_exact as select_parameters_exact,
    )

__version__ = "0.3.0"

_HOMES = {
    "Arithmetic": ".acceleration.arithmetic",
    "AttackBudget": ".attacks.budget",
    "AttackResult": ".attacks.result",
    "AutoAttack": ".attacks.drop_in",
    "BatchShape": ".acceleration.batch_shape",
    "LogitTransform": ".mixing.transforms",
    "MixedClassifier": ".mixing.classifier",
    "MixedNUTSParameters": ".selection.choice",
    "MixedNutsError": ".errors",
    "RunConfig": ".config.run_config",
    "Selection": ".selection.selection",
    "SmoothedMixture": ".certification.smoothed_mixture",
    "ThreatModel": ".config.threat",
    "autoattack": ".attacks.adaptive",
    "load_classifier": ".classifiers.base_classifiers",
    "load_config": ".config.run_config",
    "load_pretrained": ".deployment.loading",
    "load_run": ".deployment.loading",
    "load_smoothed": ".deployment.loading",
    "minimum_margin_attack": ".attacks.minimum_margin",
    "mix": ".api",
    "open_dataset": ".images.datasets",
    "save_pretrained": ".deployment.loading",
    "select_parameters": ".selection.selection",
    "select_parameters_exact": ".selection.selection",
    "signed_margin": ".mixing.margins",
    "straight_through": ".attacks.straight_through",
    "top2_margin": ".mixing.margins",
}
__all__ = list(_HOMES)  # for type checkers the imports above say it, by `as`


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has: {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
