"""All commands: a signal ends them with one line, and only the result goes to stdout."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests
import yaml
from click.testing import CliRunner
from ray.exceptions import AuthenticationError

from mixednuts_dist.cli import main
from mixednuts_dist.cli.options import reported
from mixednuts_dist.errors import BaseClassifierError
from tests.helpers.runs import tiny_file

COMMAND = """
import atexit
import time
import click
from mixednuts_dist.cli.options import RESUMES, reported

class Swallows:
    def __del__(self):  # what is raised in here is ignored
        print("ready", flush=True)
        time.sleep(600)

def ordinary():
    print("ready", flush=True)
    time.sleep(600)

def swallows():
    Swallows()
    print("swallowed", flush=True)
    time.sleep(600)

def swallows_at_its_end():
    Swallows()
    print("swallowed", flush=True)

@click.command()
def main():
    with reported(RESUMES):
        try:
            WORK()
        finally:
            time.sleep(PUTS_AWAY)

atexit.register(time.sleep, 1.0)  # the last signal comes as Python ends
main()
"""
LISTENING = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job has it ignored, nohup SIGHUP
signal.signal(signal.SIGHUP, signal.SIG_DFL)
"""
PATIENCE_SECONDS = 400  # on a machine that does ten other things
INTERRUPTED = "Interrupted. Finished partitions are stored; run the same command to resume."


def command(work: str, puts_away: float, listening: str = LISTENING) -> "subprocess.Popen[str]":
    code = listening + COMMAND.replace("WORK", work).replace("PUTS_AWAY", str(puts_away))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_signals_that_come_at_once_end_a_command_with_one_line(number: signal.Signals, status: int) -> None:
    """`uv run` passes on what the whole process group has got already."""
    with command("ordinary", puts_away=0.3) as process:
        for pause in (0.05, 0.05, 0.75, 0.0):
            process.send_signal(number)
            time.sleep(pause)
        _, told = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == status
    assert told == INTERRUPTED + "\n"


@pytest.mark.parametrize(("work", "puts_away"), [("swallows_at_its_end", 0), ("ordinary", 2.5)])
def test_swallowed_interrupt_ends_a_command(work: str, puts_away: float) -> None:
    """Cleanup takes time."""
    with command(work, puts_away) as process:
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        out, told = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 143
    assert told.endswith(INTERRUPTED + "\n")
    assert out == ("" if work == "ordinary" else "swallowed\n")
    assert time.monotonic() - began >= puts_away


def test_second_signal_ends_a_running_command() -> None:
    with command("swallows", 0) as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert process.stdout.readline() == "swallowed\n"
        time.sleep(2.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == -signal.SIGTERM


def test_nohup_command_survives_its_terminal() -> None:
    ignoring = LISTENING + "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    with command("ordinary", 0.1, ignoring) as process:
        process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 143


def test_error_on_the_terminal_has_no_escape_sequence_and_no_password(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), reported():
        raise BaseClassifierError("no \x1b[2J\x1b]0;title\x07 weights in s3://key:s3cr3t@bucket")
    assert r"no \x1b[2J\x1b]0;title\x07 weights in s3://...@bucket" in capsys.readouterr().err


def test_interrupted_report_promises_no_partitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mixednuts_dist.reports.report.run", interrupt)
    shown = CliRunner().invoke(main, ["report", str(tiny_file(tmp_path))])
    assert (shown.exit_code, shown.stderr.splitlines()[-1]) == (130, "Interrupted.")


STARTING = """
import os, signal, click, ray
from mixednuts_dist.cli.options import RESUMES, reported
from mixednuts_dist.distributed.cluster import connect

@click.command()
def main():
    with reported(RESUMES):
        connect("local")

def init(**_):  # as Ray's own does, before it has started
    from ray._private.utils import set_sigterm_handler
    set_sigterm_handler(lambda number, _: os.sys.exit(number))
    os.kill(os.getpid(), signal.SIGTERM)

ray.init = init
main()
"""


def test_sigterm_while_ray_starts_ends_a_command_with_one_line() -> None:
    done = subprocess.run([sys.executable, "-c", STARTING], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (143, INTERRUPTED + "\n")


def test_a_name_too_long_for_a_file_ends_in_one_line() -> None:
    for command in ("run", "status", "report"):
        shown = CliRunner().invoke(main, [command, "a" * 300])
        assert shown.exit_code == 1
        assert isinstance(shown.exception, SystemExit)


PRINTS = """
import os
from mixednuts_dist.classifiers.factories import demo_rob

class Prints(type(demo_rob())):
    def forward(self, x):
        print("printed")
        os.write(1, b"written below Python\\n")
        return super().forward(x)

def factory():
    network = demo_rob()
    network.__class__ = Prints
    return network
"""


def test_what_a_classifier_prints_goes_to_stderr(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prints.py").write_text(PRINTS)
    config = {
        "name": "prints", "data": {"uri": "digits", "n": 2}, "rob": f"py:{tmp_path}/prints.py:factory",
        "threat": {"eps": 0.1}, "precision": "fp32", "evaluate": {"attacks": ["apgd-ce"], "n_iter": 1},
        "storage": str(tmp_path), "compute": {"executor": "debug", "batch_size": 8},
    }  # fmt: skip
    (tmp_path / "prints.yaml").write_text(yaml.safe_dump(config))
    shown = CliRunner().invoke(main, ["run", "--json", str(tmp_path / "prints.yaml")])
    below = capfd.readouterr()
    assert json.loads(shown.stdout)["run"]["name"] == "prints"
    assert "printed" in shown.stderr
    assert "written below Python" in below.err
    assert "written below Python" not in below.out


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (AuthenticationError("Unauthorized"), "requires a token. Set RAY_AUTH_MODE=token"),
        (requests.exceptions.ConnectionError("Connection aborted."), "Connection aborted."),
    ],
)
def test_submission_names_the_cluster_that_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def refuse(_address: str) -> None:
        raise error

    monkeypatch.setattr("mixednuts_dist.distributed.submission.JobSubmissionClient", refuse)
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(main, ["submit", str(tiny_file(tmp_path)), "--address", "http://127.0.0.1:1"])
    assert shown.exit_code == 1
    text = " ".join(shown.stderr.split())
    assert "ClusterError: the cluster" in text and "http://127.0.0.1:1" in text and message in text
