"""A barrier of all ranks in the job's store, before a collective: a rank that does not come is named,
where the collective would hang until the process group's own timeout and name nobody.

Arrival takes one word per block of ranks, and one register that is written once: by the last rank
to arrive (all are here), by a rank that knows that another is gone (`failure_detector`), or by a
rank that has waited too long. So either all ranks go on into the collective, or all that come raise
the same error.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ckptd.client.log_lines import get_logger
from ckptd.client.ranks import store_connection
from ckptd.client.ranks.failure_detector import FailureDetector
from ckptd.client.ranks.store_connection import job_store, own_connection
from ckptd.errors import DaemonUnavailable

__all__ = ["DEADLINE_S", "StoreBarrier", "arrive", "wait_at"]

logger = get_logger(__name__)

# As long as torch waits in a collective by default: a rank may be bringing gigabytes from storage meanwhile.
DEADLINE_S = 1800.0
_BLOCK = 48
_NAMED = 8
_POLL_S, _POLL_MAX_S = 0.002, 0.25
# Ranks that look at the store, per second and all together; it answers some 20,000 small requests.
_LOOKS_PER_S = 8_000
# Between looks for whether a rank is gone; until the log names the missing ranks, and does again.
_GONE_S, _WARN_S, _WARN_AGAIN_S = 1.0, 60.0, 300.0


class StoreBarrier:
    """The barriers of one process group: each has keys of its own.

    Args:
        group: the default process group, of all ranks.
    """

    _made = 0

    def __init__(self, group: Any) -> None:
        StoreBarrier._made += 1  # a new group begins anew, on all of its ranks
        self._group, self._number = weakref.ref(group), 0
        # Its place in the process group, whoever the user says this rank is.
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._store = own_connection(job_store())
        self._detector = FailureDetector(
            job_store(),
            f"ckptd/ranks/{StoreBarrier._made}",
            rank=self._rank,
            world_size=self._world_size,
        )

    def is_of(self, group: Any) -> bool:
        """Whether it is this group's."""
        return self._group() is group

    def close(self) -> None:
        """There are no more barriers: nobody is watched any more."""
        self._detector.close()

    def wait(self, prefix: str, *, deadline_s: float) -> None:
        """Arrive at the next barrier, and wait until all ranks have.

        Raises:
            DaemonUnavailable: ranks did not come in time, or one is gone; or the job's store is.
        """
        self._number += 1
        store = _Answers(self._store)
        waiting = _BackgroundCall(
            lambda: wait_at(
                store,
                prefix,
                self._number,
                rank=self._rank,
                world_size=self._world_size,
                deadline_s=deadline_s,
                gone_key=self._detector.gone_key,
            )
        )
        while not waiting.over.wait(_GONE_S):
            if time.monotonic() - store.answered_s > store_connection.STORE_ANSWER_S:
                raise _store_gone(f"it has not answered for {store_connection.STORE_ANSWER_S:.0f} s")
        if isinstance(waiting.error, RuntimeError):  # what torch's stores raise
            raise _store_gone(str(waiting.error).partition("\n")[0]) from waiting.error
        if waiting.error is not None:
            raise waiting.error
        self._detector.all_are_here()


class _Answers:
    """A store, and when it last answered: a client waits without end where the store's host has
    lost power.
    """

    def __init__(self, store: Any) -> None:
        self._store, self.answered_s = store, time.monotonic()

    def __getattr__(self, name: str) -> Any:
        asked = getattr(self._store, name)

        def ask(*args: Any) -> Any:
            found = asked(*args)
            self.answered_s = time.monotonic()
            return found

        return ask


