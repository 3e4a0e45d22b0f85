"""The kernel that copies to the host: its tiles, its launch, and its source, which the host plays here."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ckptd.cuda import store_kernel as module
from ckptd.cuda.store_kernel import StoreKernel, Tiles, store_kernel
from tests.cuda.host_kernel import HostLaunch

SOURCES = Path(module.__file__).parent / "csrc"
HOST = torch.device("cpu")
STREAM = 7
TILE = 64 << 10


def tensors() -> list[Tensor]:
    return [torch.randn(n) for n in (5, 1, 300)]


def test_tiles_are_parts_of_tensors_at_their_places() -> None:
    large = torch.zeros(TILE // 4 + 3)
    small = torch.zeros(2)
    rows = Tiles.of([large, small], [64, 1 << 20], HOST).rows.tolist()
    assert rows == [
        [large.data_ptr(), 64, TILE],
        [large.data_ptr() + TILE, 64 + TILE, 12],
        [small.data_ptr(), 1 << 20, 8],
    ]
    assert len(Tiles.of([], [], HOST)) == 0


def test_a_launch_brings_all_tiles_and_no_other_byte_changes() -> None:
    live, image = tensors(), torch.full((2048,), 0xA5, dtype=torch.uint8)
    launch = HostLaunch()
    kernel = StoreKernel(launch, ctypes.c_void_p(1))
    kernel.store(Tiles.of(live, [16, 40, 512], HOST), image.data_ptr(), STREAM)
    expected = torch.full((2048,), 0xA5, dtype=torch.uint8)
    for tensor, place in zip(live, (16, 40, 512), strict=True):
        raw = tensor.view(torch.uint8)
        expected[place : place + len(raw)] = raw
    assert torch.equal(image, expected)
    assert (launch.sizes, launch.streams) == ([[20, 4, 1200]], [STREAM])


def test_there_are_no_more_blocks_than_tiles_and_no_launch_for_nothing() -> None:
    launch = HostLaunch()
    kernel = StoreKernel(launch, ctypes.c_void_p(1))
    image = torch.zeros(8 * TILE, dtype=torch.uint8)
    source = torch.zeros(2 * TILE)
    for size in (TILE, 2 * TILE, 8 * TILE, 0):
        kernel.store(Tiles.of([source[: size // 4]], [0], HOST), image.data_ptr(), STREAM)
    assert launch.grids == [(1, 1, 1), (2, 1, 1), (4, 1, 1)]


def test_a_refused_launch_is_an_error_with_its_code() -> None:
    tiles = Tiles.of(tensors(), [0, 64, 128], HOST)
    with pytest.raises(RuntimeError, match="could not be launched: code 700"):
        StoreKernel(HostLaunch(700), ctypes.c_void_p(1)).store(tiles, 0, STREAM)


class Driver:
    """Takes the kernel's text, or refuses it."""

    def __init__(self, code: int, *, host_pointers: int = 1) -> None:
        self._code, self._host_pointers = code, host_pointers
        self.cuLaunchKernel = HostLaunch()
        self.text = b""

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:
        assert (attribute, device) == (91, 0)
        ctypes.cast(value, ctypes.POINTER(ctypes.c_int))[0] = self._host_pointers
        return 0

    def cuModuleLoadData(self, module: object, text: bytes) -> int:
        self.text = text
        return self._code

    def cuModuleGetFunction(self, function: object, module: object, name: bytes) -> int:
        assert name == b"ckptd_store"
        return 0


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Driver | None], StoreKernel | None]]:
    def kernel_of(driver: Driver | None) -> StoreKernel | None:
        store_kernel.cache_clear()
        monkeypatch.setattr(module, "cuda_driver", lambda: driver)
        return store_kernel(0)

    yield kernel_of
    store_kernel.cache_clear()


def test_the_driver_compiles_the_kernel_that_is_in_the_package(
    compiled: Callable[[Driver | None], StoreKernel | None], caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(0)
    assert compiled(driver) is not None
    assert driver.text == (SOURCES / "store_kernel.ptx").read_bytes() + b"\0"
    assert compiled(None) is None
    with caplog.at_level("INFO"):
        assert compiled(Driver(222)) is None
        assert compiled(Driver(0, host_pointers=0)) is None
    assert "device 0: no kernel copies to the host: the driver refuses it with code 222" in caplog.text
    assert "device 0: no kernel copies to the host: it cannot use the host's addresses" in caplog.text


def test_what_the_driver_compiles_was_made_of_the_source() -> None:
    """`make kernel` makes it anew; any device from compute capability 7.0 on takes it, with any driver that knows
    PTX 7.0 (CUDA 11).
    """
    text = (SOURCES / "store_kernel.ptx").read_text()
    digest = hashlib.sha256((SOURCES / "store_kernel.cu").read_bytes()).hexdigest()
    assert text.splitlines()[0] == f"// sha256 of store_kernel.cu: {digest}"
    assert ".version 7.0\n.target sm_70\n" in text
    assert ".visible .entry ckptd_store(" in text


_PLAYED = """
#include <cstdint>
struct Three { unsigned int x; };
static Three blockIdx, blockDim, gridDim, threadIdx;
struct alignas(16) uint4 { unsigned int x, y, z, w; };
#define __device__
#define __forceinline__ inline
#define __global__
#define __restrict__
#include "store_kernel.cu"
extern "C" void play(const Tile* tiles, unsigned int count, unsigned char* image, unsigned int blocks) {
    gridDim.x = blocks;
    blockDim.x = 96;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++) ckptd_store(tiles, count, image);
}
"""


def test_the_source_copies_every_byte_of_any_alignment(tmp_path: Path) -> None:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler here, which plays the device")
    program, library = tmp_path / "play.cpp", tmp_path / "play.so"
    program.write_text(_PLAYED)
    command = [compiler, "-O1", "-shared", "-fPIC", f"-I{SOURCES}", "-o", str(library), str(program)]
    subprocess.run(command, check=True, timeout=300)
    play = ctypes.CDLL(str(library)).play
    source = torch.randint(0, 256, (1 << 16,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    image, expected = (torch.full((1 << 20,), 0xA5, dtype=torch.uint8) for _ in range(2))
    rows, at = [], 0
    for number, size in enumerate((1, 3, 16, 4096, 96 * 64, 96 * 64 + 13, 5000, 24_000, 24_001, 0)):
        for begin in (0, 16, 4, 1):
            at += 64 + (number + begin) % 3 * 4
            rows.append([source.data_ptr() + begin, at, size])
            expected[at : at + size] = source[begin : begin + size]
            at += size
    tiles = torch.tensor(rows)
    for blocks in (1, 4):
        image.fill_(0xA5)
        play(ctypes.c_void_p(tiles.data_ptr()), len(rows), ctypes.c_void_p(image.data_ptr()), blocks)
        assert torch.equal(image, expected)
