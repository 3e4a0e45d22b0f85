"""What the hosts of a job do, event by event."""

from __future__ import annotations

import random

import pytest

from ckptd.errors import LocalProtocolError
from ckptd.host.epochs import (
    AbandonJob,
    BeginEpoch,
    HostEvent,
    HostLife,
    HostState,
    JobEpochs,
    ReleaseHosts,
    StopJob,
)


def job(
    world_size: int = 4, *, max_restarts: int = 2, steady_s: float = 100, min_ranks: int | None = None
) -> JobEpochs:
    """All hosts have joined."""
    epochs = JobEpochs(world_size, max_restarts=max_restarts, steady_s=steady_s, min_ranks=min_ranks)
    epochs.joined()
    return epochs


def test_a_failure_begins_an_epoch() -> None:
    assert job().failed(2, 0, "rank 2: SIGKILL", 1.0) == BeginEpoch(1, "rank 2: SIGKILL")


def test_failures_that_follow_from_a_failure_are_no_further_failures() -> None:
    epochs = job()
    epochs.failed(2, 0, "SIGKILL", 1.0)
    assert epochs.failed(1, 0, "exit code 1", 1.1) is None
    assert epochs.failed(3, 0, "exit code 1", 1.1) is None
    assert (epochs.epoch, epochs.failures) == (1, 1)


def test_a_failure_during_recovery_begins_one_more_epoch() -> None:
    epochs = job()
    epochs.failed(2, 0, "SIGKILL", 1.0)
    assert epochs.failed(0, 1, "SIGKILL", 1.2) == BeginEpoch(2, "SIGKILL")


def test_a_crash_loop_ends_with_the_last_reason() -> None:
    epochs = job(max_restarts=2)
    orders = [epochs.failed(0, epoch, f"exit code {epoch}", float(epoch)) for epoch in range(3)]
    assert isinstance(orders[2], AbandonJob)
    assert "3 failures" in orders[2].because
    assert "exit code 2" in orders[2].because
    assert epochs.failed(1, 2, "exit code 1", 4.0) is None


def test_where_a_job_hangs_again_the_deadline_counts_more() -> None:
    """It was too short for that step, perhaps; once the job is beyond it, the usual one counts."""
    epochs = job(max_restarts=100)
    orders = [epochs.hung(step, "rank 1 is stopped", 1.0) for step in (7, 7, 5, 8, 8)]
    assert [order.patience for order in orders if isinstance(order, BeginEpoch)] == [1, 4, 16, 1, 4]
    after = epochs.failed(0, epochs.epoch, "SIGKILL", 2.0)
    assert isinstance(after, BeginEpoch)
    assert after.patience == 4, "it may come to that step again"
    for _ in range(50):
        order = epochs.hung(8, "rank 1 is stopped", 1.0)
    assert isinstance(order, BeginEpoch)
    assert order.patience == 4**5


def test_a_job_that_hangs_again_and_again_is_ended() -> None:
    """Its trainers would wait for each other; whoever started the job decides."""
    epochs = job(max_restarts=1)
    assert isinstance(epochs.hung(7, "rank 1 is stopped", 1.0), BeginEpoch)
    order = epochs.hung(7, "rank 1 is stopped", 2.0)
    assert isinstance(order, StopJob)
    assert "2 failures" in order.because
    assert epochs.hung(7, "rank 1 is stopped", 3.0) is None


def test_no_restart_is_allowed() -> None:
    order = job(max_restarts=0).failed(0, 0, "exit code 7", 1.0)
    assert isinstance(order, AbandonJob)
    assert "exit code 7" in order.because


def test_an_epoch_that_lasts_begins_the_count_anew() -> None:
    epochs = job(max_restarts=1, steady_s=100)
    for epoch in range(10):
        epochs.started(0, epoch, 1000.0 * epoch)
        assert epochs.failed(0, epoch, "SIGKILL", 1000.0 * epoch + 100) == BeginEpoch(epoch + 1, "SIGKILL")
    assert isinstance(epochs.failed(0, 10, "SIGKILL", 10_001.0), AbandonJob)


def test_an_epoch_that_never_started_shows_nothing() -> None:
    epochs = job(max_restarts=1, steady_s=100)
    epochs.failed(0, 0, "SIGKILL", 0.0)
    assert isinstance(epochs.failed(0, 1, "SIGKILL", 500.0), AbandonJob)


