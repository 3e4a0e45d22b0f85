"""A job that re-routes goes on without those that fail, event by event."""

from __future__ import annotations

import random

from ckptd.host.epochs import AbandonJob, BeginEpoch, EndLoops, ReleaseHosts, StopJob
from ckptd.host.rerouted_epochs import ReroutedEpochs


def job(world_size: int = 4, *, max_restarts: int = 4) -> ReroutedEpochs:
    """All hosts have joined."""
    epochs = ReroutedEpochs(world_size, max_restarts=max_restarts, steady_s=100)
    epochs.joined()
    return epochs


def test_the_others_go_on_at_once_and_take_it_back_at_a_boundary() -> None:
    epochs = job()
    assert epochs.failed(2, 0, "rank 2: SIGKILL", 1.0) == BeginEpoch(1, "rank 2: SIGKILL", absent=(2,))
    assert epochs.ready(2, 1) == BeginEpoch(2, "rank 2 is back", at_boundary=True)
    assert epochs.ready(2, 2) is None
    assert epochs.failures == 1, "a return is none"


def test_each_failure_is_one_also_while_they_are_under_way_to_another_epoch() -> None:
    """Whatever epoch its host is in: what a host says arrives in its order."""
    epochs = job()
    epochs.failed(2, 0, "SIGKILL", 1.0)
    assert epochs.failed(1, 0, "SIGKILL", 1.0) == BeginEpoch(2, "SIGKILL", absent=(1, 2))
    epochs.ready(2, 2)
    assert epochs.failed(2, 2, "SIGKILL", 1.1) == BeginEpoch(4, "SIGKILL", absent=(1, 2))


def test_all_meet_anew_and_nobody_is_missed_if_the_store_has_gone() -> None:
    epochs = job()
    epochs.failed(2, 0, "SIGKILL", 1.0)
    assert epochs.store_lost(0, 2.0) is None
    why = "the server of stores has ended"
    assert epochs.store_lost(1, 2.0) == BeginEpoch(2, why, absent=(2,), at_boundary=True)
    assert epochs.ready(2, 1) == BeginEpoch(3, "rank 2 is back", at_boundary=True)


def test_nobody_is_interrupted_by_the_failure_of_one_that_was_absent() -> None:
    epochs = job()
    epochs.failed(2, 0, "SIGKILL", 1.0)
    assert epochs.failed(2, 1, "exit code 1", 2.0) == BeginEpoch(
        2, "exit code 1", absent=(2,), at_boundary=True
    )
    for _ in range(2):
        epochs.failed(2, 2, "exit code 1", 3.0)
    assert isinstance(epochs.failed(2, 4, "exit code 1", 4.0), StopJob), "it is a crash loop"


def test_a_lost_host_is_missed_until_another_one_has_taken_its_place() -> None:
    epochs = job()
    assert epochs.lost({3}, "its host is lost", 1.0) == BeginEpoch(1, "its host is lost", absent=(3,))
    assert epochs.lost({3}, "its host is lost", 1.1) is None
    assert epochs.ready(3, 1) == BeginEpoch(2, "rank 3 is back", at_boundary=True)
    assert epochs.left({1}, "its host got SIGTERM") == BeginEpoch(3, "its host got SIGTERM", absent=(1,))
    assert epochs.lost({1}, "its host is lost", 1.2) is None


def test_what_ends_the_job_for_a_new_start() -> None:
    for order in (
        job().lost({0}, "host of rank 0", 1.0),
        job().lost((), "silent", 1.0),
        job().hung(7, "rank 1 does not go on", 1.0),
        job().cannot_go_on(0, "nobody has stage 1"),
    ):
        assert isinstance(order, StopJob)
    assert job().left({0}, "SIGTERM") == AbandonJob("SIGTERM")
    epochs = job(2)
    epochs.failed(0, 0, "SIGKILL", 1.0)
    assert epochs.failed(1, 1, "SIGKILL", 1.0) == StopJob("no trainer is left; last: SIGKILL")


def test_the_loop_ends_for_all_at_once() -> None:
    """Before that a trainer may be asked to do its last iteration again; afterwards nobody needs it."""
    epochs = job()
    epochs.failed(3, 0, "SIGKILL", 1.0)
    assert [epochs.finished(rank, 1) for rank in (0, 3, 1)] == [None] * 3
    assert isinstance(epochs.failed(1, 1, "SIGKILL", 2.0), BeginEpoch)
    assert epochs.finished(2, 1) is None, "that was in an epoch that is over"
    assert [epochs.finished(rank, 2) for rank in (0, 2)] == [None, EndLoops((1, 3))]
    assert epochs.ready(3, 2) is None
    assert [epochs.completed(rank, 2) for rank in (2, 3, 0)] == [None, None, ReleaseHosts()]


def test_a_failure_after_the_loop_is_nobody_elses() -> None:
    epochs = job(2)
    epochs.finished(0, 0)
    assert epochs.finished(1, 0) == EndLoops(())
    assert epochs.failed(1, 0, "exit code 1", 1.0) == AbandonJob("exit code 1")


def test_any_order_of_events_keeps_the_invariants() -> None:
    """`validated` checks them after each."""
    for seed in range(200):
        draw, epochs = random.Random(seed), job(5, max_restarts=50)
        for _ in range(60):
            rank, epoch = draw.randrange(5), max(0, epochs.epoch - draw.randrange(2))
            event = draw.choice(("failed", "ready", "ready", "finished", "lost", "completed"))
            if event == "failed":
                order = epochs.failed(rank, epoch, "SIGKILL", 1.0)
            elif event == "lost":
                order = epochs.lost({rank}, "lost", 1.0)
            else:
                order = getattr(epochs, event)(rank, epoch)
            if isinstance(order, BeginEpoch):
                assert set(order.absent) == epochs.absent
                assert order.at_boundary or rank in epochs.absent
