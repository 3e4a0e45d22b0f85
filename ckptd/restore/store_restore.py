"""Checkpoints of elastic jobs' incarnations, restored from storage into this node's memory.

Their runs have no attached trainers. An elastic job that starts is another run than the one whose state it
continues, and may have other ranks. So its ranks do not fetch for themselves: they divide the old run's
images among the nodes, and read them in place. The images go into segments of the old run's ranks, filled
and verified like any other fetch, and are given back with the rest of that run.

On the daemon's loop thread; a caller that waits asks again and again.
"""

from __future__ import annotations

from functools import partial

from ckptd.core.recovery.held import STORE_NODE
from ckptd.core.sessions import RankKey
from ckptd.core.slots.segment_format import decode_descriptor
from ckptd.errors import SegmentError
from ckptd.memory.housekeeping import Housekeeper
from ckptd.memory.segment_file import Segment
from ckptd.memory.segment_store import SegmentMaker, SegmentStore
from ckptd.persistence.keeper_wire import CommittedCheckpoint, FoundWorlds
from ckptd.persistence.store_link import StoreLink
from ckptd.restore.fetches import Fetches
from ckptd.restore.slot_fetch import FetchJob
from ckptd.transport import messages as m
from ckptd.transport.messages import FetchPiece, FetchSource, RefusalCode
from ckptd.units import format_bytes


class StoreRestore:
    """Serves elastic jobs that start.

    Args:
        link: the store; None where none is configured.
    """

    def __init__(
        self,
        link: StoreLink | None,
        store: SegmentStore,
        maker: SegmentMaker,
        fetches: Fetches,
        housekeeper: Housekeeper,
    ) -> None:
        self._link, self._store, self._maker = link, store, maker
        self._fetches, self._housekeeper = fetches, housekeeper
        self._looks: dict[tuple[str, str], _Look] = {}
        self._restores: dict[tuple[str, str], _Checkpoint] = {}

    def look(self, message: m.GetDurableWorlds) -> m.Reply:
        """List what is durable: begin to, or answer with what was found."""
        if self._link is None:
            return m.DurableWorlds(configured=False)
        run = message.job, message.run
        found = self._looks.get(run)
        if found is None or found.asker != message.asker:
            found = self._looks[run] = _Look(message.asker)
            self._link.find_worlds(
                *run, again=message.again, done=found.saw, failed=partial(found.failed, run)
            )
        if found.reply is None:
            return m.DurableWorlds(configured=True, running=True)
        del self._looks[run]
        return found.reply

    def restore(self, message: m.BringStored) -> m.Reply:
        """Begin to restore a checkpoint, or answer with the progress."""
        if self._link is None:
            return m.Refused(RefusalCode.NOT_FOUND, "no store is configured here")
        run = message.job, message.run
        found = self._restores.get(run)
        if found is not None and not found.serves(message):
            self._give_up(found, f"iteration {message.iteration} is wanted in its place")
            found = None
        if found is None:
            found = self._restores[run] = _Checkpoint(message)
            self._link.offer(
                *run,
                message.iteration,
                message.ranks,
                partial(self._offered, found),
                partial(self._not_offered, found),
            )
        progress = found.state
        if progress.state in ("failed", "refused"):
            self._give_up(found, progress.reason)
        elif progress.state == "done":
            del self._restores[run]
        return progress

    # -- one checkpoint --------------------------------------------------------------------------

    def _offered(self, found: _Checkpoint, offered: list[CommittedCheckpoint]) -> None:
        if found.over:
            return
        lacking = set(found.wanted.ranks) - {stored.rank for stored in offered}
        if lacking:
            found.fail(f"what rank {min(lacking)} has in it cannot be read by this version")
            return
        found.waiting = list(offered)
        self._make_next(found)

    def _not_offered(self, found: _Checkpoint, code: str, reason: str) -> None:
        found.fail(f"{reason} ({code})")

    def _make_next(self, found: _Checkpoint) -> None:
        """Make memory for one rank after the other; earlier images are read meanwhile."""
        if found.waiting and not found.over:
            self._make(found, found.waiting.pop(0))

    def _make(self, found: _Checkpoint, stored: CommittedCheckpoint) -> None:
        """Make memory for a rank's last snapshot, which is all of a checkpoint of dense snapshots."""
        try:
            plan = self._store.plan(decode_descriptor(stored.descriptor), 1, stored.slot_bytes)
        except (SegmentError, ValueError) as error:
            found.fail(f"{stored.name} is of no segment that can be made here: {error}")
            return
        what = f"a snapshot of {format_bytes(stored.lengths[-1])} from storage"
        made, refused = partial(self._made, found, stored), partial(self._refused, found)
        refusal = self._maker.make(plan, what=what, made=made, refused=refused)
        if refusal is not None:
            self._refused(found, refusal)

    def _made(self, found: _Checkpoint, stored: CommittedCheckpoint, segment: Segment) -> None:
        if found.over:
            self._housekeeper.remove(segment, "it is no longer needed")
            return
        last = len(stored.headers) - 1
        source = FetchSource(STORE_NODE, stored.name, last)
        piece = FetchPiece(stored.headers[last], (source,))
        found.jobs[segment.key] = self._fetches.fetch(segment, [piece])
        self._make_next(found)

    def _refused(self, found: _Checkpoint, refusal: m.Refused) -> None:
        """Fail; unless this node was only busy, it has no room for an older checkpoint either."""
        busy = refusal.code == RefusalCode.IN_USE
        hint = f" ({refusal.hint})" if refusal.hint else ""
        found.fail(f"{refusal.message}{hint}", fatal=not busy)

    def _give_up(self, found: _Checkpoint, why: str) -> None:
        """Drop what was restored: the checkpoint is damaged, or another one is wanted."""
        found.over = True
        del self._restores[found.wanted.job, found.wanted.run]
        for job in found.jobs.values():
            job.close(why, wanted=False)
            if self._store.get(job.segment.key, job.segment.generation) is job.segment:
                self._housekeeper.remove(job.segment, why)