def test_all_hosts_are_released_when_all_have_succeeded() -> None:
    epochs = job(3)
    assert epochs.completed(1, 0) is None
    assert epochs.completed(0, 0) is None
    assert epochs.completed(2, 0) == ReleaseHosts()


def test_those_that_have_succeeded_run_again_with_the_others() -> None:
    """As with torchrun: a group of workers ends together."""
    epochs = job(2)
    epochs.completed(0, 0)
    assert isinstance(epochs.failed(1, 0, "exit code 1", 1.0), BeginEpoch)
    assert epochs.completed(1, 1) is None
    assert epochs.completed(0, 1) == ReleaseHosts()


def test_a_success_of_an_earlier_epoch_counts_for_nothing() -> None:
    epochs = job(2)
    epochs.failed(1, 0, "SIGKILL", 1.0)
    epochs.completed(0, 0)
    epochs.completed(1, 1)
    assert not epochs.closed


def test_a_host_that_leaves_leaves_the_job_to_the_launcher() -> None:
    epochs = job()
    assert epochs.left({3}, "it got SIGTERM") == AbandonJob("it got SIGTERM")
    assert epochs.left({2}, "it got SIGTERM, too") is None
    assert epochs.lost({3}, "its connection is closed", 1.0) is None, "it has ended, as it said it would"
    assert epochs.failed(0, 0, "exit code 1", 1.0) is None


def test_the_loss_of_a_host_ends_the_job_once() -> None:
    epochs = job()
    epochs.failed(1, 0, "SIGKILL", 1.0)
    assert epochs.lost({3}, "it was killed", 1.0) == StopJob("it was killed")
    assert epochs.lost({2}, "it ends because of that", 1.0) is None
    assert epochs.failed(0, 1, "SIGTERM", 2.0) is None
    assert epochs.closed


def test_hosts_that_have_been_released_may_go() -> None:
    epochs = job(2)
    epochs.completed(0, 0)
    epochs.completed(1, 0)
    assert epochs.lost({1}, "its connection is closed", 1.0) is None


def test_an_elastic_job_goes_on_without_a_lost_node() -> None:
    epochs = job(4, min_ranks=2)
    assert epochs.lost({2}, "rank 2 is lost", 1.0) == BeginEpoch(1, "rank 2 is lost", 1, (2,), staying=False)
    assert epochs.ranks == (0, 1, 3)
    assert epochs.lost({2}, "its other end", 1.1) is None
    assert epochs.failed(3, 0, "its peer has gone", 1.1) is None
    assert epochs.failed(3, 1, "SIGKILL", 1.2) == BeginEpoch(2, "SIGKILL", 1, (2,))
    for rank in (0, 1):
        assert epochs.completed(rank, 2) is None
    assert epochs.completed(2, 2) is None, "it belongs to the job no longer"
    assert epochs.completed(3, 2) == ReleaseHosts()


def test_ranks_of_one_node_are_lost_together() -> None:
    epochs = job(4, min_ranks=2)
    assert epochs.lost({2, 3}, "a node is lost", 1.0) == BeginEpoch(
        1, "a node is lost", 1, (2, 3), staying=False
    )
    assert epochs.ranks == (0, 1)


@pytest.mark.parametrize(
    ("min_ranks", "lost"),
    [(3, {2, 3}), (4, {3}), (2, {0}), (2, set())],
    ids=["too few are left", "all are needed", "the coordinator's", "unknown which"],
)
def test_an_elastic_job_ends_for_a_new_start(min_ranks: int, lost: set[int]) -> None:
    assert job(4, min_ranks=min_ranks).lost(lost, "lost", 1.0) == StopJob("lost")


def test_until_all_have_joined_none_may_be_lost() -> None:
    epochs = JobEpochs(4, max_restarts=2, steady_s=100, min_ranks=2)
    assert epochs.lost({3}, "lost", 1.0) == StopJob("lost")


def test_a_loss_counts_as_a_failure() -> None:
    """Where no more are allowed, the others would wait for the one that is gone."""
    epochs = job(4, min_ranks=1, max_restarts=1)
    assert isinstance(epochs.lost({3}, "lost", 1.0), BeginEpoch)
    order = epochs.lost({2}, "lost", 2.0)
    assert isinstance(order, StopJob)
    assert "2 failures" in order.because


