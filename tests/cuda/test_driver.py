"""The driver's library, where there is one, and what a thread asks of it."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckptd.cuda import driver
from ckptd.cuda.cuda_engine import CudaEngine
from ckptd.cuda.driver import cuda_driver, ignore_captures
from tests.cuda.fake_device import pretend_a_device


class Modes:
    """Which thread has asked for which mode of captures."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.asked: dict[str, int] = {}

    def exchange(self, mode: Any) -> int:
        value = ctypes.cast(mode, ctypes.POINTER(ctypes.c_int)).contents.value
        self.asked[threading.current_thread().name] = value
        return self.code


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> Modes:
    found = Modes()
    library = SimpleNamespace(cuThreadExchangeStreamCaptureMode=found.exchange)
    monkeypatch.setattr(driver, "cuda_driver", lambda: library)
    return found


def test_the_threads_of_an_engine_let_training_capture_graphs(
    monkeypatch: pytest.MonkeyPatch, modes: Modes
) -> None:
    """And the training thread's own mode stays."""
    pretend_a_device(monkeypatch)
    CudaEngine(torch.device("cpu")).close()
    assert modes.asked == {"ckptd-issue": 2, "ckptd-copy": 2}


def test_a_refusal_is_told(modes: Modes, caplog: pytest.LogCaptureFixture) -> None:
    modes.code = 1
    ignore_captures()
    assert "a graph that is captured while snapshots are copied may fail: the driver says 1" in caplog.text


def test_a_machine_without_a_driver_has_none_and_nothing_to_ask_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda_driver.cache_clear()
    monkeypatch.setattr(driver, "_LIBRARY", "libcuda-that-is-not-there.so.1")
    with caplog.at_level("INFO"):
        assert cuda_driver() is None
        ignore_captures()
    assert "no driver of CUDA here: libcuda-that-is-not-there.so.1" in caplog.text
    cuda_driver.cache_clear()
