"""Requests keep their tokens, to the bit, whichever devices are lost and whenever.

Devices are threads here (`device_threads`); `test_tensor_parallel_server` has processes that are killed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ckptd.client.serving.generation import GenerationRequest
from ckptd.client.serving.serving_device import EngineOptions
from tests.client.serving.device_threads import ThreadedServer
from tests.client.serving.tiny_models import greedy, save_tiny

Models = Callable[[str], Path]

REQUESTS = [
    GenerationRequest(
        id=f"r{i}",
        prompt=tuple((7 * i + j) % 61 for j in range(3 + 5 * i)),
        most=6 + i,
        temperature=float(i % 2),
        seed=i,
        top=9 * (i % 3 == 0),
    )
    for i in range(5)
]


@pytest.fixture(scope="module")
def undisturbed(tiny_model: Models) -> Callable[[str], dict[str, tuple[int, ...]]]:
    """The answers of one device."""

    @cache
    def answers(kind: str) -> dict[str, tuple[int, ...]]:
        server = ThreadedServer(tiny_model(kind), [0])
        server.serve(REQUESTS)
        return server.answers

    return answers


def test_answers_are_those_of_transformers(tiny_model: Models) -> None:
    server = ThreadedServer(tiny_model("qwen3_moe"), range(3))
    cold = [GenerationRequest(id=r.id, prompt=r.prompt, most=r.most) for r in REQUESTS]
    server.serve(cold)
    for each in cold:
        assert list(server.answers[each.id]) == greedy(tiny_model("qwen3_moe"), each.prompt, each.most)[0]


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_losses_one_by_one_and_returns(
    tiny_model: Models, undisturbed: Callable[[str], dict[str, tuple[int, ...]]], kind: str
) -> None:
    """Lost KV comes from the backup but for what is in no whole block; a return costs nothing again."""
    server = ThreadedServer(tiny_model(kind), range(4), stripes=64)
    server.serve(REQUESTS, steps=7)
    for lost in (2, 0, 3):
        server.lose(lost)
        server.serve(REQUESTS, steps=1)
        settled = server.settled[1]
        assert settled.plan is not None
        assert settled.plan.lost == (lost,)
        assert settled.backup_bytes > 0
        # Of each request: less than a block and what the backup's thread has in hand, or less than a piece.
        assert settled.recomputed < 8 * len(settled.plan.requests)
    for back in (0, 3):
        server.come_back(back)
        server.serve(REQUESTS, steps=1)
        assert server.settled[1].recomputed == 0
        assert server.settled[back].peer_bytes > 0
    server.serve(REQUESTS)
    server.close()
    assert server.answers == undisturbed(kind)


def test_without_a_backup_all_is_computed_again(
    tiny_model: Models, undisturbed: Callable[[str], dict[str, tuple[int, ...]]]
) -> None:
    server = ThreadedServer(tiny_model("llama"), range(4))
    server.serve(REQUESTS, steps=5)
    state = server.devices[0].state
    assert state is not None
    computed = sum(each.computed for each in state.open)
    server.lose(3)
    server.serve(REQUESTS)
    assert server.settled[0].recomputed == computed > 0
    assert server.answers == undisturbed("llama")


def _disturbed(folder: Path, seed: int) -> dict[str, tuple[int, ...]]:
    """Losses and returns at any word, also while others settle."""
    draw = random.Random(seed)
    block = draw.choice([1, 2, 4])
    server = ThreadedServer(
        folder,
        range(4),
        stripes=draw.choice([0, 40, 200]) // block,
        block_tokens=block,
        hybrid=draw.random() < 0.7,
    )
    for _ in range(draw.randrange(1, 6)):
        gone = [device for device in range(4) if device not in server.devices]
        if gone and draw.random() < 0.5:
            server.come_back(draw.choice(gone))
        if len(server.devices) > 1:
            words = draw.randrange(draw.choice([8, 40, 150]))
            server.serve(REQUESTS, dies=(draw.choice(list(server.devices)), words))
    server.serve(REQUESTS)
    server.close()
    return server.answers


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 24, 8))
def test_losses_at_any_moment(
    tiny_model: Models, undisturbed: Callable[[str], dict[str, tuple[int, ...]]], first: int
) -> None:
    for seed in range(first, first + 8):
        found = _disturbed(tiny_model("qwen3_moe"), seed)
        assert found == undisturbed("qwen3_moe"), f"seed {seed}"


def test_damaged_backups_are_computed_again(
    tiny_model: Models, undisturbed: Callable[[str], dict[str, tuple[int, ...]]]
) -> None:
    server = ThreadedServer(tiny_model("llama"), range(2), stripes=64)
    server.serve(REQUESTS, steps=8)
    server.drain()
    (memory,) = server.memories.values()
    for at in range(len(memory) // 8, len(memory), 97):  # behind the table
        memory[at] ^= 0xFF
    server.lose(1)
    server.serve(REQUESTS)
    backup = server.devices[0].backup
    assert backup is not None
    assert backup.damaged > 0
    assert server.answers == undisturbed("llama")
    server.close()


NODES = {0: "a", 1: "a", 2: "b", 3: "b", 4: "c"}


def _copied(server: ThreadedServer) -> None:
    """Serve on until every block is on the other nodes, too."""
    server.drain()
    server.serve(steps=1)


def test_a_node_is_lost_with_its_memory_and_comes_back(
    tiny_model: Models, undisturbed: Callable[[str], dict[str, tuple[int, ...]]]
) -> None:
    """Its blocks come from the copy on the next node. What was on it as a copy is copied again, so that the
    next node may be lost, too.
    """
    server = ThreadedServer(tiny_model("llama"), range(5), stripes=64, nodes=NODES, backup_copies=1)
    server.serve(REQUESTS, steps=7)
    for node in ("b", "a"):
        _copied(server)
        server.lose_node(node)
        server.serve(REQUESTS, steps=1)
        settled = server.settled[4]
        assert settled.plan is not None
        assert settled.plan.lost == tuple(device for device, of in NODES.items() if of == node)
        assert settled.backup_bytes > 0
        assert 0 < settled.recomputed < 8 * len(settled.plan.requests)
        server.serve(steps=1)
    server.come_back(2)
    server.serve(REQUESTS, steps=2)
    _copied(server)
    server.lose_node("c")
    server.serve(REQUESTS)
    assert server.settled[2].backup_bytes > 0
    server.close()
    assert server.answers == undisturbed("llama")


def test_a_device_is_lost_and_its_node_has_no_other(
    tiny_model: Models, undisturbed: Callable[[str], dict[str, tuple[int, ...]]]
) -> None:
    """Nobody there can read the node's memory: without a copy all is computed again."""
    for copies in (0, 1):
        server = ThreadedServer(
            tiny_model("llama"), range(3), stripes=64, nodes={0: "a", 1: "b", 2: "c"}, backup_copies=copies
        )
        server.serve(REQUESTS, steps=7)
        _copied(server)
        server.lose(1)
        server.serve(REQUESTS)
        server.close()
        assert (sum(each.backup_bytes for each in server.settled.values()) > 0) == bool(copies)
        assert server.answers == undisturbed("llama")


