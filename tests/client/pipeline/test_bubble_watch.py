"""The bubbles of real schedules, and a copy that is held outside of them, but never too long."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining import schedules as torch_schedules
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptd.client import Checkpointer
from ckptd.client.pipeline import bubble_watch
from ckptd.client.pipeline.bubble_watch import BubbleWatch, CopyPacer, Unwatchable, orders_of
from ckptd.core.bubbles import UNIT_DURATIONS, ActionKind, by_kind, parse_actions, rank_bubbles
from tests.option_groups import grouped

RANKS = 4


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """A world of four in which nobody else is, and nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


def stage(index: int, count: int, group: Any = None) -> PipelineStage:
    sample = torch.zeros(1, 2)
    return PipelineStage(
        nn.Linear(2, 2),
        index,
        count,
        torch.device("cpu"),
        input_args=sample.requires_grad_(index > 0),
        output_args=torch.zeros(1, 2, requires_grad=True),
        group=group,
    )


def loss(output: Any, target: Any) -> Any:
    return (output - target).sum()


# (schedule, number of a rank's second stage of eight; None: one stage; the fraction that is bubble in an
# iteration of eight micro-batches, by itself and where iterations follow each other)
KINDS = [
    ("ScheduleGPipe", None, 3 / 11, 3 / 11),
    ("Schedule1F1B", None, 3 / 11, 3 / 11),
    ("ScheduleInterleaved1F1B", 4, 3 / 19, 3 / 19),
    ("ScheduleLoopedBFS", 4, 3 / 19, 3 / 19),
    ("ScheduleInterleavedZeroBubble", 4, 1 / 17, 1 / 17),
    ("ScheduleZBVZeroBubble", 7, 1 / 17, 0.0),
    ("ScheduleDualPipeV", 7, 1 / 17, 1 / 17),
]


def schedule_of(name: str, second: int | None) -> Any:
    kind = getattr(torch_schedules, name, None)
    if kind is None:
        pytest.skip(f"torch {torch.__version__} has no {name}")
    if second is None:
        return kind(stage(0, RANKS), 8, loss_fn=loss)
    return kind([stage(0, 2 * RANKS), stage(second, 2 * RANKS)], 8, loss_fn=loss)


@pytest.mark.parametrize(("name", "second", "once", "steady"), KINDS, ids=[k[0] for k in KINDS])
def test_every_schedule_of_torch_is_played(name: str, second: int | None, once: float, steady: float) -> None:
    schedule = schedule_of(name, second)
    orders = orders_of(schedule)
    durations = by_kind(UNIT_DURATIONS)
    for rank in range(RANKS):
        for expected, repeated in ((once, False), (steady, True)):
            found = rank_bubbles(orders, durations, steady=repeated)[rank]
            assert found.fraction == pytest.approx(expected), f"rank {rank}, {repeated=}"
    if steady:
        assert "not measured yet" in BubbleWatch(schedule, float).describe()
    else:
        with pytest.raises(Unwatchable, match=rf"{name} with 4 rank\(s\) has no bubbles"):
            BubbleWatch(schedule, float)


@pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B])
def test_orders_without_a_list_are_as_torch_lists_them(kind: Any) -> None:
    schedule = kind(stage(0, RANKS), 6, loss_fn=loss)
    if not hasattr(schedule, "_get_pipeline_order"):
        pytest.skip(f"torch {torch.__version__} lists no single stages")
    listed, orders = schedule._get_pipeline_order(), orders_of(schedule)
    for rank in range(RANKS - 1):  # 1F1B's last rank lacks its first forward there
        assert orders[rank] == parse_actions(listed[rank])


class Clock:
    """Seconds that pass when somebody computes or waits."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Alone:
    """Torch's schedule of one stage: its neighbours answer after a tenth of a second, actions take one."""

    def __init__(self, kind: Any, index: int, clock: Clock, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[ActionKind, int]] = []
        self._clock, self._stage = clock, stage(index, RANKS)
        self.schedule = kind(self._stage, 5, loss_fn=loss)

        def acts(kind: ActionKind) -> Any:
            def act(number: int, *args: Any, **kwargs: Any) -> None:
                self.seen.append((kind, number))
                clock.now += 1.0

            return act

        receives = {"fwd": index > 0, "bwd": index < RANKS - 1}
        for direction, does in receives.items():
            patch.setattr(self._stage, f"get_{direction}_recv_ops", lambda m, does=does: ["message"] * does)
            patch.setattr(self._stage, f"get_{direction}_send_ops", lambda m: [])
        patch.setattr(self._stage, "forward_one_chunk", acts(ActionKind.FORWARD))
        patch.setattr(self._stage, "backward_one_chunk", acts(ActionKind.BACKWARD))
        patch.setattr(self._stage, "perform_reduce_grad", lambda scale: None)
        for name in ("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses"):
            patch.setattr(self.schedule, name, lambda *args: None)
        patch.setattr(torch_schedules, "_batch_p2p", lambda ops, desc=None: ops)
        patch.setattr(torch_schedules, "_sorted_batch_p2p", lambda ops, desc=None: {0: ops} if ops else {})
        patch.setattr(torch_schedules, "_wait_batch_p2p", self.wait)

    def wait(self, works: Any) -> None:
        self._clock.now += 0.1 * len(works)

    def step(self) -> None:
        self.schedule._step_microbatches([()] * 5, [{}] * 5)


