"""Votes under noise: keyed by image and draw, in full batches, with draws only where they matter."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mixednuts_dist.certification.smoothing import SmoothingPlan, Votes, noisy, smoothed_votes
from tests.helpers.small_nets import small_net, tiny_images

PLAN = SmoothingPlan(sigma=0.25, n=800, confidence=0.99, n_choose=40, alphas=(1.0, 0.8), radii=(0.1, 0.25))
N_CLASSES, ROWS = 4, 64


NETWORK, IMAGES = small_net(N_CLASSES, (3, 4, 4), sharpness=1), tiny_images(12)
LABELS = NETWORK(IMAGES).argmax(dim=1)


class Batches:
    """The network in batches of one fixed number of rows; notes how many rows each call needed."""

    def __init__(self) -> None:
        self.sizes = list[int]()

    def __call__(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        padded = torch.cat([x, x[:1].expand(ROWS - len(x), -1, -1, -1)])
        answer: Tensor = NETWORK(padded)[: len(x)]
        return answer


def votes_of(
    ids: Sequence[int] = range(12), plan: SmoothingPlan = PLAN, labels: Tensor = LABELS
) -> tuple[Votes, Batches]:
    batches, rows = Batches(), list(ids)
    chosen = IMAGES[rows], labels[rows]
    votes = smoothed_votes(batches, *chosen, plan, n_classes=N_CLASSES, sample_ids=ids, seed=0, rows=ROWS)
    return votes, batches


def test_an_images_votes_do_not_depend_on_its_company() -> None:
    everyone, _ = votes_of()
    alone, _ = votes_of([7])
    turned, _ = votes_of(list(reversed(range(12))))
    for name in ("chosen_counts_BK", "counts_BK"):
        assert torch.equal(getattr(everyone, name)[7:8], getattr(alone, name)), name
        assert torch.equal(getattr(everyone, name), getattr(turned, name).flip(0)), name


def test_a_draw_is_the_same_in_whatever_stretch_it_is_made() -> None:
    whole = noisy(IMAGES[0], 0.25, 3, 5, 0, 50)
    assert torch.equal(noisy(IMAGES[0], 0.25, 3, 5, 21, 37), whole[21:37])
    assert torch.equal(noisy(IMAGES[0], 0.25, 3, 5, 32, 33), whole[32:33])
    assert not torch.equal(noisy(IMAGES[0], 0.25, 3, 6, 0, 50), whole)
    assert not torch.equal(noisy(IMAGES[0], 0.25, 4, 5, 0, 50), whole)
    assert not torch.equal(noisy(IMAGES[0], 0.25, 3 + 2**32, 5, 0, 50), whole)


def test_the_noise_is_normal_and_not_clamped() -> None:
    noise = (noisy(IMAGES[0], 0.25, 0, 0, 0, 2000) - IMAGES[0]) / 0.25
    assert abs(float(noise.mean())) < 0.02
    assert float(noise.std()) == pytest.approx(1, abs=0.02)
    assert float(noise.abs().max()) > 3


def test_every_batch_but_the_last_of_a_look_is_full() -> None:
    votes, batches = votes_of()
    n_drawn_B = votes.counts_BK.sum(dim=1)
    assert set(n_drawn_B.tolist()) - {800}, "some images stop early, so that batches mix images"
    assert sum(size < ROWS for size in batches.sizes) <= len(PLAN.looks.at)
    assert sum(batches.sizes) == votes.n_forward == int(n_drawn_B.sum()) + 12 * PLAN.n_choose


def test_early_stop_counts_a_prefix_of_all_draws() -> None:
    early, _ = votes_of()
    full, _ = votes_of(plan=replace(PLAN, stop_when_decided=False))
    assert full.counts_BK.sum(dim=1).tolist() == [800] * 12
    assert full.chosen_counts_BK.sum(dim=1).tolist() == [40] * 12
    assert torch.equal(early.chosen_counts_BK, full.chosen_counts_BK)
    assert bool((early.counts_BK <= full.counts_BK).all())


def test_image_with_a_wrong_class_stops_at_once() -> None:
    wrong = (LABELS + 1) % N_CLASSES
    votes, _ = votes_of(labels=wrong)
    missed = votes.classes != wrong
    assert missed.any()
    assert votes.counts_BK[missed].sum(dim=1).tolist() == [PLAN.looks.at[0]] * int(missed.sum())
