"""The lines that a trainer prints: each begins with ``ckptd:``, whatever the logging set-up of the
program is.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

__all__ = ["get_logger"]

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
    """The logger of this name; what is said to it begins with ``ckptd:``.

    In a program that has set up no logging, Python prints the bare text of warnings and errors:
    among the program's own lines nobody could tell whose they are.
    """
    return _Lines(logging.getLogger(name), {})
