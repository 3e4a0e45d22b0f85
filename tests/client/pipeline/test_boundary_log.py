"""The boundary log of one rank: what is sent is there to the bit, within bounds, and trouble with
it is no trouble for training.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckptd.client import Checkpointer
from ckptd.client.pipeline.boundary_log import BoundaryLog, SilentLog
from ckptd.client.pipeline.log_reader import LogReader
from ckptd.client.recovery.replay import ReplayMismatch
from ckptd.core.slots.boundary import RecordKey, SentKind
from ckptd.core.slots.slots import SlotState
from ckptd.cuda.cuda_engine import make_engine
from ckptd.cuda.engine import CopyEngine, CopyItem, CpuEngine, HostMemory
from ckptd.errors import CorruptionError, SegmentError
from tests.ckptd.running import eventually
from tests.e2e.harness import own_daemon
from tests.option_groups import grouped

ACT, GRAD = SentKind.ACTIVATION, SentKind.GRADIENT
Send = Callable[[BoundaryLog, int], None]
WIDE = 6


class Trained:
    """A small model, its checkpointer and the log; ``sent`` is what each iteration sent."""

    def __init__(self, endpoint: str, run: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(WIDE, WIDE), nn.GELU(), nn.Linear(WIDE, WIDE))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        of_log = {k: options.pop(k) for k in ("limit_bytes", "replicate") if k in options}
        options = {"job": "log", "run": run, "daemon": endpoint, "window": 2, **options}
        self.ckpt = Checkpointer(self.model, self.optimizer, **grouped(**options))
        try:
            log = self.ckpt.boundary_log(**of_log)
        except ValueError:
            self.ckpt.close()
            raise
        assert isinstance(log, BoundaryLog)
        self.log = log
        self.sent: dict[int, dict[RecordKey, Tensor]] = {}

    def step(self, step: int, send: Send | None = None) -> None:
        """The body of the loop: two micro-batches cross the boundary, there and back."""
        (send or self.send)(self.log, step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.let_the_daemon_follow()

    def let_the_daemon_follow(self) -> None:
        """These steps are quicker than any daemon: without this, what is there would be a matter of luck."""
        memory, coming = self.ckpt._memory, self.log._slots._coming
        assert memory is not None
        if coming is not None:
            coming.exception(20)
        memory.session.flush(20)
        if memory.session.connected:
            eventually(lambda: not self.unsealed(), "everything is sealed")

    def unsealed(self) -> bool:
        """Whether something was filled, and is not sealed yet."""
        memory = self.ckpt._memory
        assert memory is not None
        segments = (*memory.table.segments, *memory.logs)
        headers = [s.header(i) for s in segments for i in range(s.geometry.num_slots)]
        return any(h is not None and h.state is SlotState.FILLED for h in headers)

    def send(self, log: BoundaryLog, step: int) -> None:
        kept = self.sent[step] = {}
        for m in range(2):
            inputs = torch.full((3, WIDE), float(step + m)).requires_grad_()
            out = self.model(inputs)
            log.activation(out, micro_batch=m)
            out.square().mean().backward()
            grad = inputs.grad
            assert grad is not None
            log.gradient(grad, micro_batch=m, stage=4)
            kept[RecordKey(ACT, 0, m)] = out.detach().clone()
            kept[RecordKey(GRAD, 4, m)] = grad.clone()

    def train(self, total: int, send: Send | None = None) -> list[int]:
        steps = []
        for step in self.ckpt.steps(total):
            self.step(step, send)
            steps.append(step)
        return steps

    @property
    def paths(self) -> list[Path]:
        assert self.ckpt._memory is not None
        return [Path(segment.path) for segment in self.ckpt._memory.logs]

    def reader(self) -> LogReader:
        """As soon as all that was filled is sealed."""
        eventually(lambda: not self.unsealed(), "everything is sealed")
        return LogReader(self.paths)


@pytest.fixture
def make(endpoint: str, run: str) -> Iterator[Callable[..., Trained]]:
    made: list[Trained] = []

    def create(**options: Any) -> Trained:
        made.append(Trained(endpoint, run, **options))
        return made[-1]

    yield create
    for each in made:
        each.ckpt.close()


def same(a: dict[RecordKey, Tensor], b: dict[RecordKey, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and a[k].shape == b[k].shape and torch.equal(a[k], b[k]) for k in a
    )


# -- what is there ---------------------------------------------------------------------------------


def test_what_was_sent_since_the_suffix_began_is_there_to_the_bit(
    make: Callable[..., Trained],
) -> None:
    job = make()
    job.train(9)
    reader = job.reader()
    assert reader.iterations()[-2:] == [7, 8]
    for iteration in (7, 8):
        assert same(reader.read(iteration), job.sent[iteration])
    stats = job.ckpt.stats()
    assert stats["log_records"] == 4 * stats["log_iterations"] > 0
    assert stats["log_bytes"] == stats["log_iterations"] * 2 * 4 * (3 * WIDE + 3 * WIDE)
    assert (stats["log_skipped"], stats["log_failed"]) == (0, 0)


def test_any_tensor_that_can_be_kept_is_kept(make: Callable[..., Trained]) -> None:
    """Of any dtype and shape, aligned or not, and the same one twice; in the order in which they were sent."""
    sent = [
        torch.tensor([True, False, True]),
        torch.randn(5, 7).bfloat16(),
        torch.randn(4, 6).T[1:],
        torch.tensor(3.5, dtype=torch.float64),
        torch.empty(0, 3),
        torch.randn(200_000),
        torch.randn(3, requires_grad=True),
        torch.arange(3, dtype=torch.uint8),
    ]

    def send(log: BoundaryLog, step: int) -> None:
        job.send(log, step)
        for i, tensor in enumerate(sent):
            log.activation(tensor, micro_batch=1, stage=2, index=i)
        log.activation(sent[1] + 1, micro_batch=1, stage=2, index=1)

    job = make()
    job.train(7, send)
    wanted = {**job.sent[6], **{RecordKey(ACT, 2, 1, i): t.detach() for i, t in enumerate(sent)}}
    wanted[RecordKey(ACT, 2, 1, 1, 1)] = sent[1] + 1
    found = job.reader().read(6)
    assert list(found) == list(wanted)
    assert same(found, wanted)


def test_an_iteration_that_sends_nothing_is_logged_as_such(make: Callable[..., Trained]) -> None:
    job = make()

    def send(log: BoundaryLog, step: int) -> None:
        if step < 7:
            job.send(log, step)

    job.train(9, send)
    assert job.reader().read(8) == {}


def test_memory_is_bounded_and_told(make: Callable[..., Trained]) -> None:
    """Forty iterations take no more slots than the first few, and each is logged."""
    job = make()
    job.train(8)
    (path,) = job.paths
    size = path.stat().st_size
    job.train(48)
    assert job.paths == [path]
    assert path.stat().st_size == size
    stats = job.ckpt.stats()
    assert stats["log_memory_bytes"] <= size
    assert stats["log_skipped"] == 0
    assert len(job.reader().iterations()) == stats["log_slots"] == 5  # a window of 2, and three
    assert f"for {int(stats['log_slots'])} iterations of at most" in job.ckpt.describe()


def test_before_the_first_full_step_there_is_none(make: Callable[..., Trained]) -> None:
    assert "boundary log: none yet" in make().ckpt.describe()


# -- steps -----------------------------------------------------------------------------------------


def test_outside_of_a_step_it_is_a_clear_error(make: Callable[..., Trained]) -> None:
    job = make()
    with pytest.raises(ValueError, match=r"log\.activation\(\) was called outside a step"):
        job.log.activation(torch.zeros(1), micro_batch=0)
    job.train(5)
    with pytest.raises(ValueError, match=r"log\.gradient\(\) was called outside a step"):
        job.log.gradient(torch.zeros(1), micro_batch=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"micro_batch": -1}, "micro_batch=-1: numbers start at 0"),
        ({"micro_batch": 0, "stage": 10**9}, "stage=1000000000: numbers start at 0"),
        ({"micro_batch": 0, "tensor": torch.zeros(1, dtype=torch.complex128)}, "complex128"),
    ],
    ids=str,
)
def test_what_cannot_be_logged_is_named(
    make: Callable[..., Trained], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make().log.activation(**{"tensor": torch.zeros(1), **arguments})


def test_a_limit_that_is_none_is_refused(endpoint: str, run: str) -> None:
    with pytest.raises(ValueError, match="limit_bytes=0"):
        Trained(endpoint, run, limit_bytes=0)
    with pytest.raises(ValueError, match="replicate='no'"):
        Trained(endpoint, run, replicate="no")


def test_a_step_that_is_left_in_its_middle_is_logged_when_it_is_done_again(
    make: Callable[..., Trained],
) -> None:
    job = make()
    job.train(7)
    for step in job.ckpt.steps(12):
        job.send(job.log, step)
        break
    assert 7 not in job.reader().iterations()
    job.optimizer.zero_grad()
    job.train(9)
    found = job.reader().read(7)
    assert same(found, job.sent[7])
    assert all(key.round == 0 for key in found)


def test_a_step_that_is_left_after_its_update_is_logged(make: Callable[..., Trained]) -> None:
    job = make()
    for step in job.ckpt.steps(12):
        job.step(step)
        if step == 7:
            break
    assert same(job.reader().read(7), job.sent[7])


def test_a_verification_is_not_logged(make: Callable[..., Trained]) -> None:
    job = make()
    job.train(8)
    before = job.ckpt.stats()["log_records"]
    certificate = job.ckpt.verify(job.step)
    assert certificate.identical, str(certificate)
    assert job.ckpt.stats()["log_records"] == before


def test_a_checkpointer_that_is_off_has_a_log_that_keeps_nothing() -> None:
    model = nn.Linear(2, 2)
    ckpt = Checkpointer(model, torch.optim.SGD(model.parameters()), daemon=None)
    log = ckpt.boundary_log()
    log.activation(torch.zeros(1), micro_batch=0)
    log.gradient(torch.zeros(1), micro_batch=0)
    assert type(log) is SilentLog


# -- recovery --------------------------------------------------------------------------------------


def test_a_replay_sends_the_same_and_the_log_is_complete_again(
    make: Callable[..., Trained],
) -> None:
    first = make()
    first.train(9)
    first.ckpt.close()
    again = make()
    assert again.train(11) == [7, 8, 9, 10]
    stats = again.ckpt.stats()
    assert (stats["log_compared"], stats["log_mismatches"]) == (8, 0)
    reader = again.reader()
    assert same(reader.read(8), first.sent[8])
    for iteration in (9, 10):
        assert same(reader.read(iteration), again.sent[iteration])
    assert again.paths == first_paths(again)


def first_paths(job: Trained) -> list[Path]:
    """The generations that were there when it attached."""
    assert job.ckpt._memory is not None
    return [Path(info.path) for info in job.ckpt._memory.session.logs]


def other_bits(job: Trained) -> Send:
    def send(log: BoundaryLog, step: int) -> None:
        job.send(log, step)
        log.activation(torch.zeros(3), micro_batch=5)

    return send


def test_a_replay_that_sends_something_else_is_an_error(make: Callable[..., Trained]) -> None:
    first = make()
    first.train(9)
    first.ckpt.close()
    again = make()
    wanted = "replay of iteration 7 did not reproduce .*: activation/0/5/0/0 was not sent before"
    with pytest.raises(ReplayMismatch, match=wanted):
        again.train(11, other_bits(again))


def test_or_a_warning_if_asked_for(make: Callable[..., Trained], caplog: pytest.LogCaptureFixture) -> None:
    first = make()
    first.train(9)
    first.ckpt.close()

    def send(log: BoundaryLog, step: int) -> None:
        again.send(log, step)
        log.gradient(torch.zeros(3), micro_batch=0)

    again = make(on_mismatch="warn")
    with caplog.at_level(logging.ERROR):
        assert again.train(11, send) == [7, 8, 9, 10]
    assert again.ckpt.stats()["log_mismatches"] == 2
    assert "gradient/0/0/0/0 was not sent before" in caplog.text


def test_a_damaged_log_is_put_aside_and_written_anew(make: Callable[..., Trained]) -> None:
    first = make()
    first.train(9)
    first.reader()
    (path,) = first.paths
    first.ckpt.close()
    value = first.sent[8][RecordKey(ACT, 0, 1)].numpy().tobytes()
    content = bytearray(path.read_bytes())
    at = content.index(value)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([content[at] ^ 1]))
    with pytest.raises(CorruptionError, match="activation/0/1/0/0"):
        LogReader([path]).read(8)
    again = make()
    again.train(11)
    assert again.ckpt.stats()["log_mismatches"] == 0
    assert same(again.reader().read(8), first.sent[8])


def test_a_run_that_begins_anew_gives_the_log_of_the_former_one_back(
    make: Callable[..., Trained],
) -> None:
    first = make()
    first.train(9)
    (path,) = first.paths
    first.ckpt._memory.leave_hint(0)  # type: ignore[union-attr]
    first.ckpt._memory.forget_everything()  # type: ignore[union-attr]
    eventually(lambda: not path.exists(), "its memory is given back")


# -- room ------------------------------------------------------------------------------------------


def test_iterations_that_outgrow_their_slots_get_larger_ones(
    make: Callable[..., Trained], caplog: pytest.LogCaptureFixture
) -> None:
    """Not logged are the first that does, and the one in which room is made; all after it are."""
    job = make()

    def send(log: BoundaryLog, step: int) -> None:
        job.send(log, step)
        if step >= 8:
            log.activation(torch.full((50_000,), float(step)), micro_batch=2)

    job.train(8, send)
    (narrow,) = job.paths
    with caplog.at_level(logging.WARNING):
        job.train(10, send)
        job.train(30, send)
    assert "iteration 8 is not logged (1 in a row): the step sent" in caplog.text
    (wide,) = job.paths
    assert wide != narrow
    eventually(lambda: not narrow.exists(), "what nobody needs is given back")
    assert torch.equal(job.reader().read(29)[RecordKey(ACT, 0, 2)], torch.full((50_000,), 29.0))
    assert job.ckpt.stats()["log_skipped"] == 2


def test_more_than_its_limit_is_not_asked_for(
    make: Callable[..., Trained], caplog: pytest.LogCaptureFixture
) -> None:
    job = make(limit_bytes=1000)
    with caplog.at_level(logging.WARNING):
        assert job.train(10) == list(range(10))
    assert job.paths == []
    assert job.ckpt.stats()["log_iterations"] == 0
    assert "boundary log: none (the log needs " in job.ckpt.describe()
    assert "but limit_bytes is 1000 B" in job.ckpt.describe()
    assert caplog.text.count("training continues without it") == 1


def test_a_log_tells_its_daemon_whether_it_is_to_be_replicated(
    make: Callable[..., Trained],
) -> None:
    """Asked for by the next trainer, too: a log of the next generation says so, and the one before
    goes when nothing needs it.
    """
    job = make()
    job.train(4)
    before = job.log._slots.newest
    assert before is not None
    assert not before.descriptor.replicated
    assert "replicated" not in job.log.describe()
    job.ckpt.close()
    job = make(replicate=True)
    job.train(16)
    newest = job.log._slots.newest
    assert newest is not None
    assert newest.descriptor.replicated
    assert newest.generation > before.generation
    assert len(job.paths) == 1
    assert "replicated like snapshots" in job.log.describe()


@pytest.mark.slow
def test_without_memory_for_it_training_and_snapshots_go_on(
    run: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The quota holds the snapshots and not the log: a warning with the numbers."""
    with own_daemon("--memory", "8MiB") as daemon:
        job = Trained(daemon.endpoint, run)

        def send(log: BoundaryLog, step: int) -> None:
            job.send(log, step)
            log.activation(torch.zeros(1 << 20), micro_batch=2)

        with caplog.at_level(logging.WARNING):
            job.train(30, send)
        stats = job.ckpt.stats()
        assert stats["snapshots"] > 10
        assert (stats["log_iterations"], stats["log_memory_bytes"]) == (0, 0)
        told = job.ckpt.describe()
        job.ckpt.close()
    assert "boundary log: none (no memory for 20.0 MiB (5 iterations of at most 4.0 MiB" in told
    assert "the quota is 8 MiB" in told
    assert caplog.text.count("training continues without it") == 1


