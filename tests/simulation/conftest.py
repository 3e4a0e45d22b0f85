"""Worlds make garbage by the million objects, and all that the process has imported is looked through for it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="package")
def seldom_collected() -> Iterator[None]:
    """As in the campaign (`tests.simulation.campaign`): a tenth to a fifth of a play is saved."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)
    yield
    gc.set_threshold(*before)
    gc.unfreeze()
