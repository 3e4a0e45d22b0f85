"""The trainer's log lines: each begins with ``ckptd:``, whatever the program's logging set-up is."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

_PREFIX = "ckptd: "

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


class _Lines(_Adapter):
    def process(
        self, msg: object, kwargs: MutableMapping[str, Any]
    ) -> tuple[object, MutableMapping[str, Any]]:
        return f"{_PREFIX}{msg}", kwargs


def get_logger(name: str) -> logging.LoggerAdapter[logging.Logger]:
    """The logger of this name, with the prefix ``ckptd:``.

    Without a logging set-up Python prints the bare text of warnings and errors; the prefix tells them
    from the program's own lines.
    """
    return _Lines(logging.getLogger(name), {})
