"""The folder with the real images and networks that tests marked `real` need."""

import os
from pathlib import Path

REAL = Path(os.environ.get("MIXEDNUTS_REAL", Path(__file__).parents[3] / "shared" / "real")).absolute()
ZOO = REAL / "zoo.py"  # factories of the networks
CIFAR10 = f"npz:{REAL / 'cifar10_test_first1000.npz'}"
MISSING = f"{ZOO} does not exist; set MIXEDNUTS_REAL to the folder with the real images and networks"
