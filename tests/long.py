"""Tests that only a campaign plays: ``CKPTD_LONG=1``, or ``make campaign-matrix``."""

from __future__ import annotations

import os

import pytest

__all__ = ["LONG", "long"]

LONG = bool(os.environ.get("CKPTD_LONG"))
long = pytest.mark.skipif(not LONG, reason="left to make campaign-matrix: CKPTD_LONG=1 runs it")
