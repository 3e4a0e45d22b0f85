"""The hints at the end of a segment's prologue page, by which daemon, trainer and the trainer's
successor tell each other something.

They are outside every checksum, and each is one aligned store: they change while the segment is in
use, and nothing but thrift depends on them. ``docs/architecture.md`` section 2 says where each
lies.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "HINT_APART",
    "HINT_APART_AGAIN",
    "HINT_DROP_GRADIENTS",
    "HINT_OFFSET",
    "PAGE_BYTES",
    "PROLOGUE_BYTES",
    "QUIET_OFFSET",
    "RingHint",
    "read_ring_hint",
    "write_ring_hint",
]

PAGE_BYTES = 4096
PROLOGUE_BYTES = PAGE_BYTES
# The prologue page's last byte, outside every checksum: what a trainer learned for its successor
# (0: nothing).
HINT_OFFSET = PROLOGUE_BYTES - 1
HINT_DROP_GRADIENTS = 1
# A localized recovery has begun and not come to its end: once, or more than once in a row.
HINT_APART = 2
HINT_APART_AGAIN = 4
# Before it what the daemon tells the trainer, see `RingHint`: i64, u32, i64, i64, u16, u8, and u16
# after the trainer's wish for quiet.
_AIM_AT = slice(PROLOGUE_BYTES - 40, PROLOGUE_BYTES - 32)
_EPOCH_AT = slice(PROLOGUE_BYTES - 28, PROLOGUE_BYTES - 24)
_FLOOR_AT = slice(PROLOGUE_BYTES - 24, PROLOGUE_BYTES - 16)
_HORIZON_AT = slice(PROLOGUE_BYTES - 16, PROLOGUE_BYTES - 8)
_SPAN_AT = slice(PROLOGUE_BYTES - 8, PROLOGUE_BYTES - 6)
_SOLE_AT = PROLOGUE_BYTES - 6
QUIET_OFFSET = PROLOGUE_BYTES - 5
_BEHIND_AT = slice(PROLOGUE_BYTES - 4, PROLOGUE_BYTES - 2)


class RingHint(NamedTuple):
    """What the daemon knows of the other ranks, for the trainer's choice of slots (docs/replication.md §6).

    And for a restarted daemon, which goes on from there: ``epoch`` is the history in which it was
    agreed on. ``floor``: what the run agreed on (-1: nothing yet), see
    `ckptd.core.replication.replicas`. ``horizon`` to ``aim``: where suffixes end that may become
    the floor before this ring is told. ``span``: how many snapshots the longest suffix among all
    ranks has (0: unknown). ``sole``: fewer than two other nodes are known to keep the floor's
    suffix, so that this ring must. ``behind``: how many iterations the slowest of the nodes that do
    is behind.
    """

    floor: int = -1
    horizon: int = -1
    span: int = 0
    sole: bool = False
    behind: int = 0
    epoch: int = 0
    aim: int = -1


def read_ring_hint(buf: memoryview) -> RingHint:
    """The daemon's hint; nonsense counts as none."""
    # Against the order of writing: a mixture of two hints has the older horizon, or the newer span
    # and aim, and keeps more.
    horizon, floor = (max(-1, int(buf[at].cast("q")[0])) for at in (_HORIZON_AT, _FLOOR_AT))
    span, behind = (int(buf[at].cast("H")[0]) for at in (_SPAN_AT, _BEHIND_AT))
    epoch: int = buf[_EPOCH_AT].cast("I")[0]
    sole, aim = bool(buf[_SOLE_AT]), max(-1, int(buf[_AIM_AT].cast("q")[0]))
    return RingHint(floor, horizon, span, sole, behind, epoch, aim)


def write_ring_hint(buf: memoryview, hint: RingHint) -> None:
    """Store the daemon's hint. Each part is one store, in the order in which a mixture of two hints
    keeps more, not less.

    Raises:
        ValueError: a number is out of range.
    """
    numbers_fit = all(0 <= n < 1 << 16 for n in (hint.span, hint.behind))
    numbers_fit = numbers_fit and 0 <= hint.epoch < 1 << 32
    if min(hint.floor, hint.horizon, hint.aim) < -1 or not numbers_fit:
        raise ValueError(f"{hint} cannot be")
    buf[_AIM_AT].cast("q")[0] = hint.aim
    buf[_SPAN_AT].cast("H")[0] = hint.span
    buf[_SOLE_AT] = hint.sole
    buf[_EPOCH_AT].cast("I")[0] = hint.epoch
    buf[_FLOOR_AT].cast("q")[0] = hint.floor
    buf[_HORIZON_AT].cast("q")[0] = hint.horizon
    buf[_BEHIND_AT].cast("H")[0] = hint.behind
