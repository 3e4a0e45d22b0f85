"""Snapshots on their way to this node (docs/replication.md §7).

A `FetchedPiece` is one snapshot. Once it is begun, its slot is locked, and it is COPIED from this
node, if a copy is here, damaged or not, or PULLED in parts from all its holders
(`ckptd.restore.puller`); then a worker VERIFIES it as a whole: by its xxh3 digests, which say where
it is wrong, and last by the cryptographic digest that its holders vouch for
(`ckptd.restore.fetched_image`). What does not match is fetched again from other copies, until the
piece is SEALED. The slot stays locked until neither a worker nor a cancelled transfer touches it.

A holder that delivered something wrong verifies its copy when the piece is over, and not before: a
quarantined copy cannot be opened any more, and the rest of it may be needed.

A `FetchJob` fetches the pieces of one segment. All on the daemon's loop thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

from ckptd.core.recovery.held import STORE_NODE
from ckptd.core.recovery.striping import ImagePart, Stripes
from ckptd.core.slots.segment_format import (
    SlotHeader,
    set_slot_state,
    slot_lock_byte,
    unpack_slot_header,
    write_slot_header,
)
from ckptd.core.slots.slots import SlotState
from ckptd.memory import locks
from ckptd.memory.segment_file import Segment
from ckptd.restore.fetched_image import (
    WHOLE_IMAGE,
    Examined,
    Repairs,
    Vouchers,
    Vouching,
    Wrong,
    copy_parts,
    examine,
)
from ckptd.restore.puller import FetchTools, Pulling
from ckptd.transport.messages import (
    FetchPiece,
    FetchSource,
    FetchState,
    GetHoldings,
    Holdings,
)
from ckptd.units import format_bytes


class FetchedPiece:
    """Fills slot ``index`` with the snapshot of this header."""

    def __init__(
        self,
        index: int,
        header: SlotHeader,
        sources: Sequence[FetchSource],
        tools: FetchTools,
        job: FetchJob,
    ) -> None:
        self.header, self.sealed = header, False
        self._index, self._tools, self._job = index, tools, job
        self._sources = list(dict.fromkeys(sources))
        self._near = [source for source in self._sources if source.node == tools.node]
        self._stripes = Stripes(header.image_len, self._sources)
        self._vouchers = Vouchers(tools.node)
        self._pulling = Pulling(
            header,
            self._stripes,
            tools,
            job.tick,
            image=lambda: self._image,
            vouchers=self._vouchers,
            drained=self._drained,
        )
        self._repairs = Repairs(header.iteration, tools.node)
        self._begun = self._asked = False
        self._may_ask_storage = tools.stored and all(s.node != STORE_NODE for s in self._sources)
        self._asks_storage = False
        self._disputes = False  # holders vouch for different digests; wait for the others
        self._fd = -1
        self._busy = False  # a worker copies or verifies

    @property
    def bytes_by_node(self) -> dict[str, int]:
        """The bytes that have arrived, by the node that delivered them."""
        found: dict[str, int] = {}
        for source, size in self._stripes.bytes_by_holder.items():
            found[source.node] = found.get(source.node, 0) + size
        return found

    def push(self) -> None:
        """Do what is possible now."""
        if not self._begun:
            self._begun = True
            if not self._take_slot():
                return
            self._vouch_near()
        if not self._busy:
            self._advance()

    def lose(self, node: str) -> None:
        """Ask other nodes for the parts of this one."""
        if self._begun:
            self._pulling.lose(node)

    def end(self, *, mapped: bool) -> None:
        """The job is over; free a slot that is not sealed, if the segment is still ``mapped``."""
        self._tell_accused()
        self._pulling.end()
        if self._fd >= 0 and not self.sealed and mapped:
            segment = self._tools.segment
            set_slot_state(segment.buffer, segment.geometry, self._index, SlotState.FREE)
        self._rest()

    def _advance(self) -> None:
        self._stripes.mix()
        if self._copy_near():
            return
        if self._stripes.complete:
            if not self._pulling.landing and not self._unvouched():
                self._verify()
            return
        if not self._asked:
            self._asked = True
            self._pulling.open()
        if not self._stripes.failed:
            self._pulling.advance()
        elif not self._asks_storage and not self._ask_storage():
            names = ", ".join(dict.fromkeys(source.node for source in self._sources))
            text = f"iteration {self.header.iteration}: no holder is left of {names}"
            self._job.close(text + self._repairs.hopeless(self._stripes.hopeless()))

    # -- the slot --------------------------------------------------------------------------------

    def _take_slot(self) -> bool:
        """Lock the slot and mark it as filling; false if the job has failed instead."""
        segment = self._tools.segment
        try:
            fd = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            self._job.close(f"{segment.path.name} cannot be opened: {error.strerror}")
            return False
        if not locks.try_lock(fd, slot_lock_byte(self._index), exclusive=True):
            os.close(fd)
            self._job.close(f"slot {self._index} of {segment.path.name} is locked")
            return False
        self._fd = fd  # from here on the slot is ours to free
        filling = replace(self.header, state=SlotState.FILLING, writer_pid=os.getpid())
        write_slot_header(segment.buffer, segment.geometry, self._index, filling)
        return True

    @property
    def _image(self) -> memoryview:
        return self._tools.segment.image(self._index, self.header)

    def _seal(self, digest: str) -> None:
        segment = self._tools.segment
        segment.keep_digest(self._index, self.header, digest)
        write_slot_header(segment.buffer, segment.geometry, self._index, self.header)
        self.sealed = True
        mended = self._repairs.mended(self._stripes.bringers)
        if mended:
            self._tools.events.add("info", "fetch_repaired", mended)
        self._tell_accused()
        self._rest()
        self._job.tick()

    def _drained(self) -> None:
        if self._job.over:
            self._rest()
        else:
            self._job.tick()

    def _rest(self) -> None:
        """Unlock the slot, unless a worker or a transfer still touches it: its end comes here again."""
        if self._busy or self._pulling.landing:
            return
        self._pulling.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _worker_done(self) -> bool:
        """Whether to go on with what a worker found."""
        self._busy = False
        if self._job.goes_on():
            return True
        self._rest()
        return False

    # -- from this node --------------------------------------------------------------------------

    def _copy_near(self) -> bool:
        """Copy what a copy on this node has; false if there is none (any more)."""
        tools = self._tools
        for source in self._near:
            parts = self._stripes.wanted_of(source)
            if not parts:
                continue
            segment = tools.local(source.segment)
            if segment is None:
                self._pulling.give_up(source, "gone")
                continue
            # If the workers are full the next tick tries again.
            self._busy = tools.verifiers.submit(
                partial(copy_parts, segment, source.slot, self.header, self._image, parts),
                partial(self._copied, source, segment, parts),
                partial(self._not_copied, source, segment),
            )
            return True
        return False

    def _copied(self, source: FetchSource, segment: Segment, parts: Sequence[ImagePart], there: bool) -> None:
        if not self._worker_done():
            return
        if not there:
            self._no_copy(source, segment, "the copy on this node is gone")
            return
        for part in parts:
            self._stripes.claim(source, part)
        self._job.tick()

    def _not_copied(self, source: FetchSource, segment: Segment, error: BaseException) -> None:
        if self._worker_done():
            self._no_copy(source, segment, f"the copy on this node cannot be read: {error!r}")

    def _no_copy(self, source: FetchSource, segment: Segment, reason: str) -> None:
        self._pulling.give_up(source, reason)
        # Unless it is quarantined, the next plan names it again.
        self._tools.doubts.here(segment, source.slot, self.header.sequence)
        self._job.tick()

    def _vouch_near(self) -> None:
        """Use digests kept with copies here; a digest may be right although its copy is not.

        It came from the sender, or this node made it.
        """
        for source in self._near:
            segment = self._tools.local(source.segment)
            header = None if segment is None else segment.header(source.slot)
            same = header is not None and _same(header, self.header)
            kept = segment.kept_digest(source.slot, header) if segment and header and same else ""
            self._vouchers.tell(source, kept)

    # -- from storage ----------------------------------------------------------------------------

    def _ask_storage(self) -> bool:
        """Look for the snapshot in storage; false if storage may not be asked.

        Plans do not look there if memory suffices; but storage may have the very snapshot.
        """
        link = self._tools.link(STORE_NODE) if self._may_ask_storage else None
        if link is None:
            return False
        self._may_ask_storage, self._asks_storage = False, True
        key = self._tools.segment.key
        link.ask(
            GetHoldings(key.job, key.run),
            Holdings,
            lambda held: self._stored(_stored_copies(held, key.rank, self.header)),
            lambda code, reason: self._stored([], f": {code}: {reason}"),
        )
        return True

    def _stored(self, sources: Sequence[FetchSource], why: str = "") -> None:
        self._asks_storage = False
        if self._job.over:
            return
        if not sources:
            text = f"iteration {self.header.iteration}: not to be had from storage{why}"
            self._tools.events.add("warning", "fetch_source_lost", text)
        for source in sources:
            self._sources.append(source)
            self._stripes.add_holder(source)
            self._pulling.ask(source)
        self._job.tick()

    # -- is it what it should be -----------------------------------------------------------------

    def _bringers(self) -> list[FetchSource]:
        return self._stripes.bringers((0, self.header.image_len))

    def _unvouched(self) -> bool:
        """Whether to wait for a digest: of a holder that has delivered a part, or of any if digests disagree.

        A holder that is lost does not answer any more.
        """
        left = self._stripes.holders_left()
        lacking = self._vouchers.lacks([*self._bringers(), *(left if self._disputes else ())])
        for source in lacking:
            if source not in left:
                self._vouchers.tell(source, "")
        return any(source in left for source in lacking) or (self._disputes and self._asks_storage)

    def _verify(self) -> None:
        tools, digests = self._tools, self._vouchers.digests
        # If the workers are full the next tick tries again.
        self._busy = tools.verifiers.submit(
            partial(
                examine,
                self._image,
                self.header.header_digest,
                digests,
                tools.digests.map_fn,
                tools.digests.count,
            ),
            self._verified,
            self._not_verified,
        )

    def _verified(self, found: Examined) -> None:
        if not self._worker_done():
            if found.wrong:  # nobody waits any more, but the copies are still damaged
                self._found(found.wrong, "fetch_damaged")
                self._tell_accused()
            return
        if found.wrong:
            self._wrong(found.wrong, "fetch_damaged")
            return
        verdict = self._vouchers.verdict(found.matching)
        if not self._vouchers.digests and not all(_known(s, self._near) for s in self._bringers()):
            verdict = Vouching.WRONG  # bytes from a network count only if somebody vouches for them
        if verdict is Vouching.WRONG:
            everything = Wrong(0, self.header.image_len, (WHOLE_IMAGE,))
            self._wrong([everything], "fetch_forged")
        elif verdict is Vouching.DISPUTED:
            self._disputed(found.matching)
        else:
            self._doubt_others(found.matching)
            self._seal(min(found.matching, default=""))

    def _wrong(self, wrong: Sequence[Wrong], kind: str) -> None:
        if self._found(wrong, kind):
            self._job.tick()
        else:
            text = f"iteration {self.header.iteration} does not match its digests, and nobody brought"
            self._job.close(f"{text} what is wrong")

    def _found(self, wrong: Sequence[Wrong], kind: str) -> bool:
        """Blame the sources that delivered it; false if none did."""
        blamed = self._stripes.blame((each.start, each.stop) for each in wrong)
        if len(blamed) < len(wrong):
            return False
        self._tools.events.add("error", kind, self._repairs.found(wrong, blamed))
        return True

    def _disputed(self, matching: Collection[str]) -> None:
        """No digest has a majority of nodes. Others may answer yet, and storage may be one more."""
        self._disputes = True
        if self._unvouched() or self._ask_storage():
            return
        sides = self._vouchers.vouching(matching), self._vouchers.against(matching)
        named = " and ".join(self._repairs.named(side) for side in sides)
        why = f"{named} vouch for different contents of it"
        hint = (
            "find out which of them was changed, and take away the key of the other (`ckptctl keys untrust`)"
        )
        self._job.close(f"iteration {self.header.iteration}: {why}; {hint}")

    def _doubt_others(self, matching: Collection[str]) -> None:
        """Report the nodes that vouch for another digest: their copies differ from the others."""
        if others := self._vouchers.against(matching):
            self._repairs.accuse(others)
            text = (
                f"iteration {self.header.iteration}: unlike most nodes "
                f"{self._repairs.named(others)} vouched for other contents of it"
            )
            self._tools.events.add("error", "fetch_forged", text)

    def _tell_accused(self) -> None:
        """Have the accused copies verified: unless they are quarantined, the next plan names them again."""
        for source in self._repairs.accused():
            if source not in self._near:
                self._pulling.doubt(source)
            elif (segment := self._tools.local(source.segment)) is not None:
                self._tools.doubts.here(segment, source.slot, self.header.sequence)

    def _not_verified(self, error: BaseException) -> None:
        if self._worker_done():
            self._job.close(f"verifying failed: {error!r}")


def _stored_copies(stored: Holdings, rank: int, header: SlotHeader) -> list[FetchSource]:
    """Committed checkpoints that have this very snapshot of a rank."""
    return [
        FetchSource(STORE_NODE, segment.name, slot.slot)
        for segment in stored.segments
        if segment.rank == rank
        for slot in segment.slots
        if (held := unpack_slot_header(slot.header)) is not None
        and held.header_digest == header.header_digest
    ]


def _same(held: SlotHeader, wanted: SlotHeader) -> bool:
    """Whether a slot holds the snapshot that is wanted."""
    found = (held.iteration, held.epoch, held.sequence, held.header_digest)
    return found == (wanted.iteration, wanted.epoch, wanted.sequence, wanted.header_digest)


def _known(source: FetchSource, near: Sequence[FetchSource]) -> bool:
    """Whether its bytes count without a digest: it is on this node, or an old version stored it."""
    return source in near or source.node == STORE_NODE


_OPEN_PIECES = 2


class FetchJob:
    """Fills slot i of the segment ``tools.segment`` with piece i.

    Pieces are filled in the order in which replay needs them; the next one begins while the last
    parts of the one before are under way, so links stay busy. A piece that no holder can deliver
    ends the job with a reason; what was sealed before stays.

    Args:
        finished: called once, with "" or the reason of the failure.
    """

    def __init__(
        self,
        tools: FetchTools,
        pieces: Sequence[FetchPiece],
        finished: Callable[[str], None],
    ) -> None:
        self.segment = segment = tools.segment
        self.reason = ""
        self.over = False
        self._tools, self._finished = tools, finished
        self._began_s = tools.clock()
        self._unfit = ""
        self._pieces: list[FetchedPiece] = []
        for index, piece in enumerate(pieces):
            header = unpack_slot_header(piece.header)
            if header is None:
                self._unfit = "a slot header in the request is damaged"
                break
            if not 0 < header.image_len <= segment.geometry.slot_bytes:  # a peer's header says so
                self._unfit = f"an image of {header.image_len} bytes fits into no slot here"
                break
            self._pieces.append(FetchedPiece(index, header, piece.sources, tools, self))

    def start(self) -> None:
        """Begin; all further work is done in callbacks and `tick`."""
        if self._unfit:
            self.close(self._unfit)
        self.tick()

    @property
    def state(self) -> FetchState:
        """The progress, for the trainer that waits."""
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
        """Do what is possible now; ask other holders for the parts of those that became slow."""
        if not self.goes_on():
            return
        unsealed = [piece for piece in self._pieces if not piece.sealed]
        if not unsealed:
            self.close("")
        for piece in unsealed[:_OPEN_PIECES]:
            if not self.over:  # the piece before may have ended the job
                piece.push()

    def goes_on(self) -> bool:
        """False if the job is over, or if the trainer has dropped the segment (its ranks plan anew)."""
        if self.over:
            return False
        if self.segment.fd >= 0 and self.segment.in_place():
            return True
        self.close("its memory was given back")
        return False

    def peer_lost(self, node: str) -> None:
        """Ask other nodes for the parts of this one."""
        for piece in self._pieces:
            piece.lose(node)
        self.tick()

    def close(self, reason: str = "cancelled", *, wanted: bool = True) -> None:
        """End and free what is not sealed.

        Args:
            reason: "" if it is complete.
            wanted: false if nobody needs it any more, which is no failure.
        """
        if self.over:
            return
        self.over, self.reason = True, reason
        mapped = self._tools.local(self.segment.path.name) is self.segment
        for piece in self._pieces:
            piece.end(mapped=mapped)
        took_s = self._tools.clock() - self._began_s
        delivered = _sum_by_node([piece for piece in self._pieces if piece.sealed])
        where = ", ".join(f"{format_bytes(n)} from {name}" for name, n in delivered.items() if n)
        kind = self.segment.descriptor.kind
        what = kind if kind == "snapshots" else f"slots ({kind})"
        key = self.segment.key
        text = reason or f"{len(self._pieces)} {what} in {took_s:.2f} s: {where}"
        text = f"{key.job}/{key.run} rank {key.rank}: {text}"
        if reason and wanted:
            self._tools.events.add("error", "fetch_failed", text)
        else:
            self._tools.events.add("info", "fetch_ended" if reason else "fetched", text)
        self._finished(reason)


def _sum_by_node(pieces: Sequence[FetchedPiece]) -> dict[str, int]:
    """Bytes that arrived, by the node that delivered them."""
    found: dict[str, int] = {}
    for piece in pieces:
        for name, size in piece.bytes_by_node.items():
            found[name] = found.get(name, 0) + size
    return found