@pytest.mark.slow
def test_while_the_daemon_is_away_boundaries_are_logged(run: str) -> None:
    with own_daemon() as daemon:
        job = Trained(daemon.endpoint, run)
        job.train(8)
        daemon.kill()
        job.train(20)
        assert same(job.reader().read(19), job.sent[19])
        daemon.start()
        job.train(24)
        assert same(job.reader().read(23), job.sent[23])
        assert job.ckpt.stats()["log_skipped"] == 0
        job.ckpt.close()


# -- trouble ---------------------------------------------------------------------------------------


def test_what_cannot_be_copied_is_counted_and_training_goes_on(
    make: Callable[..., Trained], caplog: pytest.LogCaptureFixture
) -> None:
    """A sparse tensor has no bytes of its own."""
    job = make()

    def send(log: BoundaryLog, step: int) -> None:
        job.send(log, step)
        if step == 7:
            log.activation(torch.eye(2).to_sparse(), micro_batch=2)

    with caplog.at_level(logging.WARNING):
        assert job.train(10, send) == list(range(10))
    assert job.ckpt.stats()["log_failed"] == 1
    assert "iteration 7 is not logged: copying failed" in caplog.text
    assert job.reader().iterations()[-2:] == [8, 9]


def test_after_a_few_failures_in_a_row_nothing_is_logged_any_more(
    make: Callable[..., Trained], caplog: pytest.LogCaptureFixture
) -> None:
    """A segment that went under our feet, say."""
    job = make()
    job.train(7)
    job.log._slots.claim = None  # type: ignore[method-assign, assignment]
    with caplog.at_level(logging.ERROR):
        assert job.train(14) == list(range(7, 14))
    assert job.log.given_up
    assert job.ckpt.stats()["log_failed"] == 3
    assert "stopped logging boundaries: TypeError" in caplog.text


