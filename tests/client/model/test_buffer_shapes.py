"""Buffers that change their shape, come, or go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ckptd.client import values
from ckptd.client.model import buffer_shapes
from ckptd.client.model.buffer_shapes import ChangedBuffers
from ckptd.client.model.live_state import LiveState


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.grows: torch.Tensor
        self.gone: torch.Tensor | None
        self.register_buffer("grows", torch.zeros(0, 2))
        self.register_buffer("later", None)
        self.register_buffer("gone", torch.ones(3))
        self.register_buffer("same", torch.ones(2))


def watched() -> tuple[Keeps, ChangedBuffers, LiveState]:
    model = nn.Sequential(Keeps())
    binding = LiveState(model, [torch.optim.SGD(model.parameters(), lr=0.1)], None)
    keeps = model[0]
    assert isinstance(keeps, Keeps)
    return keeps, ChangedBuffers(binding), binding


def packed(changed: ChangedBuffers) -> Any:
    return values.unpack(values.pack(changed.state_dict()))


def test_they_come_back() -> None:
    before, changed, binding = watched()
    assert changed.state_dict() == {}
    before.grows, before.later, before.gone = torch.ones(3, 2), torch.full((), 2.0), None
    nn.Module.register_buffer(before, "new", torch.ones(4), persistent=False)
    before.get_buffer("same").mul_(2)
    assert set(binding.planned_buffers()) == {"0.same"}
    after, here, _ = watched()
    here.load_state_dict(packed(changed))
    assert torch.equal(after.get_buffer("grows"), torch.ones(3, 2))
    assert (float(after.get_buffer("later")), len(after.get_buffer("new"))) == (2.0, 4)
    assert after._buffers["gone"] is None
    assert "new" not in after.state_dict()
    assert torch.equal(after.get_buffer("same"), torch.ones(2))  # the plan has it


def test_one_that_is_resized_in_place() -> None:
    keeps, changed, _ = watched()
    assert packed(changed) == {}
    torch.ones(2, 2, out=keeps.get_buffer("grows"))
    assert list(packed(changed)) == ["0.grows"]


def test_what_has_changed_since_gets_its_first_shape() -> None:
    """In a process that goes back."""
    keeps, changed, binding = watched()
    recorded = packed(changed)
    keeps.grows, keeps.gone = torch.ones(3, 2), None
    keeps.register_buffer("new", torch.ones(4))
    changed.load_state_dict(recorded)
    assert {name: tuple(b.shape) for name, b in binding.buffers().items()} == {
        "0.grows": (0, 2),
        "0.gone": (3,),
        "0.same": (2,),
    }


def test_many_bytes_are_told_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_shapes, "_WARNED_BYTES", 16)
    keeps, changed, _ = watched()
    keeps.grows = torch.ones(3, 2)
    changed.state_dict()
    changed.state_dict()
    assert caplog.text.count("changed their shape while they train (0.grows)") == 1


def test_a_module_that_is_not_there(caplog: pytest.LogCaptureFixture) -> None:
    _, changed, _ = watched()
    changed.load_state_dict({"9.mean": [torch.ones(1), True]})
    assert "the snapshot has buffer 9.mean" in caplog.text
