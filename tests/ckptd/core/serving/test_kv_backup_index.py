"""Blocks never share bytes, only finished ones count, and an ended request's memory waits for readers."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ckptd.core.serving.kv_backup_index import BackupGeometry, BlockPlace, KvBackupIndex
from ckptd.core.serving.loss_plan import plan_devices
from ckptd.core.serving.request_routing import ServedRequest
from ckptd.core.serving.server_layout import place_server
from ckptd.errors import LocalProtocolError
from tests.ckptd.core.serving.models import decoder

LAYERS, HEADS = 2, 3


def geometry(stripes: int = 4, **more: Any) -> BackupGeometry:
    """Blocks of 4 tokens of 16 bytes: a stripe has 384 bytes."""
    given: dict[str, Any] = {
        "model": "m",
        "layers": LAYERS,
        "kv_heads": HEADS,
        "kv_token_bytes": 16,
        "block_tokens": 4,
        "quota_bytes": stripes * 384 + 100,
    }
    return BackupGeometry(**(given | more))


def write_stripe(index: KvBackupIndex, request: str, without: tuple[tuple[int, int], ...] = ()) -> None:
    number = index.reserve(request)
    assert number is not None
    for layer in range(LAYERS):
        for head in range(HEADS):
            if (layer, head) not in without:
                index.finish(index.write(BlockPlace(request, number, layer, head)))


def test_only_finished_blocks_without_a_gap_count() -> None:
    index = KvBackupIndex(geometry())
    index.begin("a", 16)
    write_stripe(index, "a")
    write_stripe(index, "a", without=((1, 2),))
    write_stripe(index, "a")
    assert (index.tokens("a", 0, 0), index.tokens("a", 1, 2), index.tokens("b", 0, 0)) == (12, 4, 0)
    late = index.write(BlockPlace("a", 1, 1, 2))
    assert index.tokens("a", 1, 2) == 4
    index.finish(late, complete=False)
    assert index.tokens("a", 1, 2) == 4
    index.finish(index.write(BlockPlace("a", 1, 1, 2)))
    assert index.tokens("a", 1, 2) == 12
    assert len(list(index.finished("a"))) == 3 * LAYERS * HEADS


def test_a_plan_asks_the_index() -> None:
    """Two finished blocks of 4 tokens: of a request of 10 tokens 2 are computed again."""
    model = decoder(LAYERS, HEADS)
    index = KvBackupIndex(geometry(kv_token_bytes=model.kv_token_bytes, quota_bytes=10_000))
    index.geometry.check_model(model, "m")
    index.begin("a", 30)
    write_stripe(index, "a")
    write_stripe(index, "a")
    layout = place_server(model, range(3))
    plan = plan_devices(layout, [ServedRequest("a", 10, 20)], index.tokens, lost=[1])
    assert plan.recomputed == {"a": 2}
    for fetch in plan.kv:
        for number in range(fetch.tokens // 4):
            index.done(index.read(BlockPlace("a", number, fetch.layer, fetch.head)))


def test_without_a_stripe_left_a_request_waits_for_the_end_of_another() -> None:
    index = KvBackupIndex(geometry(2))
    index.begin("a", 8)
    index.begin("b", 8)
    write_stripe(index, "a")
    write_stripe(index, "b")
    assert index.reserve("a") is None
    index.end("b")
    assert (index.reserve("a"), index.used_bytes, index.requests) == (1, 768, ("a",))


def test_memory_is_free_when_the_last_write_and_read_have_ended() -> None:
    index = KvBackupIndex(geometry(1))
    index.begin("a", 4)
    write_stripe(index, "a", without=((0, 0),))
    writing = index.write(BlockPlace("a", 0, 0, 0))
    reading = [index.read(BlockPlace("a", 0, 1, 1)) for _ in range(2)]
    index.end("a")
    index.begin("a", 4)
    for end in (lambda: index.finish(writing), *[lambda at=at: index.done(at) for at in reading]):
        assert index.reserve("a") is None
        end()
    assert index.reserve("a") == 0
    assert index.tokens("a", 1, 1) == 0


def test_what_is_computed_again_is_dropped() -> None:
    index = KvBackupIndex(geometry())
    index.begin("a", 16)
    for _ in range(3):
        write_stripe(index, "a")
    index.keep("a", 4)
    assert (index.tokens("a", 0, 0), index.used_bytes) == (4, 384)
    assert index.reserve("a") == 1


def test_any_history_keeps_blocks_of_their_own() -> None:
    """1,500 calls in random order, on memory that is written with the name of its block."""
    draws = random.Random(7)
    index = KvBackupIndex(geometry(3))
    memory: dict[int, BlockPlace] = {}
    writing: dict[int, BlockPlace] = {}
    reading: list[tuple[int, BlockPlace]] = []
    life = 0
    for _ in range(1500):
        names = list(index.requests)
        if len(names) < 2:
            life += 1
            index.begin(f"r{life}", 12)
        elif draws.random() < 0.04:
            index.end(draws.choice(names))
        elif draws.random() < 0.04:
            index.keep(draws.choice(names), draws.randrange(12))
        elif draws.random() < 0.1:
            index.reserve(draws.choice(names))
        else:
            block = BlockPlace(
                draws.choice(names), draws.randrange(3), draws.randrange(LAYERS), draws.randrange(HEADS)
            )
            if block in set(index.finished(block.request)):
                at = index.read(block)
                assert memory[at] == block
                reading.append((at, block))
            else:
                try:
                    at = index.write(block)
                except LocalProtocolError:
                    continue  # written just now, or its stripe was not reserved
                assert at not in writing
                assert at not in {each for each, _ in reading}
                writing[at] = memory[at] = block
        while len(writing) > 4:
            at = draws.choice(list(writing))
            assert memory[at] == writing.pop(at)
            index.finish(at, complete=draws.random() < 0.9)
        while len(reading) > 4:
            at, block = reading.pop(draws.randrange(len(reading)))
            assert memory[at] == block
            index.done(at)
    assert life > 10
    for at in writing:
        index.finish(at)
    for at, _ in reading:
        index.done(at)
    for name in index.requests:
        index.end(name)
    assert index.used_bytes == 0


def test_backups_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="block_tokens is 0"):
        geometry(block_tokens=0)
    with pytest.raises(ValueError, match="a quota of 383 B does not hold 4 tokens, which are 384 B"):
        geometry(quota_bytes=383)
    with pytest.raises(ValueError, match=r"'m' .2 layers of 3 KV heads, 16 .* the server has 'other'"):
        geometry().check_model(decoder(LAYERS, HEADS), "other")
    index = KvBackupIndex(geometry())
    with pytest.raises(ValueError, match=r"'a' may have 20 tokens, which are 1\.875 KiB .* without a backup"):
        index.begin("a", 20)
    assert index.requests == ()


def test_calls_out_of_order_are_bugs() -> None:
    index = KvBackupIndex(geometry())
    index.begin("a", 8)
    index.reserve("a")
    block = BlockPlace("a", 0, 1, 1)
    for call, said in (
        (lambda: index.begin("a", 8), "begun already"),
        (lambda: index.reserve("b"), "has not begun, or has ended"),
        (lambda: index.read(block), "is not finished"),
        (lambda: index.write(BlockPlace("a", 1, 0, 0)), "it has 1 stripes"),
        (lambda: index.write(BlockPlace("a", 0, 2, 0)), "no such layer or head"),
        (lambda: index.finish(0), "no block is written at offset 0"),
        (lambda: index.done(384 * 3), "no block is read at offset 1152"),
    ):
        with pytest.raises(LocalProtocolError, match=said):
            call()
    index.write(block)
    with pytest.raises(LocalProtocolError, match="written or finished already"):
        index.write(block)


def test_an_index_with_the_stripes_of_another_one() -> None:
    """They are given in the same order as there; what is finished must be said."""
    index = KvBackupIndex(geometry(5))
    for request in ("a", "b"):
        index.begin(request, 2 * index.geometry.block_tokens)
        index.reserve(request)
    index.end("a")
    index.reserve("b")
    index.finish(index.write(BlockPlace("b", 0, 0, 0)))
    again = KvBackupIndex.restored(index.geometry, {"b": index.stripes_of("b")}, index.free)
    assert (again.requests, again.stripes_of("b"), again.free) == (("b",), index.stripes_of("b"), index.free)
    assert (index.tokens("b", 0, 0), again.tokens("b", 0, 0)) == (index.geometry.block_tokens, 0)
    (stripe,) = {*index.stripes_of("b")[:1]}
    told = KvBackupIndex.restored(
        index.geometry, {"b": index.stripes_of("b")}, index.free, {stripe: [(0, 0)]}
    )
    assert list(told.finished("b")) == list(index.finished("b"))
    for each in (index, again):
        each.begin("c", 1)
        each.reserve("c")
    assert again.stripes_of("c") == index.stripes_of("c")
    with pytest.raises(ValueError, match="are not all there are"):
        KvBackupIndex.restored(index.geometry, {"b": [1, 2]}, [0, 1])


def test_blocks_of_several_heads_at_once() -> None:
    index, again = KvBackupIndex(geometry()), KvBackupIndex(geometry())
    heads = [
        (layer, head) for layer in range(index.geometry.layers) for head in range(index.geometry.kv_heads)
    ]
    for each in (index, again):
        each.begin("a", 1)
        each.reserve("a")
    offsets = index.write_heads("a", 0, heads[1:])
    assert offsets == [again.write(BlockPlace("a", 0, *at)) for at in heads[1:]]
    assert index.write_heads("a", 0, []) == []
    for wrong in (heads[:2], [heads[0]] * 2, [(0, 99)], [(-1, 0)], [(99, 0)]):
        with pytest.raises(LocalProtocolError):
            index.write_heads("a", 0, wrong)
    index.finish_heads(offsets[0], heads[2:])
    for offset in offsets[1:]:
        again.finish(offset)
    assert list(index.finished("a")) == list(again.finished("a"))
    for each in (index, again):
        each.end("a")
        assert each.used_bytes > 0  # one is written yet
    with pytest.raises(LocalProtocolError, match="not all of 2 blocks"):
        index.finish_heads(offsets[0], heads[1:3])
    index.finish(offsets[0], complete=False)
    assert (index.used_bytes, index.blocks_of("a") if "a" in index.requests else 0) == (0, 0)
