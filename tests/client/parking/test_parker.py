"""What is parked is the state at the top of the step, to the bit, or it is not parked; and training
never pays for trouble with it.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from ckptd.client import Checkpointer
from ckptd.client.model.freezing import Tape
from ckptd.client.model.live_state import LiveState
from ckptd.client.parking.park_memory import parked_image, parked_records
from ckptd.client.parking.park_writer import Moment
from ckptd.client.parking.parker import (
    COPY_TRANSITIONS,
    CopyEvent,
    CopyState,
    ParkGate,
    Parking,
)
from ckptd.client.pipeline.upstream_feed import FedLogs, ValueLogs
from ckptd.client.recovery.localized_recovery import LocalizedStart
from ckptd.client.recovery.replay import Replay
from ckptd.client.recovery.snapshot_loading import SnapshotLoader
from ckptd.core.recovery.localized_plan import LocalizedPlan, RankKind, RankPlan
from ckptd.core.slots.slots import SlotState
from ckptd.ctl.main import main as ckptctl
from ckptd.cuda.engine import CopyItem, CpuEngine, HostMemory
from ckptd.errors import CorruptionError, LocalProtocolError
from tests.ckptd.running import eventually
from tests.e2e.harness import own_daemon
from tests.e2e.parking_job import Job, unlike
from tests.option_groups import grouped
from tests.transcripts import Driver, scenarios


class Gate:
    """A training thread that reports the life of its steps, and somebody who parks."""

    def __init__(self) -> None:
        self.gate = ParkGate("no step has begun")
        self.waiting: threading.Event | None = None

    def play(self, words: list[str]) -> list[str]:
        lines = []
        match words:
            case ["top", step]:
                self.gate.top(moment_of(int(step)))
            case ["update"]:
                self.waiting = self.gate.update()
            case ["waited-too-long"]:
                self.gate.abandon_copy()
                self.waiting = None
                lines = ["   the optimizer goes on"]
            case ["close", *why]:
                self.gate.close(" ".join(why))
            case ["park"]:
                moment = self.gate.awaited(0)
                began = moment is not None and self.gate.begin_copy(moment)
                lines = ["   copy begins" if began else f"   refused: {self.gate.why_not}"]
            case ["copied"]:
                lines = ["   thrown away" if self.gate.end_copy() else "   kept"]
            case _:
                raise ValueError(words)
        if self.waiting is not None:
            if self.waiting.is_set():
                self.waiting = None
                lines.append("   the optimizer may step")
            else:
                lines.append("   the optimizer waits")
        moment_state, copy_state = self.gate.state
        return [*lines, f"moment {moment_state}, copy {copy_state}"]


def moment_of(step: int) -> Moment:
    return Moment(step, 0, {}, {}, {}, [], None, None)


@pytest.mark.parametrize("name", scenarios("parking"))
def test_transcripts(name: str, transcript: Callable[[str, Driver], None]) -> None:
    transcript(name, Gate())


def test_a_second_copy_beside_the_first_is_refused_by_name() -> None:
    """Both would use one slot and one engine."""
    with pytest.raises(LocalProtocolError, match=r"parking copy: event begin .* in state running"):
        COPY_TRANSITIONS.after(CopyState.RUNNING, CopyEvent.BEGIN)


def test_the_copy_of_a_step_that_is_over_does_not_begin() -> None:
    """It was asked for before the optimizer stepped: what is live now is of no top."""
    gate = ParkGate("no step has begun")
    old = moment_of(1)
    gate.top(old)
    gate.update()
    gate.top(moment_of(2))
    assert not gate.begin_copy(old)
    assert gate.state[1] is CopyState.NONE


def test_who_waits_for_the_next_top_gets_its_moment() -> None:
    """Asked while an optimizer steps, and answered from the training thread."""
    gate = ParkGate("no step has begun")
    gate.update()
    found: list[Moment | None] = []
    waiting = threading.Thread(target=lambda: found.append(gate.awaited(60)))
    waiting.start()
    moment = moment_of(5)
    gate.top(moment)
    waiting.join(60)
    assert found == [moment]


Body = Callable[[int], None]


class Trained(Job):
    """A job with a checkpointer that parks."""

    def __init__(self, endpoint: str, run: str, **options: Any) -> None:
        super().__init__()
        options = {
            "job": "park",
            "run": run,
            "daemon": endpoint,
            "window": 2,
            "park": True,
            **options,
        }
        self.ckpt = Checkpointer(self.model, self.optimizer, self.state, **grouped(**options))
        self.tops: dict[int, dict[str, Any]] = {}

    @property
    def parking(self) -> Parking:
        assert self.ckpt._loop.parking is not None
        return self.ckpt._loop.parking

    @property
    def memory(self) -> Any:
        assert self.ckpt._memory is not None
        return self.ckpt._memory

    def train(self, total: int, middle: Body | None = None) -> None:
        """``middle`` is called where the weights have not changed yet."""
        for step in self.ckpt.steps(total):
            self.tops[step] = self.everything()
            self.forward_and_backward()
            if middle is not None:
                middle(step)
            self.update()
            self.let_the_daemon_follow()
        self.tops[total] = self.everything()

    def let_the_daemon_follow(self) -> None:
        coming = self.parking._slots._coming
        if coming is not None:
            coming.exception(20)
        self.memory.session.flush(20)
        eventually(lambda: SlotState.FILLED not in self.states(self.memory.table.segments), "sealed")

    @staticmethod
    def states(segments: Any) -> list[SlotState]:
        headers = [s.header(i) for s in segments for i in range(s.geometry.num_slots)]
        return [h.state for h in headers if h is not None]

    def parked(self) -> list[int]:
        return [record.iteration for record in parked_records(self.memory)]

    def restored(self, iteration: int, seed: int = 9) -> Job:
        """A fresh job with what is parked as the only image of a replay, where its first step begins."""
        record = [r for r in parked_records(self.memory) if r.iteration == iteration][-1]
        fresh = Job(seed)
        plan = self.ckpt._loop.recorder.plan  # type: ignore[union-attr]
        assert plan is not None
        replay = Replay(
            SnapshotLoader(LiveState(fresh.model, [fresh.optimizer], None), plan.operators, CpuEngine()),
            [parked_image(self.memory, record)],
            stateful=fresh.state,
            tape=Tape(),
            freezing="drop",
        )
        assert replay.dense
        replay.load_state()
        replay.load_tensors()
        replay.begin_first_step()
        return fresh


@pytest.fixture
def make(endpoint: str, run: str) -> Iterator[Callable[..., Trained]]:
    made: list[Trained] = []

    def create(**options: Any) -> Trained:
        made.append(Trained(endpoint, run, **options))
        return made[-1]

    yield create
    for each in made:
        each.ckpt.close()


def at(step: int, work: Callable[[], Any]) -> Body:
    return lambda now: work() if now == step else None


def fail(why: str) -> None:
    raise RuntimeError(why)


# -- what is parked --------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"policy": "dense", "every": 4}], ids=str)
def test_what_is_parked_is_the_state_at_the_top_to_the_bit(
    make: Callable[..., Trained], options: dict[str, Any]
) -> None:
    """After forward and backward, which have changed buffers and generators; also where the step
    has no snapshot.
    """
    job = make(**options)
    job.train(10, at(9, lambda: job.parking.park("a test")))
    assert job.parked() == [9]
    fresh = job.restored(9)
    assert unlike(fresh.everything(), job.tops[9]) == []
    changed = unlike(job.tops[10], job.tops[9])  # the control: the comparison sees what one step changes
    assert {
        "seen",
        "norm.running_mean",
        "rng",
        "a.weight",
        "b.weight.exp_avg",
        "a.bias.step",
    } <= set(changed)
    assert unlike(fresh.everything(), job.tops[10]) == changed
    fresh.forward_and_backward()
    fresh.update()
    assert unlike(fresh.everything(), job.tops[10]) == []
    stats = job.ckpt.stats()
    assert (stats["parked"], stats["parked_iteration"], stats["park_refused"]) == (1, 9, 0)
    assert stats["park_memory_bytes"] > 0
    assert "for 2 states of at most" in job.ckpt.describe()


def test_it_is_parked_beside_a_training_thread_that_does_nothing(
    make: Callable[..., Trained],
) -> None:
    job, outcomes = make(), list[int]()

    def hang() -> None:
        heard = threading.Event()
        assert job.parking.ask("a test", lambda o: (outcomes.append(o.iteration), heard.set()))  # type: ignore[arg-type, func-returns-value]
        assert heard.wait(20)

    job.train(8, at(7, hang))
    assert outcomes == [7]
    assert unlike(job.restored(7).everything(), job.tops[7]) == []


@pytest.mark.parametrize("options", [{}, {"policy": "dense"}], ids=str)
def test_a_resumed_step_is_parked_like_any_other(endpoint: str, run: str, options: dict[str, Any]) -> None:
    """Its snapshot was taken in another life; and the iterator that this life makes draws from the
    generators first.
    """
    first = Trained(endpoint, run, **options)
    with pytest.raises(RuntimeError, match="gone"):
        first.train(10, at(9, lambda: fail("gone")))
    first.ckpt.close()
    second = Trained(endpoint, run, **options)
    assert second.parked() == [9]  # of the first life
    outcomes: list[int] = []
    try:
        for step in second.ckpt.steps(10):
            if not outcomes:
                torch.randn(3)  # as a data loader's iterator that is made here
            second.forward_and_backward()
            outcomes.append(second.parking.park("a test").iteration)
            second.update()
            assert outcomes[-1] == (-1 if step < 9 else 9)  # a replayed step is none of its own
        assert len(second.memory.parks) == 1  # the room of the first life serves the second
        fresh = second.restored(9)
        assert unlike(fresh.everything(), first.tops[9]) == []
        fresh.forward_and_backward()
        fresh.update()
        assert unlike(fresh.everything(), second.everything()) == []
    finally:
        second.ckpt.close()


def test_parked_again_before_its_forward_a_resumed_step_is_no_worse_than_before(
    endpoint: str, run: str
) -> None:
    """A second failure, while a stage waits for its input: what it had been restored from told the
    random state at the forward.
    """
    first = Trained(endpoint, run)
    with pytest.raises(RuntimeError, match="gone"):
        first.train(10, at(9, lambda: fail("gone")))
    first.ckpt.close()
    second = Trained(endpoint, run)
    before = parked_image(second.memory, parked_records(second.memory)[-1]).scalars()
    try:
        for step in second.ckpt.steps(10):
            if step == 9:
                assert second.parking.park("a test").iteration == 9
                break
            second.forward_and_backward()
            second.update()
        again = parked_image(second.memory, parked_records(second.memory)[-1]).scalars()
        assert before["rng_forward"] == again["rng_forward"]
    finally:
        second.ckpt.close()


def test_while_a_replay_runs_nobody_waits_for_a_top(endpoint: str, run: str) -> None:
    """After the optimizer's step of a replayed step, SIGTERM waited 20 s for a moment that does not come."""
    first = Trained(endpoint, run)
    first.train(9)
    first.ckpt.close()
    second = Trained(endpoint, run)
    try:
        for _ in second.ckpt.steps(10):
            assert second.ckpt.replaying
            second.forward_and_backward()
            second.update()
            assert "a replay is none" in second.parking.park("a test").reason
            break
    finally:
        second.ckpt.close()


