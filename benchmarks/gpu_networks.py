"""The networks and images of the GPU acceptance; `py:benchmarks/gpu_networks.py:resnet18` names one for a command."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixednuts_dist.classifiers.checkpoints import import_quietly
from mixednuts_dist.classifiers.robustbench_zoo import import_robustbench


def resnet18() -> nn.Module:
    """Return the CIFAR-10 classifier that pyautoattack includes, with 94.2% clean accuracy and without robustness."""
    module = import_quietly("pyautoattack.examples.resnet")
    network: nn.Module = module.ResNet18()
    weights = Path(str(module.__file__)).with_name("model_test.pt")
    network.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    return network


def wide_resnet(depth: int, width: int) -> nn.Module:
    """Return a WideResNet as on RobustBench, with seeded random weights."""
    module = import_robustbench("robustbench.model_zoo.architectures.dm_wide_resnet")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network: nn.Module = module.DMWideResNet(depth=depth, width=width, activation_fn=nn.SiLU)
    return network


def colored_noise(n: int) -> Tensor:
    """Return soft colored noise, (n, 3, 32, 32) in [0, 1]."""
    coarse = torch.rand(n, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return F.interpolate(coarse, size=(32, 32), mode="bicubic", align_corners=False).clamp(0, 1)
