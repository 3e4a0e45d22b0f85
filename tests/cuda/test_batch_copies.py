"""Many copies by one call; here the host plays the driver, with the arguments of its function."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from ckptd.cuda import batch_copies
from ckptd.cuda.batch_copies import CopyTable, DriverCopies, driver_copies

STREAM = 7


class HostDriver:
    """Copies at once, as the function of CUDA 12.8 would in the order of its stream."""

    def __init__(self, code: int = 0, fails_at: int = 0) -> None:
        self.code, self.fails_at = code, fails_at
        self.calls: list[list[int]] = []
        self.streams: list[int | None] = []
        self.threads: list[str] = []

    def __call__(
        self,
        targets: Any,
        sources: Any,
        sizes: Any,
        count: Any,
        attributes: Any,
        firsts: Any,
        num_attributes: Any,
        failed: Any,
        stream: Any,
    ) -> int:
        order = ctypes.cast(attributes, ctypes.POINTER(ctypes.c_int))[0]
        assert order == 1, "the order of the stream: with any other a snapshot may be torn"
        assert num_attributes.value == 1
        assert ctypes.cast(firsts, ctypes.POINTER(ctypes.c_size_t))[0] == 0
        self.streams.append(stream.value)
        self.threads.append(threading.current_thread().name)
        if self.code:
            ctypes.cast(failed, ctypes.POINTER(ctypes.c_size_t))[0] = self.fails_at
            return self.code
        words = ctypes.POINTER(ctypes.c_uint64)
        rows = [ctypes.cast(array, words)[: count.value] for array in (targets, sources, sizes)]
        for target, source, size in zip(*rows, strict=True):
            ctypes.memmove(target, source, size)
        self.calls.append(rows[2])
        return 0


def tensors() -> list[Tensor]:
    return [torch.randn(n) for n in (5, 1, 300)]


def test_a_part_of_the_table_goes_to_its_places_and_no_other_byte_changes() -> None:
    live, image = tensors(), torch.full((2048,), 0xA5, dtype=torch.uint8)
    table = CopyTable.of(live, [16, 40, 512])
    assert len(table) == 3
    driver = HostDriver()
    DriverCopies(driver).to_host(table, slice(0, 2), image.data_ptr(), STREAM)
    expected = torch.full((2048,), 0xA5, dtype=torch.uint8)
    expected[16:36] = live[0].view(torch.uint8)
    expected[40:44] = live[1].view(torch.uint8)
    assert torch.equal(image, expected)
    assert driver.calls == [[20, 4]]
    assert driver.streams == [STREAM]


def test_everything_comes_back_by_one_call() -> None:
    live, image = tensors(), torch.zeros(2048, dtype=torch.uint8)
    table, driver = CopyTable.of(live, [16, 40, 512]), HostDriver()
    copies = DriverCopies(driver)
    copies.to_host(table, slice(0, 3), image.data_ptr(), STREAM)
    before = [t.clone() for t in live]
    for tensor in live:
        tensor.zero_()
    copies.to_device(table, image.data_ptr(), STREAM)
    assert all(torch.equal(t, b) for t, b in zip(live, before, strict=True))
    assert len(driver.calls) == 2


def test_a_refusal_names_the_copy() -> None:
    table = CopyTable.of(tensors(), [0, 64, 128])
    with pytest.raises(
        RuntimeError, match=r"cuMemcpyBatchAsync failed with code 700 for copy 2 of 3: an earl"
    ):
        DriverCopies(HostDriver(700, fails_at=2)).to_host(table, slice(0, 3), 0, STREAM)


def test_a_machine_without_the_function_has_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver_copies.cache_clear()
    monkeypatch.setattr(batch_copies, "_LIBRARY", "libcuda-that-is-not-there.so.1")
    with caplog.at_level("INFO"):
        assert driver_copies() is None
    assert "tensors are copied by calls of torch" in caplog.text
    driver_copies.cache_clear()
    monkeypatch.setattr(batch_copies, "_LIBRARY", "libc.so.6")  # a driver that is older than the function
    assert driver_copies() is None
    driver_copies.cache_clear()