def test_what_needs_all_ranks_is_refused_where_not_all_are(make: Callable[..., Trained]) -> None:
    """The others, which were parked, would never come to it."""
    job = make()
    job.train(9)
    plan = LocalizedPlan(12, 0, {}, "", {})
    mine = RankPlan(RankKind.PARKED, 9, 9, (), ())
    feeds = FedLogs(job.memory.session, {})
    values = ValueLogs(job.memory.session, mine, feeds)
    job.ckpt._pipeline.start = LocalizedStart(plan, mine, [], feeds, values, 12)
    with pytest.raises(ValueError, match="iterations before 12"):
        job.ckpt.verify(lambda step: None)
    # So does a loop that ends before: a rank that was parked later would raise alone.
    with pytest.raises(ValueError, match="reach iteration 12, beyond total=11"):
        next(job.ckpt.steps(11))


def test_random_state_at_the_first_forward_is_known_also_before_it_is_reached(
    make: Callable[..., Trained],
) -> None:
    """A stage waits for its input before its forward; a resumed step that makes its iterator draws
    numbers before that.
    """
    job = make()
    job.train(7)
    for step in job.ckpt.steps(9):
        job.parking.park("a test")
        scalars = parked_image(job.memory, parked_records(job.memory)[-1]).scalars()
        # Nobody has drawn any between top and forward so far; from then on it cannot be known.
        assert scalars.get("rng_forward") == (scalars["rng"] if step == 7 else None)
        torch.randn(1)
        job.forward_and_backward()
        job.update()
        job.let_the_daemon_follow()


