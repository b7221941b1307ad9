"""The `debug` executor: a run in this thread leaves the rows of the run on Ray."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from mixednuts_dist import pipeline
from mixednuts_dist.cli import main
from mixednuts_dist.cli.options import reported
from mixednuts_dist.distributed.debug import DebugExecutor
from mixednuts_dist.stages import attack
from tests.helpers.runs import ATTACK, EVALUATE, Finished, MakeConfig, Watcher, rows


def test_run_on_ray_equals_the_debug_run(tiny_run: Finished, tiny: MakeConfig, ray_executor: Any) -> None:
    _, here, content = tiny_run
    config, watcher = tiny(), Watcher()
    found = pipeline.run(config, executor=ray_executor, progress=watcher).to_json()
    on_ray = Path(config.storage) / config.place()
    for stage, columns in (("attack", ATTACK), ("evaluate", EVALUATE)):
        assert rows(here, stage, columns) == rows(on_ray, stage, columns)
    assert (here / "search/candidates.parquet").read_bytes() == (on_ray / "search/candidates.parquet").read_bytes()
    assert (found["parameters"], found["accuracy"]) == (content["parameters"], content["accuracy"])
    assert {index for stage, index in watcher.computed if stage == "attack"} == {0, 1, 2}


def test_what_a_partition_raises_in_this_thread_surfaces_as_it_is(
    tiny: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def poisoned(*_: Any) -> None:
        raise ArithmeticError("an image of NaN")

    monkeypatch.setattr("mixednuts_dist.stages.attack.Attack.compute", poisoned)
    with pytest.raises(ArithmeticError, match="an image of NaN") as raised:
        attack.run(tiny(), executor=DebugExecutor())
    assert raised.traceback[-1].name == "poisoned"


@pytest.fixture
def usual_signals() -> Iterator[None]:
    """The handlers of a new process; a command that a signal has ended leaves its own ignored."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("usual_signals")
@pytest.mark.parametrize(("number", "becomes_another_error"), [(signal.SIGINT, False), (signal.SIGTERM, True)])
def test_signal_in_a_partition_leaves_no_file(
    tiny: MakeConfig, monkeypatch: pytest.MonkeyPatch, number: int, becomes_another_error: bool
) -> None:
    """Some libraries convert an exception in a function that they call."""
    from mixednuts_dist.attacks.verification import Verifier

    verdicts, n_calls = Verifier.verify, 0

    def interrupted(self: Verifier, *arguments: Any, **options: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        if n_calls == 2:
            try:
                signal.raise_signal(number)
            except BaseException as error:
                if becomes_another_error:
                    raise ArithmeticError from error
                raise
        return verdicts(self, *arguments, **options)

    config = tiny(partition_size=24)
    folder = Path(config.storage) / config.place()
    with monkeypatch.context() as patched:
        patched.setattr(Verifier, "verify", interrupted)
        with click.Context(main), pytest.raises(SystemExit) as ended, reported():
            attack.run(config, executor=DebugExecutor())
    assert ended.value.code == 128 + number
    assert not list(folder.parents[1].rglob("part-*"))
    attack.run(config, executor=DebugExecutor())
    assert len(list(folder.parents[1].rglob("part-*"))) == 1
