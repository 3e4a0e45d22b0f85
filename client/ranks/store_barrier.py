"""A barrier of all ranks in the job's store, before a collective: it names a rank that does not arrive, where
the collective would hang until the process group's own timeout and name nobody.

Arrival takes one word per block of ranks, and one register that is written once: by the last rank to
arrive (all are here), by a rank that knows that another is gone (`FailureDetector`), or by a rank that has
waited too long. So either all ranks go on into the collective, or all that arrive raise the same error.

For the failure detector, the ranks form a ring, and each watches the next one. A rank whose host is lost
before it arrives would otherwise be waited for until the deadline: its launcher is gone with it, the
launchers of the others see healthy workers, and no collective is under way whose connections would break.
There are two signs:

- *a connection that breaks*, and cannot be made again. Nothing is sent on it, the kernel keeps it: it
  breaks at once when the process ends, and within some ten seconds (keepalive) when the host loses power;
  a process that computes for minutes, or that a debugger stopped, still has it;
- where it never could be made (a firewall, say): *a counter in the job's store* that stands still for a
  minute.

The rank that sees a sign writes it where all waiting ranks look, and removes it when the other is back.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any

import torch.distributed as dist

from ckptd.client.log_lines import get_logger
from ckptd.client.ranks.job_link import job_link
from ckptd.cuda.quiet_threads import start_loud, waiting
from ckptd.errors import DaemonUnavailable

logger = get_logger(__name__)


STORE_ANSWER_S = 30.0


def job_store() -> Any:
    """The store by which the ranks of this job have met: that of its process group, as a rule."""
    link = job_link()
    if link is not None:
        return link.store
    return dist.distributed_c10d._get_default_store()


def own_connection(store: Any, *, answer_s: float | None = None) -> Any:
    """A connection for a thread of ours: another thread may be waiting on the shared one.

    Args:
        answer_s: after which a request fails; None: ``STORE_ANSWER_S``.
    Returns:
        The store itself, with its own timeout, if it cannot be cloned.
    """
    if not hasattr(store, "clone"):
        return store
    own = store.clone()
    own.set_timeout(datetime.timedelta(seconds=answer_s or STORE_ANSWER_S))
    return own


# As long as torch waits in a collective by default: a rank may be fetching gigabytes from storage meanwhile.
DEADLINE_S = 1800.0
_BLOCK = 48
_NAMED = 8
_POLL_S, _POLL_MAX_S = 0.002, 0.25
# Looks of all ranks together, per second; a store answers some 20,000 small requests.
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
        """End the watch: there are no more barriers."""
        self._detector.close()

    def wait(self, prefix: str, *, deadline_s: float) -> None:
        """Arrive at the next barrier, and wait until all ranks have.

        Raises:
            DaemonUnavailable: ranks did not come in time, or one is gone; or the job's store is.
        """
        self._number += 1
        store = _Answers(self._store)
        waiting = _in_background(
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
        while not wait([waiting], _GONE_S).done:
            if time.monotonic() - store.answered_s > STORE_ANSWER_S:
                raise _store_gone(f"it has not answered for {STORE_ANSWER_S:.0f} s")
        error = waiting.exception()
        if isinstance(error, RuntimeError):  # what torch's stores raise
            raise _store_gone(str(error).partition("\n")[0]) from error
        if error is not None:
            raise error
        self._detector.all_are_here()


class _Answers:
    """A store, and when it last answered: a client waits forever if the store's host has lost power."""

    def __init__(self, store: Any) -> None:
        self._store, self.answered_s = store, time.monotonic()

    def __getattr__(self, name: str) -> Any:
        asked = getattr(self._store, name)

        def ask(*args: Any) -> Any:
            found = asked(*args)
            self.answered_s = time.monotonic()
            return found

        return ask


