"""Log records as one line of text or of JSON each, on stderr."""

from __future__ import annotations

import json
import logging
import sys
import time

__all__ = ["set_up_logging"]


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": f"{self._time(record)}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)

    def _time(self, record: logging.LogRecord) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))


def set_up_logging(level: str, style: str) -> None:
    """Send records of `level` and above to stderr; `style` is text or json."""
    handler = logging.StreamHandler(sys.stderr)
    if style == "json":
        handler.setFormatter(_JsonFormatter())
    else:
        text = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s"
        handler.setFormatter(logging.Formatter(text, "%Y-%m-%d %H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
