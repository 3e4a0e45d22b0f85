"""Waiting for the daemon: steps of a test's job are so short that on a busy machine they outrun it."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from ckptd.core.slots.ring import Remedy, choose_slot

if TYPE_CHECKING:
    from ckptd.client import Checkpointer
    from ckptd.client.capture.slot_writer import Capture

_MEMORY_S = 20.0  # what memory may take
_FLOOR_S = 20.0  # what a floor may take


def let_memory_come(ckpt: Checkpointer) -> None:
    """On a busy machine these tiny steps outrun the daemon, which makes memory."""
    give_up = time.monotonic() + _MEMORY_S
    while _asks_for_memory(ckpt) and time.monotonic() < give_up:
        time.sleep(0.005)


def let_them_come(ckpt: Checkpointer) -> None:
    """They also outrun the ranks, which agree beside training."""
    stats = ckpt.stats()
    taken = stats["snapshots"]
    if not taken:
        time.sleep(1.0)
    elif taken <= stats["window"] and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        time.sleep(0.3)  # other ranks may have begun later
    give_up = time.monotonic() + _FLOOR_S
    while _no_room(ckpt) and time.monotonic() < give_up:
        time.sleep(0.005)


def let_what_is_beside_come(ckpt: Checkpointer) -> None:
    """The boundary log and what is parked have memory of their own: asked for in one step, used
    from a later one on.
    """
    for slots in (
        getattr(ckpt._pipeline.log, "_slots", None),
        getattr(ckpt._loop.parking, "_slots", None),
    ):
        coming = getattr(slots, "_coming", None)
        if coming is not None:
            coming.exception(_MEMORY_S)


def let_copies_come(ckpt: Checkpointer) -> None:
    """The end of a forward seals the snapshot of the step's top only if its copies are complete by then."""
    capture = _capture_of(ckpt)
    fill = capture._fill if capture is not None else None
    give_up = time.monotonic() + _MEMORY_S
    while fill is not None and fill.awaits("copies") and time.monotonic() < give_up:
        time.sleep(0.005)


def let_snapshot_come(ckpt: Checkpointer) -> None:
    """What a forward has made complete is handed to the daemon beside training."""
    capture = _capture_of(ckpt)
    fill = capture._fill if capture is not None else None
    give_up = time.monotonic() + _MEMORY_S
    while capture is not None and fill is not None and fill.key in capture._unsettled:
        assert time.monotonic() < give_up, "the snapshot of this step is not complete"
        time.sleep(0.005)


def _asks_for_memory(ckpt: Checkpointer) -> bool:
    return ckpt._memory is not None and ckpt._memory.session.reserving


def _no_room(ckpt: Checkpointer) -> bool:
    """Whether the next snapshot would be left out until the floor moves."""
    capture = _capture_of(ckpt)
    if capture is None:
        return False
    table = capture._table
    generation = table.segments[-1].generation
    records = table.records()
    choice = choose_slot(
        records,
        capture._num_operators,
        generation=generation,
        protected=table.promised(records, capture._num_operators),
        epochs=table.epochs,
    )
    return choice.remedy is Remedy.WAIT


def _capture_of(ckpt: Checkpointer) -> Capture | None:
    return ckpt._loop.recorder._capture if ckpt._loop.recorder is not None else None