def _in_background(work: Callable[[], None]) -> Future[None]:
    """Run something that may never end, in a thread that does not delay the exit of the process."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - raised in the thread that waits for it
            future.set_exception(error)
        else:
            future.set_result(None)

    start_loud(run, name="ckptd-barrier")
    return future


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
        # Looks that become rare while one waits, and make the wait longer by a tenth at most. (The store's
        # own `wait` writes a warning each time that it does not end.)
        with waiting():
            time.sleep(max(_POLL_S, least_s, min(_POLL_MAX_S, (now - began) / 10)))
    return str(store.get(f"{here}/verdict").decode())


def _warn_of_missing(store: Any, here: str, rank: int, world_size: int, since_s: float) -> None:
    """Log the missing ranks, on the first rank that is here."""
    missing, names = _missing(store, here, world_size)
    first = next(r for r in range(world_size) if r not in missing)
    if missing and rank == first:
        logger.warning("%s did not come yet; waited for since %.0f s", names, since_s)


def _missing(store: Any, here: str, world_size: int) -> tuple[set[int], str]:
    """The ranks that have not arrived; and the first few of them in words."""
    missing = []
    for block in range(-(-world_size // _BLOCK)):
        word = _full(block, world_size) - store.add(f"{here}/block/{block}", 0)
        missing += [block * _BLOCK + bit for bit in range(_BLOCK) if word >> bit & 1]
    names = ", ".join(map(str, missing[:_NAMED])) + (", …" if len(missing) > _NAMED else "")
    ranks = f"rank {names}" if len(missing) == 1 else f"ranks {names}"
    return set(missing), f"{ranks} of {world_size}"


def _full(block: int, world_size: int) -> int:
    return (1 << min(_BLOCK, world_size - block * _BLOCK)) - 1


def _forget(store: Any, before: str, blocks: int) -> None:
    """Remove the keys of the barrier before: all ranks have left it."""
    for block in range(blocks):
        store.delete_key(f"{before}/block/{block}")
    store.delete_key(f"{before}/blocks")
    store.delete_key(f"{before}/verdict")


_BEAT_S, _SILENT_S = 5.0, 60.0
_LOOK_S = 0.5
_CONNECT_S, _TRIES = 2.0, 2
# Broken after 3 + 3 x 2 seconds without an answer of the other kernel.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 3, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 3}


class FailureDetector:
    """This rank's part of the ring; starts at once. Needs a `TCPStore`: with another store it does nothing.

    Args:
        store: of the job; the detector makes a connection of its own.
        prefix: of the keys: the same on all ranks, and of this process group alone.
    Attributes:
        gone_key: exists while a rank is gone: which, and how it is known.
    """

    def __init__(self, store: Any, prefix: str, *, rank: int, world_size: int) -> None:
        self.gone_key = f"{prefix}/gone"
        self._prefix, self._rank, self._world_size = prefix, rank, world_size
        self._next = (rank + 1) % world_size
        self._closed, self._wake = False, threading.Event()
        self._connection: socket.socket | None = None
        self._watched_by: socket.socket | None = None
        self._reported = ""
        server = _tcp_store(store)
        if server is not None:
            start_loud(self._run, store, server, name="ckptd-rank-watch")

    def close(self) -> None:
        """End soon; the rank before this one will find this one gone."""
        self._closed = True
        self._wake.set()

    def all_are_here(self) -> None:
        """All ranks were here a moment ago: the next one can be found."""
        self._wake.set()

    def _run(self, store: Any, server: Any) -> None:
        try:
            own = own_connection(store)
            with _listener(server.host, server.port) as (host, listening):
                # A launcher may keep one store for all lives of a job: nothing of an earlier one counts.
                own.delete_key(self.gone_key)
                own.set(f"{self._prefix}/at/{self._rank}", f"{host} {listening.getsockname()[1]}")
                self._watch(own, listening)
        except Exception as error:  # noqa: BLE001 - see the next line
            # The store ends with the job, in many ways; a rank that waits at it finds that there.
            logger.debug("rank %d is not watched any more: %s", self._next, error)
        finally:
            self._drop()
            if self._watched_by is not None:
                self._watched_by.close()

    def _watch(self, store: Any, listening: socket.socket) -> None:
        beats = _Beats(store, f"{self._prefix}/beats", self._rank, self._next)
        address: tuple[str, int] | None = None
        was_there, failed = False, 0
        while not self._closed:
            if not self._is_watched(listening):
                beats.beat()
            if address is None:
                address = _address(store, f"{self._prefix}/at/{self._next}")
                if address is None:
                    self._pause(_LOOK_S)
            elif self._connection is None and not self._connect(address):
                failed += 1
                address = _address(store, f"{self._prefix}/at/{self._next}") or address
                if was_there and failed >= _TRIES:
                    self._report(store, address[0], "its connection broke")
                elif not was_there and beats.silent_s() > _SILENT_S:
                    self._report(store, address[0], f"no sign of it for {_SILENT_S:.0f} s")
                self._pause(_LOOK_S if was_there and failed < _TRIES else _BEAT_S)
            else:
                was_there, failed = True, 0
                self._report(store, "", "")
                self._wait_for_end(_BEAT_S)

    def _is_watched(self, listening: socket.socket) -> bool:
        """Whether the rank before this one has connected: then it needs no beats in the store."""
        with contextlib.suppress(BlockingIOError):
            came, _ = listening.accept()
            if self._watched_by is not None:
                self._watched_by.close()
            self._watched_by = came
        return self._watched_by is not None

    def _pause(self, most_s: float) -> None:
        with waiting():
            self._wake.wait(most_s)
        self._wake.clear()

    def _report(self, store: Any, host: str, how: str) -> None:
        """Write what all ranks should know of the next one; without ``how``, remove it: the rank is there."""
        text = f"rank {self._next} of {self._world_size} ({host}) is gone: {how}" if how else ""
        if text:
            if text != self._reported:
                logger.info("%s", text)
            store.set(self.gone_key, text)  # each time: another rank may have taken back what it said there
        elif (
            self._reported
            and store.check([self.gone_key])
            and store.get(self.gone_key).decode() == self._reported
        ):
            store.delete_key(self.gone_key)
        self._reported = text

    # -- the connection ----------------------------------------------------------------------------

    def _connect(self, address: tuple[str, int]) -> bool:
        try:
            with waiting():
                made = socket.create_connection(address, timeout=_CONNECT_S)
        except OSError as error:
            logger.debug("rank %d cannot be reached: %s", self._next, error)
            return False
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            made.setsockopt(socket.IPPROTO_TCP, option, value)
        self._connection = made
        return True

    def _wait_for_end(self, most_s: float) -> None:
        """Wait until the connection ends, and drop it; at most ``most_s``."""
        assert self._connection is not None
        poll = select.poll()  # descriptors may be above what select() takes
        poll.register(self._connection, select.POLLIN)
        with waiting():
            ended = poll.poll(most_s * 1e3)
        if not ended:
            return
        with contextlib.suppress(OSError):  # it broke: that is what is asked here
            if self._connection.recv(1):
                return
        self._drop()

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


class _Beats:
    """Counters in the store: that of this rank, and that of the rank that it watches."""

    def __init__(self, store: Any, prefix: str, mine: int, other: int) -> None:
        self._store, self._mine, self._other = store, f"{prefix}/{mine}", f"{prefix}/{other}"
        self._next_s = 0.0
        self._heard, self._heard_s = -1, time.monotonic()

    def beat(self) -> None:
        """Count on, if it is time to."""
        if time.monotonic() >= self._next_s:
            self._store.add(self._mine, 1)
            self._next_s = time.monotonic() + _BEAT_S

    def silent_s(self) -> float:
        """Seconds since the other's counter changed."""
        heard = self._store.add(self._other, 0)
        if heard != self._heard:
            self._heard, self._heard_s = heard, time.monotonic()
        return time.monotonic() - self._heard_s


