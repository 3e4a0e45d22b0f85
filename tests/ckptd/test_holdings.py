"""Holdings as they come from a node: unpacked, checked, and refused by name."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from ckptd.core.recovery.held import HeldRecords
from ckptd.core.slots.segment_format import pack_slot_header
from ckptd.core.slots.slots import SlotRecord, SlotState
from ckptd.errors import RemoteProtocolError
from ckptd.holdings import begun_epochs, held_from_segments, newest_history, operators_id
from ckptd.transport.messages import HeldSegment, HeldSlot, Holdings, RunRecord, RunSeen
from tests.ckptd.memory.fresh import HEADER
from tests.ckptd.running import descriptor


def segment(header: bytes, *, anchors: bytes = b"\x05") -> HeldSegment:
    return HeldSegment(
        name="job~run~r3~g2~0123456789abcdef.rep",
        rank=3,
        own=False,
        origin="0123456789abcdef",
        generation=2,
        world_size=8,
        window=4,
        num_operators=3,
        operators_id="table",
        slot_bytes=16384,
        num_slots=6,
        slots=(HeldSlot(5, header, anchors),),
    )


def test_a_nodes_holdings_become_records() -> None:
    record = SlotRecord(
        generation=2,
        index=5,
        state=SlotState.SEALED,
        iteration=41,
        previous=40,
        sequence=7,
        image_len=12345,
        layout_id=HEADER.layout_id,
        anchors=0b101,
        phase=3,
        epoch=6,
        epoch_start=38,
        header_digest=bytes(range(16)),
    )
    name = "job~run~r3~g2~0123456789abcdef.rep"
    assert held_from_segments("node-b", [segment(pack_slot_header(HEADER))]) == [
        HeldRecords("node-b", name, False, 3, 3, "table", 16384, (record,))
    ]
    partial = msgspec.structs.replace(segment(pack_slot_header(HEADER)), partial=True)
    assert [each.partial for each in held_from_segments("node-b", [partial])] == [True]
    assert held_from_segments("node-b", []) == []


@pytest.mark.parametrize(
    ("header", "anchors", "message"),
    [
        (bytes(112), b"\x05", "its header is damaged"),
        (pack_slot_header(HEADER)[:-1] + b"\xff", b"\x05", "its header is damaged"),
        (pack_slot_header(replace(HEADER, state=SlotState.FILLED)), b"\x05", "it is filled"),
        (pack_slot_header(HEADER), b"\x08", "anchors operators beyond the 3"),
    ],
)
def test_what_cannot_be_is_the_nodes_error(header: bytes, anchors: bytes, message: str) -> None:
    with pytest.raises(RemoteProtocolError, match=message) as caught:
        held_from_segments("node-b", [segment(header, anchors=anchors)])
    assert "node=node-b segment=job~run~r3~g2~0123456789abcdef.rep slot=5" in str(caught.value)


def test_snapshots_logs_and_parked_states_of_the_history_that_counts_are_kept_apart() -> None:
    """`ckptctl whatif` parsed logs and parked states a second time, of all histories."""
    first, second = 1 << 12, 2 << 12

    def held(epoch: int, *iterations: int) -> HeldSegment:
        slots = tuple(
            HeldSlot(
                index,
                pack_slot_header(replace(HEADER, iteration=i, previous=i - 1, epoch=epoch, epoch_start=-1)),
                b"\x07",
            )
            for index, i in enumerate(iterations)
        )
        return msgspec.structs.replace(segment(b""), name=f"{epoch}-{iterations}", slots=slots)

    both = (held(first, 4, 5), held(second, 5, 6))
    record = RunRecord("job", "run", epochs=((first, -1, -1), (second, 5, first)))
    told = Holdings("a", both, second, logs=both, parked=both[:1], record=record)
    found = newest_history(RunSeen((told,), ()))
    assert found.history.begun == {first: -1, second: 5}
    assert found.world_size == 8
    kept = [(r.epoch, r.iteration) for h in found.snapshots for r in h.records]
    assert kept == [(r.epoch, r.iteration) for h in found.logs for r in h.records]
    assert {h.segment for h in found.parked} == {both[0].name}
    assert newest_history(RunSeen((), ())).world_size == 0
    third = Holdings("b", (), record=RunRecord("job", "run", epochs=((3 << 12, 4, second),)))
    assert begun_epochs(RunSeen((told, third), ())) == {first: -1, second: -1, 3 << 12: 4}


def test_of_what_cannot_be_no_epoch_is_known() -> None:
    assert begun_epochs(RunSeen((Holdings("a", (segment(bytes(112)),)),), ())) == {}


def test_equal_operator_tables_have_equal_ids_whatever_else_the_trainer_says() -> None:
    def told(**payload: object) -> str:
        return operators_id(descriptor(client=msgspec.msgpack.encode(payload)))

    assert told(operators=["a", "b"], phases=[1]) == told(phases=[2], operators=["a", "b"])
    assert told(operators=["a", "b"]) != told(operators=["b", "a"])
    assert len(told(operators=[])) == 32


def test_a_table_of_another_form_equals_only_itself() -> None:
    payloads = [b"", b"\xc1", msgspec.msgpack.encode({"x": 1}), msgspec.msgpack.encode([1])]
    assert len({operators_id(descriptor(client=p)) for p in payloads}) == len(payloads)
