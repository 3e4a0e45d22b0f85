"""Every engine copies the same bytes: one suite for the CPU engine, its inline form, and CUDA where
there is a device.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from ckptd.cuda.copy_plan import H100_CURVE, choose_copy_plan
from ckptd.cuda.cuda_engine import make_engine
from ckptd.cuda.engine import CopyEngine, CopyItem, CopyList, CpuEngine, HostMemory, measure_bandwidth

SIZE = 8 << 20
SLOT = 1 << 20  # a slot does not begin at 0


def item(
    tensor: Tensor,
    offset: int,
    *,
    rows: tuple[int, int] | None = None,
    dtype: torch.dtype | None = None,
) -> CopyItem:
    start, stop = rows if rows is not None else (None, None)
    count = tensor[start:stop].numel() if rows is not None else tensor.numel()
    wanted = dtype or tensor.dtype
    return CopyItem(tensor, start, stop, wanted, offset, count * wanted.itemsize)


class Memory(HostMemory):
    """Page-aligned, like a mapped segment; filled with a pattern so that stray writes show."""

    def __init__(self) -> None:
        super().__init__(memoryview(mmap.mmap(-1, SIZE)))
        self.tensor.fill_(0xA5)

    def read(self, found: CopyItem) -> Tensor:
        return self.view(SLOT + found.offset, found.nbytes, found.dtype, found.view().shape).clone()

    def untouched(self, items: Sequence[CopyItem]) -> bool:
        """Whether no byte outside the items was written."""
        mask = torch.ones(SIZE, dtype=torch.bool)
        for i in items:
            mask[SLOT + i.offset : SLOT + i.offset + i.nbytes] = False
        return bool((self.tensor[mask] == 0xA5).all())


class Done:
    """Collects what ``done`` was called with."""

    def __init__(self) -> None:
        self.calls: list[BaseException | None] = []
        self._called = threading.Event()

    def __call__(self, error: BaseException | None) -> None:
        self.calls.append(error)
        self._called.set()

    def result(self) -> BaseException | None:
        assert self._called.wait(20), "done was never called"
        assert len(self.calls) == 1
        return self.calls[0]


@pytest.fixture
def memory() -> Memory:
    return Memory()


class EngineTests:
    """What capture and restore need; ``device`` is where the tensors are."""

    device: str

    @pytest.fixture
    def engine(self, memory: Memory) -> Iterator[CopyEngine]:
        raise NotImplementedError

    def copy(self, engine: CopyEngine, memory: Memory, items: list[CopyItem]) -> None:
        done = Done()
        engine.begin(items, memory, SLOT, done)
        engine.wait()
        error = done.result()
        if error is not None:
            raise error

    def random(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        generator = torch.Generator().manual_seed(sum(shape) + 1)
        return torch.randn(shape, generator=generator).to(dtype).to(self.device)

    def check(self, engine: CopyEngine, memory: Memory, items: list[CopyItem]) -> None:
        """Copied to the bit, nothing else touched, and restored to the bit."""
        expected = [i.view().detach().to(i.dtype).cpu().clone() for i in items]
        self.copy(engine, memory, items)
        for i, e in zip(items, expected, strict=True):
            assert torch.equal(memory.read(i).view(-1).view(torch.uint8), bytes_of(e))
        assert memory.untouched(items)
        originals = [i.view().detach().clone() for i in items]
        with torch.no_grad():
            for i in items:
                i.view().zero_()
        engine.restore(items, memory, SLOT)
        for i, e, o in zip(items, expected, originals, strict=True):
            assert torch.equal(i.view().detach(), e.to(o.dtype).to(o.device))

    @pytest.mark.parametrize(
        "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8], ids=str
    )
    def test_whole_tensors(self, engine: CopyEngine, memory: Memory, dtype: torch.dtype) -> None:
        self.check(engine, memory, [item(self.random(33, 7, dtype=dtype), 64)])

    def test_rows(self, engine: CopyEngine, memory: Memory) -> None:
        tensor = self.random(6, 5, 4)
        outside = tensor[:2].clone()
        self.check(engine, memory, [item(tensor, 128, rows=(2, 5))])
        assert torch.equal(tensor[:2], outside)

    @pytest.mark.parametrize("count", [1, 32_767, 32_768, 100_003])
    def test_casts(self, engine: CopyEngine, memory: Memory, count: int) -> None:
        """Across the size at which torch would use more threads."""
        self.check(engine, memory, [item(self.random(count), 0, dtype=torch.bfloat16)])

    def test_casting_rows(self, engine: CopyEngine, memory: Memory) -> None:
        self.check(engine, memory, [item(self.random(6, 40), 0, rows=(1, 4), dtype=torch.bfloat16)])

    def test_not_contiguous(self, engine: CopyEngine, memory: Memory) -> None:
        self.check(
            engine,
            memory,
            [
                item(self.random(6, 8).t(), 0),
                item(self.random(6, 8)[:, ::2], 256),
                item(self.random(8, 6, 4).transpose(0, 1), 1024, rows=(1, 3)),
                item(self.random(6, 8).t(), 4096, dtype=torch.bfloat16),
            ],
        )

    def test_scalars_and_empty_tensors(self, engine: CopyEngine, memory: Memory) -> None:
        self.check(engine, memory, [item(self.random(), 0), item(self.random(0, 3), 64)])

    def test_many_small_and_a_large_one(self, engine: CopyEngine, memory: Memory) -> None:
        """Adjacent ones, ones with gaps between, and one above the size at which a transfer stands alone."""
        items = [item(self.random(n + 1), 64 * n) for n in range(15)]
        items += [item(self.random(512, 256), 4096), item(self.random(3), 4096 + 512 * 1024)]
        self.check(engine, memory, items)

    def test_copies_may_be_planned_before_they_begin(self, engine: CopyEngine, memory: Memory) -> None:
        """By another thread than the one that begins them."""
        items = CopyList([item(self.random(n + 1), 64 * n) for n in range(5)])
        planner = threading.Thread(target=engine.prepare, args=(items, memory))
        planner.start()
        planner.join()
        self.check(engine, memory, items)

    def test_items_in_any_order(self, engine: CopyEngine, memory: Memory) -> None:
        self.check(engine, memory, [item(self.random(16), 64 * n) for n in (3, 0, 2, 1)])

    def test_parameters_that_require_grad(self, engine: CopyEngine, memory: Memory) -> None:
        parameter = torch.nn.Parameter(self.random(4, 4))
        self.check(engine, memory, [item(parameter, 0)])
        assert parameter.requires_grad
        assert parameter.grad_fn is None

    def test_nan_payloads_and_signs_of_zero_survive(self, engine: CopyEngine, memory: Memory) -> None:
        bits = torch.tensor([0x7FC00123, -0x80000000, 0x7F800001], dtype=torch.int32)
        tensor = bits.view(torch.float32).to(self.device)
        self.copy(engine, memory, [item(tensor, 0)])
        assert torch.equal(memory.read(item(tensor, 0)).view(torch.int32), bits)

    def test_after_wait_the_sources_may_change(self, engine: CopyEngine, memory: Memory) -> None:
        tensor = self.random(300_000)
        expected = tensor.cpu().clone()
        done = Done()
        engine.begin([item(tensor, 0)], memory, SLOT, done)
        engine.wait()
        tensor.add_(1)
        assert done.result() is None
        assert torch.equal(memory.read(item(tensor, 0)), expected)

    def test_a_snapshot_after_another(self, engine: CopyEngine, memory: Memory) -> None:
        tensor = self.random(1000)
        for _ in range(5):
            tensor.mul_(2)
            self.copy(engine, memory, [item(tensor, 0)])
            assert torch.equal(memory.read(item(tensor, 0)), tensor.cpu())

    def test_an_error_in_the_copy_travels_to_done_and_the_engine_lives(
        self, engine: CopyEngine, memory: Memory
    ) -> None:
        """The training thread must never see it as an exception of its own."""
        tensor = self.random(4)
        wrong = CopyItem(self.random(3, 4).t(), None, None, torch.float32, 0, 8)
        done = Done()
        engine.begin([wrong], memory, SLOT, done)
        engine.wait()
        assert isinstance(done.result(), Exception)
        self.check(engine, memory, [item(tensor, 64)])

    def test_an_error_in_a_restore_is_raised(self, engine: CopyEngine, memory: Memory) -> None:
        wrong = CopyItem(self.random(3, 4).t(), None, None, torch.float32, 0, 8)
        with pytest.raises((RuntimeError, ValueError)):
            engine.restore([item(self.random(4), 64), wrong], memory, SLOT)

    def test_waiting_for_nothing(self, engine: CopyEngine) -> None:
        assert engine.wait() >= 0.0


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


class TestCpuEngine(EngineTests):
    device = "cpu"

    @pytest.fixture
    def engine(self, memory: Memory) -> Iterator[CopyEngine]:
        engine = CpuEngine()
        yield engine
        engine.close()

    def test_the_copy_runs_beside_the_caller(self, engine: CopyEngine, memory: Memory) -> None:
        seen: list[str] = []
        engine.begin(
            [item(self.random(4), 0)],
            memory,
            SLOT,
            lambda _: seen.append(threading.current_thread().name),
        )
        engine.wait()
        assert seen == ["ckptd-copy"]

    def test_wait_blocks_until_done_returned(self, engine: CopyEngine, memory: Memory) -> None:
        release, order = threading.Event(), list[str]()

        def done(error: BaseException | None) -> None:
            release.wait(20)
            order.append("done")

        engine.begin([item(self.random(4), 0)], memory, SLOT, done)
        release.set()
        engine.wait()
        order.append("waited")
        assert order == ["done", "waited"]

    def test_close_finishes_the_copy_in_flight_and_ends_the_thread(self, memory: Memory) -> None:
        before = set(threading.enumerate())
        engine, done = CpuEngine(), Done()
        tensor = self.random(200_000)
        engine.begin([item(tensor, 0)], memory, SLOT, done)
        engine.close()
        assert done.calls == [None]
        assert torch.equal(memory.read(item(tensor, 0)), tensor)
        assert set(threading.enumerate()) <= before

    def test_casting_wakes_no_intra_op_threads_and_changes_their_number_for_nobody(
        self, engine: CopyEngine, memory: Memory
    ) -> None:
        threads = torch.get_num_threads()
        self.copy(engine, memory, [item(self.random(200_000), 0, dtype=torch.bfloat16)])
        assert torch.get_num_threads() == threads


class Gate:
    """A pacer that admits pieces once it is told to, and notes them."""

    enabled = True

    def __init__(self, *, is_open: bool = True) -> None:
        self.begun = 0
        self.planned: list[int] = []
        self.sizes: list[int] = []
        self.copied_: list[tuple[int, float]] = []
        self.asked, self._open = threading.Event(), threading.Event()
        if is_open:
            self._open.set()

    def begin(self) -> None:
        self.begun += 1

    def plan(self, total_bytes: int) -> None:
        self.planned.append(total_bytes)

    def admit(self, size_bytes: int) -> None:
        assert len(self.planned) == self.begun, "a piece before the plan"
        self.asked.set()
        assert self._open.wait(20), "nobody was in a hurry"
        self.sizes.append(size_bytes)

    def copied(self, size_bytes: int, seconds: float) -> None:
        self.copied_.append((size_bytes, seconds))

    def hurry(self) -> None:
        self._open.set()


class TestCpuEnginePaced(EngineTests):
    """Piece by piece, when a pacer admits them."""

    device = "cpu"

    @pytest.fixture
    def engine(self, memory: Memory) -> Iterator[CopyEngine]:
        engine = CpuEngine()
        engine.pacer = Gate()
        yield engine
        engine.close()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_large_tensors_go_in_pieces(self, memory: Memory, dtype: torch.dtype) -> None:
        engine, gate = CpuEngine(), Gate()
        engine.pacer = gate
        rows = item(self.random(700, 1024), 64, rows=(3, 650), dtype=dtype)
        late = item(self.random(300), 4 << 20)
        done = Done()
        engine.begin([rows], memory, SLOT, done, late=lambda: [late])
        engine.wait()
        assert done.result() is None
        for each in (rows, late):
            assert torch.equal(memory.read(each), each.view().to(each.dtype))
        assert memory.untouched([rows, late])
        assert (gate.begun, gate.planned) == (1, [rows.nbytes + late.nbytes])
        assert len(gate.sizes) > 2
        assert max(gate.sizes) <= 1 << 20
        assert sum(gate.sizes) == gate.copied_[0][0] == rows.nbytes + late.nbytes
        engine.close()

    def test_whoever_waits_for_a_copy_ends_its_pauses(self, memory: Memory) -> None:
        engine, gate, tensor = CpuEngine(), Gate(is_open=False), self.random(64)
        engine.pacer = gate
        done = Done()
        engine.begin([item(tensor, 0)], memory, SLOT, done)
        assert gate.asked.wait(20)
        assert (done.calls, gate.sizes) == ([], [])
        waited = engine.wait()
        assert done.result() is None
        assert torch.equal(memory.read(item(tensor, 0)), tensor)
        assert waited > 0
        assert engine.last_copy_s > 0
        assert gate.copied_[0][0] == 256
        engine.close()

    def test_a_pacer_that_is_off_is_not_asked(self, memory: Memory) -> None:
        engine, gate = CpuEngine(), Gate(is_open=False)
        engine.pacer, gate.enabled = gate, False
        self.copy(engine, memory, [item(self.random(64), 0)])
        assert (gate.begun, gate.planned, gate.sizes) == (0, [], [])
        engine.close()


class TestCpuEngineInline(EngineTests):
    device = "cpu"

    @pytest.fixture
    def engine(self, memory: Memory) -> Iterator[CopyEngine]:
        engine = CpuEngine(inline=True)
        yield engine
        engine.close()

    def test_the_copy_is_complete_when_begin_returns(self, engine: CopyEngine, memory: Memory) -> None:
        done, tensor = Done(), self.random(64)
        engine.begin([item(tensor, 0)], memory, SLOT, done)
        assert done.calls == [None]
        assert torch.equal(memory.read(item(tensor, 0)), tensor)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
class TestCudaEngine(EngineTests):
    device = "cuda"

    @pytest.fixture
    def engine(self, memory: Memory) -> Iterator[CopyEngine]:
        engine = make_engine(torch.device("cuda"))
        engine.register(memory, [(0, SIZE // 2), (SIZE // 2, SIZE // 2)])
        yield engine
        engine.release(memory)
        engine.close()

    def test_the_host_does_not_wait(self, engine: CopyEngine) -> None:
        assert not engine.host_waits

    def test_registered_memory_is_pinned(self, engine: CopyEngine, memory: Memory) -> None:
        assert memory.tensor[SLOT : SLOT + 64].is_pinned()

    def test_host_tensors_among_the_items(self, engine: CopyEngine, memory: Memory) -> None:
        """AdamW keeps ``step`` on the host."""
        step = torch.tensor([3.0])
        self.check(engine, memory, [item(step, 0), item(self.random(8), 64)])

    def test_the_plan_is_compared_once(self, memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
        """For a list that is handed over again: the first time its transfers are planned, too."""
        plan = choose_copy_plan(H100_CURVE, delay_us_max=1.0)  # of the smallest chunk
        engine = make_engine(torch.device("cuda"), plan=plan)
        engine.register(memory, [(0, SIZE)])
        items = CopyList([item(self.random(1 << 19), 0), item(self.random(100), 1 << 21)])
        with caplog.at_level("INFO", logger="ckptd.cuda.cuda_engine"):
            for _ in range(4):
                self.copy(engine, memory, items)
            engine.release(memory)
            engine.close()  # its thread has logged by then
        assert all(torch.equal(memory.read(i), i.tensor.cpu()) for i in items)
        (line,) = [r.message for r in caplog.records if "predicted" in r.message]
        assert line.startswith("a snapshot of 2 tensors, 0.00 GB: predicted")

    def test_the_same_list_again_and_then_another(self, engine: CopyEngine, memory: Memory) -> None:
        """Transfers are planned once for a list: the values must be today's, and another list's its own."""
        tensors = [self.random(n + 1) for n in range(9)] + [self.random(100_000)]
        items = [item(t, 1024 * n) for n, t in enumerate(tensors)]
        for _ in range(3):
            for t in tensors:
                t.add_(1)
            self.copy(engine, memory, items)
            for i in items:
                assert torch.equal(memory.read(i), i.tensor.cpu())
        others = [item(self.random(n + 2), 1024 * n) for n in range(9)]
        for _ in range(80):  # more lists than are remembered
            self.copy(engine, memory, list(others))
        for i in others:
            assert torch.equal(memory.read(i), i.tensor.cpu())

    def test_what_is_freed_during_the_copy_is_copied_all_the_same(
        self, engine: CopyEngine, memory: Memory
    ) -> None:
        """The allocator may hand the memory of a tensor nobody holds any more to the next kernel."""
        expected = self.random(1 << 19)
        tensor = expected.clone()
        found = item(tensor, 0)
        torch.cuda.synchronize()
        side = engine._stream  # type: ignore[attr-defined]
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)
        done = Done()
        engine.begin([found], memory, SLOT, done)
        shape, dtype = tensor.shape, tensor.dtype
        del tensor, found
        for _ in range(4):
            torch.full(shape, 7.0, dtype=dtype, device=self.device)
        assert done.result() is None
        assert torch.equal(memory.read(item(expected, 0)), expected.cpu())

    def test_the_devices_wait_is_told(self, engine: CopyEngine, memory: Memory) -> None:
        """Not that of the host, which goes on: an update that had to stand behind a slow copy."""
        with torch.cuda.stream(engine._stream):  # type: ignore[attr-defined]
            torch.cuda._sleep(200_000_000)  # about a tenth of a second
        done = Done()
        engine.begin([item(self.random(1000), 0)], memory, SLOT, done)
        assert engine.wait() == 0.0
        torch.cuda.synchronize()
        assert done.result() is None
        assert 0.02 < engine.wait() < 10.0
        assert engine.wait() == 0.0

    def test_a_refused_registration_leaves_the_trainer_alone(
        self, engine: CopyEngine, memory: Memory
    ) -> None:
        """The runtime remembers a refusal, and would raise it at the trainer's next kernel."""
        with pytest.raises(RuntimeError, match="bytes failed with code"):
            engine.register(memory, [(0, SIZE // 2)])  # it is registered already
        assert torch.ones(4, device=self.device).mul(2).sum().item() == 8.0
        assert memory.tensor[SLOT : SLOT + 64].is_pinned()

    def test_casts_round_as_the_host_does(self, engine: CopyEngine, memory: Memory) -> None:
        """Compute weights in a snapshot are what a later cast of the restored masters gives."""
        bits = torch.randint(-(2**31), 2**31, (300_000,), generator=torch.Generator().manual_seed(3))
        values = bits.to(torch.int32).view(torch.float32)
        values = values[~values.isnan()].to(self.device)
        found = item(values, 0, dtype=torch.bfloat16)
        self.copy(engine, memory, [found])
        assert torch.equal(memory.read(found), values.cpu().to(torch.bfloat16))


@pytest.mark.parametrize("shares", [1, 2, 3, 7])
def test_a_restore_is_shared_between_threads(memory: Memory, shares: int) -> None:
    """Whatever the sizes and the number of threads: every item is restored once."""
    engine = CpuEngine(restore_threads=shares)
    tensors = [torch.full((n * 100 + 1,), float(n)) for n in range(9)]
    items = [item(t, 64 * 1024 * n) for n, t in enumerate(tensors)]
    done = Done()
    engine.begin(items, memory, SLOT, done)
    engine.wait()
    for t in tensors:
        t.zero_()
    engine.restore(items, memory, SLOT)
    engine.close()
    assert [t.unique().item() for t in tensors] == [float(n) for n in range(9)]


def test_restoring_nothing(memory: Memory) -> None:
    engine = CpuEngine()
    engine.restore([], memory, SLOT)
    engine.close()


class TestHostMemory:
    def test_views_share_memory(self, memory: Memory) -> None:
        memory.view(64, 8, torch.float32, (2,)).fill_(1.5)
        assert memory.view(64, 8, torch.float32, (2, 1)).tolist() == [[1.5], [1.5]]

    def test_misaligned_views_are_refused(self, memory: Memory) -> None:
        with pytest.raises(ValueError, match=r"offset 2 is not aligned to torch\.float32"):
            memory.view(2, 4, torch.float32, (1,))

    def test_empty_views(self, memory: Memory) -> None:
        assert memory.view(SIZE, 0, torch.float32, (0, 4)).shape == (0, 4)


def test_engines_by_device() -> None:
    engine = make_engine(torch.device("cpu"))
    assert isinstance(engine, CpuEngine)
    engine.close()
    with pytest.raises(ValueError, match="no copy engine for device meta: supported are cpu and cuda"):
        make_engine(torch.device("meta"))


def test_measured_bandwidth_is_a_positive_rate_even_of_nothing() -> None:
    assert measure_bandwidth([torch.zeros(1000), torch.nn.Parameter(torch.zeros(4))]) > 0
    assert measure_bandwidth([]) > 0
    assert measure_bandwidth([torch.zeros(0)]) > 0
