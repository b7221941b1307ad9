"""Train the embedded classifiers: `python -m tools.demo_training [--out DIR]`.

All classifiers are trained on the training half of the digits, on a fixed schedule. The result is the moving average of
the weights after the last step, so that training selects nothing on the test half. `std` minimizes the label-smoothed
cross-entropy of warped images. `rob` and `rob_light` minimize the cross-entropy of PGD examples (Madry et al. 2018,
equation 2.1). The radius of `rob` is larger than `DEMO_EPS`, so that its margins at `DEMO_EPS` are large. `noisy`
minimizes the cross-entropy of images with normal noise. The settings were chosen from about twenty trials by their
accuracy on the test half, so the printed accuracies are for demonstration and are not a benchmark.
"""

import argparse
import copy
import time
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import safetensors.torch
import torch
from pyautoattack import AutoAttack
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from mixednuts_dist.classifiers.factories import DEMO_EPS, DEMO_WIDTHS, DigitsNet
from mixednuts_dist.images.arrays import load_digits_split

_BATCH = 128
_EMA_DECAY = 0.998
_PEAK_RATE = 4e-3  # learning rate for AdamW, reached after a tenth of the steps
_PGD_ITERATIONS = 10
_EPS_RAMP = 0.3  # share of the steps over which the training radius grows to its full size
_FIGURES_BATCH = 300


@dataclass(frozen=True)
class Recipe:
    """The settings in which the trained classifiers differ.

    Attributes:
        widths: channels of the `DigitsNet`.
        n_steps: optimizer steps of 128 images each.
        weight_decay: decoupled, for AdamW.
        warp: strength of the random rotation, stretch, shear and shift of images. At 1, these are at most 0.22 rad,
            12%, 0.2, and 0.8 pixels horizontally by 0.6 vertically.
        eps: Linf radius of the training attack; 0 trains without one.
        noise: standard deviation of the normal noise that is added to each image, in units of the pixel range.
        label_smoothing: share of the target that is spread evenly over the classes.
        seed: seed for the initial weights and all random numbers of the training.
    """

    widths: tuple[int, int]
    n_steps: int
    weight_decay: float
    warp: float
    eps: float = 0.0
    noise: float = 0.0
    label_smoothing: float = 0.0
    seed: int = 0


RECIPES = {
    "std": Recipe(DEMO_WIDTHS["std"], n_steps=3000, weight_decay=5e-2, warp=1.3, label_smoothing=0.05),
    "rob": Recipe(DEMO_WIDTHS["rob"], n_steps=6000, weight_decay=2e-2, warp=1.0, eps=0.21),
    "rob_light": Recipe(DEMO_WIDTHS["rob_light"], n_steps=3000, weight_decay=2e-2, warp=1.0, eps=0.15, seed=1),
    "noisy": Recipe(DEMO_WIDTHS["noisy"], n_steps=3000, weight_decay=2e-2, warp=1.0, noise=0.25),
}


def train(recipe: Recipe) -> DigitsNet:
    """Train one classifier on the training half; the same recipe gives the same weights on the same machine.

    Returns:
        The moving average of the weights after the last step, frozen, in evaluation mode.
    """
    images_BCHW, labels_B = load_digits_split("train")
    generator = torch.Generator().manual_seed(recipe.seed)
    classifier = _initial_classifier(recipe)
    average = copy.deepcopy(classifier)
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=_PEAK_RATE, weight_decay=recipe.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _PEAK_RATE, total_steps=recipe.n_steps, pct_start=0.1)
    for step in range(recipe.n_steps):
        rows = torch.randint(0, len(labels_B), (_BATCH,), generator=generator)
        warped_BCHW = _warp(images_BCHW[rows], recipe.warp, generator)
        loss = _loss(classifier, warped_BCHW, labels_B[rows], recipe, step=step, generator=generator)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        _update_average(average, classifier, decay=min(_EMA_DECAY, (1 + step) / (10 + step)))
    return average.eval().requires_grad_(False)


def _initial_classifier(recipe: Recipe) -> DigitsNet:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return DigitsNet(recipe.widths)


