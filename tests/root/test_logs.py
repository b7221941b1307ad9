"""JSON lines: one object per record, with the extras of the call."""

import io
import json
import logging
import subprocess
import sys
from pathlib import Path

from mixednuts_dist.errors import JsonFormatter
from tests.helpers.runs import tiny_file


def test_log_record_becomes_one_object() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.Logger("mixednuts_dist.test")
    logger.addHandler(handler)
    logger.info("partition %d\nwritten", 7, extra={"run": "c10-3f2a1c9e", "partition": 7, "node": "gpu-3"})
    try:
        raise ValueError("bad image")
    except ValueError:
        logger.exception("failed", extra={"path": Path("x")})
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "INFO", "logger": "mixednuts_dist.test", "message": "partition 7\nwritten",
        "run": "c10-3f2a1c9e", "partition": 7, "node": "gpu-3",
    }  # fmt: skip
    assert "ValueError: bad image" in second["traceback"]
    assert second["path"] == "x"


def test_progress_and_log_of_the_command_are_json_lines(tmp_path: Path) -> None:
    config = tiny_file(tmp_path, partition_size=12)
    command = [sys.executable, "-m", "mixednuts_dist", "attack", str(config)]
    command += ["--set", "compute.executor=debug", "--log-format", "json"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert shown.returncode == 0, shown.stderr
    lines = [json.loads(line) for line in shown.stderr.splitlines() if line.startswith("{")]
    last = [line for line in lines if line.get("stage") == "attack"][-1]
    assert "partitions computed" in last["message"]
