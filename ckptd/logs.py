"""Log records as one line of text or of JSON each, on stderr."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from ckptd.printable import for_terminal, one_line

__all__ = ["TextFormatter", "set_up_logging"]


class TextFormatter(logging.Formatter):
    """A record is one line, whatever its message holds; a traceback follows on lines of its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = one_line(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return for_terminal(super().formatException(ei))


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": f"{self._time(record)}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": one_line(record.getMessage()),
        }
        if record.exc_info:
            fields["exception"] = for_terminal(self.formatException(record.exc_info))
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
        handler.setFormatter(TextFormatter(text, "%Y-%m-%d %H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
