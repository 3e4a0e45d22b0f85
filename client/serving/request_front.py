"""How requests come to a device and tokens go out: a socket of each device, and a client that tries them all.

A client connects to any device, sends one request as a line of JSON (`GenerationRequest`, and ``have``: how
many tokens it has already), and gets lines with tokens. If that device is lost it asks another one for the
rest: all devices know all requests, and a request that no survivor knows is served from the start, with the
same tokens. So a client has each token once, whatever dies.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from ckptd.client.log_lines import get_logger
from ckptd.client.serving.generation import GenerationRequest, RequestState
from ckptd.cuda.quiet_threads import start_loud, waiting

logger = get_logger(__name__)

_LINE_MAX = 32 << 20
_WAIT_S = 0.2
_CLIENTS_MAX = 256
_AGAIN_S = 0.02


class _Ask(msgspec.Struct):
    """A client's line: a request, or that the server should end."""

    request: GenerationRequest | None = None
    have: int = 0
    stop: bool = False


class _Reply(msgspec.Struct, omit_defaults=True):
    """A line for a client: further tokens, the end, or a refusal."""

    tokens: tuple[int, ...] = ()
    done: bool = False
    error: str = ""


_asks, _replies = msgspec.json.Decoder(_Ask), msgspec.json.Decoder(_Reply)


class ServingRefused(ValueError):
    """The server cannot serve a request; it says why."""


def socket_of(folder: Path, rank: int) -> Path:
    """The socket of a device."""
    return folder / f"serve-{rank}.sock"


class RequestFront:
    """The socket of one device.

    Args:
        check: raises ValueError for a request that cannot be served.
    Attributes:
        stopping: a client has asked the server to end.
    Raises:
        OSError: the socket cannot be made.
    """

    def __init__(self, path: Path, check: Callable[[GenerationRequest], None]) -> None:
        self._path, self._check = path, check
        self._wanted: dict[str, GenerationRequest] = {}
        self._found: dict[str, tuple[tuple[int, ...], bool]] = {}
        self._changed = threading.Condition()
        self._clients = threading.BoundedSemaphore(_CLIENTS_MAX)
        self.stopping = self._closed = False
        with contextlib.suppress(FileNotFoundError):
            path.unlink()  # of an earlier process of this rank
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(os.fspath(path))
        path.chmod(0o600)
        self._socket.listen(_CLIENTS_MAX)
        start_loud(self._accept, name="ckptd-front")

    # -- called by the server's loop --------------------------------------------------------------

    def inbox(self, known: Collection[str]) -> list[GenerationRequest]:
        """Requests of clients that are not known yet."""
        with self._changed:
            return [each for name, each in self._wanted.items() if name not in known]

    def publish(self, requests: Mapping[str, RequestState], answers: Mapping[str, Sequence[int]]) -> None:
        """Give clients what there is of their requests now."""
        with self._changed:
            for name in self._wanted:
                if (state := requests.get(name)) is not None:
                    self._found[name] = tuple(state.tokens), state.finished
                elif (answer := answers.get(name)) is not None:
                    self._found[name] = tuple(answer), True
            self._changed.notify_all()

    def close(self) -> None:
        """Take no further requests; clients find another device, or none."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # a close alone does not end an accept
        self._socket.close()
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        with self._changed:
            self._changed.notify_all()

    # -- in threads -------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closed:
            try:
                with waiting():
                    connection, _ = self._socket.accept()
                    self._clients.acquire()
            except OSError:
                return  # closed
            start_loud(lambda it=connection: self._serve(it), name="ckptd-client")

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, connection.makefile("rb") as lines:
                with waiting():
                    line = lines.readline(_LINE_MAX)
                self._answer(connection, line)
        except OSError as error:
            logger.info("a client has gone: %s", error)
        finally:
            self._clients.release()

    def _answer(self, connection: socket.socket, line: bytes) -> None:
        try:
            ask = _asks.decode(line)
            if ask.stop:
                self.stopping = True
                _send(connection, _Reply(done=True))
                return
            if ask.request is None:
                raise ValueError("a line has no request")
            self._check(ask.request)
        except (ValueError, msgspec.MsgspecError) as error:
            _send(connection, _Reply(error=f"{error}"))
            return
        request, sent, done = ask.request, ask.have, False
        while not done and not self._closed:
            with self._changed:
                self._wanted[request.id] = request  # again, if another client of it has left
                tokens, done = self._found.get(request.id, ((), False))
                if len(tokens) <= sent and not done:
                    with waiting():
                        self._changed.wait(_WAIT_S)
                    continue
            _send(connection, _Reply(tokens=tokens[sent:], done=done))
            sent = max(sent, len(tokens))
        with self._changed:
            self._wanted.pop(request.id, None)
            self._found.pop(request.id, None)


def _send(connection: socket.socket, reply: _Reply) -> None:
    line = msgspec.json.encode(reply) + b"\n"
    with waiting():
        connection.sendall(line)


class ServingClient:
    """Asks whichever device answers.

    Args:
        folder: with the devices' sockets.
        patience_s: for how long there may be no device at all, or no token.
    """

    def __init__(self, folder: Path, *, patience_s: float = 120.0) -> None:
        self._folder, self._patience_s = folder, patience_s

    def generate(self, request: GenerationRequest) -> Iterator[tuple[int, ...]]:
        """Tokens as they come, each once.

        Raises:
            ServingRefused: the request cannot be served.
            TimeoutError: nothing came for too long.
        """
        have, last = 0, time.monotonic()
        while True:
            for reply in self._ask(_Ask(request=request, have=have)):
                if reply.error:
                    raise ServingRefused(reply.error)
                if reply.tokens:
                    have, last = have + len(reply.tokens), time.monotonic()
                    yield reply.tokens
                if reply.done:
                    return
            if time.monotonic() - last > self._patience_s:
                raise TimeoutError(f"no token of request {request.id!r} for {self._patience_s:g} s")
            time.sleep(_AGAIN_S)

    def stop(self) -> None:
        """Ask the server to end.

        Raises:
            TimeoutError: no device answers.
        """
        until = time.monotonic() + self._patience_s
        while not any(reply.done for reply in self._ask(_Ask(stop=True))):
            if time.monotonic() > until:
                raise TimeoutError(f"no device answers at {self._folder}")
            time.sleep(_AGAIN_S)

    def _ask(self, ask: _Ask) -> Iterator[_Reply]:
        """The lines of the first device that answers, until its end or its death."""
        for path in sorted(self._folder.glob("serve-*.sock")):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(self._patience_s)
                try:
                    connection.connect(os.fspath(path))
                    connection.sendall(msgspec.json.encode(ask) + b"\n")
                    with connection.makefile("rb") as lines:
                        for line in lines:
                            if line.endswith(b"\n"):  # else its device has died while it wrote
                                yield _replies.decode(line)
                    return
                except TimeoutError:
                    return
                except OSError:
                    continue  # nobody is behind it