def test_the_memory_of_a_node_is_lost_alone(
    tiny_model: Models, undisturbed: Callable[[str], dict[str, tuple[int, ...]]]
) -> None:
    """Its devices go on with another memory, and its blocks come from the copies if one of them is lost."""
    server = ThreadedServer(tiny_model("llama"), range(4), stripes=64, nodes=NODES, backup_copies=1)
    server.serve(REQUESTS, steps=7)
    _copied(server)
    server.lose_memory("a")
    server.lose(1)
    server.serve(REQUESTS, steps=1)
    settled = server.settled[0]
    assert settled.plan is not None
    assert 0 < settled.recomputed < 8 * len(settled.plan.requests)
    assert sum(server.settled[device].backup_bytes for device in (0, 2, 3)) > 0
    _copied(server)
    server.lose_node("b")  # what it had, and what node a had lost, is on node a now
    server.serve(REQUESTS)
    assert server.settled[0].recomputed < 8 * len(settled.plan.requests)
    server.close()
    assert server.answers == undisturbed("llama")


def _nodes_lost(folder: Path, seed: int) -> dict[str, tuple[int, ...]]:
    """As `_disturbed`, with nodes that lose their memory, too."""
    draw = random.Random(seed)
    server = ThreadedServer(
        folder,
        range(5),
        stripes=draw.choice([10, 50]),
        nodes=NODES,
        backup_copies=draw.choice([0, 1, 1, 2]),
        hybrid=draw.random() < 0.7,
    )
    for _ in range(draw.randrange(1, 6)):
        for device in NODES:
            if device not in server.devices and draw.random() < 0.4:
                server.come_back(device)
        if len(server.devices) > 1:
            victim, words = draw.choice(list(server.devices)), draw.randrange(draw.choice([8, 60, 200]))
            server.serve(REQUESTS, dies=(victim, words))
            node = NODES[victim]
            if draw.random() < 0.6 and any(NODES[each] != node for each in server.devices):
                server.lose_node(node)
    server.serve(REQUESTS)
    server.close()
    return server.answers


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 24, 8))
def test_nodes_are_lost_at_any_moment(
    tiny_model: Models, undisturbed: Callable[[str], dict[str, tuple[int, ...]]], first: int
) -> None:
    for seed in range(first, first + 8):
        assert _nodes_lost(tiny_model("llama"), seed) == undisturbed("llama"), f"seed {seed}"


