"""What peers tell of runs: newer adds to what is known, older epochs say nothing, and our own ranks count."""

from __future__ import annotations

from ckptd.known_runs import KnownRuns
from ckptd.replicas import Promise

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