# -- copies ----------------------------------------------------------------------------------------


class Gated(CpuEngine):
    """Tells of a copy's end when it is let: as a device does that is behind."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def begin(
        self,
        items: Sequence[CopyItem],
        memory: HostMemory,
        base: int,
        done: Callable[[BaseException | None], None],
        late: Callable[[], Sequence[CopyItem]] = tuple,
        at_once: Sequence[CopyItem] = (),
    ) -> None:
        def wait() -> Sequence[CopyItem]:
            assert self.gate.wait(20)
            return late()

        super().begin(items, memory, base, done, wait)


@contextmanager
def logging_by(job: Trained, engine: CopyEngine) -> Iterator[BoundaryLog]:
    """Another log over the same memory, whose copies are made by ``engine``."""
    recorder, memory = job.ckpt._loop.recorder, job.ckpt._memory
    assert recorder is not None
    assert memory is not None
    log = BoundaryLog(
        memory,
        engine,
        job.ckpt._stats,
        plan=lambda: recorder.plan,
        silent=lambda: False,
    )
    try:
        yield log
    finally:
        log.close()


class LogByEngineTests:
    """What must hold whoever copies."""

    device: str

    def engine(self) -> CopyEngine:
        raise NotImplementedError

    def test_what_was_sent_is_there(self, make: Callable[..., Trained]) -> None:
        job = make()

        def send(log: BoundaryLog, step: int) -> None:
            job.send(log, step)
            log.activation(torch.zeros(80_000), micro_batch=2)  # so much room is there

        job.train(7, send)
        tensors = [torch.randn(n, device=self.device) for n in (3, 70_000, 11)]
        with logging_by(job, self.engine()) as log:
            for iteration in (100, 101):
                log.begin(iteration, replaying=False)
                for m, tensor in enumerate(tensors):
                    log.activation(tensor + iteration, micro_batch=m)
                log.end()
        found = job.reader()
        for iteration in (100, 101):
            wanted = {RecordKey(ACT, 0, m): t.cpu() + iteration for m, t in enumerate(tensors)}
            assert same(found.read(iteration), wanted)

    def test_an_abandoned_step_leaves_its_slot_free(self, make: Callable[..., Trained]) -> None:
        job = make()
        job.train(7)
        with logging_by(job, self.engine()) as log:
            log.begin(100, replaying=False)
            log.activation(torch.randn(1000, device=self.device), micro_batch=0)
            log.abandon()
        records = job.log._slots.records()
        assert {r.state for r in records} <= {SlotState.FREE, SlotState.SEALED, SlotState.FILLED}
        assert all(r.iteration != 100 or r.state is SlotState.FREE for r in records)


class TestInline(LogByEngineTests):
    device = "cpu"

    def engine(self) -> CopyEngine:
        return CpuEngine(inline=True)


class TestBeside(LogByEngineTests):
    """As on a device: copies end later, on another thread."""

    device = "cpu"

    def engine(self) -> CopyEngine:
        return CpuEngine()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
class TestCuda(LogByEngineTests):
    device = "cuda"

    def engine(self) -> CopyEngine:
        return make_engine(torch.device("cuda"))


def _by_a_step(tensor: Tensor) -> None:
    tensor.add_(1)


def _by_data(tensor: Tensor) -> None:
    tensor.data.add_(1)


def _by_memory(tensor: Tensor) -> None:
    tensor.numpy()[:] += 1


def _by_storage(tensor: Tensor) -> None:
    torch.empty(0).set_(tensor.untyped_storage()).add_(1)


@pytest.mark.parametrize("write", [_by_a_step, _by_data, _by_memory, _by_storage])
def test_a_tensor_that_is_changed_while_it_is_copied_spoils_its_iteration_and_no_other(
    make: Callable[..., Trained], caplog: pytest.LogCaptureFixture, write: Callable[[Tensor], None]
) -> None:
    """From then on each copy comes before whatever follows. Only the first of these writes moves
    the tensor's version counter: of the others nobody noticed anything, and a neighbour that
    replayed was fed what had never been sent.
    """
    job = make()
    job.train(7)
    engine, tensor = Gated(), torch.zeros(10)
    with logging_by(job, engine) as log:
        log.begin(100, replaying=False)
        log.activation(tensor, micro_batch=0)
        write(tensor)
        engine.gate.set()
        engine.wait()
        log.end()
        log.begin(101, replaying=False)
        sent = tensor.clone()
        log.activation(tensor, micro_batch=0)
        write(tensor)
        log.end()
    found = job.reader()
    told = {i: found.read(i)[RecordKey(ACT, 0, 0)] for i in found.iterations() if i >= 100}
    assert list(told) == [101], told
    assert torch.equal(told[101], sent)
    assert "iteration 100 is not logged: a tensor was changed in place" in caplog.text


def test_what_is_written_once_a_copy_is_over_spoils_nothing(make: Callable[..., Trained]) -> None:
    """A buffer that is used again for the next micro-batch, by a write that moves no version counter."""
    job = make()
    job.train(7)
    engine, tensor = CpuEngine(), torch.zeros(4)
    with logging_by(job, engine) as log:
        log.begin(100, replaying=False)
        for m in range(2):
            tensor.data.fill_(m)
            log.activation(tensor, micro_batch=m)
            engine.wait()
        log.end()
    found = job.reader().read(100)
    assert [found[RecordKey(ACT, 0, m)].tolist() for m in range(2)] == [[0.0] * 4, [1.0] * 4]


@pytest.mark.parametrize("inline", [True, False])
def test_what_is_a_conjugate_is_logged_as_one(make: Callable[..., Trained], inline: bool) -> None:
    """It shares its memory with what it is the conjugate of; that memory was logged."""
    job = make()
    job.train(7)
    tensor = torch.complex(torch.arange(3.0), torch.ones(3)).conj()
    assert tensor.is_conj()
    with logging_by(job, CpuEngine(inline=inline)) as log:
        log.begin(100, replaying=False)
        log.activation(tensor, micro_batch=0)
        log.end()
    assert torch.equal(job.reader().read(100)[RecordKey(ACT, 0, 0)], tensor.resolve_conj())


# -- reading ---------------------------------------------------------------------------------------


def test_a_reader_says_what_is_not_there(make: Callable[..., Trained]) -> None:
    job = make()
    job.train(7)
    reader = job.reader()
    with pytest.raises(KeyError, match="iteration 77 is not logged; logged iterations: "):
        reader.read(77)
    memory = job.ckpt._memory
    assert memory is not None
    with pytest.raises(SegmentError, match="holds snapshots"):
        LogReader([memory.table.segments[-1].path])


def test_a_slot_that_is_being_read_is_not_overwritten(make: Callable[..., Trained]) -> None:
    job = make()
    job.train(8)
    (file,) = job.reader()._files
    oldest = min((r for r in file.records() if r.sealed), key=lambda r: r.iteration)
    with file.held(oldest) as image:
        assert image is not None
        before = bytes(image)
        job.train(20)
        assert bytes(image) == before
        assert same(job.reader().read(19), job.sent[19])


def test_what_a_recovery_elsewhere_ran_again_does_not_count(make: Callable[..., Trained]) -> None:
    job = make()
    job.train(9)
    job.reader()
    epoch = job.ckpt._memory.epoch  # type: ignore[union-attr]
    reader = LogReader(job.paths, epochs={epoch + 1: 8})
    assert reader.iterations()[-1] == 7
