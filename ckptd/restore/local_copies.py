"""Copies of a snapshot on the node that fetches it, also those in quarantine: what of them is right
need not travel.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from ckptd.core.sessions import RankKey
from ckptd.core.slots.ring import SlotState
from ckptd.core.slots.segment_format import unpack_slot_header
from ckptd.memory.segment_file import Segment
from ckptd.transport.messages import FetchPiece, FetchSource

__all__ = ["with_copies_here"]

_USABLE = (SlotState.SEALED, SlotState.QUARANTINED)


def with_copies_here(
    pieces: Sequence[FetchPiece], node: str, key: RankKey, segments: Iterable[Segment]
) -> list[FetchPiece]:
    """The pieces, with the copies of them in this node's segments as further sources.

    No plan names a copy in quarantine: it is not whole, and so is nothing to rely on. Beside a copy
    that the plan names it can only help, since nothing counts that does not verify.
    """
    found: dict[bytes, list[FetchSource]] = {}
    for segment in segments:
        if segment.key == key:
            for index, header in segment.headers():
                if header.state in _USABLE:
                    source = FetchSource(node, segment.path.name, index)
                    found.setdefault(header.header_digest, []).append(source)
    return [_with(piece, found) for piece in pieces]


def _with(piece: FetchPiece, found: dict[bytes, list[FetchSource]]) -> FetchPiece:
    header = unpack_slot_header(piece.header)
    here = [] if header is None else found.get(header.header_digest, [])
    sources = tuple(dict.fromkeys((*piece.sources, *here)))
    return msgspec.structs.replace(piece, sources=sources)
