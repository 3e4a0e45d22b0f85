"""Tests that only a campaign plays: ``CKPTD_LONG=1``, or ``make campaign-matrix``."""

from __future__ import annotations

import os

import pytest

__all__ = ["LONG", "long", "long_since"]

LONG = bool(os.environ.get("CKPTD_LONG"))


def long_since(why: str) -> pytest.MarkDecorator:
    """Left to a campaign, for this reason; `tests/conftest.py` skips it elsewhere."""
    return pytest.mark.long(f"{why}: CKPTD_LONG=1 runs it")


long = long_since("left to make campaign-matrix")