def too_long(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("all ranks were played while the job trains")


@pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B])
@pytest.mark.parametrize("index", [0, 1, RANKS - 1])
def test_a_schedule_runs_as_its_orders_say_and_its_waits_are_measured(
    kind: Any, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    alone = Alone(kind, index, clock, monkeypatch)
    before = torch_schedules._wait_batch_p2p
    watch = BubbleWatch(alone.schedule, float, clock)
    with watch.listening(), monkeypatch.context() as patch:
        patch.setattr(bubble_watch, "rank_bubbles", too_long)
        for _ in range(4):
            watch.top()
            alone.seen.clear()
            alone.step()
            assert alone.seen == [(a.kind, a.micro_batch) for a in orders_of(alone.schedule)[index]]
        watch.top()
    assert torch_schedules._wait_batch_p2p == before
    waits = 0.1 * 5 * ((index > 0) + (index < RANKS - 1))
    assert watch.predicted_fraction == pytest.approx(3 / 8)
    assert watch.measured_fraction == pytest.approx(waits / (waits + 10.0))
    assert (
        watch.describe()
        == f"bubbles of {kind.__name__}: 37.5% predicted, {waits / (waits + 10):.1%} measured"
    )


def test_a_step_with_two_schedules_runs_or_none_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    alone = Alone(ScheduleGPipe, 1, clock, monkeypatch)
    watch = BubbleWatch(alone.schedule, float, clock)
    with watch.listening():
        for runs in (0, 2, 0, 3):
            watch.top()
            for _ in range(runs):
                alone.step()
        watch.top()
    assert "not measured yet" in watch.describe()


def test_copies_run_while_a_stage_waits_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, opened = Clock(), list[tuple[bool, int]]()
    alone = Alone(ScheduleGPipe, 0, clock, monkeypatch)
    watch = BubbleWatch(alone.schedule, float, clock)
    monkeypatch.setattr(watch.pacer, "bubble", lambda is_open: opened.append((is_open, len(alone.seen))))
    with watch.listening():
        for enabled in (True, False, True):
            watch.pacer.enabled = enabled
            watch.top()
            alone.seen.clear()
            opened.clear()
            alone.step()
            if not enabled:
                assert opened == []
    assert not watch.pacer.enabled
    # The first stage receives gradients only: it waits before each of its five backwards.
    assert opened == [(is_open, before) for before in range(5, 10) for is_open in (True, False)]


def test_a_pipeline_of_one_stage_has_no_bubbles() -> None:
    with pytest.raises(Unwatchable, match=r"with 1 rank\(s\) has no bubbles"):
        BubbleWatch(ScheduleGPipe(stage(0, 1, dist.new_group([0])), 4, loss_fn=loss), float)


def test_what_is_no_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match=r"copy_in_bubbles\(PipelineStage\): pass a schedule"):
        BubbleWatch(stage(0, RANKS), float)


def test_a_list_that_cannot_be_run_ends_no_training() -> None:
    schedule = schedule_of("ScheduleInterleaved1F1B", 4)
    schedule.pipeline_order[0] = list(reversed(schedule.pipeline_order[0]))
    with pytest.raises(Unwatchable, match="cannot be run"):
        BubbleWatch(schedule, float)


def test_puts_go_while_a_stage_waits_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait from the top on, as soon as bubbles are measured, and as long as no peer lags behind."""
    clock, asked = Clock(), list[tuple[bool, int]]()
    alone = Alone(ScheduleGPipe, 0, clock, monkeypatch)
    watch = BubbleWatch(alone.schedule, float, clock, lambda quiet: asked.append((quiet, len(alone.seen))))
    # The first stage receives gradients only: it waits before each of its five backwards.
    in_bubbles = [(True, 0), *((quiet, before) for before in range(5, 10) for quiet in (False, True))]
    with watch.listening():
        watch.pacer.enabled = True
        for lagging, expected in (
            (False, []),  # nothing is measured yet
            (False, in_bubbles),
            (True, [(False, 0)]),
            (True, []),
            (False, in_bubbles),
        ):
            alone.seen.clear()
            asked.clear()
            watch.top(lagging=lagging)
            alone.step()
            assert asked == expected
        asked.clear()
    assert asked == [(False, 10)]


def test_puts_go_at_any_time_where_copies_do_not_wait_for_bubbles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another way to copy is tried, or was faster."""
    clock, asked = Clock(), list[bool]()
    alone = Alone(ScheduleGPipe, 0, clock, monkeypatch)
    watch = BubbleWatch(alone.schedule, float, clock, asked.append)
    with watch.listening():
        for enabled in (True, True, False, False):
            watch.pacer.enabled = enabled
            watch.top()
            alone.step()
        assert asked == [True, *[False, True] * 5, False]
    assert len(asked) == 12


