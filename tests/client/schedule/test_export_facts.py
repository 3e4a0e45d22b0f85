"""What a run tells for its exports."""

from __future__ import annotations

import msgspec
import torch
from torch import nn

from ckptd.client.model.live_state import LiveState
from ckptd.client.schedule.export_facts import export_facts
from ckptd.export.source import facts_of
from tests.client.exporting import make_adamw, make_model


def test_transient_buffers_ties_and_groups_are_told_and_understood() -> None:
    model = nn.ModuleDict({"inner": make_model(0)})
    params = list(model.parameters())
    optimizer = torch.optim.AdamW([{"params": params[1:]}, {"params": params[:1]}])
    told = export_facts(LiveState(model, [optimizer], None))
    facts = facts_of(msgspec.msgpack.encode(told), rank=0)
    assert facts.transient == {"inner.cache"}
    assert facts.aliases == {"inner.head.weight": "inner.embed.weight"}
    assert facts.groups["inner.embed.weight"] == (0, 1)
    assert facts.groups["inner.norm.bias"] == (0, 0)


def test_one_group_needs_no_telling() -> None:
    model = make_model(0)
    assert export_facts(LiveState(model, [make_adamw(model)], None))["groups"] == {}
