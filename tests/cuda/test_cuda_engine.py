"""What a list of copies becomes; with a pack in host memory, where tensors of the host play those
of a device.
"""

from __future__ import annotations

import ctypes
import mmap
import queue
import threading
import time

import pytest
import torch
from torch import Tensor

from ckptd.cuda import cuda_engine
from ckptd.cuda.copy_plan import DEFAULT_PLAN, H100_CURVE, choose_copy_plan
from ckptd.cuda.cuda_engine import CopyTransfers, CudaEngine, describe_copies, plan_transfers
from ckptd.cuda.engine import CopyItem, CopyList, HostMemory
from ckptd.cuda.store_kernel import StoreKernel
from tests.cuda import fake_device
from tests.cuda.fake_device import pretend_a_device
from tests.cuda.host_kernel import HostLaunch

SIZE = 1 << 16


def item(tensor: Tensor, offset: int, dtype: torch.dtype | None = None) -> CopyItem:
    wanted = dtype or tensor.dtype
    return CopyItem(tensor, None, None, wanted, offset, tensor.numel() * wanted.itemsize)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def plan(items: list[CopyItem], *, pack_bytes: int = 4096, small_bytes: int = 256) -> CopyTransfers:
    return plan_transfers(items, torch.empty(pack_bytes, dtype=torch.uint8), small_bytes=small_bytes)


def through(items: list[CopyItem], transfers: CopyTransfers) -> Tensor:
    """The image after ``send``; checks every byte of it, and that ``receive`` brings the tensors back."""
    image = torch.full((SIZE,), 0xA5, dtype=torch.uint8)
    transfers.send(image)
    expected = torch.full((SIZE,), 0xA5, dtype=torch.uint8)
    for i in items:
        raw = i.view().detach().to(i.dtype).contiguous().reshape(-1).view(torch.uint8)
        expected[i.offset : i.offset + i.nbytes] = raw
    assert torch.equal(image, expected)
    before = [i.view().detach().to(i.dtype).to(i.tensor.dtype) for i in items]
    for i in items:
        i.tensor.detach().zero_()
    transfers.receive(image)
    assert all(torch.equal(i.view(), b) for i, b in zip(items, before, strict=True))
    return image


def test_large_dense_tensors_go_directly_and_small_ones_of_a_run_together() -> None:
    items = [
        item(random(128), 0),
        item(random(3), 512),
        item(random(5), 524),
        item(random(100), 1024),
    ]
    found = plan(items)
    assert [t.numel() for t in found.direct] == [512, 400]
    assert [(p.offset, p.nbytes, len(p.tensors)) for p in found.packs] == [(512, 32, 2)]
    through(items, found)


def test_large_tensors_make_way_for_the_copies_of_others() -> None:
    """At most the pack's length at a stretch, whether of one tensor or of several."""
    items = [item(random(n), 16_384 * i) for i, n in enumerate((3000, 100, 200, 4000))]
    found = plan(items, pack_bytes=1024)
    lengths = [sum(t.numel() for t in found.direct[part]) for part in found.stretches]
    assert sum(lengths) == 4 * 7300
    assert max(lengths) == 1024
    assert len(found.stretches) == 30
    through(items, found)


def test_a_gap_ends_a_run() -> None:
    items = [item(random(3), at) for at in (0, 12, 28, 40)]
    assert [(p.offset, p.nbytes) for p in plan(items).packs] == [(0, 24), (28, 24)]
    through(items, plan(items))


def test_a_small_tensor_without_neighbours_needs_no_pack() -> None:
    """Unless it is cast, or has gaps."""
    alone = [item(random(3), 0), item(random(100), 1024), item(random(5), 2048)]
    found = plan(alone)
    assert [t.numel() for t in found.direct] == [12, 400, 20]
    assert not found.packs
    through(alone, found)
    others = [item(random(3), 0, torch.bfloat16), item(random(8, 2).t(), 1024)]
    found = plan(others)
    assert [p.offset for p in found.packs] == [0, 1024]
    assert not found.direct
    through(others, found)


