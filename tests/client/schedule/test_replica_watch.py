"""Ranks that share parameters compare them while they train. Before, they did once: ranks that parted later
resumed with the values of one of them, in most cases without a word.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
import uuid
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

from ckptd.client.model.live_state import LiveState
from ckptd.client.model.replicated_params import Replicas, ReplicatedParams
from ckptd.client.schedule import replica_watch
from ckptd.client.schedule.replica_watch import ReplicaWatch
from tests.client.daemon_link.test_rank_memory import events
from tests.client.schedule import parting_ranks
from tests.forked import Forked
from tests.ports import free_port

RANKS = (0, 1)
WAIT_S = 60.0


class Side:
    """One rank of two, with a model of its own."""

    def __init__(self, store: Any, rank: int) -> None:
        torch.manual_seed(3)
        self.layers = [nn.Linear(3, 3) for _ in range(8)]
        self.model = nn.Sequential(*self.layers)
        optimizer = torch.optim.AdamW(self.model.parameters())
        self.told: list[tuple[str, str, str]] = []
        identity = SimpleNamespace(job="unit", run="watch", rank=rank, world_size=2)
        session = SimpleNamespace(notice=lambda *words: self.told.append(words))
        memory: Any = SimpleNamespace(identity=identity, epoch=1, session=session)
        binding = LiveState(self.model, [optimizer], None)
        self.watch = ReplicaWatch(binding, memory)
        self.sharing = ReplicatedParams(dict.fromkeys(binding.params, Replicas(RANKS, None)))

    def look(self, step: int) -> str:
        return self.watch.look(step, self.sharing)


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> list[Side]:
    store = HashStore()
    monkeypatch.setattr(replica_watch, "job_store", lambda: store)
    return [Side(store, rank) for rank in RANKS]


def verdicts(sides: list[Side], first: int) -> list[str]:
    """What the ranks find at the steps from ``first`` on; none of these begins a comparison."""
    found = ["", ""]
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until and any(side.watch._open is not None for side in sides):
        for number, side in enumerate(sides):
            found[number] = found[number] or side.look(first)
        time.sleep(0.01)
    assert all(side.watch._open is None for side in sides)
    return found


def compared(side: Side, steps: Iterable[int]) -> list[int]:
    """Those of these steps at which a comparison begins."""
    begun: list[int] = []
    side.watch._begin = lambda step, sharing: begun.append(step)  # type: ignore[method-assign]
    for step in steps:
        side.look(step)
    return begun


def test_it_compares_ever_more_rarely(sides: list[Side]) -> None:
    assert compared(sides[0], range(5000)) == [16, 32, 64, 128, 256, 512, 1024, 2048, 3072, 4096]


@pytest.mark.parametrize("stride", [3, 7])
def test_where_not_every_step_is_a_boundary_the_next_one_counts(sides: list[Side], stride: int) -> None:
    due = [-(-step // stride) * stride for step in (16, 32, 64, 128, 256, 512, 1024, 2048)]
    assert compared(sides[0], range(0, 2100, stride)) == due


def test_a_life_that_begins_late_compares_at_the_same_steps_as_the_others(sides: list[Side]) -> None:
    assert compared(sides[0], range(700, 2100)) == [1024, 2048]


def test_equal_replicas_say_nothing(sides: list[Side]) -> None:
    for side in sides:
        assert side.look(16) == ""
    assert verdicts(sides, 17) == ["", ""]
    assert [side.told for side in sides] == [[], []]


def flip(side: Side) -> None:
    with torch.no_grad():
        side.layers[5].weight.view(torch.int32)[1, 2] ^= 1


def test_a_flipped_bit_is_told_once_with_its_part_of_the_model(sides: list[Side]) -> None:
    for first in (16, 32, 64):
        if first == 32:
            flip(sides[1])
        for side in sides:
            side.look(first)
        assert verdicts(sides, first + 1) == ["", ""], "snapshots go on"
    assert sides[1].told == []
    [(level, kind, text)] = sides[0].told
    assert (level, kind) == ("error", "replicas_differ")
    assert "5.weight to 5.bias (2 parameters): equal at step 16, different at step 32" in text


def test_a_difference_that_has_gone_may_be_told_again(sides: list[Side]) -> None:
    for first in (16, 32, 64):
        flip(sides[1])
        for side in sides:
            side.look(first)
        verdicts(sides, first + 1)
    assert len(sides[0].told) == 2


def test_ranks_that_train_apart_know_both(sides: list[Side]) -> None:
    with torch.no_grad():
        for param in sides[1].model.parameters():
            param.add_(1.0)
    for side in sides:
        side.look(16)
    found = verdicts(sides, 17)
    for text in found:
        assert text.startswith("ranks 0, 1 train apart: ")
        assert "equal after the first update, and differ at step 16" in text


def test_a_group_that_does_not_answer_hides_no_other_one(sides: list[Side]) -> None:
    with torch.no_grad():
        for param in sides[1].model.parameters():
            param.add_(1.0)
    silent = Replicas((0, 1, 2), None)  # rank 2 never comes
    for side in sides:
        side.sharing = ReplicatedParams(dict(side.sharing.replicas) | {"0.weight": silent})
        side.look(16)
    found, until = "", time.monotonic() + WAIT_S
    while not found and time.monotonic() < until:
        found = sides[0].look(17)
        time.sleep(0.01)
    assert found.startswith("ranks 0, 1 train apart: ")
    for side in sides:
        side.watch.close()


def test_a_rank_that_does_not_come_is_not_waited_for(sides: list[Side]) -> None:
    sides[0].look(16)
    for step in range(17, 32):
        assert sides[0].look(step) == ""
    for side in sides:
        side.look(32)
    assert verdicts(sides, 33) == ["", ""]


def test_the_store_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    monkeypatch.setattr(replica_watch, "job_store", lambda: store)
    sides = [Side(store, rank) for rank in RANKS]
    sizes: list[int] = []
    for first in (16, 32, 64, 128, 256):
        for side in sides:
            side.look(first)
        verdicts(sides, first + 1)
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until and first > 32 and store.num_keys() > max(sizes):
            time.sleep(0.01)
        sizes.append(store.num_keys())
    assert sizes[-1] <= max(sizes[:2])


# -- real ranks ------------------------------------------------------------------------------------


def lives(
    endpoint: str, run: str, what: str, *, steps: int, window: int = 1
) -> list[tuple[str, str, int | None]]:
    """Output, log and exit code of both ranks of a life."""
    port = str(free_port())
    ranks = [
        Forked(parting_ranks.main, endpoint, run, what, rank, steps, window, port, env=os.environ)
        for rank in RANKS
    ]
    return [(*each.communicate(timeout=280), each.returncode) for each in ranks]


@pytest.mark.parametrize("window", [1, 3])
def test_local_sgd_behind_a_warm_up_resumes_exactly(endpoint: str, window: int) -> None:
    """torch's post-local SGD: gradients are reduced over all ranks in the warm-up, and then within each rank; the
    models are averaged now and then. Its optimizer is a wrapper, and what its averager counts is captured.
    """
    run = uuid.uuid4().hex[:8]
    first = lives(endpoint, run, "local SGD", steps=0, window=window)
    assert first[1][2] == -signal.SIGKILL, first
    for _, said, _ in first:
        assert "train apart" in said, said
    steps = json.loads(first[1][0].splitlines()[-1])["steps"] + 6
    ends = []
    for daemon in (endpoint, "off"):
        found = lives(daemon, run, "local SGD", steps=steps, window=window)
        assert [code for *_, code in found] == [0, 0], found
        ends.append([json.loads(out.splitlines()[-1]) for out, *_ in found])
    assert all(end["resumed"] is not None for end in ends[0])
    assert ends[0][0]["weights"] != ends[0][1]["weights"], "they train apart"
    assert [end["weights"] for end in ends[0]] == [end["weights"] for end in ends[1]]


def test_a_bit_that_flips_in_one_rank_is_an_event_and_snapshots_go_on(endpoint: str) -> None:
    run = uuid.uuid4().hex[:8]
    found = lives(endpoint, run, "flip", steps=0)
    assert [code for *_, code in found] == [0, 0], found
    [(level, text)] = events(endpoint, run, "replicas_differ")
    assert level == "error"
    assert re.search(r"hold different values of 4\.weight to 4\.bias .*different at step 32", text)