class _Look:
    """A question to the store, and its answer once that is there."""

    def __init__(self, asker: str) -> None:
        self.asker = asker
        self.reply: m.Reply | None = None

    def saw(self, found: FoundWorlds) -> None:
        self.reply = m.DurableWorlds(
            configured=True,
            worlds=tuple(found.numbers),
            checkpoints=tuple(m.DurableWorld(c.world, c.end, tuple(c.sizes)) for c in found.checkpoints),
            damaged=tuple(found.damaged),
        )

    def failed(self, run: tuple[str, str], code: str, reason: str) -> None:
        text = f"the durable checkpoints of {'/'.join(run)} cannot be listed: {reason} ({code})"
        hint = "`ckptctl events` and `ckptctl checkpoints` say more; start again when the store answers"
        self.reply = m.Refused(RefusalCode.NOT_FOUND, text, hint)


class _Checkpoint:
    """The restore of one checkpoint."""

    def __init__(self, wanted: m.BringStored) -> None:
        self.wanted = wanted
        self.jobs: dict[RankKey, FetchJob] = {}
        self.waiting: list[CommittedCheckpoint] = []  # ranks without memory yet
        self.over = self._fatal = False
        self._reason = ""

    def serves(self, message: m.BringStored) -> bool:
        """Whether it is the requested checkpoint, with all memory here: an earlier start may have asked."""
        same = message == self.wanted
        return same and all(job.segment.in_place() for job in self.jobs.values())

    def fail(self, reason: str, *, fatal: bool = False) -> None:
        """It cannot be restored; ``fatal``: an older checkpoint could not be, either."""
        self._reason, self._fatal, self.over = self._reason or reason, self._fatal or fatal, True

    @property
    def state(self) -> m.Brought:
        """The progress, for the caller that waits."""
        states = [job.state for job in self.jobs.values()]
        reason = self._reason or next((one.reason for one in states if one.state == "failed"), "")
        state = "running"
        if reason:
            state = "refused" if self._fatal else "failed"
        elif len(states) == len(self.wanted.ranks) and all(one.state == "done" for one in states):
            state = "done"
        done = sum(one.bytes_done for one in states)
        total = sum(one.bytes_total for one in states) + sum(s.lengths[-1] for s in self.waiting)
        return m.Brought(state, reason, done, total)