@pytest.mark.parametrize("offset", [0, 4, 60, 100])
def test_a_run_that_does_not_begin_at_a_multiple_of_the_packs_alignment(offset: int) -> None:
    items = [item(random(3, dtype=torch.float64), offset + 4 & ~7), item(random(1), 512)]
    through(items, plan(items))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "tensor",
    [
        random(3000),
        random(40, 75).t(),
        random(1, 5000),
        random(5000, 1)[:, 0],
        random(3, 40, 30).mT,
    ],
    ids=["flat", "transposed", "one_row", "column", "batch_of_transposed"],
)
def test_what_is_larger_than_the_pack_goes_through_it_in_parts(tensor: Tensor, dtype: torch.dtype) -> None:
    items = [item(tensor.clone(memory_format=torch.preserve_format), 64, dtype)]
    found = plan(items, pack_bytes=1024, small_bytes=1 << 20)
    parts = [p.nbytes for p in found.packs] + [t.numel() for t in found.direct]
    assert len(parts) > 4
    assert all(size <= 1024 - 64 for size in parts)
    assert not (found.packs and found.direct)
    through(items, found)


def test_rows_of_a_tensor() -> None:
    tensor = random(10, 64)
    for cast in (torch.float32, torch.float16):
        rows = CopyItem(tensor, 2, 5, cast, 128, 3 * 64 * cast.itemsize)
        untouched = tensor[5:].clone()
        found = plan([rows])
        assert bool(found.direct) is (cast is torch.float32)
        image = torch.zeros(SIZE, dtype=torch.uint8)
        found.send(image)
        assert torch.equal(image[128 : 128 + rows.nbytes].view(cast).view(3, 64), tensor[2:5].to(cast))
        tensor[2:5] = 0
        found.receive(image)
        assert torch.equal(tensor[2:5].to(cast), image[128 : 128 + rows.nbytes].view(cast).view(3, 64))
        assert torch.equal(tensor[5:], untouched)


def test_tensors_of_another_device_are_copied_by_themselves() -> None:
    found = plan_transfers([item(random(5), 0)], torch.empty(4096, dtype=torch.uint8, device="meta"))
    assert len(found.host) == 1
    assert not found.packs
    image = torch.zeros(SIZE, dtype=torch.uint8)
    found.send(image)
    assert torch.equal(image[:20].view(torch.float32), random(5))


def test_the_order_does_not_matter_and_nothing_is_a_list_of_transfers() -> None:
    items = [item(random(n + 1), 512 * n) for n in (3, 0, 2, 1)]
    through(items, plan(items))
    assert not plan([]).packs
    empty = item(random(0, 3), 64)
    through([empty], plan([empty]))


def test_wrong_items_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(3, 4\) of torch.float32 are not 8 bytes"):
        plan([CopyItem(random(3, 4), None, None, torch.float32, 0, 8)])
    with pytest.raises(ValueError, match="two items overlap at byte 256"):
        plan([item(random(128), 0), item(random(128), 256)])


def test_what_was_measured_is_told_beside_what_the_plan_predicts() -> None:
    sizes = [4 << 20] * 1000
    line = describe_copies(DEFAULT_PLAN, sizes, 0.1, 0.012)
    assert line.startswith(
        "a snapshot of 1000 tensors, 4.19 GB: 100.0 ms of copying and 12.00 ms to issue it, predicted 80.5 and "
        "9.04 ms; NVIDIA H100 80GB HBM3: tensors are direct from 4096 KiB on"
    )
    assert describe_copies(None, sizes, 0.1, 0.001) == (
        "a snapshot of 1000 tensors, 4.19 GB, by a kernel that stores into host memory: 100.0 ms of copying and "
        "1.00 ms to issue it"
    )


