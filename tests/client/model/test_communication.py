"""With whom a rank communicates in a step: told from what real process groups do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckptd.client.model.communication import Communication
from tests.client.gloo_ranks import run_in_ranks

WORLD = "collectives over process group 'default_pg' of 3 ranks"
PAIR = "of 2 ranks"

Seen = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    """What each of three ranks saw, by the name of what they did in a step."""
    folder = tmp_path_factory.mktemp("ranks")
    run_in_ranks(_process, 3, folder, str(folder))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)]


def _process(rank: int, folder: str) -> None:
    pair = dist.new_group([0, 1])
    before = vars(dist.ProcessGroup)["send"]
    found: Seen = {}
    for name, step in _STEPS.items():
        communication = Communication()
        communication.begin()
        step(communication, rank, pair)
        communication.end()
        neighbours = sorted(communication.neighbours)
        found[name] = {"neighbours": neighbours, "joined": communication.joined}
        communication.close()
    found["closed"] = {"as before": vars(dist.ProcessGroup)["send"] is before}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _chain(told: int) -> Any:
    """0 sends to 1, 1 to 2; so many of the two messages on each way are told."""

    def step(communication: Communication, rank: int, pair: Any) -> None:
        for number in range(2):
            if rank > 0:
                if number < told:
                    communication.receives([rank - 1])
                dist.recv(torch.zeros(1), rank - 1)
            if rank < 2:
                if number < told:
                    communication.sends([rank + 1])
                dist.send(torch.zeros(1), rank + 1)

    return step


def _both_ways(communication: Communication, rank: int, pair: Any) -> None:
    if rank < 2:
        communication.sends([1 - rank])
        communication.receives([1 - rank])
        operations = [
            dist.P2POp(dist.isend, torch.zeros(1), 1 - rank),
            dist.P2POp(dist.irecv, torch.zeros(1), 1 - rank),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def _all_reduce(communication: Communication, rank: int, pair: Any) -> None:
    _chain(2)(communication, rank, pair)
    dist.all_reduce(torch.zeros(1))


def _all_reduce_aside(communication: Communication, rank: int, pair: Any) -> None:
    _chain(2)(communication, rank, pair)
    with communication.aside():
        dist.all_reduce(torch.zeros(1))
        _chain(0)(communication, rank, pair)
    _chain(2)(communication, rank, pair)


def _from_anybody(communication: Communication, rank: int, pair: Any) -> None:
    if rank == 1:
        communication.sends([2])
        dist.send(torch.zeros(1), 2)
    if rank == 2:
        dist.recv(torch.zeros(1))


def _reduced_in_cpp(communication: Communication, rank: int, pair: Any) -> None:
    """DDP's reducer calls no function of torch.distributed."""
    if rank < 2:
        model = DistributedDataParallel(nn.Linear(2, 2), process_group=pair)
        communication.begin()
        model(torch.zeros(1, 2)).sum().backward()


def _by_an_unknown_group(communication: Communication, rank: int, pair: Any) -> None:
    """As a process group does that torch has no record of: the message goes, and that is all that
    is known of it.
    """
    assert communication.single("sent", object(), 1, lambda: "it went") == "it went"


def _left_in_the_middle(communication: Communication, rank: int, pair: Any) -> None:
    dist.all_reduce(torch.zeros(1))
    communication.abandon()


_STEPS = {
    "logged": _chain(2),
    "one is not": _chain(1),
    "both ways": _both_ways,
    "all-reduce": _all_reduce,
    "aside": _all_reduce_aside,
    "from anybody": _from_anybody,
    "ddp": _reduced_in_cpp,
    "left": _left_in_the_middle,
    "unknown": _by_an_unknown_group,
}


@pytest.mark.slow
def test_what_is_logged_makes_neighbours_and_joins_nobody(seen: list[Seen]) -> None:
    assert [each["logged"] for each in seen] == [
        {"neighbours": [1], "joined": {}},
        {"neighbours": [0, 2], "joined": {}},
        {"neighbours": [1], "joined": {}},
    ]
    assert [each["both ways"]["joined"] for each in seen] == [{}, {}, {}]


@pytest.mark.slow
def test_one_message_more_than_is_logged_joins_both_ends(seen: list[Seen]) -> None:
    sent, received = (f"{how} by itself, not with the boundary log" for how in ("sent", "received"))
    assert seen[0]["one is not"]["joined"] == {"1": sent}
    assert seen[2]["one is not"]["joined"] == {"1": received}
    assert seen[1]["one is not"]["joined"] == {"2": sent, "0": received}


@pytest.mark.slow
def test_collectives_join_all_of_their_group(seen: list[Seen]) -> None:
    """Also between logged messages over the same group, and those that DDP begins by itself."""
    assert seen[0]["all-reduce"]["joined"] == {"1": WORLD, "2": WORLD}
    assert list(seen[0]["ddp"]["joined"]) == ["1"]
    assert seen[0]["ddp"]["joined"]["1"].endswith(PAIR)
    assert list(seen[1]["ddp"]["joined"]) == ["0"]
    assert seen[2]["ddp"]["joined"] == {}


@pytest.mark.slow
def test_what_a_repeat_does_not_do_joins_nobody(seen: list[Seen]) -> None:
    assert [each["aside"]["joined"] for each in seen] == [{}, {}, {}]
    assert [each["left"]["joined"] for each in seen] == [{}, {}, {}]


@pytest.mark.slow
def test_who_receives_from_whoever_sends_is_joined_with_all(seen: list[Seen]) -> None:
    why = "received from whoever sends"
    assert seen[2]["from anybody"]["joined"] == {"0": why, "1": why}


@pytest.mark.slow
def test_what_cannot_be_told_joins_everybody_and_disturbs_nobody(seen: list[Seen]) -> None:
    assert [sorted(each["unknown"]["joined"]) for each in seen] == [
        ["1", "2"],
        ["0", "2"],
        ["0", "1"],
    ]


@pytest.mark.slow
def test_afterwards_process_groups_are_as_they_were(seen: list[Seen]) -> None:
    assert [each["closed"] for each in seen] == [{"as before": True}] * 3