@pytest.mark.parametrize("words", range(4, 9))
def test_the_last_one_that_knows_is_lost_before_the_others_do(
    tiny_model: Models, undisturbed: Callable[[str], dict[str, tuple[int, ...]]], words: int
) -> None:
    """Nobody knows any request then: clients ask again."""
    server = ThreadedServer(tiny_model("llama"), [0])
    server.serve(REQUESTS, steps=3)
    server.come_back(1)
    server.serve(REQUESTS, dies=(0, words))
    server.serve(REQUESTS)
    assert server.answers == undisturbed("llama")


def test_a_request_without_a_backup_is_served_beside_others(
    tiny_model: Models, undisturbed: Callable[[str], dict[str, tuple[int, ...]]]
) -> None:
    server = ThreadedServer(tiny_model("llama"), range(3), stripes=20)
    own = GenerationRequest(id="own", prompt=REQUESTS[3].prompt, most=8, backed_up=False)
    server.serve([*REQUESTS, own], steps=5)
    server.lose(2)
    server.serve([*REQUESTS, own])
    backup = server.devices[0].backup
    assert backup is not None
    assert backup.index.used_bytes == 0  # all have ended
    server.close()
    answers = server.answers
    assert list(answers.pop("own")) == greedy(tiny_model("llama"), own.prompt, own.most)[0]
    assert answers == undisturbed("llama")


def test_what_is_refused(tiny_model: Models, tmp_path: Path) -> None:
    server = ThreadedServer(tiny_model("llama"), [0], stripes=3)
    device = server.devices[0]
    device.check(GenerationRequest(id="a", prompt=(1,) * 10, most=3))
    with pytest.raises(ValueError, match="the model has 61"):
        device.check(GenerationRequest(id="a", prompt=(61,), most=1))
    save_tiny("llama", tmp_path / "other", seed=4)
    other = ThreadedServer(tmp_path / "other", [0]).devices[0]
    backup = device.backup
    assert backup is not None
    with pytest.raises(ValueError, match="begin a backup of its own"):
        other.attach(backup)
    smaller = ThreadedServer(tiny_model("llama"), [0], block_tokens=2).devices[0]
    with pytest.raises(ValueError, match="has blocks of 4 tokens, the server of 2"):
        smaller.attach(backup)
    server.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"block_tokens": 0}, "at least 1"),
        ({"block_tokens": 3, "piece_tokens": 8}, "a multiple of block_tokens, 3"),
        ({"unit_s": -1.0}, "must not be negative"),
    ],
)
def test_options_that_cannot_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineOptions(**given)