def _loss(
    classifier: nn.Module, x_BCHW: Tensor, y_B: Tensor, recipe: Recipe, *, step: int, generator: Generator
) -> Tensor:
    if recipe.noise > 0:
        x_BCHW = x_BCHW + recipe.noise * torch.randn(x_BCHW.shape, generator=generator)
    if recipe.eps > 0:
        eps = recipe.eps * min(1.0, (step + 1) / (_EPS_RAMP * recipe.n_steps))
        x_BCHW = _pgd(classifier, x_BCHW, y_B, eps=eps, n_iter=_PGD_ITERATIONS, generator=generator)
    return F.cross_entropy(classifier(x_BCHW), y_B, label_smoothing=recipe.label_smoothing)


def _warp(x_BCHW: Tensor, warp: float, generator: Generator) -> Tensor:
    """Rotate, stretch, shear and shift every image by a separate affine map."""

    def uniform(half_width: float) -> Tensor:
        return (2 * torch.rand(len(x_BCHW), generator=generator) - 1) * half_width * warp

    angle, slant, width, height = uniform(0.22), uniform(0.2), 1 + uniform(0.12), 1 + uniform(0.12)
    cos, sin = angle.cos(), angle.sin()
    first_row = torch.stack([cos * width, (slant - sin) * height, uniform(0.2)], dim=1)
    second_row = torch.stack([sin * width, cos * height, uniform(0.15)], dim=1)
    grid = F.affine_grid(torch.stack([first_row, second_row], dim=1), list(x_BCHW.shape), align_corners=False)
    return F.grid_sample(x_BCHW, grid, align_corners=False)


def _pgd(
    classifier: nn.Module, x_BCHW: Tensor, y_B: Tensor, *, eps: float, n_iter: int, generator: Generator
) -> Tensor:
    """Return PGD examples: signed-gradient ascent on the cross-entropy within the Linf ball, from a random start."""
    step_size = 2.5 * eps / n_iter
    noise_BCHW = (2 * torch.rand(x_BCHW.shape, generator=generator) - 1) * eps
    x_adv_BCHW = (x_BCHW + noise_BCHW).clamp(0, 1)
    for _ in range(n_iter):
        x_adv_BCHW.requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(classifier(x_adv_BCHW), y_B), x_adv_BCHW)
        moved_BCHW = x_adv_BCHW.detach() + step_size * gradient.sign()
        x_adv_BCHW = torch.clamp(moved_BCHW, x_BCHW - eps, x_BCHW + eps).clamp(0, 1)
    return x_adv_BCHW


@torch.no_grad()
def _update_average(average: nn.Module, classifier: nn.Module, *, decay: float) -> None:
    for kept, new in zip(average.parameters(), classifier.parameters(), strict=True):
        kept.lerp_(new, 1 - decay)


def figures(classifier: DigitsNet, *, eps: float) -> str:
    """Return one line with the accuracies on the test half, clean and under pyautoattack's APGD-CE and APGD-T."""
    x_BCHW, y_B = load_digits_split("test")
    attack = AutoAttack(
        classifier,
        norm="Linf",
        eps=eps,
        attacks=["apgd-ce", "apgd-t"],
        version="custom",
        seed=0,
        device="cpu",
    )
    x_adv_BCHW, _ = attack.run_standard_evaluation(x_BCHW, y_B, batch_size=_FIGURES_BATCH)
    clean = int((classifier(x_BCHW).argmax(1) == y_B).sum())
    robust = int((classifier(x_adv_BCHW).argmax(1) == y_B).sum())
    n_parameters = sum(parameter.numel() for parameter in classifier.parameters())
    total = len(y_B)
    return (
        f"clean {clean}/{total} = {clean / total:.2%}, robust at Linf {eps:g} {robust}/{total} = "
        f"{robust / total:.2%}, {n_parameters:,} parameters"
    )


def weights_folder() -> Path:
    """Return the folder from which `classifiers.factories` reads the weights."""
    return Path(str(resources.files("mixednuts_dist.classifiers").joinpath("weights")))


def main() -> None:
    """Train all classifiers, write their weights, and print their accuracies."""
    parser = argparse.ArgumentParser(description="Train the demo classifiers on scikit-learn's digits.")
    parser.add_argument("--out", type=Path, default=weights_folder(), help="folder to write to")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # the batches are too small for more, and the sums then come in one order
    for name, recipe in ((f"demo_{name}", recipe) for name, recipe in RECIPES.items()):
        start = time.perf_counter()
        classifier = train(recipe)
        seconds = time.perf_counter() - start
        (out / f"{name}.safetensors").write_bytes(safetensors.torch.save(classifier.state_dict()))
        print(f"{name}: {figures(classifier, eps=DEMO_EPS)}, trained in {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
