"""JSON lines: one object per record, with the extras of the call."""

import io
import json
import logging
from pathlib import Path

from mixednuts_dist.errors import JsonFormatter


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
