"""What all commands share: how a signal ends one."""

import signal
import subprocess
import sys
import time

import pytest

COMMAND = """
import atexit
import time
import click
from mixednuts_dist.cli.options import reported

@click.command()
@click.pass_context
def main(ctx):
    ctx.find_root().params["log_format"] = "text"
    with reported(verbose=False):
        print("ready", flush=True)
        try:
            time.sleep(60)
        finally:
            time.sleep(0.3)  # something to put away

atexit.register(time.sleep, 1.0)  # the last signal comes as Python ends
main()
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_that_come_at_once_end_a_command_with_one_line(number: signal.Signals, status: int) -> None:
    """`uv run` passes on what the whole process group has got already."""
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for pause in (0.05, 0.05, 0.75, 0.0):
            process.send_signal(number)
            time.sleep(pause)
        _, told = process.communicate(timeout=60)
    assert process.returncode == status
    assert told == "interrupted: what is written is kept; the same command goes on from there\n"
