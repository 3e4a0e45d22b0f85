"""One snapshot on its way here: into which slot, and whether it is what it should be (docs/replication.md §7).

A `FetchedPiece` waits until it is begun; then its slot is locked, and it is COPIED from this very node, if a copy is here, damaged
or not, or PULLED in parts from all its holders (`ckptd.fetching.pulling`); then VERIFIED as a whole on a worker. What does not match is
brought again from other copies, until it is SEALED. It tells its job what happened, by `Job`, and is asked to go on by `push`. The slot
stays locked until nobody touches it any more: neither a worker nor a transfer that was cancelled. All on the daemon's loop thread.

Whoever brought something wrong is told to verify its copy when the piece is over, and not before: a copy that is in quarantine
cannot be opened any more, and the rest of it may be needed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ckptd.fetching.image import Wrong, copy_parts, wrong_ranges
from ckptd.fetching.pulling import Pulling
from ckptd.fetching.repairs import Repairs
from ckptd.fetching.stored_copies import find_stored
from ckptd.fetching.tools import FetchTools, Job
from ckptd.memory import locks
from ckptd.memory.ring import SlotState
from ckptd.memory.segment_file import Segment
from ckptd.memory.segment_format import (
    SlotHeader,
    set_slot_state,
    slot_lock_byte,
    write_slot_header,
)
from ckptd.recovery.held import STORE_NODE
from ckptd.recovery.striping import Part, Stripes
from ckptd.transport.messages import FetchSource

__all__ = ["FetchedPiece"]


class FetchedPiece:
    """Fills slot ``index`` with the snapshot of this header."""

    def __init__(
        self,
        index: int,
        header: SlotHeader,
        sources: Sequence[FetchSource],
        tools: FetchTools,
        job: Job,
    ) -> None:
        self.header, self.sealed = header, False
        self._index, self._tools, self._job = index, tools, job
        self._sources = list(dict.fromkeys(sources))
        self._near = [source for source in self._sources if source.node == tools.node]
        self._stripes = Stripes(header.image_len, self._sources)
        self._pulling = Pulling(
            header,
            self._stripes,
            tools,
            job,
            image=lambda: self._image,
            drained=self._drained,
        )
        self._repairs = Repairs(header.iteration, tools.node)
        self._begun = self._asked = False
        self._may_ask_storage = tools.stored and all(s.node != STORE_NODE for s in self._sources)
        self._asks_storage = False
        self._fd = -1
        self._busy = False  # a worker copies or verifies

    @property
    def bytes_by_node(self) -> dict[str, int]:
        """What has arrived, by who delivered it."""
        found: dict[str, int] = {}
        for source, size in self._stripes.bytes_by_holder.items():
            found[source.node] = found.get(source.node, 0) + size
        return found

    def push(self) -> None:
        """Do what can be done now."""
        if not self._begun:
            self._begun = True
            if not self._take_slot():
                return
        if not self._busy:
            self._advance()

    def lose(self, node: str) -> None:
        """Its parts are asked of others at once."""
        if self._begun:
            self._pulling.lose(node)

    def end(self, *, mapped: bool) -> None:
        """The job is over; what is not sealed is freed, if the segment is still ``mapped``."""
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
            if not self._pulling.landing:
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
            self._job.failed(text + self._repairs.hopeless(self._stripes.hopeless()))

    # -- the slot --------------------------------------------------------------------------------

    def _take_slot(self) -> bool:
        """Lock the slot and mark it; false if that cannot be, and the job has ended."""
        segment = self._tools.segment
        try:
            fd = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            self._job.failed(f"{segment.path.name} cannot be opened: {error.strerror}")
            return False
        if not locks.try_lock(fd, slot_lock_byte(self._index), exclusive=True):
            os.close(fd)
            self._job.failed(f"slot {self._index} of {segment.path.name} is locked")
            return False
        self._fd = fd  # from here on the slot is ours to free
        filling = replace(self.header, state=SlotState.FILLING, writer_pid=os.getpid())
        write_slot_header(segment.buffer, segment.geometry, self._index, filling)
        return True

    @property
    def _image(self) -> memoryview:
        return self._tools.segment.image(self._index, self.header)

    def _seal(self) -> None:
        segment = self._tools.segment
        write_slot_header(segment.buffer, segment.geometry, self._index, self.header)
        self.sealed = True
        mended = self._repairs.mended(self._stripes.bringers)
        if mended:
            self._tools.events.add("info", "fetch_repaired", mended)
        self._tell_accused()
        self._rest()
        self._job.progressed()

    def _drained(self) -> None:
        if self._job.over():
            self._rest()
        else:
            self._job.progressed()

    def _rest(self) -> None:
        """Unlock the slot, unless somebody still touches it: who does comes here again."""
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
        """What a copy on this very node can bring needs no network; false if there is none (any more)."""
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

    def _copied(
        self, source: FetchSource, segment: Segment, parts: Sequence[Part], there: bool
    ) -> None:
        if not self._worker_done():
            return
        if not there:
            self._no_copy(source, segment, "the copy on this node is gone")
            return
        for part in parts:
            self._stripes.claim(source, part)
        self._job.progressed()

    def _not_copied(self, source: FetchSource, segment: Segment, error: BaseException) -> None:
        if self._worker_done():
            self._no_copy(source, segment, f"the copy on this node cannot be read: {error!r}")

    def _no_copy(self, source: FetchSource, segment: Segment, reason: str) -> None:
        self._pulling.give_up(source, reason)
        # Unless it is quarantined, the next plan would want it again.
        self._tools.doubt(segment, source.slot, self.header.sequence)
        self._job.progressed()

    # -- from storage ----------------------------------------------------------------------------

    def _ask_storage(self) -> bool:
        """Where memory is enough no plan looks for what is durable; but it may have the very snapshot. False: not to be asked."""
        link = self._tools.link(STORE_NODE) if self._may_ask_storage else None
        if link is None:
            return False
        self._may_ask_storage, self._asks_storage = False, True
        find_stored(
            link,
            self._tools.segment.key,
            self.header,
            self._stored,
            lambda reason: self._stored([], f": {reason}"),
        )
        return True

    def _stored(self, sources: Sequence[FetchSource], why: str = "") -> None:
        self._asks_storage = False
        if self._job.over():
            return
        if not sources:
            text = f"iteration {self.header.iteration}: not to be had from storage{why}"
            self._tools.events.add("warning", "fetch_source_lost", text)
        for source in sources:
            self._sources.append(source)
            self._stripes.add_holder(source)
            self._pulling.ask(source)
        self._job.progressed()

    # -- is it what it should be -----------------------------------------------------------------

    def _verify(self) -> None:
        tools = self._tools
        # If the workers are full the next tick tries again.
        self._busy = tools.verifiers.submit(
            partial(wrong_ranges, self._image, self.header.header_digest, tools.map_fn),
            self._verified,
            self._not_verified,
        )

    def _verified(self, wrong: Sequence[Wrong]) -> None:
        if not self._worker_done():
            return
        if not wrong:
            self._seal()
            return
        blamed = self._stripes.blame((each.start, each.stop) for each in wrong)
        if len(blamed) < len(wrong):
            text = (
                f"iteration {self.header.iteration} does not match its digests, and nobody brought"
            )
            self._job.failed(f"{text} what is wrong")
            return
        self._tools.events.add("error", "fetch_damaged", self._repairs.found(wrong, blamed))
        self._job.progressed()

    def _tell_accused(self) -> None:
        """Have them verify what they hold: unless it is quarantined, the next plan would ask for it again."""
        for source in self._repairs.accused():
            if source not in self._near:
                self._pulling.doubt(source)
            elif (segment := self._tools.local(source.segment)) is not None:
                self._tools.doubt(segment, source.slot, self.header.sequence)

    def _not_verified(self, error: BaseException) -> None:
        if self._worker_done():
            self._job.failed(f"verifying failed: {error!r}")
