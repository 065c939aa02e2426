"""Where log lines go: `event key=value` on a terminal, one JSON object a line otherwise."""

from __future__ import annotations

import json
import logging
import sys
import time

LEVELS = ("debug", "info", "warning", "error")


def start_logging(level: str, *, as_json: bool) -> None:
    """Send the log of this process to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if as_json else logging.Formatter("%(asctime)s %(levelname).1s %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("deepinfer").setLevel(level.upper())


class _Json(logging.Formatter):
    """Time, level and either the event with its values or the message."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, object] = {"time": f"{stamp}.{int(record.msecs):03d}Z", "level": record.levelname.lower()}
        values = getattr(record, "values", None)
        entry.update(values if isinstance(values, dict) else {"event": "log", "message": record.getMessage()})
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)
