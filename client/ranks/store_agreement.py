"""Ranks agree through the job's own store while training goes on: no rank waits for another.

All ranks must snapshot by one schedule: the gradient of a replicated parameter is a mean over ranks, so the
parameter must be frozen on all of them in the same replayed iterations, or on none (MoEvement §3.4). The
schedule follows from measurements of each rank: each proposes its numbers, and the largest of each counts.
The last rank to propose announces the result, so each rank makes a constant number of requests.

`ckptd.core.switching` decides which registers are read and written in which order; `play` does it
on a real store.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

from ckptd.client.identity import Identity
from ckptd.client.log_lines import get_logger
from ckptd.client.ranks.store_barrier import own_connection
from ckptd.core.switching import (
    Access,
    Add,
    CompareAndSwap,
    Delete,
    Get,
    Has,
    forget_largest,
    largest_found,
    propose_largest,
)
from ckptd.cuda.quiet_threads import Bell, may_end_here, start_quiet

logger = get_logger(__name__)

_POLL_S, _POLL_MAX_S = 0.01, 0.5
_Result = TypeVar("_Result")


class StoreAgreement:
    """Agreements of one rank in one epoch.

    Args:
        store: the job's store.
        prefix: equal on all ranks, and new after each restart of the job.
    """

    def __init__(self, store: Any, identity: Identity, *, prefix: str) -> None:
        self._store, self._identity, self._prefix = store, identity, prefix
        self._found: dict[str, tuple[int, ...]] = {}
        self._closed = threading.Event()

    def propose(self, what: str, mine: Sequence[int], *, among: int | None = None) -> None:
        """Propose this rank's numbers; does not block.

        Args:
            among: how many ranks take part; None: all.
        """
        args = what, tuple(mine), among or self._identity.world_size
        start_quiet(self._run, *args, name="ckptd-agree")

    def largest(self, what: str) -> tuple[int, ...] | None:
        """The largest of each number over all ranks; None until all have proposed theirs."""
        return self._found.get(what)

    def forget(self, what: str, numbers: int, ranks: Sequence[int]) -> None:
        """Remove what these ranks have proposed; does not block. None of them asks for it any more."""
        start_quiet(self._forget, what, numbers, tuple(ranks), name="ckptd-forget")

    def close(self) -> None:
        """Stop waiting for other ranks."""
        self._closed.set()

    def _forget(self, what: str, numbers: int, ranks: tuple[int, ...]) -> None:
        try:
            play(own_connection(self._store), self._prefix, forget_largest(what, numbers, ranks))
        except Exception as error:  # noqa: BLE001 - the store ends with the job
            logger.debug("%s stays in the store: %s", what, error)

    def _run(self, what: str, mine: tuple[int, ...], among: int) -> None:
        try:
            store = own_connection(self._store)
            steps = propose_largest(what, mine, rank=self._identity.rank, ranks=among)
            play(store, self._prefix, steps)
            wait_s, bell = _POLL_S, Bell()
            while (found := play(store, self._prefix, largest_found(what))) is None:
                if self._closed.is_set():
                    return
                bell.wait(wait_s)
                wait_s = min(2 * wait_s, _POLL_MAX_S)
            self._found[what] = found
        except Exception as error:  # noqa: BLE001 - see the next line
            # The store ends with the job, in as many ways as there are backends.
            if not self._closed.is_set():
                logger.error("this rank could not agree on the %s with the others: %s", what, error)


def play(store: Any, prefix: str, steps: Generator[Access, bytes | int, _Result]) -> _Result:
    """Make the accesses that ``steps`` yields, to keys beneath ``prefix``; returns its result."""
    answer: bytes | int | None = None
    while True:
        try:
            access = next(steps) if answer is None else steps.send(answer)
        except StopIteration as done:
            result: _Result = done.value
            return result
        may_end_here()
        answer = _access(store, prefix, access)


def _access(store: Any, prefix: str, access: Access) -> bytes | int:
    key = f"{prefix}/{access.key}"
    found: bytes | int
    match access:
        case Add():
            found = store.add(key, 1)
        case CompareAndSwap():
            found = store.compare_set(key, access.old, access.new)
        case Has():
            found = int(store.check([key]))
        case Get():
            found = store.get(key)
        case Delete():
            found = int(store.delete_key(key))
    return found