def test_an_engine_compares_its_plan_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For a list that is handed over again: the first time its transfers are planned, too. The device is played
    by the host.
    """
    pretend_a_device(monkeypatch)
    engine = CudaEngine(torch.device("cpu"), DEFAULT_PLAN)
    memory = HostMemory(memoryview(mmap.mmap(-1, SIZE)))
    engine.register(memory, [(0, SIZE)])
    kept = CopyList([item(random(3000), 0), item(random(100), 16_384)])
    other = [item(random(10), 0)]
    with caplog.at_level("INFO", logger="ckptd.cuda.cuda_engine"):
        for items in (kept, other, kept, kept, kept):
            engine.begin(items, memory, 0, lambda error: None, lambda: [item(random(7), 32_768)])
            engine.wait()
        engine.close()  # its thread has logged by then
    for each in kept:
        assert torch.equal(memory.view(each.offset, each.nbytes, torch.float32, (-1,)), each.tensor)
    (line,) = [r.message for r in caplog.records if "predicted" in r.message]
    assert line.startswith("a snapshot of 3 tensors, 0.00 GB: "), "the late one is counted"


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> HostLaunch:
    """A device and its driver, which compiles and launches the kernel, played by the host."""
    pretend_a_device(monkeypatch)
    launch = HostLaunch()
    kernel = StoreKernel(launch, ctypes.c_void_p(1))
    monkeypatch.setattr(cuda_engine, "store_kernel", lambda number: kernel)
    return launch


def test_the_kernel_sends_dense_tensors_of_any_size(launches: HostLaunch) -> None:
    """By one launch, not in the training thread; a list that comes once, or memory that is not registered, is sent
    by torch.
    """
    engine = CudaEngine(torch.device("cpu"))
    size = 4 << 20
    memory = HostMemory(memoryview(mmap.mmap(-1, size)))
    items = CopyList([item(random(700_000), 64), item(random(100), 3 << 20), item(random(3), 3_200_000)])
    cast, once = item(random(7), 3_250_000, torch.bfloat16), [item(random(4), 3_300_012)]
    items.append(cast)
    errors: list[BaseException | None] = []
    engine.begin(items, memory, 0, errors.append)
    engine.wait()
    engine.release(memory)
    assert not launches.sizes
    engine.register(memory, [(0, size)])
    memory.tensor.zero_()
    engine.begin(items, memory, 0, errors.append, lambda: once)
    engine.wait()
    tile = 64 << 10
    assert launches.sizes == [[*[tile] * 42, 2_800_000 - 42 * tile, 400, 12]]
    assert launches.threads == ["ckptd-issue"]
    for each in (*items, *once):
        there = memory.view(each.offset, each.nbytes, each.dtype, (-1,))
        assert torch.equal(there, each.tensor.to(each.dtype))
    before = [i.tensor.clone() for i in items[:3]]
    for i in items[:3]:
        i.tensor.zero_()
    engine.restore(items, memory, 0)
    assert all(torch.equal(i.tensor, b) for i, b in zip(items[:3], before, strict=True))
    engine.close()
    assert errors == [None, None]


def test_a_copy_that_the_driver_refuses_is_reported_and_the_next_one_works(launches: HostLaunch) -> None:
    engine = CudaEngine(torch.device("cpu"))
    memory = HostMemory(memoryview(mmap.mmap(-1, SIZE)))
    engine.register(memory, [(0, SIZE)])
    items = CopyList([item(random(1000), 0)])
    errors: list[BaseException | None] = []
    launches.code = 700
    engine.begin(items, memory, 0, errors.append)
    engine.wait()
    launches.code = 0
    engine.begin(items, memory, 0, errors.append)
    engine.wait()
    engine.close()
    assert "could not be launched: code 700" in str(errors[0])
    assert errors[1:] == [None]
    assert torch.equal(memory.view(0, 4000, torch.float32, (-1,)), items[0].tensor)


def test_an_event_that_cannot_be_recorded_is_reported(
    launches: HostLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device with an error: the slot must not stay claimed, and the trainer must not wait."""

    class Broken(fake_device.Event):
        def __init__(self, *, enable_timing: bool = False, blocking: bool = False) -> None:
            super().__init__(enable_timing=enable_timing, blocking=blocking)
            self._breaks = blocking

        def record(self, stream: fake_device.Stream | None = None) -> None:
            if self._breaks:
                raise RuntimeError("the device has an error")
            super().record(stream)

    engine = CudaEngine(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "Event", Broken)
    memory = HostMemory(memoryview(mmap.mmap(-1, SIZE)))
    reported = queue.SimpleQueue[BaseException | None]()
    engine.begin(CopyList([item(random(10), 0)]), memory, 0, reported.put)
    assert "the device has an error" in str(reported.get(timeout=60))
    engine._issued()
    engine.close()
    assert reported.empty()


