"""What peers tell of runs: newer adds to what is known, older epochs say nothing, and our own ranks count."""

from __future__ import annotations

from ckptd.core.replication.known_runs import KnownRuns
from ckptd.core.replication.replicas import Promise

RUN = ("job", "run")


def runs(own: Promise | None = None, span: int = 1, epoch: int = -1) -> KnownRuns:
    return KnownRuns(lambda job, run: (epoch, own or Promise(), span))


def test_an_epoch_is_news_once_and_the_highest_counts() -> None:
    known = runs()
    assert known.newest_epoch(*RUN) == -1
    assert known.note_epoch(*RUN, 4, 10)
    assert not known.note_epoch(*RUN, 4, 10)
    assert known.note_epoch(*RUN, 2, 5)
    assert known.newest_epoch(*RUN) == 4
    assert known.epochs(*RUN) == {4: 10, 2: 5}
    assert known.newest_epoch("job", "other") == -1


def test_a_promise_only_grows_within_an_epoch() -> None:
    known = runs()
    known.learn(*RUN, 1, Promise(5, 3), 4)
    known.learn(*RUN, 1, Promise(4, 7), 2)
    assert known.promise(*RUN) == (Promise(5, 7), 4)


def test_what_an_older_epoch_agreed_on_says_nothing_of_a_newer_one() -> None:
    known = runs()
    known.learn(*RUN, 1, Promise(50, 50), 4)
    known.learn(*RUN, 2, Promise(10, 10), 1)
    known.learn(*RUN, 1, Promise(60, 60), 9)
    assert known.promise(*RUN) == (Promise(10, 10), 1)


def test_what_our_own_ranks_know_counts_too() -> None:
    known = runs(Promise(8, 2), 3, epoch=1)
    known.learn(*RUN, 1, Promise(5, 6), 1)
    assert known.promise(*RUN) == (Promise(8, 6), 3)
    known.forget_promises(lambda job, run: (job, run) == RUN)
    assert known.promise(*RUN) == (Promise(8, 2), 3)


def test_of_two_epochs_the_later_one_alone_counts() -> None:
    """An abandoned horizon would give away the floor of this epoch."""
    ahead = runs(Promise(6, 3), 2, epoch=2)
    ahead.learn(*RUN, 1, Promise(7, 7), 5)
    assert ahead.promise(*RUN) == (Promise(6, 3), 2)
    behind = runs(Promise(7, 7), 5, epoch=1)
    behind.learn(*RUN, 2, Promise(6, 3), 2)
    assert behind.promise(*RUN) == (Promise(6, 3), 2)


def test_a_floor_that_a_recovery_left_behind_does_not_survive_it() -> None:
    """A host without ranks was told 12; the job was recovered at 11, and until 12 was sealed again
    the promise let 10 and 11 go.
    """
    known = runs()
    known.learn(*RUN, 1, Promise(12, 12), 3)
    known.note_epoch(*RUN, 2, 11)
    assert known.promise(*RUN) == (Promise(), 1)
    known.learn(*RUN, 1, Promise(12, 12), 3)
    assert known.promise(*RUN) == (Promise(), 1), "also if who told it has not heard of the recovery"
    known.learn(*RUN, 2, Promise(11, 11), 3)
    assert known.promise(*RUN) == (Promise(11, 11), 3)


def test_a_floor_from_which_a_recovery_went_on_is_one_of_the_new_history_too() -> None:
    """Without its horizon: that one the new history may never reach."""
    known = runs()
    known.learn(*RUN, 1, Promise(9, 15), 3)
    known.note_epoch(*RUN, 2, 11)
    assert known.promise(*RUN) == (Promise(9), 3)
    known.note_epoch(*RUN, 3, 9)
    assert known.promise(*RUN) == (Promise(9), 3)
    known.note_epoch(*RUN, 4, 8)
    assert known.promise(*RUN) == (Promise(), 1)


def test_what_our_own_ranks_agreed_on_ends_with_their_history_too() -> None:
    """Until they join the new one; they may have been moved to another node and never do."""
    known = runs(Promise(12, 12), 3, epoch=1)
    known.note_epoch(*RUN, 1, -1)
    assert known.promise(*RUN) == (Promise(12, 12), 3)
    known.note_epoch(*RUN, 2, 11)
    assert known.promise(*RUN) == (Promise(), 1)


def test_a_snapshot_of_an_older_history_brings_a_floor_that_is_still_one() -> None:
    """The first that a sender brings after a recovery are older than it, and a full ring must learn
    what may go.
    """
    known = runs()
    known.note_epoch(*RUN, 2, 11)
    known.learn(*RUN, 1, Promise(9, 10), 3)
    assert known.promise(*RUN) == (Promise(9), 3)
    known.learn(*RUN, 1, Promise(12, 12), 5)
    assert known.promise(*RUN) == (Promise(9), 3)


def test_epochs_that_are_told_late_change_nothing() -> None:
    known = runs()
    known.learn(*RUN, 3, Promise(20, 20), 1)
    known.note_epoch(*RUN, 2, 11)
    assert known.promise(*RUN) == (Promise(20, 20), 1)
