"""Random state: captured without drawing, restored to the bit."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from ckptd.client import values
from ckptd.client.rng_state import capture_rng, restore_rng


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
