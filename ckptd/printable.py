"""Text that is safe to print, and log records made of it.

It has no credentials, and no characters that steer a terminal or forge a line of a log. Events, log lines,
errors and the output of `ckptctl` pass here, wherever they come from: a trainer's notice, a peer's refusal,
the error of a store's client.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from typing import Any

HIDDEN = "***"

# A credential may be a token; lost tokens are those of a text.
_SECRET = (
    r"(?:secret|(?<!lost_)token|passw|pwd|credential|signature|(?:access|account|api)_?key|sas|authoriz)"
)
# scheme://user:password@host, also without a password; the user may be the key.
_USER = re.compile(r"(?<=://)[^/\s'\"@?#]+@")
# ?token=…, &X-Amz-Signature=…, secret_access_key=… What follows a name is bounded, and nothing
# before it is matched: a long notice must not cost more than its length.
_PAIR = re.compile(rf"(?i)({_SECRET}[\w.-]{{0,64}}=)[^&\s'\",;)}}]+")
# "aws_secret_access_key": "…", as in options and in errors that repeat them
_FIELD = re.compile(rf"(?i)({_SECRET}[\w.-]{{0,64}}['\"]\s{{0,8}}:\s{{0,8}})(\"[^\"]*\"|'[^']*')")
_SECRET_NAME = re.compile(rf"(?i){_SECRET}|^key$|^auth$")
# Controls of C0 and C1, other line ends, and characters that change the direction of text.
_CONTROL = r"\x00-\x1f\x7f-\x9f\u061c\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_STEERS = re.compile(f"[{_CONTROL}]")
# Of a text of several lines: line ends are ours, and the one colour that we use and its end. Others
# could hide text.
_STEERS_TERMINAL = re.compile(rf"(?!\n)(?!\x1b\[(?:0|97;48;5;[0-9]{{1,3}})m)[{_CONTROL}]")


def hide_secrets(text: str) -> str:
    """Replace credentials in URLs, in pairs and in fields."""
    text = _USER.sub(f"{HIDDEN}@", text)
    text = _PAIR.sub(rf"\g<1>{HIDDEN}", text)
    return _FIELD.sub(rf'\g<1>"{HIDDEN}"', text)


def one_line(text: str) -> str:
    """Text for an event or a line of a log: no secrets, controls escaped."""
    return _STEERS.sub(_escaped, hide_secrets(text))


def for_terminal(text: str) -> str:
    """Like `one_line`, for text of several lines."""
    return _STEERS_TERMINAL.sub(_escaped, hide_secrets(text))


def for_json(encoded: str) -> str:
    """Escape a JSON document further: terminals obey more controls than encoders escape."""
    return _STEERS.sub(lambda found: f"\\u{ord(found[0]):04x}", encoded)


def hide_options(options: str) -> str:
    """Replace the values of secret options in a JSON object, at any depth."""
    try:
        return json.dumps(_hidden(json.loads(options)), ensure_ascii=False)
    except ValueError:
        return HIDDEN


def _hidden(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: HIDDEN if _SECRET_NAME.search(k) else _hidden(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_hidden(each) for each in value]
    return hide_secrets(value) if isinstance(value, str) else value


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


class TextFormatter(logging.Formatter):
    """Formats a record as one line, whatever its message holds; a traceback follows on its own lines."""

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
