"""Objects that change have another fingerprint, and times do not count."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ckptd.client.capture.uncaptured.fingerprints import fingerprint, is_time


class Own:
    def __init__(self, **kept: Any) -> None:
        vars(self).update(kept)


def _object() -> Own:
    return Own(count=0, inner=Own(found=[1.0]))


@pytest.mark.parametrize(
    ("made", "changed"),
    [
        ([1.0], lambda value: value.append(2.0)),
        (deque([1, 2], maxlen=2), lambda value: value.append(3)),
        ({"best": 1.0}, lambda value: value.update(best=0.5)),
        ({1, 2}, lambda value: value.add(3)),
        (np.zeros(3), lambda value: value.__setitem__(1, 5.0)),
        (torch.zeros(3), lambda value: value.add_(1)),
        (torch.Generator(), lambda value: torch.rand(1, generator=value)),
        (np.random.default_rng(1), lambda value: value.normal()),
        (np.random.RandomState(1), lambda value: value.normal()),
        (random.Random(1), lambda value: value.random()),
        (_object(), lambda value: value.inner.found.append(2.0)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_change_is_seen(made: Any, changed: Callable[[Any], object]) -> None:
    before = fingerprint(made)
    assert fingerprint(made) == before
    changed(made)
    assert fingerprint(made) != before


def test_times_do_not_count() -> None:
    timer: Any = Own(began=time.perf_counter(), lost=float("nan"))
    before = fingerprint(timer)
    timer.began = time.perf_counter()
    assert fingerprint(timer) == before
    assert is_time(time.time())
    assert not is_time(3.25)
    assert not is_time(7)


def test_a_large_object_is_read_in_part() -> None:
    rows = [[n] * 1000 for n in range(1000)]
    assert len(repr(fingerprint(rows))) < 100_000


def test_what_is_not_looked_at() -> None:
    """A part that is captured elsewhere, and objects of libraries: a logger, a progress bar."""
    captured = [1.0]
    own: Any = Own(captured=captured, library=SimpleNamespace(count=1))
    before = fingerprint(own, lambda part: part is captured)
    captured.append(2.0)
    own.library.count = 2
    assert fingerprint(own, lambda part: part is captured) == before