def test_an_elastic_job_goes_on_without_hosts_that_leave() -> None:
    """Failures that follow from their going are none, and no epoch begins with them."""
    epochs = job(4, min_ranks=2)
    assert epochs.left({3}, "it got SIGTERM") is None
    assert epochs.failed(1, 0, "its peer has gone", 1.0) is None
    assert epochs.hung(5, "rank 3 is stopped", 1.0) is None
    assert epochs.depart("it got SIGTERM", 1.5) == BeginEpoch(1, "it got SIGTERM", 1, (3,), staying=False)
    assert epochs.depart("it got SIGTERM", 1.5) is None


def test_a_loss_takes_along_those_that_are_leaving() -> None:
    epochs = job(4, min_ranks=2)
    epochs.left({3}, "it got SIGTERM")
    assert epochs.lost({1}, "rank 1 is lost", 1.0) == BeginEpoch(
        1, "rank 1 is lost", 1, (1, 3), staying=False
    )


def test_when_all_leave_the_job_is_the_launchers() -> None:
    """So it is when members change: torchrun ends all workers, those of the coordinator's node at last."""
    epochs = job(4, min_ranks=2)
    assert epochs.left({3}, "SIGTERM") is None
    assert epochs.left({2}, "SIGTERM") is None
    assert epochs.left({0}, "SIGTERM") == AbandonJob("SIGTERM")
    assert epochs.depart("SIGTERM", 1.0) is None


@pytest.mark.parametrize("end", [HostEvent.FAIL, HostEvent.COMPLETE])
def test_a_host_that_is_stopped_waits_for_its_trainer_and_ends_as_a_failure(end: HostEvent) -> None:
    life = HostLife()
    life.handle(HostEvent.START)
    assert life.handle(HostEvent.STOP) is HostState.ENDING
    assert life.begin(1) is HostState.ENDING, "too late"
    assert life.handle(HostEvent.ABANDON) is HostState.ENDING
    assert life.handle(end) is HostState.OVER
    assert life.stopped


def test_a_host_whose_trainer_ends_by_itself_is_not_stopped() -> None:
    """It was told to end, or its trainer has failed too often: its own end says more."""
    life = HostLife()
    life.handle(HostEvent.START)
    life.handle(HostEvent.ABANDON)
    assert life.handle(HostEvent.STOP) is HostState.ALONE
    life.handle(HostEvent.COMPLETE)
    assert not life.stopped


@pytest.mark.parametrize("end", [HostEvent.FAIL, HostEvent.COMPLETE])
def test_a_host_whose_trainer_is_not_needed_any_more_stays_until_all_have_ended(end: HostEvent) -> None:
    life = HostLife()
    life.handle(HostEvent.START)
    assert life.handle(HostEvent.DISMISS) is HostState.DISMISSED
    assert life.begin(1) is HostState.DISMISSED
    assert life.handle(end) is HostState.COMPLETED
    assert life.handle(HostEvent.RELEASE) is HostState.OVER
    late = HostLife()
    assert late.handle(HostEvent.DISMISS) is HostState.COMPLETED
    slow = HostLife()
    slow.handle(HostEvent.START)
    slow.handle(HostEvent.DISMISS)
    assert slow.handle(HostEvent.RELEASE) is HostState.ALONE, "its trainer parks"
    assert slow.handle(end) is HostState.OVER


@pytest.mark.parametrize("end", [None, HostEvent.FAIL, HostEvent.COMPLETE])
def test_a_host_without_a_trainer_stops_at_once(end: HostEvent | None) -> None:
    life = HostLife()
    if end is not None:
        life.handle(HostEvent.START)
        life.handle(end)
    assert life.handle(HostEvent.STOP) is HostState.OVER
    assert life.stopped


def test_a_host_starts_stops_and_starts_again() -> None:
    life = HostLife()
    assert life.handle(HostEvent.START) is HostState.RUNNING
    assert life.begin(1) is HostState.STOPPING
    assert life.begin(2) is HostState.STOPPING
    assert life.handle(HostEvent.FAIL) is HostState.STARTING
    assert life.epoch == 2
    assert life.handle(HostEvent.START) is HostState.RUNNING
    assert life.handle(HostEvent.COMPLETE) is HostState.COMPLETED
    assert life.handle(HostEvent.RELEASE) is HostState.OVER


