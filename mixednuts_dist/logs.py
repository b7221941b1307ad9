"""Log lines as JSON objects, one a line, for whatever collects the logs of many machines."""

import json
import logging
from datetime import UTC, datetime

_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """time, level, logger and message, then whatever the call gave as `extra` (run, stage, partition, node, ...).

    Ray gives every record of its process a name with an underscore before it; those are left out.
    """

    def format(self, record: logging.LogRecord) -> str:
        content = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **{key: value for key, value in vars(record).items() if key not in _STANDARD and key[0] != "_"},
        }
        if record.exc_info:
            content["traceback"] = self.formatException(record.exc_info)
        return json.dumps(content, default=str)


def log_json(level: int = logging.INFO) -> None:
    """Write this process's log to stderr as JSON; for entry points only."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