def test_a_step_is_parked_once_however_many_ask(make: Callable[..., Trained]) -> None:
    job, found = make(), list[int]()

    def thrice() -> None:
        found.extend(job.parking.park("a test").iteration for _ in range(3))

    job.train(8, at(7, thrice))
    assert found == [7, 7, 7]
    assert job.ckpt.stats()["parked"] == 1
    assert job.parked() == [7]


# -- the moment ------------------------------------------------------------------------------------


def test_while_the_optimizer_steps_it_is_refused(make: Callable[..., Trained]) -> None:
    job, told = make(), list[str]()

    def within(*_: Any) -> None:
        if job.ckpt.step == 7:
            told.append(job.parking.park("a test").reason)

    job.optimizer.register_step_post_hook(within)
    job.train(8)
    assert told == ["an optimizer is stepping"]
    assert job.ckpt.stats()["park_refused"] == 1
    assert job.parked() == []


def test_put_off_it_is_the_next_top_that_is_parked(make: Callable[..., Trained]) -> None:
    job, later = make(), list[int]()

    def within(*_: Any) -> None:
        if job.ckpt.step == 7:
            job.parking.ask("a test", lambda outcome: later.append(outcome.iteration))

    job.optimizer.register_step_post_hook(within)
    job.train(9, at(8, lambda: eventually(lambda: bool(later), "it is parked")))
    assert later == [8]
    assert unlike(job.restored(8).everything(), job.tops[8]) == []


