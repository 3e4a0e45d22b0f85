"""Fingerprints tell batches apart at a bounded cost, and the ledger names the iteration whose batch
is another.
"""

from __future__ import annotations

import logging
from collections import UserDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from ckptd.client import values
from ckptd.client.data import BatchLedger
from ckptd.client.data.ledger import fingerprint


def of(batch: Any) -> int:
    return fingerprint(batch).value


@dataclass(slots=True)
class Pair:
    left: Any
    right: Any


def test_the_same_batch_has_the_same_fingerprint() -> None:
    def batch() -> Any:
        return {"x": torch.arange(6.0).reshape(2, 3), "y": [np.arange(3), ("a", 1, None)], "z": Pair(1, b"b")}

    assert of(batch()) == of(batch())
    assert of(UserDict(batch())) == of(UserDict(batch()))


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.tensor([1.0, 2.5]), "y": ["a", 1]},
        {"x": torch.tensor([[1.0, 2.0]]), "y": ["a", 1]},
        {"x": torch.tensor([1.0, 2.0], dtype=torch.float64), "y": ["a", 1]},
        {"x": torch.tensor([1.0, 2.0]), "y": ["b", 1]},
        {"x": torch.tensor([1.0, 2.0]), "y": ["a", 2]},
        {"x": torch.tensor([1.0, 2.0]), "z": ["a", 1]},
        {"x": np.array([1.0, 2.0], dtype=np.float32), "y": ["a", 1]},
    ],
)
def test_another_batch_has_another(other: Any) -> None:
    assert of({"x": torch.tensor([1.0, 2.0]), "y": ["a", 1]}) != of(other)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(4, 1000, 1000),
        lambda: torch.zeros(1000, 1000, 4).permute(2, 0, 1),
        lambda: torch.zeros(1 << 20)[::2],
        lambda: np.zeros((4, 1000, 1000)),
        lambda: np.zeros((1000, 1000, 4)).transpose(2, 0, 1),
    ],
)
def test_of_a_large_one_a_sample_is_read(make: Any) -> None:
    """What was drawn anew is another; one element in the middle may be passed over, the first may not."""
    value = make()
    before = of(value)
    first = (0,) * value.ndim
    value[first] = 1
    assert of(value) != before
    assert of(make() + 1) != before


def test_tensors_of_all_kinds_can_be_read() -> None:
    for dtype in (torch.bool, torch.bfloat16, torch.complex64, torch.int8, torch.float8_e5m2):
        of(torch.zeros(3, dtype=dtype))
    of(torch.zeros(0, 3))
    of(torch.eye(3).to_sparse())
    of(torch.tensor([1 + 2j]).conj())
    of(torch.nn.Parameter(torch.ones(2)))
    of(np.array(["a", None], dtype=object))


def test_a_tensor_on_a_device_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    found = fingerprint([torch.zeros(2, device="meta")])
    assert found.devices == ("meta",)
    ledger = BatchLedger()
    with caplog.at_level(logging.INFO, logger="ckptd"):
        for step in range(3):
            ledger.begin(step)
            ledger.note(torch.zeros(2, device="meta"))
    assert caplog.text.count("does not fingerprint") == 1


# -- the ledger ----------------------------------------------------------------------------------


def played(*batches: float, first: int = 0) -> BatchLedger:
    ledger = BatchLedger()
    for step, batch in enumerate(batches, first):
        ledger.begin(step)
        ledger.note(torch.tensor(float(batch)))
    return ledger


def recorded(ledger: BatchLedger) -> dict[str, Any]:
    found: dict[str, Any] = values.unpack(values.pack(ledger.state_dict()))
    return found


def test_the_iteration_whose_batch_is_another_is_named() -> None:
    before = recorded(played(1, 2, 3, 4))
    assert played(1, 2, 3, 4).differences(before) == []
    (text,) = played(1, 2, 9, 9).differences(before)
    assert text.startswith("the batch of iteration 2 differs from the one before the crash")


def test_another_number_of_batches_is_named() -> None:
    ledger = played(1, 2)
    ledger.note(torch.tensor(3.0))
    (text,) = ledger.differences(recorded(played(1, 2)))
    assert "iteration 1" in text
    assert "it took 1 fetches then and 2 now" in text


def test_a_step_that_is_entered_again_counts_once() -> None:
    ledger = played(1, 2)
    ledger.begin(1)
    ledger.note(torch.tensor(2.0))
    assert ledger.differences(recorded(played(1, 2))) == []


def test_a_successor_goes_on_with_what_was_recorded() -> None:
    successor = BatchLedger()
    successor.load_state_dict(recorded(played(1, 2)))
    successor.begin(2)
    successor.note(torch.tensor(3.0))
    assert successor.differences(recorded(played(1, 2, 3))) == []


def test_it_does_not_grow_for_ever() -> None:
    assert len(recorded(played(*range(1000)))["fingerprints"]) == 64