@contextlib.contextmanager
def _listener(host: str, port: int) -> Iterator[tuple[str, socket.socket]]:
    """The name or address by which others reach this host, and a listening socket that does not block.

    The kernel completes connections, keeps them, and ends them with the process.
    """
    family, here = _way_to(host, port)
    # Where the store's own host has its name at a loopback address, the others know it by that name only.
    by_name = _is_loopback(here) and host != "localhost" and not _is_loopback(host)
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.bind(("" if by_name else here, 0))
        listening.listen()
        listening.setblocking(False)
        yield host if by_name else here, listening


def _way_to(host: str, port: int) -> tuple[socket.AddressFamily, str]:
    """This host's address on the route to that host, and its family."""
    failed: OSError | None = None
    for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(address)  # sends nothing: the kernel chooses the way
            except OSError as error:
                failed = error
                continue
            return family, str(probe.getsockname()[0])
    raise OSError(f"no way to {host}") from failed


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:  # a name
        return False


def _address(store: Any, key: str) -> tuple[str, int] | None:
    if not store.check([key]):
        return None
    host, port = store.get(key).decode().split()
    return host, int(port)


def _tcp_store(store: Any) -> Any:
    """The `TCPStore` under its prefixes; None if it is another kind of store."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store if isinstance(store, dist.TCPStore) else None  # type: ignore[attr-defined]
