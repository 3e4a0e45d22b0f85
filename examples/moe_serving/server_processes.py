"""The processes of a server: hosts that are started, killed and started again, and clients that keep asking.

The demo and `bench.serving` are built on it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from ckptd.client.serving.device_group import ThreadDevices
from ckptd.client.serving.generation import GenerationRequest
from ckptd.client.serving.request_front import ServingClient
from ckptd.client.serving.serving_device import EngineOptions, ServingDevice
from ckptd.client.serving.weight_files import DeviceWeights, ModelFiles
from ckptd.demo.lab import Event, read_events
from examples.rerouted_hosts import TIMEOUT_S, ReroutedHosts

__all__ = ["Clients", "ServerProcesses", "tokens_per_s", "undisturbed_answers"]

MODULE = "ckptd.client.serving.tensor_parallel_server"


class ServerProcesses(ReroutedHosts):
    """A host for each device.

    Args:
        words: the command line of each process, behind the model.
    """

    def __init__(self, folder: Path, model: Path, devices: int, words: Sequence[str] = ()) -> None:
        self._events = folder / "events.jsonl"
        self.sockets = folder / "sockets"
        place = ["--sockets", str(self.sockets), "--events", str(self._events)]
        super().__init__("the server", folder, devices, [MODULE, str(model), *place, *words])

    def start_all(self) -> None:
        self.sockets.mkdir(parents=True)
        super().start_all()

    def told(self, event: str) -> list[Event]:
        return [each for each in read_events(self._events) if each["event"] == event]

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
            RunEnded: one ended with an error, or it took too long.
        """
        ServingClient(self.sockets).stop()
        self.wait()


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
