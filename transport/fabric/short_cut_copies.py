"""Chunks that take the short cut (`ckptd.transport.fabric.short_cut`): which may, and the thread
that copies them.

A `Copier` is one thread for a whole fabric, so that copies take one processor at most from the
training beside us; a `CopyLane` is one link's way to it. A chunk that cannot be copied goes back to
its transfer, which then stays on the network.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from ckptd.transport.fabric.chunks import Chunk, ChunkedTransfer, ChunkUse
from ckptd.transport.fabric.short_cut import copy_chunk
from ckptd.transport.verbs import Access, FabricCounters

__all__ = ["Copier", "CopyLane"]

logger = logging.getLogger(__name__)

MAX_COPIES = 2  # of one link: one under way, and the next


class Copier:
    """Runs what it is given, one after the other, on a thread that begins with the first."""

    def __init__(self, name: str) -> None:
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started = False

    def submit(self, task: Callable[[], None]) -> None:
        """For the fabric's thread. ``task`` does not raise."""
        if not self._started:
            self._started = True
            self._thread.start()
        self._todo.put(task)

    def close(self) -> None:
        """End after what was submitted."""
        self._todo.put(None)
        if self._started:
            self._thread.join()

    def _run(self) -> None:
        while (task := self._todo.get()) is not None:
            task()


class CopyLane:
    """On the fabric's thread, but for `_copy`.

    Args:
        node: who we are for our peers.
        copier: None if the short cut is switched off.
        call: runs something on the fabric's thread; false if that has ended.
        done: a chunk was copied.
    """

    def __init__(
        self,
        node: str,
        copier: Copier | None,
        counters: FabricCounters,
        call: Callable[[Callable[[], None]], bool],
        done: Callable[[Chunk], None],
    ) -> None:
        self._node, self._copier, self._counters = node, copier, counters
        self._call, self._done = call, done
        self._lock = threading.Lock()
        self._under_way = 0

    def takes(self, transfer: ChunkedTransfer) -> bool:
        """Whether this transfer's chunks may be tried here."""
        return self._copier is not None and not transfer.network_only

    @property
    def room(self) -> int:
        return MAX_COPIES - self._under_way

    def send(self, chunk: Chunk) -> None:
        """Copy it soon; call it if there is room."""
        assert self._copier is not None
        self._under_way += 1
        use = ChunkUse(chunk, self._lock)
        self._copier.submit(lambda: self._copy(use))

    def _copy(self, use: ChunkUse) -> None:
        """On the copier's thread."""
        if not use.claim():  # its transfer has ended
            self._call(lambda: self._ended(use.chunk, None))
            return
        chunk, copied = use.chunk, False
        transfer = chunk.transfer
        access = Access.WRITE if transfer.is_put else Access.READ
        try:
            copied = copy_chunk(self._node, transfer.key, access, chunk.offset, use.view)
        except Exception:  # the thread's task: the chunk must not be lost
            logger.exception("a copy failed")
        finally:
            use.finish()
        self._call(lambda: self._ended(chunk, copied))

    def _ended(self, chunk: Chunk, copied: bool | None) -> None:
        self._under_way -= 1
        if copied:
            self._counters.short_cut_bytes += chunk.length
            self._done(chunk)
        elif copied is False:
            chunk.transfer.network_only = True
            chunk.transfer.give_back(chunk)
