"""Shards of experts out of images of one number of ranks into the live model and optimizer of another one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ckptd.client import values
from ckptd.client.capture.step_state import gather_groups
from ckptd.client.elastic.incarnation.image_inventory import Inventory, LocalState, Unreadable
from ckptd.client.elastic.incarnation.optimizer_extras import OptimizerExtras
from ckptd.client.elastic.incarnation.state_transfer import Loader, check_fits
from ckptd.client.elastic.incarnation.whole_state import same_call
from ckptd.client.elastic.layer.expert_tensors import cut, joined
from ckptd.client.model.live_state import LiveState
from ckptd.client.model.operators import discover_operators
from ckptd.client.model.snapshot_layout import (
    CapturedOperators,
    EntrySource,
    PhasePlan,
    StateTable,
    build_phase,
)
from ckptd.client.rng_state import capture_rng
from ckptd.core.elastic.incarnation_plan import Handover, plan_handover
from ckptd.core.elastic.incarnations import SHARDS, ExpertLayers, choose, shard_length
from ckptd.core.slots.segment_format import WORLD_TOPOLOGY
from ckptd.memory.segment_file import open_segment
from ckptd.memory.segment_store import SegmentStore
from ckptd.memory.slot_digests import seal_slot
from tests.ckptd.export.samples import raw, segment_folder
from tests.ckptd.running import MIB, descriptor, fill
from tests.client.rank_threads import outcomes
from tests.e2e.test_bad_input import flip

LAYERS = ExpertLayers(("moe",), 2)
# One and two elements: with three ranks some shards are padding only.
NUMELS = {
    f"{SHARDS}moe.{n}.{name}": numel
    for n in range(2)
    for name, numel in (("up", 11), ("bias", 2), ("scale", 1))
}
# Never trained: its optimizer keeps nothing.
IDLE = f"{SHARDS}moe.1.scale"
NUM_OPERATORS = 2


class Rank:
    """A dense part that is alike on all ranks, a rank's shards, and their optimizers."""

    def __init__(self, rank: int, ranks: int, seed: int, dtype: torch.dtype = torch.float32) -> None:
        self.rank, self.ranks = rank, ranks
        torch.manual_seed(seed)
        self.model = nn.ModuleDict({"model": nn.Linear(2, 2), "expert_shards": nn.Module()})
        self.shards = {}
        for name, numel in NUMELS.items():
            shard = nn.Parameter(cut(torch.randn(numel, dtype=dtype), ranks)[rank].clone())
            self._put(name, shard)
            self.shards[name] = shard
        self.optimizers = [
            torch.optim.AdamW(self.model["model"].parameters(), lr=0.1),
            torch.optim.AdamW(self.shards.values(), lr=0.2),
        ]
        self.binding = LiveState(self.model, self.optimizers, None)
        self.firsts = {name: rank * shard_length(numel, ranks) for name, numel in NUMELS.items()}

    def _put(self, name: str, shard: nn.Parameter) -> None:
        *path, leaf = name.split(".")
        module: nn.Module = self.model
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        setattr(module, leaf, shard)

    def train(self, steps: int) -> None:
        """Gradients follow from the element, whoever owns it."""
        generator = torch.Generator().manual_seed(5)
        for _ in range(steps):
            for param in self.model["model"].parameters():
                param.grad = torch.randn(param.shape, generator=generator)
            for name, shard in self.shards.items():
                whole = torch.randn(NUMELS[name], generator=generator).to(shard.dtype)
                shard.grad = None if name == IDLE else cut(whole, self.ranks)[self.rank].clone()
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def everything(self) -> dict[str, Tensor]:
        found = {name: param.detach().clone() for name, param in self.binding.params.items()}
        for name in self.binding.params:
            for key, value in self.binding.state(name).items():
                found[f"{name}/{key}"] = value.detach().clone()
        return found