def test_a_trainer_may_stay_for_another_epoch() -> None:
    life = HostLife()
    life.handle(HostEvent.START)
    life.begin(1)
    life.begin(2)
    assert life.handle(HostEvent.STAY) is HostState.RUNNING
    assert life.begin(3) is HostState.STOPPING
    life.handle(HostEvent.ABANDON)
    with pytest.raises(LocalProtocolError, match="stay"):  # it was told to end
        life.handle(HostEvent.STAY)


def test_trainers_stay_where_all_ranks_do_and_none_hangs() -> None:
    epochs = job(4, max_restarts=9, min_ranks=2)
    orders = [epochs.failed(2, 0, "SIGKILL", 1.0), epochs.hung(5, "rank 1 is stopped", 2.0)]
    epochs.joined()
    orders += [epochs.lost({3}, "rank 3 is lost", 3.0), epochs.failed(1, 3, "SIGKILL", 4.0)]
    assert [isinstance(each, BeginEpoch) and each.staying for each in orders] == [True, False, False, True]


def test_an_order_of_the_past_changes_nothing() -> None:
    life = HostLife()
    life.begin(3)
    life.handle(HostEvent.START)
    assert life.begin(3) is HostState.RUNNING
    assert life.begin(2) is HostState.RUNNING


def test_no_epoch_begins_for_a_host_that_is_alone() -> None:
    life = HostLife()
    life.handle(HostEvent.START)
    life.handle(HostEvent.ABANDON)
    assert life.begin(1) is HostState.ALONE
    assert life.handle(HostEvent.FAIL) is HostState.OVER


def test_an_impossible_event_is_our_bug() -> None:
    with pytest.raises(LocalProtocolError, match="epoch=0"):
        HostLife().handle(HostEvent.FAIL)


@pytest.mark.parametrize("seed", range(20))
def test_hosts_and_coordinator_always_come_to_an_end_together(seed: int) -> None:
    """Trainers fail at random, hosts are lost, orders and reports arrive late; at the end all have succeeded in one
    epoch, or the job was abandoned after as many failures as are allowed, or was stopped."""
    rng = random.Random(seed)
    size = rng.randint(1, 5)
    epochs = job(size, max_restarts=rng.randint(0, 6), min_ranks=rng.randint(1, size))
    hosts = [HostLife() for _ in range(size)]
    inbox: list[list[object]] = [[] for _ in range(size)]
    for _ in range(5_000):
        rank = rng.randrange(size)
        host, order = hosts[rank], None
        if inbox[rank] and rng.random() < 0.5:
            match inbox[rank].pop(0):
                case BeginEpoch(epoch, without=without) if rank not in without:
                    host.begin(epoch)
                case BeginEpoch():
                    host.handle(HostEvent.STOP)
                case AbandonJob():
                    host.handle(HostEvent.ABANDON)
                case ReleaseHosts():
                    host.handle(HostEvent.RELEASE)
                case StopJob():
                    host.handle(HostEvent.STOP)
        elif host.state is not HostState.OVER and rng.random() < 0.002:
            host.handle(HostEvent.STOP)  # its link is lost
            host.state = HostState.OVER
            order = epochs.lost({rank}, "it was killed", 0.0)
        elif host.state is HostState.RUNNING and rng.random() < 0.01:
            host.handle(HostEvent.ABANDON)  # it was told to end
            order = epochs.left({rank}, "it got SIGTERM")
        elif rng.random() < 0.05:
            order = epochs.depart("it got SIGTERM", 0.0)
        elif host.state is HostState.STARTING:
            host.handle(HostEvent.START)
            epochs.started(rank, host.epoch, 0.0)
        elif host.state is HostState.STOPPING and rng.random() < 0.3:
            host.handle(HostEvent.STAY)
            epochs.started(rank, host.epoch, 0.0)
        elif host.state in (HostState.RUNNING, HostState.STOPPING, HostState.ALONE, HostState.ENDING):
            fails, tells = rng.random() < 0.3, host.state is HostState.RUNNING
            host.handle(HostEvent.FAIL if fails else HostEvent.COMPLETE)
            if tells and fails:
                order = epochs.failed(rank, host.epoch, "SIGKILL", 0.0)
            elif tells:
                order = epochs.completed(rank, host.epoch)
        if order is not None:
            for box in inbox:
                box.append(order)
        if all(each.state is HostState.OVER for each in hosts):
            break
    assert {each.state for each in hosts} == {HostState.OVER}
    assert epochs.closed
