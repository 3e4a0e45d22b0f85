"""msgpack of others: whatever is in it, one error, and no more memory than its types allow."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import pytest

from ckptd.core.recovery.held import from_wire
from ckptd.core.recovery.recovery_facts import facts_from_wire, facts_of_log
from ckptd.core.slots.segment_format import decode_descriptor
from ckptd.errors import RemoteProtocolError, SegmentError
from ckptd.memory.inventory import operator_names
from ckptd.transport.fabric.frames import decode_answer, decode_ask
from ckptd.transport.peer_messages import decode_peer
from ckptd.transport.wire import WireError, decode
from ckptd.unpacking import unpack

ROOT = Path(__file__).resolve().parents[2]
DEEP = b"\x91" * 200_000 + b"\xc0"
MIB = 1 << 20


class Told(msgspec.Struct):
    numbers: Annotated[list[list[int]], msgspec.Meta(max_length=1000)] = []


TOLD = msgspec.msgpack.Decoder(Told)
FIELD = b"\x81\xa7numbers"


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (DEEP, "Expected"),
        (FIELD + b"\x91" + DEEP, "Expected"),
        (b"\x81\xa5other" + DEEP, "too deeply"),  # skipped, no field takes it
        (FIELD + b"\xdd\xff\xff\xff\xff", "length"),  # announces four billion
        (b"\x81\xa5other\xdf\xff\xff\xff\xff", "truncated"),
        (b"\x81\xa5other\xc6\xff\xff\xff\xff", "truncated"),
        (b"\xc1", "malformed"),
        (b"", "truncated"),
        (b"\x01" * 101, "101 bytes; at most 100"),
    ],
)
def test_what_cannot_be_read_is_one_error(data: bytes, what: str) -> None:
    limit = 100 if len(data) == 101 else MIB
    with pytest.raises(ValueError, match=what):
        unpack(TOLD, data, max_bytes=limit)


def test_a_list_that_is_too_long_is_refused_before_it_is_made() -> None:
    """Each byte of it would be an object of 56."""
    data = FIELD + b"\xdd" + MIB.to_bytes(4, "big") + b"\x90" * MIB
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="length"):
            unpack(TOLD, data)
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("read", "error"),
    [
        (decode_peer, ValueError),
        (decode_ask, ValueError),
        (decode_answer, ValueError),
        (decode_descriptor, SegmentError),
        (lambda data: decode([msgspec.msgpack.encode({"protocol": 0, "id": 1}), data]), WireError),
        (from_wire, RemoteProtocolError),
        (lambda data: facts_from_wire([data]), RemoteProtocolError),
    ],
)
def test_messages_that_are_nested_deeply_are_refused(
    read: Callable[[bytes], object], error: type[Exception]
) -> None:
    """Some of these let a `RecursionError` through, which nobody expected: a file in the segment
    folder then kept the daemon from starting.
    """
    with pytest.raises(error):
        read(DEEP)


def test_a_trainers_own_part_of_a_descriptor_may_be_anything() -> None:
    assert facts_of_log(DEEP) is None
    assert operator_names(DEEP, 1, rank=0) == ("operator 0",)
    item = b"\x81\xa9operators\x91" + DEEP
    assert operator_names(item, 1, rank=0) == ("operator 0",)


def test_a_table_of_operators_that_is_none_costs_no_memory() -> None:
    """`ckptctl snapshots --operators` made an object of each byte of it: 16 MiB took the daemon
    more than a gigabyte and half a minute, in which it served nobody.
    """
    many = 2 * MIB
    data = b"\x81\xa9operators\xdd" + many.to_bytes(4, "big") + b"\x90" * many
    one = b"\x81\xa9operators\x91\xdd" + many.to_bytes(4, "big") + b"\x90" * many
    tracemalloc.start()
    try:
        for client in (data, one):
            assert operator_names(client, 1, rank=0) == ("operator 0",)
        assert tracemalloc.get_traced_memory()[1] < 4 * MIB
    finally:
        tracemalloc.stop()


def test_all_msgpack_of_others_is_read_by_one_function() -> None:
    """The client decodes some of its own: what ranks of one job tell each other over their store."""
    decoding = re.compile(r"msgpack\.decode\(|msgpack\.unpackb\(|ecoder\.decode\(")
    found = [
        str(path.relative_to(ROOT))
        for folder in ("ckptd", "transport", "storage")
        for path in (ROOT / folder).rglob("*.py")
        if "msgpack" in (text := path.read_text(encoding="utf-8")) and decoding.search(text)
    ]
    assert [name for name in found if not name.startswith("ckptd/client/")] == ["ckptd/unpacking.py"]