def test_the_sources_are_those_of_the_moment_of_the_call(launches: HostLaunch) -> None:
    """Though training gives a tensor other memory before its turn comes."""
    engine = CudaEngine(torch.device("cpu"))
    memory = HostMemory(memoryview(mmap.mmap(-1, SIZE)))
    engine.register(memory, [(0, SIZE)])
    tensor = random(1000)
    expected, goes_on = tensor.clone(), threading.Event()

    def late() -> list[CopyItem]:
        assert goes_on.wait(60)
        return []

    engine.begin(CopyList([item(tensor, 0)]), memory, 0, lambda error: None, late)
    tensor.data = torch.zeros(1000)
    goes_on.set()
    engine.wait()
    engine.close()
    assert torch.equal(memory.view(0, 4000, torch.float32, (-1,)), expected)


def test_what_is_copied_at_once_is_there_before_the_training_thread_goes_on(launches: HostLaunch) -> None:
    """The rest waits for its turn, here until the training thread has changed what was copied at once."""
    engine = CudaEngine(torch.device("cpu"))
    memory = HostMemory(memoryview(mmap.mmap(-1, SIZE)))
    engine.register(memory, [(0, SIZE)])
    at_once, steady = item(random(1000), 0), item(random(900), 8192)
    expected = at_once.tensor.clone()
    goes_on = threading.Event()

    def late() -> list[CopyItem]:
        assert goes_on.wait(60)
        return []

    engine.begin(CopyList([steady]), memory, 0, lambda error: None, late, [at_once])
    at_once.tensor.zero_()
    goes_on.set()
    engine.wait()
    engine.close()
    assert torch.equal(memory.view(0, 4000, torch.float32, (-1,)), expected)
    assert torch.equal(memory.view(8192, 3600, torch.float32, (-1,)), steady.tensor)


def test_waiting_for_copies_that_are_not_issued_counts_as_a_stall(launches: HostLaunch) -> None:
    engine = CudaEngine(torch.device("cpu"))
    memory = HostMemory(memoryview(mmap.mmap(-1, SIZE)))

    def late() -> list[CopyItem]:
        time.sleep(0.2)
        return []

    engine.begin(CopyList([item(random(10), 0)]), memory, 0, lambda error: None, late)
    assert engine.wait() > 0
    engine.begin(CopyList([item(random(10), 0)]), memory, 0, lambda error: None)
    while not engine._open.issued.is_set():  # type: ignore[union-attr]
        time.sleep(0.001)
    assert engine._issued() == 0
    engine.close()


def test_the_chunk_of_the_plan_is_the_length_of_the_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_a_device(monkeypatch)
    plan_of_1_mib = choose_copy_plan(H100_CURVE, delay_us_max=1.0)
    engine = CudaEngine(torch.device("cpu"), plan_of_1_mib)
    assert engine._pack.numel() == plan_of_1_mib.chunk_bytes == 1 << 20
    engine.close()
