"""How much memory a fine grid takes: two of 64 slabs of a 64 x 64 x 64 grid, one a thread; the others reuse theirs."""

import subprocess
import sys

import pytest

N_IMAGES, N_CLASSES, N_VALUES, N_BIASES = 750, 1000, 64, 2
BYTES_A_RESULT = 8 + 8 + 8 + 1 + 1  # log threshold, count, objective, infeasible, undeployable
# VmHWM, since `ru_maxrss` of a process starts at the size of the process that started it.
SEARCH = f"""
from pathlib import Path
import torch
from mixednuts_dist.config.keys import SearchConfig
from mixednuts_dist.selection.selection import select_parameters_exact

torch.set_num_threads(2)
generator = torch.Generator().manual_seed(0)
attacked, clean = (torch.randn({N_IMAGES}, {N_CLASSES}, generator=generator) for _ in range(2))
attacked[:, 0] += 4
clean[:, 0] += 3
labels = torch.zeros({N_IMAGES}, dtype=torch.int64)
std_pred = torch.randint(2, ({N_IMAGES},), generator=generator)
selection = select_parameters_exact(
    attacked, labels, clean, labels, std_pred,
    scales=torch.linspace(0.05, 5, {N_VALUES}).tolist(), powers=torch.linspace(1, 4, {N_VALUES}).tolist(),
    biases=[-1.0, -0.5], betas=SearchConfig().all_betas(),
)
assert selection.objectives.shape == (13, {N_VALUES}, {N_VALUES}, {N_BIASES})
print(int(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0]) * 1024)
"""


@pytest.mark.slow
def test_a_fine_grid_stays_below_2_gigabytes() -> None:
    found = subprocess.run([sys.executable, "-c", SEARCH], capture_output=True, text=True, check=True)
    other_results = 13 * N_VALUES**2 * (N_VALUES - N_BIASES) * BYTES_A_RESULT
    assert int(found.stdout) + other_results < 2e9
