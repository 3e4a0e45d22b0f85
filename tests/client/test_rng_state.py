"""Random state: captured without drawing, restored to the bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from ckptd.client import rng_state, values
from ckptd.client.rng_state import Draws, capture_rng, restore_rng


def draws() -> list[Any]:
    """From each global generator, odd counts included (Gaussian generators keep half a pair)."""
    return [
        torch.rand(3).tolist(),
        torch.randn(1).item(),
        np.random.rand(3).tolist(),
        np.random.standard_normal(),
        random.random(),
        random.gauss(0, 1),
    ]


def test_what_follows_a_restore_is_what_followed_the_capture() -> None:
    draws()
    state = capture_rng()
    expected = draws()
    draws()
    restore_rng(state)
    assert draws() == expected


def test_capturing_draws_nothing() -> None:
    before = capture_rng()
    assert capture_rng() == before
    draws()
    assert capture_rng() != before


def test_survives_the_wire() -> None:
    draws()
    state = values.unpack(values.pack(capture_rng()))
    expected = draws()
    restore_rng(state)
    assert draws() == expected


def test_more_devices_than_are_here_is_an_error_that_says_so() -> None:
    state = capture_rng()
    devices = torch.cuda.device_count() + 1
    state["cuda"] = [b"\0" * 16] * devices
    with pytest.raises(ValueError, match=f"{devices} CUDA devices"):
        restore_rng(state)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_every_device_is_captured() -> None:
    torch.rand(1, device="cuda")
    state = capture_rng()
    expected = torch.rand(4, device="cuda")
    restore_rng(state)
    assert torch.equal(torch.rand(4, device="cuda"), expected)


DRAWS: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.rand(1),
    "numpy": np.random.random_sample,
    "numpy, two normal numbers": lambda: np.random.standard_normal(2),
    "numpy, a whole turn of its state": lambda: np.random.bytes(4 * 624),
    "python": random.random,
    "python, two normal numbers": lambda: (random.gauss(0, 1), random.gauss(0, 1)),
}


@pytest.fixture(params=["in place", "packed"], autouse=True)
def generators(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The global generators, as they are at first and are again afterwards."""
    if request.param == "packed":
        monkeypatch.setattr(rng_state, "_in_place", lambda: False)
    else:
        assert rng_state._in_place(), "else each step costs ten times as much"
    kept = torch.get_rng_state(), np.random.get_state(), random.getstate()
    np.random.seed(1)
    random.seed(1)
    yield
    torch.set_rng_state(kept[0])
    np.random.set_state(kept[1])
    random.setstate(kept[2])


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_within_a_step_is_seen_and_those_between_steps_are_not(name: str) -> None:
    draws, draw = Draws(watches=True), DRAWS[name]
    for optimizer in (0, 1):
        draw()
        draws.before()
        draws.after(optimizer)
        assert draws.found == -1
    draws.before()
    draw()
    draws.after(1)
    assert draws.found == 1


@pytest.mark.parametrize(
    "normal",
    [lambda: np.random.standard_normal(), lambda: random.gauss(0, 1)],
    ids=["numpy", "python"],
)
def test_a_number_that_was_drawn_ahead_counts_when_it_is_taken(normal: Callable[[], float]) -> None:
    """Normal numbers are drawn in pairs. Who takes the second one moves nothing else of the state."""
    draws = Draws(watches=True)
    normal()
    draws.before()
    normal()
    draws.after(0)
    assert draws.found == 0


def test_another_kind_of_generator_in_numpy_is_watched_too() -> None:
    kept = np.random.mtrand.get_bit_generator()
    np.random.mtrand.set_bit_generator(np.random.PCG64(3))
    try:
        draws = Draws(watches=True)
        draws.before()
        draws.after(0)
        assert draws.found == -1
        draws.before()
        np.random.random_sample()
        draws.after(0)
        assert draws.found == 0
    finally:
        np.random.mtrand.set_bit_generator(kept)


@pytest.mark.parametrize("name", DRAWS)
def test_a_capture_holds_the_state_of_its_moment(name: str) -> None:
    """It is not made anew as long as nobody draws."""
    before = capture_rng()
    DRAWS[name]()
    after = capture_rng()
    assert after != before
    restore_rng(before)
    assert capture_rng() == before
    DRAWS[name]()
    assert capture_rng() == after


def test_a_capture_is_its_callers_own() -> None:
    expected = capture_rng()
    capture_rng()["numpy"].clear()
    capture_rng()["python"].clear()
    assert capture_rng() == expected
