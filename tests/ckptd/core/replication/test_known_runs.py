"""What peers tell of runs: newer adds to what is known, older epochs say nothing, and our own ranks count."""

from __future__ import annotations

from dataclasses import dataclass

from ckptd.core.replication.known_runs import GUEST_S, MAX_GUEST_RUNS, MAX_GUESTS, KnownRuns, RunAccess
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


def test_a_floor_of_an_epoch_counts_more_than_one_of_before_also_if_it_is_lower() -> None:
    """A node was away; the run began anew without it, and went on from iteration 5. The floor of the history
    that the node had known was 5, too, and the new one has come to 4: the node gave away what 4 needs
    (simulation, split seed 35182).
    """
    known = runs(Promise(5, 12), 3, epoch=1)
    known.note_epoch(*RUN, 3, 5)
    assert known.promise(*RUN) == (Promise(5), 3)
    known.learn(*RUN, 3, Promise(-1, 2), 3)
    assert known.promise(*RUN) == (Promise(5, 2), 3)
    known.learn(*RUN, 3, Promise(4, 4), 3)
    assert known.promise(*RUN) == (Promise(4, 4), 3)
    known.learn(*RUN, 1, Promise(5, 12), 3)
    assert known.promise(*RUN) == (Promise(4, 4), 3)


def test_epochs_that_are_told_late_change_nothing() -> None:
    known = runs()
    known.learn(*RUN, 3, Promise(20, 20), 1)
    known.note_epoch(*RUN, 2, 11)
    assert known.promise(*RUN) == (Promise(20, 20), 1)


@dataclass(frozen=True)
class Card:
    node: str


@dataclass(frozen=True)
class Record:
    cards: tuple[Card, ...]


class Setting:
    """A node that knows some runs and holds something of some."""

    def __init__(self, *, everybody: bool = False) -> None:
        self.records: dict[tuple[str, str], Record] = {}
        self.held: set[tuple[str, str]] = set()
        self.access = RunAccess(
            "here",
            ["configured"],
            record_of=lambda job, run: self.records.get((job, run)),
            holds=lambda job, run: (job, run) in self.held,
            everybody=everybody,
        )

    def knows(self, *nodes: str, run: str = "r") -> None:
        self.records["j", run] = Record(tuple(Card(node) for node in nodes))

    def may(self, peer: str, *, run: str = "r", now_s: float = 0.0) -> bool:
        return not self.access.objection(peer, "j", run, now_s=now_s)


def test_a_trusted_node_that_is_no_member_may_do_nothing_with_a_run() -> None:
    """Before, every trusted node could read every run, and replace or end what lies here of it."""
    setting = Setting()
    setting.knows("a", "b")
    assert setting.may("a")
    assert not setting.may("stranger")
    objection = setting.access.objection("stranger", "j", "r", now_s=0.0)
    assert objection == "stranger is no member of j/r: its members are a, b"


def test_membership_is_of_one_run() -> None:
    setting = Setting()
    setting.knows("a", run="one")
    setting.knows("b", run="two")
    assert [setting.may("a", run=run) for run in ("one", "two")] == [True, False]


def test_this_node_and_configured_peers_are_members_of_every_run() -> None:
    setting = Setting()
    setting.knows("a")
    assert setting.may("here")
    assert setting.may("configured")


def test_a_run_that_is_unknown_here_is_anybodys_to_bring() -> None:
    """A node that lends its memory hears of a run with the first replica of it."""
    assert Setting().may("a")


def test_what_is_here_of_a_run_whose_members_are_unknown_is_nobodys() -> None:
    setting = Setting()
    setting.held.add(("j", "r"))
    assert not setting.may("a")
    assert "not known" in setting.access.objection("a", "j", "r", now_s=0.0)


def test_nodes_of_a_start_may_read_before_their_ranks_have_joined() -> None:
    """A spare must fetch what its ranks need before it is a member."""
    setting = Setting()
    setting.knows("a")
    setting.knows("a", run="other")
    setting.access.admit("j", "r", ["spare"], now_s=0.0)
    assert setting.may("spare", now_s=GUEST_S - 1)
    assert not setting.may("spare", run="other")
    assert not setting.may("spare", now_s=GUEST_S)


def test_an_admission_is_renewed_and_ends_with_its_run() -> None:
    setting = Setting()
    setting.knows("a")
    setting.access.admit("j", "r", ["spare"], now_s=0.0)
    setting.access.admit("j", "r", ["spare"], now_s=GUEST_S)
    assert setting.may("spare", now_s=GUEST_S + 1)
    setting.access.forget("j", "r")
    assert not setting.may("spare", now_s=GUEST_S + 1)


def test_admissions_are_bounded() -> None:
    setting = Setting()
    setting.knows("a")
    setting.access.admit("j", "r", ["first"], now_s=0.0)
    setting.access.admit("j", "r", [f"n{i}" for i in range(MAX_GUESTS)], now_s=1.0)
    assert not setting.may("first", now_s=2.0)
    assert setting.may("n0", now_s=2.0)


def test_what_one_node_names_is_bounded_and_pushes_out_no_others() -> None:
    """A node with a trusted key could have a daemon remember names without end, of runs that nobody knew."""
    setting = Setting()
    admit = setting.access.admit
    admit("j", "r", ["mine"], now_s=0.0)
    admit("j", "r", ["theirs"], now_s=0.0, by="a")
    for number in range(MAX_GUEST_RUNS + 10):
        admit("j", f"r{number}", ["x"], now_s=1.0, by="b")
    setting.held |= {("j", "r"), ("j", "r0"), ("j", "r10")}
    assert [setting.may(node, now_s=2.0) for node in ("mine", "theirs", "x")] == [True, True, False]
    assert [setting.may("x", run=run, now_s=2.0) for run in ("r0", "r10")] == [False, True]
    admit("j", "many", [f"n{i}" for i in range(MAX_GUESTS)], now_s=3.0, by="b")
    assert not setting.may("x", run="r10", now_s=3.0)
    setting.access.tick(GUEST_S)
    assert (list(setting.access._guests), list(setting.access._named)) == ([("j", "many")], ["b"])
    setting.access.forget("j", "many")
    assert not setting.access._named


def test_epochs_are_forgotten_with_their_run_and_bounded() -> None:
    known = KnownRuns(lambda job, run: (-1, Promise(), 1))
    for number in range(300):
        known.note_epoch("j", "r", number, -1)
        known.note_epoch("j", f"r{number}", 1, -1)
    assert list(known.epochs("j", "r")) == [*range(44, 300)]
    known.forget_epochs(lambda job, run: run != "r")
    assert (known.newest_epoch("j", "r"), known.newest_epoch("j", "r7")) == (299, -1)


def test_the_operator_may_let_every_trusted_node_act_on_every_run() -> None:
    setting = Setting(everybody=True)
    setting.knows("a")
    assert setting.may("stranger")
