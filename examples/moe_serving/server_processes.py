"""The processes of a server: hosts that are started, killed and started again, and clients that keep asking.

The demo and `bench.serving` are built on it.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ckptd.client.serving.device_group import ThreadDevices
from ckptd.client.serving.generation import GenerationRequest
from ckptd.client.serving.request_front import ServingClient
from ckptd.client.serving.serving_device import EngineOptions, ServingDevice
from ckptd.client.serving.weight_files import DeviceWeights, ModelFiles
from ckptd.demo.lab import MAX_RESTARTS, REPOSITORY, SHARED_CORES, Event, read_events

__all__ = ["Clients", "ServerEnded", "ServerProcesses", "tokens_per_s", "undisturbed_answers"]

TIMEOUT_S = 600.0
POLL_S = 0.01
TAIL_BYTES = 4000
MODULE = "ckptd.client.serving.tensor_parallel_server"


class ServerEnded(RuntimeError):
    """The server ended, or made no progress, when it should have gone on."""


@dataclass
class ServerProcesses:
    """A host for each device.

    Attributes:
        words: the command line of each process, behind the model.
    """

    folder: Path
    model: Path
    devices: int
    words: Sequence[str] = ()
    hosts: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    port: int = 0

    @property
    def sockets(self) -> Path:
        return self.folder / "sockets"

    def start_all(self) -> None:
        self.sockets.mkdir(parents=True, exist_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        for rank in range(self.devices):
            self.start(rank)

    def start(self, rank: int) -> None:
        count = f"{self.devices}"
        place = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{self.port}", "GLOO_SOCKET_IFNAME": "lo"}
        place |= {"CKPTD_RUNTIME_DIR": str(self.folder), "OMP_NUM_THREADS": "1"}
        path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "ckptd.host", "--reroute", "--max-restarts", MAX_RESTARTS]
        command += ["-m", MODULE, str(self.model), "--sockets", str(self.sockets)]
        command += ["--events", str(self._events), *self.words]
        with (self.folder / f"host{rank}.log").open("ab") as sink:
            self.hosts[rank] = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env={**os.environ, **SHARED_CORES, **place, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def _events(self) -> Path:
        return self.folder / "events.jsonl"

    def told(self, event: str) -> list[Event]:
        return [each for each in read_events(self._events) if each["event"] == event]

    def kill(self, rank: int) -> float:
        """SIGKILL the host; its device dies with it, as on a machine that is gone. Returns when (unix time)."""
        at = time.time()
        self.hosts[rank].send_signal(signal.SIGKILL)
        self.hosts.pop(rank).wait()
        return at

    def kill_device(self, rank: int) -> float:
        """SIGKILL the device's process alone: its host starts another one."""
        pid = [each["pid"] for each in self.told("settled") if each["rank"] == rank][-1]
        at = time.time()
        os.kill(pid, signal.SIGKILL)
        return at

    def until(self, reached: Callable[[], bool], what: str) -> None:
        """Wait for it.

        Raises:
            ServerEnded: a host ended before, or it took too long.
        """
        deadline = time.monotonic() + TIMEOUT_S
        while not reached():
            ended = [rank for rank, host in self.hosts.items() if host.poll() is not None]
            if ended or time.monotonic() > deadline:
                log = self.folder / f"host{(ended or [0])[0]}.log"
                tail = log.read_bytes()[-TAIL_BYTES:].decode(errors="replace").strip()
                raise ServerEnded(f"the server did not reach {what}; {log.name}: {tail}")
            time.sleep(POLL_S)

    def until_absent(self, ranks: Collection[int]) -> None:
        """Wait until it serves without exactly these devices."""
        wanted = sorted(ranks)
        self.until(
            lambda: bool(found := self.told("settled")) and found[-1]["absent"] == wanted,
            f"a server without {wanted or 'losses'}",
        )

    def end(self) -> None:
        """Have a client say that the server should end, and wait until all hosts have, by themselves.

        Raises:
            ServerEnded: one ended with an error, or it took too long.
        """
        ServingClient(self.sockets).stop()
        codes = {rank: host.wait(TIMEOUT_S) for rank, host in self.hosts.items()}
        if any(codes.values()):
            raise ServerEnded(f"hosts ended with {codes}")

    def stop(self) -> None:
        """End what still runs: a host ends its device on SIGTERM."""
        for host in self.hosts.values():
            host.terminate()
        for host in self.hosts.values():
            try:
                host.wait(60)
            except subprocess.TimeoutExpired:
                host.kill()
                host.wait()
        self.hosts.clear()

    @contextmanager
    def running(self) -> Iterator[ServerProcesses]:
        """Start all, and end what is left."""
        try:
            self.start_all()
            yield self
        finally:
            self.stop()


class Clients:
    """Threads that ask for one request after the other.

    Attributes:
        found: tokens by request.
        times: (unix time, request) of each token.
    """

    def __init__(self, sockets: Path, requests: Sequence[GenerationRequest], *, at_once: int) -> None:
        self.found: dict[str, list[int]] = {each.id: [] for each in requests}
        self.times: list[tuple[float, str]] = []
        self.errors: list[Exception] = []
        self._left, self._sockets = iter(requests), sockets
        self._taking = threading.Lock()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(at_once)]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        client = ServingClient(self._sockets)
        while True:
            with self._taking:
                request = next(self._left, None)
            if request is None:
                return
            try:
                for tokens in client.generate(request):
                    self.times += [(time.time(), request.id)] * len(tokens)
                    self.found[request.id] += tokens
            except (OSError, ValueError) as error:
                self.errors.append(error)
                return

    @property
    def tokens(self) -> int:
        """So far."""
        return len(self.times)

    @property
    def over(self) -> bool:
        return not any(thread.is_alive() for thread in self._threads)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(TIMEOUT_S)

    def gap_s(self, at: float) -> float:
        """From a loss to the next token that was not on its way already: the longest pause that begins near
        it.
        """
        times = [t for t, _ in list(self.times)]
        return max((b - max(a, at) for a, b in itertools.pairwise(times) if b > at), default=0.0)


def undisturbed_answers(
    model: Path, requests: Sequence[GenerationRequest], options: EngineOptions
) -> dict[str, list[int]]:
    """The answers of one device in this process, one request at a time."""
    device = ServingDevice(0, DeviceWeights(ModelFiles(model)), options)
    group = ThreadDevices([0]).seat(0)
    device.settle(group, 0)
    for request in requests:
        device.step(group, [request])
        assert device.state is not None
        while device.state.requests:
            device.step(group)
    return {name: list(tokens) for name, tokens in device.answers.items()}


def tokens_per_s(times: Sequence[tuple[float, str]], begin: float, end: float) -> float:
    """Between two moments."""
    return sum(begin <= at < end for at, _ in times) / max(end - begin, 1e-9)
