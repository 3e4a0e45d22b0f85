"""What a hand-written pipeline gets from its log: whether to send, whether to receive, what all
ranks have alike, and its facts.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ckptd.client import Checkpointer
from ckptd.client.daemon_link.mapped_segment import MappedSegment
from ckptd.client.model.communication import Communication
from ckptd.client.pipeline.boundary_log import BoundaryLog
from ckptd.client.pipeline.isolated_stage import IsolatedStage, Records
from ckptd.client.pipeline.log_reader import LogFacts, LogReader, facts_of
from ckptd.core.slots.boundary import RecordKey, SentKind
from ckptd.errors import CorruptionError
from tests.ckptd.running import eventually
from tests.client.pipeline.test_boundary_log import Trained
from tests.e2e.harness import own_daemon

LOST, RESUME = 6, 10


@pytest.fixture
def make(endpoint: str) -> Iterator[Callable[..., Trained]]:
    made: list[Trained] = []

    def create(**options: Any) -> Trained:
        made.append(Trained(endpoint, uuid.uuid4().hex[:8], **options))
        return made[-1]

    yield create
    for each in made:
        each.ckpt.close()


def apart(reader: LogReader, **options: Any) -> IsolatedStage:
    """Rank 0 runs [LOST, RESUME) without rank 1, whose log is read."""

    def logs(rank: int, iteration: int) -> Records:
        assert rank == 1
        return reader.read(iteration)

    return IsolatedStage([], 0, {0: LOST}, RESUME, logs, **options)


def segments(job: Trained) -> list[MappedSegment]:
    assert job.ckpt._memory is not None
    return list(job.ckpt._memory.logs)


def facts(job: Trained) -> list[LogFacts | None]:
    return [facts_of(segment.descriptor.client) for segment in segments(job)]


# -- receiving -------------------------------------------------------------------------------------


def test_who_is_not_there_is_read_and_not_sent_to(make: Callable[..., Trained]) -> None:
    """What rank 1 has logged arrives in the buffers, to the bit, until all run together."""
    neighbour = make()
    neighbour.train(RESUME + 1)
    job = make()
    job.log.isolated = apart(neighbour.reader())
    told = []

    def body(log: BoundaryLog, step: int) -> None:
        buffer = torch.full((3, 6), -1.0, requires_grad=True)
        fed = log.receive_activation(buffer, source=1, micro_batch=1)
        sends = log.gradient(buffer.detach(), micro_batch=1, dest=1)
        anyhow = log.gradient(buffer.detach(), micro_batch=1, index=1)
        expected = neighbour.sent[step][RecordKey(SentKind.ACTIVATION, 0, 1)]
        assert fed == torch.equal(buffer, expected)
        told.append((step, fed, sends, anyhow))

    for step in job.ckpt.steps(RESUME + 1, start=LOST):
        job.step(step, body)
    fed = [(step, True, False, True) for step in range(LOST, RESUME)]
    assert told == [*fed, (RESUME, False, True, True)]
    assert RecordKey(SentKind.GRADIENT, 0, 1) in job.reader().read(RESUME)


def test_a_round_of_the_same_is_fed_in_its_order(make: Callable[..., Trained]) -> None:
    """A step that runs its schedule twice sends the same micro-batch twice."""
    neighbour = make()

    def twice(log: BoundaryLog, step: int) -> None:
        for number in range(2):
            log.activation(torch.full((2,), step + number / 2), micro_batch=0)

    neighbour.train(RESUME, twice)
    job = make()
    job.log.isolated = apart(neighbour.reader())
    received: list[Tensor] = []

    def body(log: BoundaryLog, step: int) -> None:
        for _ in range(2):
            received.append(torch.zeros(2))
            assert log.receive_activation(received[-1], source=1, micro_batch=0)

    for step in job.ckpt.steps(RESUME, start=LOST):
        job.step(step, body)
    assert [each.tolist()[0] for each in received] == [n / 2 for n in range(2 * LOST, 2 * RESUME)]


def test_what_is_not_in_the_log_is_told(make: Callable[..., Trained]) -> None:
    neighbour = make()
    neighbour.train(RESUME)
    job = make()
    job.log.isolated = apart(neighbour.reader())
    missing = r"run isolated \[rank=0 iteration=6 neighbour=1 kind=gradient stage=4 micro_batch=2 index=0 round=0\]: it is not in the log"
    other = r"torch.float32 \[3, 6\] was sent, but torch.float64 \[3, 6\] is expected"
    for step in job.ckpt.steps(RESUME, start=LOST):
        with pytest.raises(CorruptionError, match=missing):
            job.log.receive_gradient(torch.zeros(3, 6), source=1, stage=4, micro_batch=2)
        with pytest.raises(CorruptionError, match=other):
            job.log.receive_activation(torch.zeros(3, 6).double(), source=1, micro_batch=1)
        with pytest.raises(ValueError, match="source=-1: numbers start at 0"):
            job.log.receive_activation(torch.zeros(3, 6), source=-1, micro_batch=1)
        job.step(step)
        break


def test_off_or_with_everybody_there_all_is_sent_and_received(make: Callable[..., Trained]) -> None:
    off = Checkpointer(torch.nn.Linear(1, 1), None, daemon=None).boundary_log()
    buffer = torch.zeros(1)
    job = make()
    for _ in job.ckpt.steps(1):
        for log in (off, job.log):
            assert log.activation(buffer, micro_batch=0, dest=1)
            assert log.gradient(buffer, micro_batch=0, dest=1)
            assert not log.receive_activation(buffer, source=1, micro_batch=0)
            assert not log.receive_gradient(buffer, source=1, micro_batch=0)


def test_a_rank_that_has_given_up_logging_is_fed_all_the_same(make: Callable[..., Trained]) -> None:
    """It would wait for a rank that is not there."""
    neighbour = make()
    neighbour.train(RESUME)
    job = make()
    job.log.isolated = apart(neighbour.reader())
    job.log.given_up = True
    for step in job.ckpt.steps(RESUME, start=LOST):
        buffer = torch.full((3, 6), -1.0)
        assert job.log.receive_activation(buffer, source=1, micro_batch=1)
        assert not (buffer == -1).any()
        job.step(step)
        break


def test_what_verify_communicates_does_not_join_ranks(make: Callable[..., Trained]) -> None:
    job = make()
    communication = job.log._communication = Communication()
    aside = []

    def again(step: int) -> None:
        aside.append(communication._aside)
        job.step(step)

    for step in job.ckpt.steps(9):
        job.step(step)
        if step == 8:
            job.ckpt.verify(again)
    assert aside
    assert set(aside) == {1}


# -- shared values ---------------------------------------------------------------------------------


def body_with_norm(job: Trained, computed: list[int], got: list[Any]) -> Callable[..., None]:
    """A step that asks for two values; ``computed`` are the steps in which they were computed."""

    def body(log: BoundaryLog, step: int) -> None:
        job.send(log, step)

        def norm() -> Tensor:
            computed.append(step)
            return torch.tensor([step / 3, float("nan")], requires_grad=True)

        got.append((step, job.ckpt.shared_value("norm", norm)))
        got.append((step, job.ckpt.shared_value("mode", lambda: {"warm": step})))

    return body


def test_shared_values_are_recorded_and_a_replay_does_not_compute_them(
    make: Callable[..., Trained], endpoint: str
) -> None:
    job = make()
    computed: list[int] = []
    got: list[Any] = []
    job.train(9, body_with_norm(job, computed, got))
    assert computed == list(range(9))
    run = job.ckpt._identity.run
    job.ckpt.close()
    again = Trained(endpoint, run)
    computed.clear()
    repeated: list[Any] = []
    steps = again.train(10, body_with_norm(again, computed, repeated))
    again.ckpt.close()
    assert steps[0] < 9  # something was replayed
    assert computed == [9]
    before = {(step, str(value)) for step, value in got if step >= steps[0]}
    now = {(step, str(value)) for step, value in repeated if step < 9}
    assert {(step, text.replace(", requires_grad=True", "")) for step, text in before} == now
    assert again.ckpt.stats()["log_mismatches"] == 0


def test_whoever_runs_apart_gets_shared_values_from_another_log(
    make: Callable[..., Trained],
) -> None:
    neighbour = make()
    neighbour.train(RESUME, body_with_norm(neighbour, [], []))
    reader = neighbour.reader()
    job = make()
    job.log.isolated = apart(reader, shared=reader.read)
    computed: list[int] = []
    got: list[Any] = []
    body = body_with_norm(job, computed, got)
    for step in job.ckpt.steps(RESUME + 1, start=LOST):
        job.step(step, body)
    assert computed == [RESUME]
    values = [value for _, value in got]
    assert torch.equal(values[0].nan_to_num(-1), torch.tensor([2.0, -1.0]))
    assert values[1] == {"warm": 6}
    assert values[3] == {"warm": 7}
    # It has them in its own log, too, for the next who needs them.
    own = job.reader().read(RESUME - 1)
    theirs = reader.read(RESUME - 1)
    for number in range(2):
        key = RecordKey(SentKind.VALUE, 0, number)
        assert torch.equal(own[key], theirs[key])


def test_a_shared_value_that_nobody_knows_or_knows_otherwise_is_told(
    make: Callable[..., Trained],
) -> None:
    neighbour = make()
    neighbour.train(RESUME, body_with_norm(neighbour, [], []))
    reader = neighbour.reader()
    job = make()
    job.log.isolated = apart(reader)
    for step in job.ckpt.steps(RESUME, start=LOST):
        with pytest.raises(CorruptionError, match="no log that is read contains shared value 'norm'"):
            job.ckpt.shared_value("norm", lambda: 0)
        job.log.isolated._shared = reader.read
        other = "shared value 0 of the step is 'norm' in the log, but 'loss' is requested"
        with pytest.raises(CorruptionError, match=other):
            job.ckpt.shared_value("loss", lambda: 0)
        job.step(step)
        break


def test_what_cannot_be_kept_is_refused(make: Callable[..., Trained]) -> None:
    job = make()
    for _ in job.ckpt.steps(1):
        with pytest.raises(ValueError, match="shared value 'thing'"):
            job.ckpt.shared_value("thing", object)
    assert Checkpointer(torch.nn.Linear(1, 1), None, daemon=None).shared_value("a", lambda: 3) == 3


# -- facts -----------------------------------------------------------------------------------------


def watched(job: Trained) -> Communication:
    """As in a job of several ranks: this one has no process group, it is told what was seen."""
    job.log._communication = Communication()
    return job.log._communication


def test_facts_lie_beside_the_log_and_a_change_makes_another_generation(
    make: Callable[..., Trained], endpoint: str
) -> None:
    job = make()
    communication = watched(job)
    communication.sends([1])
    job.train(12)
    (first,) = segments(job)
    assert facts(job) == [LogFacts((1,), (0,))]
    communication.joined[2] = "an all-reduce every 12 steps"
    job.train(30)
    (second,) = segments(job)
    assert second.generation > first.generation
    known = LogFacts((1,), (0, 2), (), ("an all-reduce every 12 steps",))
    assert facts(job) == [known]
    run = job.ckpt._identity.run
    job.ckpt.close()
    again = Trained(endpoint, run)
    watched(again).sends([1])
    again.train(40)
    assert facts(again) == [known]  # though it has not happened again
    again.ckpt.close()


@pytest.mark.slow
def test_rather_no_log_than_one_whose_facts_are_wrong(caplog: pytest.LogCaptureFixture) -> None:
    """Memory is there for one log of that size, not for two: it is given back, and asked for again."""
    with own_daemon("--memory", "24MiB") as daemon:
        job = Trained(daemon.endpoint, uuid.uuid4().hex[:8])
        communication = watched(job)

        def send(log: BoundaryLog, step: int) -> None:
            log.activation(torch.zeros(500_000), micro_batch=0)

        job.train(12, send)
        assert facts(job) == [LogFacts((), (0,))]
        communication.joined[1] = "an all-reduce"
        with caplog.at_level(logging.WARNING):
            job.train(16, send)
            assert segments(job) == []
            job.train(80, send)
        assert "training continues without it" in caplog.text
        assert facts(job) == [LogFacts((), (0, 1), (), ("an all-reduce",))]
        eventually(lambda: 79 in job.reader().iterations(), "it is logged again")
        job.ckpt.close()
