"""Names of an image's tensors: parameter, kind of state, and rows. Pure."""

from __future__ import annotations

import re

__all__ = ["BUFFER", "MASTER", "OPTIM", "OURS", "param_and_key", "split_rows"]

OURS = "ckptd."  # entries that only the client reads
BUFFER, MASTER, OPTIM = "buffer/", "master/", "optim/"

_SLICE = re.compile(r"(?P<name>.*)\[(?P<begin>\d+):(?P<end>\d+)\]", re.DOTALL)


def split_rows(name: str) -> tuple[str, tuple[int, int] | None]:
    """The name without the rows, and the rows (None: the whole tensor)."""
    match = _SLICE.fullmatch(name)
    if match is None:
        return name, None
    return match["name"], (int(match["begin"]), int(match["end"]))


def param_and_key(name: str) -> tuple[str, str]:
    """The parameter (or buffer) and the key of its optimizer state (``master``; empty: the
    parameter itself).
    """
    if name.startswith(MASTER):
        return name.removeprefix(MASTER), "master"
    if name.startswith(OPTIM):
        key, _, param = name.removeprefix(OPTIM).partition("/")
        return param, key
    return name.removeprefix(BUFFER), ""