def sealed(folder: Path, one: Rank, world: int, iteration: int) -> None:
    """Its snapshot in a segment, as the trainer and the daemon leave it."""
    operators = discover_operators(one.model, rows_allowed=one.binding.rows_allowed)
    plan = build_phase(
        one.binding,
        operators,
        CapturedOperators(range(len(operators))),
        state=StateTable.of(one.binding),
        phase=0,
        compute_dtypes={},
        identity={},
        scalars_capacity=1 << 16,
    )
    one.binding.kept.look({})
    scalars = {
        "groups": gather_groups(one.binding),
        "python": one.binding.kept.python(),
        "absent": [n for n in one.binding.owner if not one.binding.state(n)],
        "state": {},
        "rng": capture_rng(),
    }
    packed = values.pack(scalars)
    tensors = tuple(
        (
            entry.name,
            entry.dtype,
            entry.shape,
            _bytes_of(one.binding, plan, source, entry.name, packed),
        )
        for entry, source in zip(plan.layout.entries, plan.sources, strict=True)
    )
    told = {
        "operators": [
            [op.name, str(op.kind), "", None, None, [[m.param, m.start, m.stop] for m in op.members]]
            for op in operators
        ]
    }
    store = SegmentStore(folder, 64 * MIB, "n", mlock="off", hugepages="off")
    store.adopt(0.0)
    whose = descriptor(run=f"run.w{world}", rank=one.rank, world_size=one.ranks, topology=WORLD_TOPOLOGY)
    segment = store.create(msgspec.structs.replace(whose, client=values.pack(told)), 1, MIB)
    fill(segment, 0, iteration, tensors=tensors, anchors=3, scalars_len=len(packed))
    seal_slot(segment, 0)
    segment.close()


def _bytes_of(
    binding: LiveState, plan: PhasePlan, source: EntrySource | None, name: str, packed: bytes
) -> bytes:
    if source is None:
        return packed if name == "ckptd.scalars" else plan.static
    if source.kind == "packed":
        zero = torch.zeros((), dtype=source.dtype)
        return raw(torch.stack([binding.state(n).get(k, zero) for n, k in plan.packed[source.dtype]]))
    live: Any = binding.params[source.name]
    if source.kind == "optim":
        live = binding.state(source.name).get(source.key, torch.zeros_like(live))
    whole = live.detach()
    return raw(whole if source.start is None else whole[source.start : source.stop])


def handed_over(folder: Path, ranks: int) -> tuple[LocalState, Handover]:
    """What ranks of one node plan from what lies in its folder."""
    inventory = Inventory(folder, "job", "run", LAYERS)
    found = choose([inventory.of_node], LAYERS)
    assert found is not None
    plan = plan_handover(found, LAYERS, np.ones((1, ranks, 2)), [0] * ranks, NUMELS)
    return LocalState(inventory.images, LAYERS), plan


def load(one: Rank, local: LocalState, plan: Handover) -> None:
    loader = Loader(one.binding, {}, OptimizerExtras(one.binding, LAYERS), one.firsts)
    mine = [give.unit for give in plan.gives if give.target == one.rank]
    check_fits(one.binding, mine, set(one.binding.params))
    loader.clear()
    for unit in mine:
        loader.units(b"".join(local.unit(unit)))
    loader.scalars(local.scalars(plan.scalars[one.rank][1]), one.rank)
    loader.finish()