def test_weights_that_were_written_to_are_not_parked(make: Callable[..., Trained]) -> None:
    job, told = make(), list[str]()

    def write() -> None:
        with torch.no_grad():
            job.model.b.weight.add_(1)
        told.append(job.parking.park("a test").reason)

    job.train(8, at(7, write))
    assert told == ["b.weight changed since the top of step 7"]
    assert job.parked() == []
    assert SlotState.FILLING not in job.states(job.memory.parks)


class Gated(CpuEngine):
    """Stops in the middle of a copy until it is let go on."""

    def __init__(self) -> None:
        super().__init__(inline=True)
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.gated = False

    def begin(
        self,
        items: Sequence[CopyItem],
        memory: HostMemory,
        base: int,
        done: Callable[[BaseException | None], None],
        late: Callable[[], Sequence[CopyItem]] = tuple,
        at_once: Sequence[CopyItem] = (),
    ) -> None:
        items = list(items)

        def rest() -> Sequence[CopyItem]:
            if self.gated:
                self.reached.set()
                assert self.go_on.wait(30)
            return [*items[len(items) // 2 :], *late()]

        super().begin(items[: len(items) // 2], memory, base, done, rest, at_once)


def gated(job: Trained, update_wait_s: float) -> Gated:
    """Parking with copies that stop half-way."""
    engine = Gated()
    parking = job.parking
    parking._engine = parking._copy._engine = engine
    parking._update_wait_s = update_wait_s
    return engine


def test_the_update_waits_for_a_copy_that_is_under_way(make: Callable[..., Trained]) -> None:
    job = make()
    engine, outcomes, order = gated(job, 30.0), list[int](), list[str]()
    job.optimizer.register_step_post_hook(lambda *_: order.append(f"update {job.ckpt.step}"))

    def ask() -> None:
        engine.gated = True
        job.parking.ask("a test", lambda o: outcomes.append(o.iteration))
        assert engine.reached.wait(20)

        def let_go() -> None:
            order.append("copied")
            engine.go_on.set()

        threading.Timer(0.3, let_go).start()

    job.train(8, at(7, ask))
    eventually(lambda: bool(outcomes), "it is parked")
    assert outcomes == [7]
    assert order[order.index("copied") + 1] == "update 7"
    assert unlike(job.restored(7).everything(), job.tops[7]) == []


def test_a_write_that_moves_no_version_counter_leaves_nothing_that_is_parked_torn(
    make: Callable[..., Trained],
) -> None:
    """Weight decay through ``p.data`` before the optimizer's step: what is there then is not the
    top of the step, whatever the counters say.
    """
    job = make()
    # Nor does a snapshot that is sealed afterwards make what was parked superfluous.
    job.parking._slots._outlived = lambda: -1  # type: ignore[method-assign]

    def decay_and_park() -> None:
        for parameter in job.model.parameters():
            parameter.data.mul_(0.97)
        job.parking.park("a test")

    job.train(7, at(6, lambda: job.parking.park("a test")))
    job.train(9, at(8, decay_and_park))
    assert job.parked() == [6]
    assert unlike(job.restored(6).everything(), job.tops[6]) == []


def test_a_copy_that_takes_too_long_is_thrown_away_and_what_was_parked_before_stays(
    make: Callable[..., Trained],
) -> None:
    """A torn image must be impossible: here the weights change while half of them is still to be copied."""
    job = make()
    told: list[str] = []
    # Nor does a snapshot that is sealed at once make it superfluous.
    job.parking._slots._outlived = lambda: -1  # type: ignore[method-assign]
    job.train(9, at(8, lambda: job.parking.park("a test")))
    engine = gated(job, 0.05)
    for step in job.ckpt.steps(10):
        job.forward_and_backward()
        engine.gated = True
        job.parking.ask("a test", lambda outcome: told.append(outcome.reason))
        assert engine.reached.wait(20)
        job.parking.before_update()
        with torch.no_grad():
            job.model.b.weight.data.add_(1)  # what a fused kernel does, too: no version is counted up
        engine.go_on.set()
        eventually(lambda: bool(told), "it has given up")
        assert step == 9
        assert told == ["the optimizer's step waited 0.05 s for it, and went on"]
        assert job.parked() == [8]
        assert unlike(job.restored(8).everything(), job.tops[8]) == []
        assert SlotState.FILLING not in job.states(job.memory.parks)
        job.update()


# -- memory ----------------------------------------------------------------------------------------


def test_the_last_two_stay_until_every_rank_has_a_newer_suffix(
    make: Callable[..., Trained],
) -> None:
    job = make()
    seen: list[list[int]] = []

    def park() -> None:
        job.parking.park("a test")
        seen.append(job.parked())

    job.train(12, lambda step: park() if step in (7, 8, 9) else None)
    assert [found[-1] for found in seen] == [7, 8, 9]
    assert all(len(found) <= 2 for found in seen)
    eventually(lambda: job.memory.table.ring_hint.floor > 9, "the daemon says how far everybody is")
    job.train(14)
    assert job.parked() == []
    (segment,) = job.memory.parks
    assert segment.geometry.num_slots == 2


def test_no_memory_is_one_warning_with_the_numbers_and_training_goes_on(
    run: str, caplog: pytest.LogCaptureFixture
) -> None:
    with own_daemon("--memory", "4MiB") as daemon, caplog.at_level(logging.WARNING):
        job = Trained(daemon.endpoint, run)
        told: list[str] = []
        job.train(62, at(60, lambda: told.append(job.parking.park("a test").reason)))
        job.ckpt.close()
    warnings = [r.getMessage() for r in caplog.records if "parking: no memory for 2" in r.getMessage()]
    assert len(warnings) == 1
    assert "the quota is" in warnings[0]
    assert told[0].startswith("there is no room for it: no memory for 2 states of")
    assert job.ckpt.stats()["snapshots"] > 0


def test_damage_is_noticed_and_set_aside(make: Callable[..., Trained]) -> None:
    job = make()
    job.train(9, at(8, lambda: job.parking.park("a test")))
    (record,) = parked_records(job.memory)
    segment = job.memory.parks.of(record)
    segment.slot(record.index)[record.image_len - 1] ^= 1
    with pytest.raises(CorruptionError, match="parked at iteration 8 is damaged"):
        parked_image(job.memory, record)
    assert job.parked() == []


# -- who asks --------------------------------------------------------------------------------------


def test_a_loop_that_is_left_in_its_middle_parks_that_step(make: Callable[..., Trained]) -> None:
    job = make()
    job.train(7)
    with pytest.raises(RuntimeError, match="connection closed by peer"):
        job.train(9, at(7, lambda: fail("connection closed by peer")))
    assert job.parked() == [7]
    assert unlike(job.restored(7).everything(), job.tops[7]) == []


def test_a_loop_that_ends_parks_nothing(make: Callable[..., Trained]) -> None:
    job = make()
    job.train(8)
    memory = job.memory
    assert parked_records(memory) == []
    job.ckpt.close()
    assert job.ckpt.stats()["parked"] == job.ckpt.stats()["park_refused"] == 0


def test_closed_in_the_middle_of_a_step_it_is_parked(endpoint: str, run: str) -> None:
    job = Trained(endpoint, run)
    steps = job.ckpt.steps(9)
    while next(steps) < 7:
        job.forward_and_backward()
        job.update()
        job.let_the_daemon_follow()
    job.ckpt.close()
    assert job.ckpt.stats()["parked_iteration"] == 7


def test_a_step_that_lasts_too_long_is_parked_and_goes_on(make: Callable[..., Trained]) -> None:
    job = make(park_after_s=0.4)

    def last() -> None:
        eventually(lambda: 7 in job.parked(), "it lasts too long")

    job.train(8, at(7, last))
    assert job.ckpt.stats()["parked"] >= 1
    assert unlike(job.restored(7).everything(), job.tops[7]) == []


@pytest.mark.parametrize("wrong", [{"park": "yes"}, {"park_after_s": 0}, {"park_after_s": -1.0}], ids=str)
def test_what_cannot_be_meant_is_named(endpoint: str, run: str, wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=f"^{name}="):
        Trained(endpoint, run, **wrong)


def test_unless_asked_for_one_rank_does_not_park(make: Callable[..., Trained]) -> None:
    job = make(park=None)
    job.ckpt.boundary_log()
    assert job.ckpt._loop.parking is None


def test_the_signal_is_as_it_was_when_nobody_parks_any_more(endpoint: str, run: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    jobs = [Trained(endpoint, f"{run}-{i}") for i in range(2)]
    installed = signal.getsignal(signal.SIGTERM)
    assert installed != before
    jobs[0].ckpt.close()
    assert signal.getsignal(signal.SIGTERM) == installed
    jobs[1].ckpt.close()
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_outside_of_the_main_thread_no_handler_is_installed_and_that_is_said(
    endpoint: str, run: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def elsewhere() -> None:
        job = Trained(endpoint, run)
        job.train(8, at(7, lambda: job.parking.park("a test")))
        assert job.parked() == [7]
        job.ckpt.close()
        done.set()

    done = threading.Event()
    with caplog.at_level(logging.WARNING):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join(60)
    assert done.is_set()
    assert signal.getsignal(signal.SIGTERM) == before
    told = [r.getMessage() for r in caplog.records if "SIGTERM will not park" in r.getMessage()]
    assert told == ["ckptd: SIGTERM will not park: handlers can be installed in the main thread only"]


def test_a_trainer_that_does_not_park_says_so_when_it_is_asked(
    make: Callable[..., Trained], endpoint: str, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make(park=False)
    code = ckptctl(["park", "park", run, "--endpoint", endpoint])
    said = f"park/{run} rank 0: not parked: this trainer does not park: pass recovery=RecoveryOptions(park=True), or log boundaries\n"
    assert (code, capsys.readouterr().out) == (1, said)
