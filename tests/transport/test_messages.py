"""Messages accept what the protocol allows and nothing else."""

from __future__ import annotations

import msgspec
import pytest

from ckptd.transport import messages as m


def test_every_message_survives_the_wire() -> None:
    samples: list[m.Message] = [
        m.Hello("1", 2),
        m.Attach("j", "r", 0, 1, "t", 1, 0, "text", (1, 2)),
        m.Reserve(4096, 2, b"\x00"),
        m.Filled(0, 1, 2),
        m.Drop(0),
        m.Report(3, {"stall_ms": 0.5}),
        m.Notice("warning", "kind", "message"),
        m.Detach(True),
        m.Ping(),
        m.GetStatus(),
        m.GetSnapshots(),
        m.GetEvents(),
        m.Forget("j", "r"),
        m.Done(),
        m.Pong("b", False),
        m.Refused("quota", "no"),
    ]
    for sample in samples:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(sample), type=m.Message) == sample


@pytest.mark.parametrize("name", ["", "a/b", "a~b", "..", ".", "x" * 65, "a\n", "ä"])
def test_names_that_cannot_be_in_a_file_name_are_refused(name: str) -> None:
    payload = msgspec.msgpack.encode(m.Forget(name, "r"))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(payload, type=m.Message)


@pytest.mark.parametrize(
    "message",
    [
        m.Attach("j", "r", -1, 1, "t", 1, 0),
        m.Attach("j", "r", 0, 0, "t", 1, 0),
        m.Attach("j", "r", 0, 1, "t" * 5000, 1, 0),
        m.Reserve(0, 1, b""),
        m.Reserve(1, 0, b""),
        m.Filled(-1, 0, 0),
        m.Filled(0, 1 << 20, 0),
        m.Notice("fatal", "k", "m"),
        m.Hello("1", 0),
        m.GetEvents(limit=0),
    ],
)
def test_values_out_of_range_are_refused(message: m.Message) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=m.Message)


class _AttachedBefore(msgspec.Struct, frozen=True, tag="Attached"):
    """As a daemon or a trainer of 0.4 knows it."""

    segments: tuple[m.SegmentInfo, ...]
    quota_bytes: int
    available_bytes: int


def test_the_answer_to_an_attach_goes_with_older_daemons_and_trainers() -> None:
    """Times of failures were added to it; without them they are not known."""
    older = msgspec.msgpack.encode(_AttachedBefore((), 5, 4))
    assert msgspec.msgpack.decode(older, type=m.Message) == m.Attached((), 5, 4)
    newer = msgspec.msgpack.encode(m.Attached((), 5, 4, failure_ago_s=1.5, others_ended_ago_s=0.5))
    assert msgspec.msgpack.decode(newer, type=_AttachedBefore) == _AttachedBefore((), 5, 4)