class Copier:
    """A thread that asks for one piece."""

    def __init__(self, pacer: CopyPacer, size_bytes: int) -> None:
        self._thread = threading.Thread(target=lambda: pacer.admit(size_bytes), daemon=True)
        self._thread.start()

    def is_held(self) -> bool:
        self._thread.join(0.05)
        return self._thread.is_alive()

    def ends(self) -> bool:
        self._thread.join(20)
        return not self._thread.is_alive()


def paced(clock: Clock, *, gap_s: float = 10.0, window_s: float = 1000.0) -> CopyPacer:
    """Copies 100 bytes each second; the bubbles of an iteration take ``gap_s``."""
    pacer = CopyPacer(lambda: [gap_s], lambda: window_s, clock)
    pacer.copied(100, 1.0)
    return pacer


def begin(pacer: CopyPacer, total_bytes: int) -> None:
    pacer.begin()
    pacer.plan(total_bytes)


def test_a_piece_waits_for_a_bubble() -> None:
    pacer = paced(Clock())
    begin(pacer, 500)
    copier = Copier(pacer, 100)
    assert copier.is_held()
    pacer.bubble(True)
    assert copier.ends()
    pacer.admit(100)
    pacer.bubble(False)
    assert pacer.bytes_inside == 200
    last = Copier(pacer, 100)
    assert last.is_held()
    pacer.hurry()
    assert last.ends()
    assert pacer.bytes_inside == 200


def test_what_does_not_fit_into_bubbles_does_not_wait() -> None:
    """Nine tenths of a bubble are used: 450 bytes of 500 fit."""
    pacer = paced(Clock(), gap_s=5.0)
    begin(pacer, 500)
    pacer.admit(50)
    copier = Copier(pacer, 100)
    assert copier.is_held()
    pacer.hurry()
    assert copier.ends()


def test_training_may_wait_before_the_copy_thread_has_planned() -> None:
    pacer = paced(Clock())
    pacer.begin()
    pacer.hurry()
    pacer.plan(500)
    assert Copier(pacer, 100).ends()


@pytest.mark.parametrize("rate_known", [True, False])
def test_without_bubbles_or_a_rate_nothing_waits(rate_known: bool) -> None:
    pacer = paced(Clock(), gap_s=0.0) if rate_known else CopyPacer(lambda: [9.0], lambda: 1e3, Clock())
    begin(pacer, 300)
    for _ in range(3):
        pacer.admit(100)
    assert pacer.bytes_inside == 0


def test_nothing_waits_when_the_rest_just_fits_before_the_optimizers_step() -> None:
    clock = Clock()
    pacer = paced(clock, window_s=100.0)
    begin(pacer, 200)  # 2 s of copies, and half as many for caution: until 90 - 3
    copier = Copier(pacer, 100)
    assert copier.is_held()
    clock.now = 87.5
    pacer.bubble(False)  # nobody tells the thread
    assert copier.is_held()
    later = paced(clock, window_s=1.0)
    begin(later, 200)
    later.admit(100)
    later.admit(100)
    pacer.hurry()
    assert copier.ends()


def checkpointer(endpoint: str, **options: Any) -> Checkpointer:
    model = nn.Linear(2, 2)
    given = {"job": "bubbles", "run": uuid.uuid4().hex[:8], "daemon": endpoint, "rank": 0, "world_size": 1}
    return Checkpointer(model, torch.optim.SGD(model.parameters(), lr=0.1), **grouped(**given, **options))


def test_options_that_exclude_each_other(endpoint: str) -> None:
    schedule = schedule_of("ScheduleInterleaved1F1B", 4)
    with (
        checkpointer(endpoint, inline_copy=True) as ckpt,
        pytest.raises(ValueError, match="inline_copy=True"),
    ):
        ckpt.copy_in_bubbles(schedule)
    with checkpointer(endpoint) as ckpt:
        ckpt.copy_in_bubbles(ScheduleGPipe(stage(0, 1, dist.new_group([0])), 4, loss_fn=loss))
        assert "copies run as without a pipeline: ScheduleGPipe with 1 rank(s)" in ckpt.describe()
        ckpt.copy_in_bubbles(schedule)
        with pytest.raises(ValueError, match="called before"):
            ckpt.copy_in_bubbles(schedule)
        assert "bubbles of ScheduleInterleaved1F1B: 15.8% predicted" in ckpt.describe()
        assert "forward_one_chunk" in vars(schedule._stages[0])
    assert "forward_one_chunk" not in vars(schedule._stages[0])
