"""Hypothesis starts, kills, overlaps and resumes drivers in any order and damages files in between.

After each step, every finished partition exists once and whole, and no valid file was renamed.
"""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from mixednuts_dist.storage.damage import verify
from mixednuts_dist.storage.index import finished_files
from mixednuts_dist.storage.partitions import split_images
from mixednuts_dist.storage.store import Store
from mixednuts_dist.storage.tables import read_columns
from tests.helpers.stored_rows import columns, content_of, write_stage

PARTS = split_images(8, 4)
FOLDER = "attack/f0"


class Run(RuleBasedStateMachine):
    """One folder and any number of drivers, each of which may be killed after each of its writes."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="machine-"))
        self.store = Store(str(self.folder))
        self.drivers: list[Iterator[None]] = []
        self.damaged: set[bytes] = set()

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @precondition(lambda self: len(self.drivers) < 3)
    @rule()
    def start(self) -> None:
        self.drivers.append(write_stage(self.store, PARTS))

    @precondition(lambda self: self.drivers)
    @rule(which=st.integers(0, 2), n_steps=st.integers(1, 4))
    def go_on(self, which: int, n_steps: int) -> None:
        driver = self.drivers[which % len(self.drivers)]
        for _ in range(n_steps):
            next(driver, None)

    @precondition(lambda self: self.drivers)
    @rule(which=st.integers(0, 2))
    def kill(self, which: int) -> None:
        del self.drivers[which % len(self.drivers)]

    @rule(which=st.integers(0, 9), place=st.floats(0, 1, exclude_max=True), cut=st.booleans())
    def damage(self, which: int, place: float, cut: bool) -> None:
        """Cut any file, or flip a bit in a table."""
        files = [path for path in sorted(self.folder.rglob("*")) if path.is_file() and ".bad-" not in path.name]
        files = [path for path in files if cut or path.suffix == ".parquet"]
        if not files:
            return
        path = files[which % len(files)]
        content = path.read_bytes()
        at = int(place * len(content))
        bad = content[:at] if cut or not content else content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        path.write_bytes(bad)
        self.damaged.add(bad)

    @invariant()
    def nothing_valid_was_renamed(self) -> None:
        for path in self.folder.rglob("*.bad-*"):
            assert path.read_bytes() in self.damaged, path

    @invariant()
    def each_finished_partition_is_whole(self) -> None:
        whole = {content_of(part) for part in PARTS}
        for part in PARTS:
            path = self.folder / FOLDER / part.file_name
            if path.exists():
                content = path.read_bytes()
                assert content in whole or content in self.damaged

    @rule()
    def the_same_command_ends_whole(self) -> None:
        """All others are dead; `verify` finds damage that no footer shows."""
        self.drivers.clear()
        for _ in range(2):
            list(write_stage(self.store, PARTS))
            for path in verify(self.store)[0]:
                (self.folder / path).unlink()
        assert verify(self.store)[0] == {}
        assert list(finished_files(self.store, "attack", PARTS, "f0")) == PARTS
        for part in PARTS:
            rows = read_columns(self.store, "attack", [part], "f0", list(columns(part)))
            assert all(torch.equal(rows[name], values) for name, values in columns(part).items())


@pytest.mark.parametrize(("n_examples", "n_steps"), [(5, 12), pytest.param(40, 25, marks=pytest.mark.slow)])
def test_drivers_in_any_order_lose_nothing(n_examples: int, n_steps: int) -> None:
    run_state_machine_as_test(
        Run,
        settings=settings(
            max_examples=n_examples, stateful_step_count=n_steps, deadline=None,
            suppress_health_check=list(HealthCheck), derandomize=True, database=None,
        ),
    )  # fmt: skip
