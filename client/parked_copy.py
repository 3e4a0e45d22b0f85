"""Parked state of another rank, or of another node, in memory of this process's own.

A *copied* rank has all operators alike with a peer that was parked: it takes tensors from there, and what is its own (buffers, random
state, the user's state, all step scalars) from its own snapshot of the same iteration.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path
from typing import Any, Protocol

from ckptd.client.arrival import KnowsFetches, wait_until_sealed
from ckptd.client.layout import BUFFER, parse_entry_name
from ckptd.client.replay import SnapshotImage
from ckptd.cuda.engine import HostMemory
from ckptd.errors import CorruptionError, SegmentError
from ckptd.memory import locks
from ckptd.memory.ring import SlotRecord, SlotState
from ckptd.memory.segment_format import (
    SlotHeader,
    parse_segment_file_name,
    read_prologue,
    read_slot_header,
    slot_lock_byte,
    slot_view,
)
from ckptd.recovery.holdings import fetch_piece
from ckptd.recovery.pieces import Piece, Source
from ckptd.storage.image import ImageError, ImageView, verify
from ckptd.transport.messages import NodeCard

__all__ = ["BringsParked", "CopiedImage", "read_parked"]
