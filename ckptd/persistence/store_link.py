"""Storage as one more holder of snapshots: recoveries request from the store what they request from peers
(docs/persistence.md §6). All on the daemon's loop thread.

A `StoreLink` answers like a `PeerLink` whose node is `STORE_NODE`, so the recovery plan, the fetches and
the drills need no code for storage: a committed checkpoint is a segment, and each of its snapshots a slot.
The store keeper reads bytes directly into the file of the target segment.

A starting trainer waits for the list of durable checkpoints, and its start is refused without it.
Therefore the request outlives the keeper: if the keeper dies, the next one is asked, as long as the trainer
may be waiting.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import xxhash

from ckptd.core.recovery.held import STORE_NODE
from ckptd.core.slots.segment_format import decode_descriptor
from ckptd.core.snapshot_policy import PolicyKind
from ckptd.errors import SegmentError
from ckptd.holdings import operators_id, policy_of
from ckptd.memory.segment_file import Segment
from ckptd.node_context import Post
from ckptd.persistence import keeper_wire as w
from ckptd.persistence.keeper_client import AWAY, StoreChild
from ckptd.transport import peer_messages as p
from ckptd.transport.messages import GetHoldings, HeldSegment, HeldSlot, Holdings
from ckptd.transport.verbs import Completion, Done, Fault, PeerAddress, RegionKey

_TOKEN = bytes(16)
# How long a request is repeated with new keepers. A trainer waits 900 s for the answer
# (`ckptd.client.daemon_link.session`), of which the last keeper may need the 600 s of `store_deadline_s`;
# within this time about eight keepers have died.
_ASK_FOR_S = 120.0
_MAX_FOUND = 64  # checkpoints that can be read; a start is offered three


class StoreLink:
    """Finds and reads stored checkpoints.

    Args:
        child: the store keeper.
        ranks_of: the ranks of a run that are attached here; a node requests only those.
        durable_of: the newest checkpoint of a run that all ranks have in storage, as far as it was seen here;
            -1: none.
        segments: the segments of this node into which stored bytes may be read.
    """

    def __init__(
        self,
        child: StoreChild,
        *,
        post: Post,
        ranks_of: Callable[[str, str], Iterable[int]],
        durable_of: Callable[[str, str], int],
        segments: Callable[[], Iterable[Segment]],
        boot_id: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._child, self._post, self._clock = child, post, clock
        self._ranks_of, self._segments = ranks_of, segments
        self.durable_of = durable_of
        self.boot_id = boot_id
        self.address = PeerAddress(STORE_NODE, "")
        self._known: dict[str, w.CommittedCheckpoint] = {}
        # The names of each checkpoint (of a run, by end and epoch), the one that was found last at the end.
        self._found: OrderedDict[tuple[str, int, int], set[str]] = OrderedDict()
        self._regions: dict[int, tuple[str, int]] = {}
        self._numbers = itertools.count(1)
        self._unanswered: list[Callable[[], None]] = []  # to be repeated

    def tick(self) -> None:
        """Repeat the requests over which a keeper died; the child starts the next one after its backoff."""
        again, self._unanswered = self._unanswered, []
        for ask in again:
            ask()

    def ask(
        self,
        message: Any,
        expect: type[Any],
        done: Callable[[Any], None],
        failed: Callable[[str, str], None],
        *,
        timeout_s: float = 0.0,
    ) -> None:
        """As `PeerLink.ask`; the keeper has its own deadlines, and a `GetHoldings` survives its death."""
        if isinstance(message, GetHoldings):
            self.find(message, {}, done, failed)
            return
        if isinstance(message, p.DoubtSlot):
            self.tell(message)
            self._post(partial(done, p.PeerDone()))
            return
        reply = self._reply(message)
        if isinstance(reply, expect):
            self._post(partial(done, reply))
        else:
            text = "this checkpoint is not known here: it was removed, or the daemon was restarted"
            self._post(partial(failed, "unknown", text))

    def tell(self, message: Any) -> None:
        """As `PeerLink.tell`."""
        if isinstance(message, p.CloseRead):
            self._regions.pop(message.region, None)
        elif isinstance(message, p.DoubtSlot):
            # It stays known here, because its other snapshots, and other parts of this one, may be whole.
            self._child.tell(w.DoubtStored(message.name))

    def get(
        self,
        source: RegionKey,
        target: memoryview,
        *,
        offset: int,
        deadline_s: float,
        done: Done,
    ) -> _Read:
        """As `PeerLink.get`; ``target`` must be in a segment of this node and is filled through its file."""
        read = _Read(done, len(target))
        place, stored = self._place_of(target), self._regions.get(source.region)
        if place is None or stored is None:
            self._post(partial(read.end, Fault.REGION, "nothing is known of it"))
            return read
        name, index = stored
        path, file_offset = place
        message = w.ReadRange(self._child.next_id(), name, index, offset, len(target), path, file_offset)
        self._child.ask(
            message,
            lambda _: read.end(None, ""),
            lambda code, reason: read.end(_fault(code), f"{code}: {reason}"),
        )
        return read

    # -- finding checkpoints ---------------------------------------------------------------------

    def find(
        self,
        message: GetHoldings,
        begun: dict[int, int],
        done: Callable[[Any], None],
        failed: Callable[[str, str], None],
    ) -> None:
        """Find the durable checkpoints of a run, as `Holdings`.

        Args:
            begun: the epochs that the run's nodes know, with their starts.
        """
        job, run = message.job, message.run
        ranks = None if message.every_rank else sorted(self._ranks_of(job, run))
        left_out = list(message.left_out)

        def found(reply: w.Found) -> None:
            segments = [s for c in reply.checkpoints if (s := self._held(c)) is not None]
            done(Holdings(STORE_NODE, tuple(segments), reply.epoch))

        self._ask(
            lambda: w.FindStored(self._child.next_id(), job, run, ranks, left_out, begun),
            found,
            failed,
        )

    def find_worlds(
        self,
        job: str,
        run: str,
        *,
        again: bool,
        done: Callable[[w.FoundWorlds], None],
        failed: Callable[[str, str], None],
    ) -> None:
        """Find the durable checkpoints of an elastic run's incarnations (`FindWorlds`)."""
        self._ask(lambda: w.FindWorlds(self._child.next_id(), job, run, again), done, failed)

    def offer(
        self,
        job: str,
        run: str,
        end: int,
        ranks: Iterable[int],
        done: Callable[[list[w.CommittedCheckpoint]], None],
        failed: Callable[[str, str], None],
    ) -> None:
        """Find these ranks' part of a committed checkpoint, attached here or not; it can then be read."""
        listed = sorted(ranks)

        def found(reply: w.Found) -> None:
            done([stored for stored in reply.checkpoints if self._held(stored) is not None])

        self._ask(lambda: w.OfferStored(self._child.next_id(), job, run, end, listed), found, failed)

    def _ask(
        self,
        question: Callable[[], Any],
        done: Callable[[Any], None],
        failed: Callable[[str, str], None],
    ) -> None:
        """Send a request to one keeper after the other, until one answers or the time is over."""
        give_up_s = self._clock() + _ASK_FOR_S

        def refused(code: str, reason: str) -> None:
            if code == AWAY and self._clock() < give_up_s:
                self._unanswered.append(ask)
            else:
                failed(code, reason)

        def ask() -> None:
            self._child.ask(question(), done, refused)

        ask()

    def _held(self, stored: w.CommittedCheckpoint) -> HeldSegment | None:
        try:
            descriptor = decode_descriptor(stored.descriptor)
        except SegmentError:
            return None  # another version wrote it; verification names it
        self._remember(stored)
        pairs = zip(stored.headers, stored.anchors, strict=True)
        return HeldSegment(
            name=stored.name,
            rank=stored.rank,
            own=False,
            origin=xxhash.xxh3_64_hexdigest(stored.name.encode()),
            generation=descriptor.generation,
            world_size=stored.world_size,
            window=stored.window,
            num_operators=descriptor.num_operators,
            operators_id=operators_id(descriptor),
            slot_bytes=stored.slot_bytes,
            num_slots=stored.num_slots,
            slots=tuple(HeldSlot(i, header, anchors) for i, (header, anchors) in enumerate(pairs)),
            partial=policy_of(descriptor) == PolicyKind.PARTIAL,
        )

    def _remember(self, stored: w.CommittedCheckpoint) -> None:
        """Keep it until many others have been found since: each recovery finds new ones."""
        run = "/".join(stored.name.split("/", 2)[:2])
        checkpoint = run, stored.end, stored.epoch
        self._known[stored.name] = stored
        self._found.setdefault(checkpoint, set()).add(stored.name)
        self._found.move_to_end(checkpoint)
        while len(self._found) > _MAX_FOUND:
            _, names = self._found.popitem(last=False)
            for name in names:
                del self._known[name]

    def _reply(self, message: Any) -> Any:
        if isinstance(message, p.GetDescriptor):
            stored = self._known.get(message.name)
            if stored is None:
                return None
            return p.Descriptor(stored.descriptor, stored.num_slots, stored.slot_bytes)
        if isinstance(message, p.OpenRead):
            stored = self._known.get(message.name)
            if stored is None or message.slot >= len(stored.headers):
                return None
            number = next(self._numbers)
            self._regions[number] = stored.name, message.slot
            length = stored.lengths[message.slot]
            header, digest = stored.headers[message.slot], stored.digests[message.slot]
            return p.ReadOpened(number, _TOKEN, length, header, digest=digest)
        return None

    def _place_of(self, target: memoryview) -> tuple[str, int] | None:
        """The segment file that contains these bytes, and their offset in it."""
        address = _address(target)
        for segment in self._segments():
            if segment.fd < 0:
                continue
            offset = address - _address(segment.buffer)
            if 0 <= offset <= len(segment.buffer) - len(target):
                return str(segment.path), offset
        return None


class _Read:
    """A read in flight; it cannot be cancelled, and completes when the keeper has answered."""

    def __init__(self, done: Done, size_bytes: int) -> None:
        self._done, self._size_bytes = done, size_bytes
        self._began_s = time.monotonic()

    def cancel(self) -> None:
        """No effect: bytes may arrive until the completion."""

    def wait(self, timeout_s: float) -> Completion:
        """Not supported: completions arrive on the loop thread."""
        raise TimeoutError("a read from storage completes on the loop thread")

    def end(self, fault: Fault | None, detail: str) -> None:
        seconds = time.monotonic() - self._began_s
        self._done(Completion(fault, detail, self._size_bytes if fault is None else 0, 0, seconds))


def _fault(code: str) -> Fault:
    return Fault.DAMAGED if code == w.FailureCode.DAMAGED else Fault.REFUSED


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
