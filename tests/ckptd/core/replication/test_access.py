"""Which nodes may act on a run, decided without sockets."""

from __future__ import annotations

from dataclasses import dataclass

from ckptd.core.replication.access import GUEST_S, MAX_GUESTS, RunAccess


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


def test_the_operator_may_let_every_trusted_node_act_on_every_run() -> None:
    setting = Setting(everybody=True)
    setting.knows("a")
    assert setting.may("stranger")
