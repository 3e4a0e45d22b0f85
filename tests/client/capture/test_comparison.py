"""How far a tensor is from the recorded one: what an audit tells of it."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

from ckptd.client.capture.comparison import Differences, TensorDifference


def measured(recorded: Tensor, live: Tensor) -> TensorDifference:
    found = Differences()
    found.add_tensors("what", recorded, live, param="p")
    return found.tensors["what"]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.complex64]
)
def test_elements_and_bits_are_counted(dtype: torch.dtype) -> None:
    recorded = torch.arange(1, 9).to(dtype).reshape(2, 4)
    live = recorded.clone()
    live.view(torch.uint8).view(-1)[0] ^= 0b101
    found = measured(recorded, live)
    assert (found.param, found.elements, found.differing, found.bits) == ("p", 8, 1, 2)
    assert 0 < found.ratio < 2


def test_a_large_tensor_is_measured_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptd.client.capture.comparison._PIECE", 3)
    recorded = torch.arange(10.0)
    live = recorded.clone()
    live[1], live[8] = 1.5, 17.0
    found = measured(recorded, live)
    assert (found.elements, found.differing, found.ratio) == (10, 2, 1.0)


def test_a_sign_a_nan_and_an_infinity_are_differences() -> None:
    one = torch.ones(3)
    assert measured(torch.zeros(3), -torch.zeros(3)).ratio == sys.float_info.max
    for value in (float("nan"), float("inf")):
        other = one.clone()
        other[1] = value
        found = measured(one, other)
        assert (found.differing, found.ratio) == (1, sys.float_info.max)


def test_tensors_of_two_shapes_are_named_and_not_measured() -> None:
    found = Differences()
    found.add_tensors("what", torch.ones(2), torch.ones(3))
    assert (found.texts, found.tensors) == (["what"], {})


def test_differences_that_are_added_keep_their_measures() -> None:
    found, other = Differences(), Differences()
    other.add_tensors("what", torch.ones(2), torch.zeros(2))
    found.extend(other)
    assert found.tensors["what"].differing == 2
