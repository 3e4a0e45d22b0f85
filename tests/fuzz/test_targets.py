"""The short form of `make fuzz`: a few seeded mutations for each target, the same in every run."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from random import Random

import pytest

from tests.fuzz.file_targets import FILE_TARGETS
from tests.fuzz.target import Target, play
from tests.fuzz.trainer_targets import TRAINER_TARGETS
from tests.fuzz.wire_targets import WIRE_TARGETS

INPUTS = 50


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("traced", "unvalidated")
@pytest.mark.parametrize(
    "target", [*WIRE_TARGETS, *FILE_TARGETS, *TRAINER_TARGETS], ids=lambda target: target.name
)
def test_whatever_comes_is_parsed_or_refused(target: Target) -> None:
    random, seeds = Random(target.name), target.seeds()
    accepted = [play(target, seed) for seed in seeds]
    assert any(accepted), "no seed is valid"
    for number in range(INPUTS):
        play(target, target.mutate(random, seeds[number % len(seeds)]))
