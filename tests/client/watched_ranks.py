"""Ranks of a gloo group that come to barriers, or do not; for ``test_failure_detector`` and
``test_store_barrier``. Their store is the test's.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn, Self

import torch.distributed as dist

from ckptd.client.identity import Identity
from ckptd.client.ranks import collectives, store_barrier
from ckptd.client.ranks.collectives import exchange
from ckptd.errors import DaemonUnavailable
from tests.forked import FORKED

__all__ = ["Ranks", "store_process"]

HOST = "127.0.0.1"
FOREVER_S = 600.0
WAIT_S = 120.0


class Ranks:
    """Real processes, each told by name what it does after a first exchange that all take part in.

    Args:
        doing: of each rank: ``comes`` to a second exchange at once, or ``late``, when it is told to; or ``unreachable``: late, and nobody can connect to it, not
            even the rank ``beside`` it, which comes.
        quick: seconds, instead of a minute, after which silence counts, of a rank or of the store.
    """

    def __init__(self, folder: Path, port: int, doing: list[str], quick: float | None = None) -> None:
        self._folder, self._number = folder, len(doing)
        self.all: list[BaseProcess] = [
            FORKED.Process(target=_rank, args=(rank, len(doing), port, what, str(folder), quick), daemon=True)
            for rank, what in enumerate(doing)
        ]

    def __enter__(self) -> Self:
        for process in self.all:
            process.start()
        self.wait_for("begun")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.all:
            process.kill()
            process.join()

    def wait_for(self, what: str, ranks: list[int] | None = None) -> None:
        """Until these ranks (default: all) have told that."""
        paths = [self._folder / f"{rank}.{what}" for rank in ranks or range(self._number)]
        deadline = time.monotonic() + WAIT_S
        while not all(path.exists() for path in paths):
            assert time.monotonic() < deadline, f"{what}: {sorted(os.listdir(self._folder))}"
            time.sleep(0.01)

    def kill(self, rank: int, how: signal.Signals = signal.SIGKILL) -> None:
        pid = self.all[rank].pid
        assert pid is not None
        os.kill(pid, how)

    def call(self) -> None:
        """The late ones may come."""
        (self._folder / "come").touch()

    def ended(self, *ranks: int) -> list[str]:
        """What each of them said in the end."""
        self.wait_for("ended", list(ranks))
        return [(self._folder / f"{rank}.ended").read_text() for rank in ranks]


def _rank(rank: int, world_size: int, port: int, what: str, folder: str, quick: float | None) -> None:
    if quick is not None:
        store_barrier._SILENT_S, store_barrier._BEAT_S = quick, quick / 8
        # The store is in the test's process: on a busy machine it may answer after seconds.
        store_barrier.STORE_ANSWER_S = max(quick, 12.0)
    if what == "unreachable":
        store_barrier._listener = _nowhere
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore(HOST, port, timeout=datetime.timedelta(seconds=30))  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    identity = Identity("job", "run", rank, world_size)
    exchange(identity, b"first")
    while what != "beside" and collectives._barrier._detector._connection is None:  # type: ignore[union-attr]
        time.sleep(0.01)
    _tell(folder, rank, "begun")
    if what not in ("comes", "beside"):
        while not Path(folder, "come").exists():
            time.sleep(0.01)
    try:
        heard = exchange(identity, bytes([rank]), deadline_s=FOREVER_S)
        said = f"heard {heard}"
    except DaemonUnavailable as error:
        said = str(error)
    _tell(folder, rank, "ended", said)
    threading.Event().wait()


def _tell(folder: str, rank: int, what: str, text: str = "") -> None:
    path = Path(folder, f"{rank}.{what}")
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


@contextlib.contextmanager
def _nowhere(host: str, port: int) -> Iterator[tuple[str, Any]]:
    """An address at which nobody listens."""
    with socket.socket() as bound:
        bound.bind((HOST, 0))
        yield HOST, _Nowhere(bound)


class _Nowhere:
    def __init__(self, bound: socket.socket) -> None:
        self.getsockname = bound.getsockname

    def accept(self) -> NoReturn:
        raise BlockingIOError


def _serve(ports: Any) -> None:
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    ports.put(store.port)
    threading.Event().wait()


@contextlib.contextmanager
def store_process() -> Iterator[tuple[BaseProcess, int]]:
    """A process that is a job's store, and its port."""
    ports = FORKED.Queue()
    process = FORKED.Process(target=_serve, args=(ports,), daemon=True)
    process.start()
    try:
        yield process, ports.get(timeout=WAIT_S)
    finally:
        process.kill()
        process.join()
