"""Writing of one iteration's boundary log, and the comparison of a replayed iteration with its log.

A fill appends records: each is copied to the slot when it is sent, and the image's header is written at
the end of the step. Only the total size of an iteration must be known before, and iterations may differ.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ckptd.client.capture.comparison import Differences
from ckptd.client.daemon_link.mapped_segment import MappedSegment
from ckptd.client.model.snapshot_layout import SAFETENSORS_DTYPES
from ckptd.core.slots.boundary import (
    DATA_ALIGNMENT,
    RecordKey,
    padding_name,
    parse_record_name,
    record_name,
)
from ckptd.core.slots.ring import SlotState
from ckptd.core.slots.segment_format import SlotHeader
from ckptd.cuda.engine import CopyItem
from ckptd.storage.image import ImageLayout, ImageView
from ckptd.storage.image_format import TensorEntry

__all__ = ["Comparison", "Layouts", "LogFill", "Room", "header_room"]

# Sizes in the JSON of a header: of a record without its name but with its digest; and of a header without
# records.
_RECORD_HEADER_BYTES = 160
_FIXED_HEADER_BYTES = 2048
_PAGE = 4096
_KEPT_LAYOUTS = 8


def header_room(num_records: int) -> int:
    """The bytes that a slot reserves for the header of an image with this many records, including padding."""
    wanted = _FIXED_HEADER_BYTES + 2 * num_records * _RECORD_HEADER_BYTES
    return -(-wanted // _PAGE) * _PAGE


@dataclass(slots=True)
class Room:
    """The size of an iteration: its records, and their bytes with each record aligned."""

    num_records: int = 0
    data_bytes: int = 0

    def add(self, nbytes: int) -> None:
        self.num_records += 1
        self.data_bytes += -(-nbytes // DATA_ALIGNMENT) * DATA_ALIGNMENT

    def at_least(self, other: Room) -> Room:
        """The maximum of both sizes."""
        return Room(max(self.num_records, other.num_records), max(self.data_bytes, other.data_bytes))

    @property
    def slot_bytes(self) -> int:
        return header_room(self.num_records) + self.data_bytes


class Layouts:
    """Recently used image layouts: most iterations are equal, and then a header is a copy with three
    patches.
    """

    def __init__(self, identity: Mapping[str, str]) -> None:
        self._identity = dict(identity)
        self._known: OrderedDict[tuple[int, tuple[TensorEntry, ...]], ImageLayout] = OrderedDict()

    def of(self, entries: tuple[TensorEntry, ...], data_offset: int) -> ImageLayout:
        """The layout of these records, whose data are in place already.

        Raises:
            ValueError: the header does not fit before ``data_offset``.
        """
        key = data_offset, entries
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = ImageLayout.build(
                entries,
                identity={**self._identity, "holds": "boundary log"},
                num_operators=1,
                anchors=0,  # even if a reader mistook it for a snapshot, nothing could be recovered from it
                data_offset=data_offset,
            )
            if len(self._known) > _KEPT_LAYOUTS:
                self._known.popitem(last=False)
        return found


class LogFill:
    """A claimed slot: filled record by record, completed when the step has ended and all copies have arrived.

    Args:
        header: the header that was written when filling began.
        data_offset: the offset of the records in a slot of this segment.
        complete: called once, by the last of the training thread and the thread that watches copies.
    """

    def __init__(
        self,
        segment: MappedSegment,
        index: int,
        header: SlotHeader,
        data_offset: int,
        complete: Callable[[LogFill], None],
    ) -> None:
        self.segment, self.index, self.header = segment, index, header
        self._data_offset = self._end = data_offset
        self._complete = complete
        self._entries: list[TensorEntry] = []
        self._lock = threading.Lock()
        self._awaited = 1  # the end of the step, and each copy in flight
        self.num_records = self.data_bytes = 0
        # Out of room: for records, or for the header that names them.
        self.full = self.crowded = False
        self.spoilt = ""
        self._dropped = False

    @property
    def iteration(self) -> int:
        return self.header.iteration

    @property
    def base(self) -> int:
        """The offset of the slot in the mapped memory."""
        return self.segment.slot_base(self.index)

    def place(self, key: RecordKey, tensor: Tensor) -> CopyItem | None:
        """The place of this record; None if it, or an earlier one, does not fit."""
        nbytes = tensor.numel() * tensor.element_size()
        padding = -self._end % DATA_ALIGNMENT
        if self._end + padding + nbytes > self.segment.geometry.slot_bytes:
            self.full = True
        if self.full:
            return None
        if padding:
            name = padding_name(len(self._entries))
            self._entries.append(TensorEntry(name, "U8", (padding,)))
        name = record_name(key)
        self._entries.append(TensorEntry(name, SAFETENSORS_DTYPES[tensor.dtype], tuple(tensor.shape)))
        item = CopyItem(tensor, None, None, tensor.dtype, self._end + padding, nbytes)
        self._end += padding + nbytes
        self.num_records += 1
        self.data_bytes += nbytes
        return item

    def copying(self) -> None:
        """A copy starts; `copied` reports its end."""
        with self._lock:
            self._awaited += 1

    def copied(self, why_not: str = "") -> None:
        """A copy has ended; ``why_not`` is the reason why its bytes are not valid ("": they are)."""
        self._arrive(why_not)

    def end(self, *, keep: bool = True) -> None:
        """End the step."""
        self._dropped = not keep
        self._arrive("")

    def write(self, layouts: Layouts) -> bool:
        """Write the header of the image and release the slot; False if there is nothing to keep."""
        try:
            layout = None if self.spoilt or self._dropped else self._layout(layouts)
            if layout is None:
                self.segment.set_state(self.index, SlotState.FREE)
                return False
            slot = self.segment.slot(self.index)
            layout.write_header(slot, iteration=self.iteration, previous=self.header.previous, scalars_len=0)
            filled = replace(
                self.header,
                state=SlotState.FILLED,
                image_len=layout.image_len,
                layout_id=layout.layout_id,
                filled_at_ns=time.time_ns(),
            )
            self.segment.write_header(self.index, filled)
            return True
        finally:
            self.segment.unlock_slot(self.index)

    def _layout(self, layouts: Layouts) -> ImageLayout | None:
        try:
            return layouts.of(tuple(self._entries), self._data_offset)
        except ValueError as error:
            self.crowded, self.spoilt = True, str(error)
            return None

    def _arrive(self, why_not: str) -> None:
        with self._lock:
            self.spoilt = self.spoilt or why_not
            self._awaited -= 1
            last = self._awaited == 0
        if last:
            self._complete(self)


class Comparison:
    """Compares the tensors of a replayed iteration with its log; ``view`` is verified and does not
    change.
    """

    def __init__(self, view: ImageView, iteration: int) -> None:
        self._view, self.iteration = view, iteration
        self._missing = {n for n in view.names() if parse_record_name(n) is not None}
        self.compared = 0
        self.differences = Differences()

    def add(self, key: RecordKey, tensor: Tensor) -> None:
        """Compare a record that was sent again."""
        name = record_name(key)
        if name not in self._missing:
            self.differences.add(f"{name} was not sent before")
            return
        self._missing.discard(name)
        self.compared += 1
        was = self._view.tensor(name)
        if (was.dtype, was.shape) != (SAFETENSORS_DTYPES[tensor.dtype], tuple(tensor.shape)):
            now = f"{SAFETENSORS_DTYPES[tensor.dtype]} {list(tensor.shape)}"
            self.differences.add(f"{name} was {was.dtype} {list(was.shape)}, is {now}")
            return
        sent, logged = _bytes_of(tensor), self._view.data(name)
        if sent != logged:
            self.differences.add(f"{name} has other bits", logged, sent)

    def end(self) -> Differences:
        """End the step; returns all differences."""
        for name in sorted(self._missing):
            self.differences.add(f"{name} was not sent again")
        return self.differences


def _bytes_of(tensor: Tensor) -> bytes:
    """The bytes of a tensor; copied and compared by numpy, on the calling thread alone."""
    return bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