def whole(ranks: Sequence[Rank]) -> dict[str, Tensor]:
    """Of each tensor all elements, padding left out; of what is no shard that of all ranks, which
    is the same.
    """
    each = [one.everything() for one in ranks]
    found = {}
    for name, value in each[0].items():
        param = name.partition("/")[0]
        if param in NUMELS and value.shape == ranks[0].shards[param].shape:
            found[name] = joined([one[name] for one in each], NUMELS[param])
            padding = torch.cat([one[name] for one in each])[NUMELS[param] :]
            assert not padding.count_nonzero(), f"the padding of {name}"
        else:
            assert all(torch.equal(one[name], value) for one in each), name
            found[name] = value
    return found


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (3, 2), (2, 3), (3, 3), (2, 5)])
@pytest.mark.parametrize("steps", [0, 2])
def test_every_element_and_its_state_comes_to_who_owns_it(before: int, after: int, steps: int) -> None:
    """Also before the first step, when there is no state; and what ranks do afterwards is the same,
    whoever owns what.
    """
    with segment_folder() as folder:
        old = [Rank(rank, before, seed=1) for rank in range(before)]
        for one in old:
            one.train(steps)
            sealed(folder, one, 7, steps)
        new = [Rank(rank, after, seed=20 + rank) for rank in range(after)]
        local, plan = handed_over(folder, after)
        with local:
            for one in new:
                load(one, local, plan)
        was, now = whole(old), whole(new)
        assert was.keys() == now.keys()
        assert [name for name in was if not torch.equal(was[name], now[name])] == []
        assert any(name.endswith("/exp_avg") for name in now) == (steps > 0)
        assert f"{IDLE}/step" not in now
        for one in (*old, *new):
            one.train(2)
        was, now = whole(old), whole(new)
        assert [name for name in was if not torch.equal(was[name], now[name])] == []


def test_a_shard_that_is_left_out_is_missed() -> None:
    """The control of the test above: without one give, what is put together differs."""
    with segment_folder() as folder:
        old = [Rank(rank, 3, seed=1) for rank in range(3)]
        for one in old:
            one.train(2)
            sealed(folder, one, 7, 2)
        new = [Rank(rank, 2, seed=20) for rank in range(2)]
        local, plan = handed_over(folder, 2)
        left_out = next(g for g in plan.gives if g.unit.param in NUMELS and g.unit.start)
        gives = tuple(give for give in plan.gives if give != left_out)
        with local:
            for one in new:
                load(one, local, Handover(gives, plan.scalars, plan.sent_bytes, 0, 0))
        was, now = whole(old), whole(new)
        differing = [name for name in was if not torch.equal(was[name], now[name])]
        assert differing
        assert {name.partition("/")[0] for name in differing} == {left_out.unit.param}


def test_shards_of_another_dtype_are_refused() -> None:
    with segment_folder() as folder:
        sealed(folder, Rank(0, 1, seed=1), 7, 0)
        local, plan = handed_over(folder, 1)
        with local, pytest.raises(ValueError, match=r"torch\.float64 .* was torch\.float32"):
            load(Rank(0, 1, seed=1, dtype=torch.float64), local, plan)


def test_states_of_different_steps_are_not_put_together() -> None:
    """One rank's optimizer did a step more than the other's."""
    with segment_folder() as folder:
        for rank in range(2):
            one = Rank(rank, 2, seed=1)
            one.train(1 + rank)
            sealed(folder, one, 7, 3)
        local, plan = handed_over(folder, 1)
        with local, pytest.raises(ValueError, match="not the same in the shards of all ranks"):
            load(Rank(0, 1, seed=1), local, plan)


def test_what_a_rank_does_not_read_is_not_verified_by_it() -> None:
    """Another rank's image on the node is damaged: who reads its own is not held up, and who reads
    that one hears of it.
    """
    with segment_folder() as folder:
        for rank in range(2):
            sealed(folder, Rank(rank, 2, seed=1), 7, 0)
        (path,) = folder.glob("*~r0~*")
        segment = open_segment(path)
        for index, header in segment.headers():
            flip(segment, index, header)
        segment.close()
        local, plan = handed_over(folder, 2)
        with local:
            for give in plan.gives:
                if give.unit.param in NUMELS and 0 < give.unit.start < give.unit.stop:
                    local.open_for([give.unit], [1])
            first = next(g.unit for g in plan.gives if g.unit.param in NUMELS and not g.unit.start)
            with pytest.raises(Unreadable, match="~r0~"):
                local.open_for([first], [])


def test_ranks_that_call_different_methods_hear_of_it() -> None:
    calls = ["checkpointer()", "shards()", "checkpointer()"]
    found = outcomes([lambda ranks, call=call: same_call(ranks, call) for call in calls])  # type: ignore[misc]
    for one in found:
        assert isinstance(one, ValueError)
        assert "rank 0 called checkpointer(), rank 1 shards()" in str(one)
