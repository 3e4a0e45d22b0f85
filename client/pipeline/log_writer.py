"""One iteration's boundary log in the making, and the comparison of an iteration that is replayed
with what it sent before.

A fill appends: each record is copied to the slot right when it is sent, behind the one before, and
the image's header is written when the step is over. So nothing need be known of an iteration
beforehand but how much room it takes, and iterations may differ.
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
from ckptd.storage.images.image import ImageView
from ckptd.storage.images.image_format import TensorEntry
from ckptd.storage.images.image_layout import ImageLayout

__all__ = ["Comparison", "Layouts", "LogFill", "Room", "header_room"]

# Of the JSON that a header is: what a record takes besides its name, with the digest; and what is
# there without any record.
_RECORD_HEADER_BYTES = 160
_FIXED_HEADER_BYTES = 2048
_PAGE = 4096
_KEPT_LAYOUTS = 8


def header_room(num_records: int) -> int:
    """Bytes that a slot should leave for the header of an image of so many records, paddings included."""
    wanted = _FIXED_HEADER_BYTES + 2 * num_records * _RECORD_HEADER_BYTES
    return -(-wanted // _PAGE) * _PAGE


@dataclass(slots=True)
class Room:
    """What an iteration takes: records, and bytes of them where each begins at a multiple of the alignment."""

    num_records: int = 0
    data_bytes: int = 0

    def add(self, nbytes: int) -> None:
        self.num_records += 1
        self.data_bytes += -(-nbytes // DATA_ALIGNMENT) * DATA_ALIGNMENT

    def at_least(self, other: Room) -> Room:
        """Enough for both."""
        return Room(
            max(self.num_records, other.num_records), max(self.data_bytes, other.data_bytes)
        )

    @property
    def slot_bytes(self) -> int:
        return header_room(self.num_records) + self.data_bytes


class Layouts:
    """Layouts of the images made last: iterations are alike, as a rule, and then a header is a copy
    and three patches.
    """

    def __init__(self, identity: Mapping[str, str]) -> None:
        self._identity = dict(identity)
        self._known: OrderedDict[tuple[int, tuple[TensorEntry, ...]], ImageLayout] = OrderedDict()

    def of(self, entries: tuple[TensorEntry, ...], data_offset: int) -> ImageLayout:
        """The layout of these records, whose data is in place already.

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
                anchors=0,  # even if it were taken for a snapshot, nothing could be recovered from it
                data_offset=data_offset,
            )
            if len(self._known) > _KEPT_LAYOUTS:
                self._known.popitem(last=False)
        return found


class LogFill:
    """A claimed slot: filled record by record, completed once the step is over and all copies have arrived.

    Args:
        header: what was written to it when filling began.
        data_offset: where records begin in a slot of this segment.
        complete: called once, by whoever comes last (the training thread or that which watches copies).
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
        self._awaited = 1  # the step's end, and each copy that is under way
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
        """Where the slot begins in the mapped memory."""
        return self.segment.slot_base(self.index)

    def place(self, key: RecordKey, tensor: Tensor) -> CopyItem | None:
        """Where this record goes; None if there is no room for it, or for one before it."""
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
        self._entries.append(
            TensorEntry(name, SAFETENSORS_DTYPES[tensor.dtype], tuple(tensor.shape))
        )
        item = CopyItem(tensor, None, None, tensor.dtype, self._end + padding, nbytes)
        self._end += padding + nbytes
        self.num_records += 1
        self.data_bytes += nbytes
        return item

    def copying(self) -> None:
        """A copy begins: ``copied`` will tell of its end."""
        with self._lock:
            self._awaited += 1

    def copied(self, why_not: str = "") -> None:
        """That copy is over; ``why_not``: its bytes cannot be believed."""
        self._arrive(why_not)

    def end(self, *, keep: bool = True) -> None:
        """The step is over."""
        self._dropped = not keep
        self._arrive("")

    def write(self, layouts: Layouts) -> bool:
        """Write the header of the image and give the slot up; false if there is nothing to keep."""
        try:
            layout = None if self.spoilt or self._dropped else self._layout(layouts)
            if layout is None:
                self.segment.set_state(self.index, SlotState.FREE)
                return False
            slot = self.segment.slot(self.index)
            layout.write_header(
                slot, iteration=self.iteration, previous=self.header.previous, scalars_len=0
            )
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
    """What a replayed iteration sends, against what it sent when it ran first; ``view`` is verified
    and stays as it is.
    """

    def __init__(self, view: ImageView, iteration: int) -> None:
        self._view, self.iteration = view, iteration
        self._missing = {n for n in view.names() if parse_record_name(n) is not None}
        self.compared = 0
        self.differences = Differences()

    def add(self, key: RecordKey, tensor: Tensor) -> None:
        """This record was sent again."""
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
        """The step is over; every difference that there was."""
        for name in sorted(self._missing):
            self.differences.add(f"{name} was not sent again")
        return self.differences


def _bytes_of(tensor: Tensor) -> bytes:
    """Its bits; copied and compared on the calling thread alone, as numpy does."""
    return bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
