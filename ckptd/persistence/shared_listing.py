"""One listing of a run for all ranks of a node that commit the same checkpoint.

Listing a large run takes a request per thousand keys, and eight ranks that each do it before their
manifests ask for the same eight times. What a rank needs of the listing is *when it was begun*, not
by whom: whatever is staying in it can be replaced only by a checkpoint that becomes complete later.
A collector acts on that no earlier than the settle time after it (docs/format.md §8), on a listing
of its own that begins then; and until half the settle time after our listing was begun, every
manifest that relies on it is written (§7), so that the collector sees that manifest and leaves
alone what it refers to. Objects that were put after the listing was begun are protected by their
age alone, before as after. So a listing may be shared as long as its age counts, and not the time
since it was asked for: `Seen.begun_s` is what the manifest's time is counted from.

What is told wrongly is only what was *not yet* there when it was begun, such as the manifest of a
rank that is a checkpoint behind. That leads to a refusal, never to a permission; so whoever is
refused by a listing that somebody else began asks for a fresh one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import NamedTuple

from ckptd.storage.checkpoints.commit import Views

__all__ = ["Seen", "SharedLook"]

_SHARE_S = 30.0  # of the minute within which a listing must have led to a manifest's put


class Seen(NamedTuple):
    """A listing of the run, when it was begun, and whether somebody else had asked for it."""

    views: Views
    begun_s: float
    shared: bool


class SharedLook:
    """Keeps the newest listing for those who have not seen it yet. Called from several threads.

    Args:
        clock: as of `Seen.begun_s`.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # held while listing: who asks meanwhile waits for that one
        self._key: Hashable = None
        self._seen: Seen | None = None
        self._left = 0

    def get(self, key: Hashable, look: Callable[[], Views], *, sharers: int, fresh: bool = False) -> Seen:
        """What ``look`` shows, now or (if it was begun for the same ``key``) a short while ago.

        Args:
            sharers: how many will ask for it; after that it is forgotten, since it is large.
            fresh: now.
        Raises:
            StoreError: of ``look``; whoever waited for it tries for himself.
        """
        with self._lock:
            seen = self._seen
            known = seen is not None and key == self._key and self._left > 0
            if seen is None or not known or fresh or self._clock() - seen.begun_s > _SHARE_S:
                self._seen = None  # not kept while the next one is made
                begun_s = self._clock()
                seen, self._key, self._left = Seen(look(), begun_s, True), key, sharers
                self._keep(seen)
                return seen._replace(shared=False)
            self._keep(seen)
            return seen

    def _keep(self, seen: Seen) -> None:
        self._left -= 1
        self._seen = seen if self._left > 0 else None
