"""A CUDA device played by the host: what device code calls of torch, in order and at once.

It finds calls that do not fit each other, copies that go wrong, events that are read before they are recorded.
It says nothing about a device's concurrency; tests marked ``gpu`` do.
"""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

__all__ = ["pretend_a_device"]


class Event:
    def __init__(self, *, enable_timing: bool = False, blocking: bool = False) -> None:
        self._timed = enable_timing
        self._recorded_s: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        assert stream is None or isinstance(stream, Stream)
        self._recorded_s = time.perf_counter()

    def query(self) -> bool:
        return self._recorded_s is not None

    def synchronize(self) -> None:
        assert self._recorded_s is not None, "waited for an event that nobody recorded"

    def elapsed_time(self, later: Event) -> float:
        """Milliseconds."""
        assert self._timed, "the first of both events keeps no time"
        assert later._timed, "the second of both events keeps no time"
        assert self._recorded_s is not None
        assert later._recorded_s is not None
        return 1e3 * (later._recorded_s - self._recorded_s)


class Stream:
    cuda_stream = 1

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.priority = priority

    def wait_stream(self, other: Stream) -> None:
        assert isinstance(other, Stream)

    def wait_event(self, event: Event) -> None:
        assert event.query(), "no later work waits for an event that is recorded afterwards"

    def record_event(self, event: Event | None = None) -> Event:
        found = event or Event()
        found.record(self)
        return found

    def synchronize(self) -> None:
        """Everything has happened already."""


def pretend_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the end of the test ``torch.cuda`` has a device, on which the host does all work."""
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    stream = Stream()
    calls: dict[str, Any] = {
        "Event": Event,
        "Stream": Stream,
        "_sleep": lambda cycles: time.sleep(0),
        "cudart": lambda: runtime,
        "current_stream": lambda device=None: stream,
        "get_device_name": lambda device=0: "the host",
        "stream": lambda side: contextlib.nullcontext(),
        "synchronize": lambda device=None: None,
    }
    for name, call in calls.items():
        monkeypatch.setattr(torch.cuda, name, call)
