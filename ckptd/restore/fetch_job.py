"""Bringing a rank's snapshots here from whoever holds them (docs/replication.md §7).

A `FetchJob` lives on the daemon's loop thread. Pieces (`ckptd.restore.slot_fetch`) come in the
order in which replay needs them; the next one begins while the last parts of the one before are
under way, so links stay busy. A piece that nobody can deliver ends the job with a reason; what was
sealed before stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ckptd.core.slots.segment_format import unpack_slot_header
from ckptd.restore.fetch_tools import FetchTools, Job
from ckptd.restore.slot_fetch import FetchedPiece
from ckptd.transport.messages import FetchPiece, FetchState
from ckptd.units import format_bytes

__all__ = ["FetchJob"]

_OPEN_PIECES = 2


class FetchJob:
    """Fills slot i of the segment that ``tools`` names with piece i.

    Args:
        finished: called once, with "" or the reason of the failure.
    """

    def __init__(
        self,
        tools: FetchTools,
        pieces: Sequence[FetchPiece],
        finished: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.segment = segment = tools.segment
        self.reason = ""
        self.over = False
        self._tools, self._finished = tools, finished
        self._began_s = tools.clock()
        us = Job(self._goes_on, lambda: self.over, self._go_on, self._end)
        self._unfit = ""
        self._pieces: list[FetchedPiece] = []
        for index, piece in enumerate(pieces):
            header = unpack_slot_header(piece.header)
            if header is None:
                self._unfit = "a slot header in what is asked for is damaged"
                break
            if not 0 < header.image_len <= segment.geometry.slot_bytes:  # a peer's header says so
                self._unfit = f"an image of {header.image_len} bytes fits into no slot here"
                break
            self._pieces.append(FetchedPiece(index, header, piece.sources, tools, us))

    def start(self) -> None:
        """Begin; afterwards everything happens in callbacks and `tick`."""
        if self._unfit:
            self._end(self._unfit)
        self._go_on()

    @property
    def state(self) -> FetchState:
        """For the trainer that waits."""
        by_node = _sum_by_node(self._pieces)
        word = "running" if not self.over else "failed" if self.reason else "done"
        return FetchState(
            state=word,
            reason=self.reason,
            pieces_done=sum(piece.sealed for piece in self._pieces),
            bytes_done=sum(by_node.values()),
            bytes_total=sum(piece.header.image_len for piece in self._pieces),
            by_node=by_node,
        )

    def tick(self) -> None:
        """Take over parts from holders that became slow."""
        self._go_on()

    def peer_lost(self, node: str) -> None:
        """Its parts are asked of others at once."""
        for piece in self._pieces:
            piece.lose(node)
        self._go_on()

    def close(self, reason: str = "cancelled", *, wanted: bool = True) -> None:
        """End early; what is not sealed is freed. If it is not ``wanted`` any more, that is no failure."""
        self._end(reason, wanted=wanted)

    def _go_on(self) -> None:
        if not self._goes_on():
            return
        unsealed = [piece for piece in self._pieces if not piece.sealed]
        if not unsealed:
            self._end("")
        for piece in unsealed[:_OPEN_PIECES]:
            if not self.over:  # what was done for another piece may have ended the job
                piece.push()

    def _goes_on(self) -> bool:
        """False if the job is over; also if the trainer dropped the segment meanwhile (its ranks
        plan anew).
        """
        if self.over:
            return False
        if self.segment.fd >= 0 and self.segment.in_place():
            return True
        self._end("its memory was given back")
        return False

    def _end(self, reason: str, *, wanted: bool = True) -> None:
        if self.over:
            return
        self.over, self.reason = True, reason
        mapped = self._tools.local(self.segment.path.name) is self.segment
        for piece in self._pieces:
            piece.end(mapped=mapped)
        took_s = self._tools.clock() - self._began_s
        told = self.segment.descriptor
        delivered = _sum_by_node([piece for piece in self._pieces if piece.sealed])
        where = ", ".join(f"{format_bytes(n)} from {name}" for name, n in delivered.items() if n)
        failed = bool(reason) and wanted
        self._tools.events.add(
            "error" if failed else "info",
            "fetch_failed" if failed else "fetch_ended" if reason else "fetched",
            f"{told.job}/{told.run} rank {told.rank}: "
            + (reason or f"{len(self._pieces)} {_what(told.kind)} in {took_s:.2f} s: {where}"),
        )
        self._finished(reason)


def _what(kind: str) -> str:
    return kind if kind == "snapshots" else f"slots ({kind})"


def _sum_by_node(pieces: Sequence[FetchedPiece]) -> dict[str, int]:
    """Bytes that arrived, by who delivered them."""
    found: dict[str, int] = {}
    for piece in pieces:
        for name, size in piece.bytes_by_node.items():
            found[name] = found.get(name, 0) + size
    return found
