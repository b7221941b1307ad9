"""What `import mixednuts_dist` offers; `__init__.py` reads the names from this file."""

from .acceleration.batch_shape import BatchShape as BatchShape
from .acceleration.precision import FastCopies as FastCopies
from .api import MixResult as MixResult
from .api import mix as mix
from .attacks.adaptive import autoattack as autoattack
from .attacks.adaptive import minimum_margin_attack as minimum_margin_attack
from .attacks.budget import AttackBudget as AttackBudget
from .attacks.drop_in import AutoAttack as AutoAttack
from .attacks.result import AttackResult as AttackResult
from .attacks.result import Progress as Progress
from .certification.smoothed_mixture import SmoothedMixture as SmoothedMixture
from .classifiers.base_classifiers import load_classifier as load_classifier
from .classifiers.straight_through import straight_through as straight_through
from .config.run_config import RunConfig as RunConfig
from .config.run_config import load_config as load_config
from .config.run_config import parse_config as parse_config
from .config.threat import ThreatModel as ThreatModel
from .deployment.loading import load_pretrained as load_pretrained
from .deployment.loading import load_run as load_run
from .deployment.loading import load_smoothed as load_smoothed
from .deployment.loading import save_pretrained as save_pretrained
from .errors import MixedNutsError as MixedNutsError
from .images.datasets import Dataset as Dataset
from .images.datasets import open_dataset as open_dataset
from .mixing.classifier import MixedClassifier as MixedClassifier
from .mixing.margins import signed_margin as signed_margin
from .mixing.margins import top2_margin as top2_margin
from .mixing.mixture import Mixture as Mixture
from .mixing.transforms import LogitTransform as LogitTransform
from .pipeline import run as run
from .reports.report import RunReport as RunReport
from .reports.results import RunResults as RunResults
from .selection.choice import Choice as Choice
from .selection.selection import Selection as Selection
from .selection.selection import select_parameters as select_parameters
from .selection.selection import select_parameters_exact as select_parameters_exact

__version__: str
__all__: list[str]
