"""One snapshot on its way here: into which slot, and whether it is what it should be (docs/replication.md §7).

A `FetchedPiece` waits until it is begun; then its slot is locked, and it is COPIED from a replica of this very node, or PULLED in
parts from all its holders (`ckptd.fetching.pulling`); then VERIFIED as a whole on a worker. What does not match is pulled again from
others, until it is SEALED. It tells its job what happened, by `Job`, and is asked to go on by `push`. The slot stays locked until
nobody touches it any more: neither a worker nor a transfer that was cancelled. All on the daemon's loop thread.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ckptd.fetching.image import copy_slot, wrong_ranges
from ckptd.fetching.pulling import Pulling
from ckptd.fetching.tools import FetchTools, Job
from ckptd.memory import locks
from ckptd.memory.ring import SlotState
from ckptd.memory.segment_format import (
    SlotHeader,
    set_slot_state,
    slot_lock_byte,
    write_slot_header,
)
from ckptd.memory.segments import Segment
from ckptd.recovery.striping import Stripes
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
        self._near = deque(source for source in self._sources if source.node == tools.node)
        self._stripes = Stripes(header.image_len, self._sources)
        self._pulling = Pulling(
            header,
            self._stripes,
            tools,
            job,
            image=lambda: self._image,
            drained=self._drained,
        )
        self._begun = self._asked = False
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
        self._pulling.end()
        if self._fd >= 0 and not self.sealed and mapped:
            segment = self._tools.segment
            set_slot_state(segment.buffer, segment.geometry, self._index, SlotState.FREE)
        self._rest()

    def _advance(self) -> None:
        if self._copy_near():
            return
        if not self._asked:
            self._asked = True
            self._pulling.open()
        if self._stripes.complete:
            if not self._pulling.landing:
                self._verify()
        elif self._stripes.failed:
            names = ", ".join(dict.fromkeys(source.node for source in self._sources))
            self._job.failed(f"iteration {self.header.iteration}: no holder is left of {names}")
        else:
            self._pulling.advance()

    # -- the slot --------------------------------------------------------------------------------

    def _take_slot(self) -> bool:
        """Lock the slot and mark it; false if that cannot be, and the job has ended."""
        segment = self._tools.segment
        try:
            self._fd = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            self._job.failed(f"{segment.path.name} cannot be opened: {error.strerror}")
            return False
        if not locks.try_lock(self._fd, slot_lock_byte(self._index), exclusive=True):
            self._job.failed(f"slot {self._index} of {segment.path.name} is locked")
            return False
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
        """A replica on this very node needs no network; false if there is none (any more)."""
        tools = self._tools
        while self._near:
            source = self._near[0]
            segment = tools.local(source.segment)
            if segment is not None:
                # If the workers are full the next tick tries again.
                self._busy = tools.verifiers.submit(
                    partial(
                        copy_slot, segment, source.slot, self.header, self._image, tools.map_fn
                    ),
                    partial(self._copied, source, segment),
                    partial(self._not_copied, source, segment),
                )
                return True
            self._near.popleft()
            self._pulling.give_up(source, "gone")
        return False

    def _copied(
        self, source: FetchSource, segment: Segment, wrong: Sequence[tuple[int, int]]
    ) -> None:
        if not self._worker_done():
            return
        if wrong:
            self._no_copy(source, segment, "the copy on this node is damaged or gone")
            return
        for part in self._stripes.parts:
            self._stripes.claim(source, part)
        self._seal()

    def _not_copied(self, source: FetchSource, segment: Segment, error: BaseException) -> None:
        if self._worker_done():
            self._no_copy(source, segment, f"the copy on this node cannot be read: {error!r}")

    def _no_copy(self, source: FetchSource, segment: Segment, reason: str) -> None:
        self._near.popleft()
        self._pulling.give_up(source, reason)
        # Unless it is quarantined, the next plan would want it again.
        self._tools.doubt(segment, source.slot, self.header.sequence)
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

    def _verified(self, wrong: Sequence[tuple[int, int]]) -> None:
        if not self._worker_done():
            return
        if not wrong:
            self._seal()
            return
        liars = self._stripes.blame(wrong)
        if not liars:
            text = (
                f"iteration {self.header.iteration} does not match its digests, and nobody brought"
            )
            self._job.failed(f"{text} what is wrong")
            return
        names = ", ".join(dict.fromkeys(source.node for source in liars))
        self._tools.events.add(
            "error",
            "fetch_damaged",
            f"iteration {self.header.iteration} as delivered by {names} does not match its "
            "digests; it is fetched from others",
        )
        for source in liars:
            self._pulling.doubt(source)
        self._job.progressed()

    def _not_verified(self, error: BaseException) -> None:
        if self._worker_done():
            self._job.failed(f"verifying failed: {error!r}")
