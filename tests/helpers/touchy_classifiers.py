"""Robust classifiers that hang, exit or kill their process at one image, and classifiers as plain functions."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from mixednuts_dist.config.run_config import RunConfig
from tests.helpers.runs import Watcher, rows_in

FACTORY = """
import os
import pathlib
import sys
import time
import torch
from mixednuts_dist.classifiers.factories import demo_rob
from mixednuts_dist.images.arrays import load_digits_split

MARK = pathlib.Path(__file__).with_name("mark")

class Touchy(torch.nn.Module):
    def __init__(self, act):
        super().__init__()
        self.net, self.act = demo_rob(), act
        self.bad = load_digits_split("test")[0][10]

    def forward(self, x):
        if bool((x == self.bad).flatten(1).all(dim=1).any()) and (x.shape[0] > 0):
            self.act()
        return self.net(x)

def dying():
    return Touchy(lambda: os._exit(3))

def hanging_once():
    def act():
        if not MARK.exists():
            MARK.write_text("hung")
            time.sleep(3600)
    return Touchy(act)

def exiting():
    def act():
        print("closing time")
        sys.exit(3)
    return Touchy(act)
"""


BLACK_BOXES = """
import torch
from mixednuts_dist.classifiers.factories import demo_rob, demo_std

def classes(images):
    with torch.no_grad():
        return demo_std()(torch.from_numpy(images)).argmax(dim=1).numpy()

def logits(images):
    with torch.no_grad():
        return demo_rob()(torch.from_numpy(images)).numpy()
"""


class MarksTheStart(Watcher):
    """Creates a file when a stage starts; until then the driver itself runs the classifiers."""

    def __init__(self, mark: Path) -> None:
        super().__init__()
        self.mark = mark

    def stage_started(self, *arguments: Any) -> None:
        super().stage_started(*arguments)
        self.mark.touch()


def table(config: RunConfig) -> dict[str, list[Any]]:
    folder = rows_in(Path(config.storage) / config.place(), "attack")
    return pq.read_table(sorted(folder.glob("part-*.parquet"))).to_pydict()
