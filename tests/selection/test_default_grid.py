"""The library searches the grid of a configuration if no grid is given."""

import torch

from mixednuts_dist import select_parameters, select_parameters_exact
from mixednuts_dist.config.search_config import SearchConfig, grid_values


def test_select_parameters_defaults_to_the_configured_grid() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.zeros(60, dtype=torch.int64)
    clean, attacked = (torch.randn(60, 3, generator=generator) for _ in range(2))
    clean[:, 0] += 2
    attacked[:, 0] += 1
    robust = attacked.argmax(dim=1) == 0
    default = SearchConfig()
    exact = select_parameters_exact(attacked, labels, clean, labels, labels)
    paper = select_parameters(attacked[robust], clean[clean.argmax(dim=1) != 0])
    for found in (exact, paper):
        assert found.grid.scales == grid_values(default.scales)
        assert found.grid.powers == grid_values(default.powers)
        assert found.grid.biases == grid_values(default.biases)
        assert found.betas == default.all_betas()
