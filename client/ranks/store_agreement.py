"""Ranks agree on a few numbers through the job's own store, beside training: nobody waits for anybody.

All ranks must snapshot by one schedule: where a parameter is replicated, its gradient is a mean
over ranks, so it must be frozen on all of them in the same replayed iterations, or on none
(MoEvement §3.4). What the schedule follows from is measured on each rank, hence agreed on: each
proposes its numbers, the largest of each count. The last one to propose announces the result, so
the store is asked a constant number of times per rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from ckptd.client.identity import Identity
from ckptd.client.log_lines import get_logger

__all__ = ["StoreAgreement", "job_store", "propose"]

logger = get_logger(__name__)

_POLL_S, _POLL_MAX_S = 0.01, 0.5


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
        """Tell this rank's numbers, beside training.

        Args:
            among: how many ranks take part; all, if not given.
        """
        several = among or self._identity.world_size
        self._beside(
            lambda store: self._agree(store, what, tuple(mine), several), f"agree on the {what}"
        )

    def largest(self, what: str) -> tuple[int, ...] | None:
        """The largest of each number over all ranks; None until all have proposed theirs."""
        return self._found.get(what)

    def close(self) -> None:
        """Stop waiting for other ranks."""
        self._closed.set()

    def _beside(self, work: Callable[[Any], object], purpose: str) -> None:
        def run() -> None:
            try:
                work(_own_connection(self._store))
            except Exception as error:  # noqa: BLE001 - the store ends with the job, in as many ways as there are backends
                if not self._closed.is_set():
                    logger.error("this rank could not %s with the others: %s", purpose, error)

        threading.Thread(target=run, name="ckptd-agree", daemon=True).start()

    def _agree(self, store: Any, what: str, mine: tuple[int, ...], among: int) -> None:
        key = f"{self._prefix}/{what}"
        propose(store, key, mine, rank=self._identity.rank, world_size=among)
        wait_s = _POLL_S
        while not store.check([f"{key}/decided"]):
            if self._closed.wait(wait_s):
                return
            wait_s = min(2 * wait_s, _POLL_MAX_S)
        self._found[what] = _numbers(store.get(f"{key}/decided"))


def propose(store: Any, key: str, mine: Sequence[int], *, rank: int, world_size: int) -> None:
    """Take part in an agreement; the last of all ranks announces it under ``<key>/decided``.
    Repeating it does no harm.
    """
    for place, value in enumerate(mine):
        _raise_to(store, f"{key}/{place}", value)
    if store.add(f"{key}/rank{rank}", 1) == 1 and store.add(f"{key}/count", 1) == world_size:
        found = [store.get(f"{key}/{place}").decode() for place in range(len(mine))]
        store.set(f"{key}/decided", ",".join(found))


def job_store() -> Any:
    """The store through which the ranks of this job met."""
    return dist.distributed_c10d._get_default_store()


def _own_connection(store: Any) -> Any:
    """A client of its own: another thread may be waiting on the shared one."""
    return store.clone() if hasattr(store, "clone") else store


def _raise_to(store: Any, key: str, value: int) -> None:
    known = ""
    while True:
        found = store.compare_set(key, known, str(value)).decode()
        if found == str(value) or (found and int(found) >= value):
            return
        known = found


def _numbers(data: bytes) -> tuple[int, ...]:
    return tuple(int(part) for part in data.decode().split(","))