class _BackgroundCall:
    """Something that may never end, in a thread that nobody waits for at exit."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.over = threading.Event()
        self._work = work
        self.error: Exception | None = None
        threading.Thread(target=self._run, name="ckptd-barrier", daemon=True).start()

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 - raised in the thread that waits for it
            self.error = error
        finally:
            self.over.set()


def _store_gone(why: str) -> DaemonUnavailable:
    return DaemonUnavailable(
        f"the job's store is gone: {why}",
        operation="wait for the other ranks",
        hint="it is in the first rank, or in its launcher: is their host lost? Start the job again",
    )


def wait_at(
    store: Any,
    prefix: str,
    number: int,
    *,
    rank: int,
    world_size: int,
    deadline_s: float,
    gone_key: str = "",
) -> None:
    """Arrive at barrier ``number``, and wait until all ranks have.

    Args:
        gone_key: the key that is written while a rank is gone.
    Raises:
        DaemonUnavailable: ranks did not come in time, or one is gone.
    """
    arrive(store, prefix, number, rank=rank, world_size=world_size)
    verdict = _verdict(store, f"{prefix}/{number}", rank, world_size, deadline_s, gone_key)
    if verdict != "all":
        raise DaemonUnavailable(
            verdict,
            operation="wait for the other ranks",
            hint="their logs say why; start the job again when it is mended",
        )


def arrive(store: Any, prefix: str, number: int, *, rank: int, world_size: int) -> None:
    """Count this rank at barrier ``number``, once; the last one writes that all are here."""
    here = f"{prefix}/{number}"
    block, bit = divmod(rank, _BLOCK)
    # A sum of different powers of two: it shows who has come.
    if store.add(f"{here}/block/{block}", 1 << bit) == _full(block, world_size):
        blocks = -(-world_size // _BLOCK)
        if store.add(f"{here}/blocks", 1) == blocks:
            store.compare_set(f"{here}/verdict", "", "all")
            _forget(store, f"{prefix}/{number - 1}", blocks)


def _verdict(store: Any, here: str, rank: int, world_size: int, deadline_s: float, gone_key: str) -> str:
    began = time.monotonic()
    least_s = world_size / _LOOKS_PER_S
    wait_s = max(_POLL_S, least_s)
    gone_s, warn_s = began + _GONE_S, began + _WARN_S
    while not store.check([f"{here}/verdict"]):
        now = time.monotonic()
        if now > began + deadline_s:
            late = f"{_missing(store, here, world_size)[1]} did not come within {deadline_s:.0f} s"
            return str(store.compare_set(f"{here}/verdict", "", late).decode())
        if gone_key and now > gone_s:
            gone_s = now + max(_GONE_S, least_s)
            if store.check([gone_key]):
                gone = store.get(gone_key)
                return str(store.compare_set(f"{here}/verdict", "", gone).decode())
        if now > warn_s:
            warn_s = now + _WARN_AGAIN_S
            _warn_of_missing(store, here, rank, world_size, now - began)
        time.sleep(wait_s)
        wait_s = max(min(2 * wait_s, _POLL_MAX_S), least_s)
    return str(store.get(f"{here}/verdict").decode())


def _warn_of_missing(store: Any, here: str, rank: int, world_size: int, since_s: float) -> None:
    """In the log of the first rank that is here."""
    missing, names = _missing(store, here, world_size)
    first = next(r for r in range(world_size) if r not in missing)
    if missing and rank == first:
        logger.warning("%s did not come yet; waited for since %.0f s", names, since_s)


def _missing(store: Any, here: str, world_size: int) -> tuple[set[int], str]:
    """Who has not come; and the first few of them in words."""
    missing = [
        block * _BLOCK + bit
        for block in range(-(-world_size // _BLOCK))
        for bit in _bits(_full(block, world_size) - store.add(f"{here}/block/{block}", 0))
    ]
    names = ", ".join(map(str, missing[:_NAMED])) + (", …" if len(missing) > _NAMED else "")
    ranks = f"rank {names}" if len(missing) == 1 else f"ranks {names}"
    return set(missing), f"{ranks} of {world_size}"


def _full(block: int, world_size: int) -> int:
    return (1 << min(_BLOCK, world_size - block * _BLOCK)) - 1


def _bits(word: int) -> list[int]:
    return [bit for bit in range(_BLOCK) if word >> bit & 1]


def _forget(store: Any, before: str, blocks: int) -> None:
    """All have come here, hence left the barrier before."""
    for block in range(blocks):
        store.delete_key(f"{before}/block/{block}")
    store.delete_key(f"{before}/blocks")
    store.delete_key(f"{before}/verdict")
