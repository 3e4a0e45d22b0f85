"""What a short-lived child of a host does in the job's store, because only torch speaks the store's protocol.

The job's store is that at ``MASTER_ADDR:MASTER_PORT``: torchrun's, or the one that the trainer of rank 0
makes without torchrun; then the child waits until it is there. The host of rank 0 has a child set one key;
each other host has one read it.

The child is forked from the zygote (`run_errand`), or, where there is none, started with
``python -m ckptd.host.job_store <descriptor>``. It reads the request from its socket, as a line of JSON, and
answers by another, so that a token is in nobody's command line.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ckptd.host.host_loop import HostLoop
from ckptd.host.host_options import HostOptions
from ckptd.host.process_control import spawn
from ckptd.host.zygotes.zygote_link import ZygoteLink

_LINE_MAX = 64 << 10
_LISTENS_YET_S = 0.1


def run_errand(channel: socket.socket) -> None:
    """Do what the host asks for, in a process of its own.

    Requests: ``{"address", "port", "key", "within_s"}``, and ``"value"`` if it is to be set; else it is read,
    once it is there. Answers: ``{"value": …}`` or ``{"error": …}``.
    """
    with channel, channel.makefile("rw") as lines:
        request = json.loads(lines.readline())
        try:
            answer = {"value": _done(request)}
        except Exception as error:  # noqa: BLE001 - torch's classes depend on its version
            answer = {"error": str(error).strip().split("\n")[0] or type(error).__name__}
        lines.write(json.dumps(answer) + "\n")


def _done(request: dict[str, Any]) -> str:
    distributed: Any = importlib.import_module("torch.distributed")
    _wait_for(request["address"], request["port"], request["within_s"])
    store = distributed.TCPStore(
        request["address"],
        request["port"],
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=request["within_s"]),
    )
    if "value" in request:
        store.set(request["key"], request["value"])
        return str(request["value"])
    return str(store.get(request["key"]).decode())


def _wait_for(address: str, port: int, within_s: float) -> None:
    """Until somebody listens there; torch's client would look again after ever longer times."""
    until = time.monotonic() + within_s
    while True:
        try:
            socket.create_connection(
                (address, port), timeout=max(_LISTENS_YET_S, until - time.monotonic())
            ).close()
            return
        except OSError:
            if time.monotonic() > until:
                raise
        time.sleep(_LISTENS_YET_S)


def store_request(options: HostOptions, until_s: float, value: str | None = None) -> dict[str, Any]:
    """Publish where the coordinator is (``value``), or read it.

    The key has the same name in each start of the job: torchrun's agents count restarts each for themselves,
    and nothing else in the environment tells one start from another. So what is read may be of an earlier
    start: then nobody listens there any more, or who does is closed, and it is read again.

    Args:
        until_s: by `time.monotonic`.
    """
    address, port = options.store
    request = {
        "address": address,
        "port": port,
        "key": f"ckptd.host/{options.run_id}/{options.world_size}",
        "within_s": max(0.1, until_s - time.monotonic()),
    }
    return request if value is None else request | {"value": value}


class StoreErrand:
    """The host's side: one request, one answer.

    Args:
        zygote: from which the child is forked, if it is ready; else an interpreter is started.
        done: called once with the answer, which has an ``error`` if the child has gone without one.
    Raises:
        OSError: no process could be made.
    """

    def __init__(
        self,
        loop: HostLoop,
        zygote: ZygoteLink | None,
        request: dict[str, Any],
        done: Callable[[dict[str, Any]], None],
    ) -> None:
        self._loop, self._done = loop, done
        self._channel, theirs = socket.socketpair()
        self._received = b""
        with theirs:
            self._channel.send(json.dumps(request).encode() + b"\n")
            if zygote is not None and zygote.ready:
                zygote.fork_errand(theirs.fileno())
            else:
                command = [sys.executable, "-m", "ckptd.host.job_store", str(theirs.fileno())]
                spawn(command, os.environ, own_session=True, keep=[theirs.fileno()])
        self._channel.setblocking(False)
        loop.watch(self._channel, self._on_channel)

    def _on_channel(self) -> None:
        answer = self._receive()
        if answer is not None:
            self.close()
            self._done(answer)

    def _receive(self) -> dict[str, Any] | None:
        try:
            data = self._channel.recv(_LINE_MAX)
        except BlockingIOError:
            return None
        except OSError as error:
            return {"error": str(error)}
        self._received += data
        if self._received.endswith(b"\n"):
            answer: dict[str, Any] = json.loads(self._received)
            return answer
        return None if data else {"error": "the process that asks the job's store has ended"}

    def close(self) -> None:
        """Ask no further; the child ends by itself, or with the host."""
        self._loop.forget(self._channel)
        self._channel.close()


def main() -> None:
    """Without a zygote."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    run_errand(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
