"""Who is lost, back, or another than before: hellos and their answers, with the clock a number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import msgspec
import pytest

import ckptd
from ckptd.config.settings import DaemonConfig
from ckptd.event_log import EventLog
from ckptd.memory.segment_store import SegmentStore
from ckptd.node_context import NodeContext
from ckptd.peers.peer_nodes import Neighbours
from ckptd.transport import peer_messages as p
from ckptd.transport.messages import GetHoldings, Holdings, NodeCard
from ckptd.transport.verbs import Answered, Fabric, Fault, PeerAddress

DEADLINE_S = 5.0


@dataclass
class FakePeer:
    """A connection whose hellos, and other requests, are answered when the test says so."""

    address: PeerAddress
    hellos: list[Answered] = field(default_factory=list)
    closed: bool = False
    questions: list[Answered] = field(default_factory=list)

    def request(self, body: bytes, *, timeout_s: float, answered: Answered) -> None:
        hello = isinstance(p.decode_peer(body), p.PeerHello)
        (self.hellos if hello else self.questions).append(answered)

    def close(self) -> None:
        self.closed = True

    def answer(self, boot_id: str) -> None:
        welcome = p.PeerWelcome(p.PEER_PROTOCOL_VERSION, ckptd.__version__, "b", boot_id)
        self.hellos.pop(0)(p.encode_peer(welcome))

    def fail(self, fault: Fault = Fault.DEADLINE) -> None:
        self.hellos.pop(0)(fault)

    def fail_all(self) -> None:
        while self.hellos:
            self.fail()


@dataclass
class Setting:
    folder: Path
    told: list[tuple[str, ...]] = field(default_factory=list)
    peers: dict[str, FakePeer] = field(default_factory=dict)
    now_s: float = 100.0
    in_runs: set[str] = field(default_factory=lambda: {"b"})
    deadline_s: float = DEADLINE_S

    def __post_init__(self) -> None:
        self.events = EventLog(100)
        self.neighbours = Neighbours(
            NodeContext(
                DaemonConfig(peer_deadline_s=self.deadline_s),
                SegmentStore(self.folder, 1 << 30, "a", mlock="off", hugepages="off"),
                self.events,
                _at_once,
                "our boot",
                clock=lambda: self.now_s,
            ),
            cast("Fabric", self),
            self,
        )

    @property
    def address(self) -> PeerAddress:
        """Our own, as the fabric."""
        return PeerAddress("a", "tcp://a")

    def needed_nodes(self) -> set[str]:
        return self.in_runs

    def node_lost(self, node: str, reason: str) -> None:
        self.told.append(("lost", node))

    def node_back(self, node: str) -> None:
        self.told.append(("back", node))

    def node_restarted(self, node: str, boot_id: str) -> None:
        self.told.append(("restarted", node, boot_id))

    def peer(self, address: PeerAddress) -> FakePeer:
        """As the fabric."""
        return self.peers.setdefault(address.endpoint, FakePeer(address))

    def meet(self, endpoint: str, node: str = "b") -> FakePeer:
        self.neighbours.meet([NodeCard(node, endpoint)])
        return self.peers[endpoint]

    @property
    def known(self) -> list[str]:
        return [status.node for status in self.neighbours.status(self.now_s)]

    def later(self, seconds: float = 1.0) -> None:
        """Time passes in which this daemon ticks every second."""
        while seconds > 0:
            self.stand_still(min(seconds, 1.0))
            seconds -= 1.0

    def stand_still(self, seconds: float) -> None:
        """Time passes, and the first thing that this daemon does then is its tick."""
        self.now_s += seconds
        self.neighbours.tick(self.now_s)

    def heard(self) -> list[tuple[str, ...]]:
        told, self.told = self.told, []
        return told


def _at_once(work: Callable[[], None]) -> None:
    work()


class Asked:
    """A question to node b, and what came of it."""

    def __init__(self, setting: Setting, *, patient: bool = False) -> None:
        self.outcomes: list[object] = []
        ((_, ask),) = setting.neighbours.to_ask([NodeCard("b"), NodeCard("unknown")], patient=patient)
        ask(GetHoldings("job", "run"), self.outcomes.append, lambda *failure: self.outcomes.append(failure))


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path)


def test_a_neighbour_that_does_not_answer_is_lost_until_it_does(setting: Setting) -> None:
    peer = setting.meet("tcp://1")
    setting.later()
    peer.answer("b1")
    setting.later(DEADLINE_S)
    assert setting.heard() == []
    peer.fail()
    setting.later()
    assert setting.heard() == [("lost", "b")]
    assert setting.neighbours.lost == ["b"]
    setting.later()
    peer.answer("b1")
    assert setting.heard() == [("back", "b")]
    assert setting.neighbours.lost == []


def test_a_neighbour_that_never_answered_is_told_apart(setting: Setting) -> None:
    """With a wrong key `ckptctl peers` said "alive: yes", and the event "no answer" of a node that never gave
    one.
    """
    setting.meet("tcp://1")
    setting.later()
    assert [status.answered for status in setting.neighbours.status(setting.now_s)] == [False]
    setting.later(3 * DEADLINE_S)
    (lost,) = [event for event in setting.events.page(0, 100).events if event.kind == "peer_lost"]
    assert "and never before: is its daemon at tcp://1, is the port open" in lost.message
    setting.peers["tcp://1"].answer("b1")
    assert [status.answered for status in setting.neighbours.status(setting.now_s)] == [True]


@pytest.mark.parametrize("asked", [False, True])
def test_a_daemon_that_stood_still_takes_nobody_for_lost(setting: Setting, asked: bool) -> None:
    """It had not asked for so long, or had not read the answer; and the fetches of that moment ended, since "no
    holder is left": a start went on without what those holders had.
    """
    peer = setting.meet("tcp://1")
    setting.later()
    if not asked:
        peer.answer("b1")
    setting.stand_still(10 * DEADLINE_S)
    if asked:
        peer.fail()  # the fabric has counted the time, too
    setting.later()
    assert setting.heard() == []
    peer.answer("b1")
    setting.later(DEADLINE_S)
    assert setting.heard() == []
    setting.later()
    assert setting.heard() == [("lost", "b")], "it was asked meanwhile"


def test_a_tick_that_is_a_little_late_makes_nobody_silent(tmp_path: Path) -> None:
    """With a deadline of little more than the time between two ticks."""
    setting = Setting(tmp_path, deadline_s=1.2)
    peer = setting.meet("tcp://1")
    for _ in range(5):
        setting.stand_still(1.5)
        peer.answer("b1")
    assert setting.heard() == []
    setting.later(3.0)
    assert setting.heard() == [("lost", "b")]


def test_a_node_that_nobody_needs_is_not_forgotten_by_a_daemon_that_stood_still(setting: Setting) -> None:
    peer = setting.meet("tcp://1")
    setting.in_runs.clear()
    setting.stand_still(10 * DEADLINE_S)
    peer.answer("b1")
    setting.later()
    assert setting.known == ["b"]


def test_another_boot_is_told_also_of_one_that_was_lost(setting: Setting) -> None:
    """Its old life may have begun something here after we took it for lost."""
    peer = setting.meet("tcp://1")
    setting.later()
    peer.answer("b1")
    setting.later()
    peer.answer("b2")
    assert setting.heard() == [("restarted", "b", "b2")]
    setting.later(2 * DEADLINE_S)
    assert setting.heard() == [("lost", "b")]
    peer.answer("b3")
    assert setting.heard() == [("restarted", "b", "b3"), ("back", "b")]


def test_which_boot_lives_is_what_answered_last_and_is_asked_at_once(setting: Setting) -> None:
    """Something came from a boot that has not answered yet: it may be the next one, or one that is over."""
    peer = setting.meet("tcp://1")
    assert setting.neighbours.boot_of("b") == ""
    setting.later()
    peer.answer("b1")
    assert setting.neighbours.boot_of("b") == "b1"
    for _ in range(3):
        setting.neighbours.look_at("b")
    assert len(peer.hellos) == 1, "one question at a time, so that answers have an order"
    peer.answer("b2")
    assert setting.neighbours.boot_of("b") == "b2"
    assert setting.heard() == [("restarted", "b", "b2")]
    setting.neighbours.look_at("nobody")


def test_a_restart_is_noticed_across_a_change_of_address(setting: Setting) -> None:
    old = setting.meet("tcp://1")
    setting.later()
    old.answer("b1")
    setting.later()
    new = setting.meet("tcp://2")
    new.answer("b2")
    assert (old.closed, new.closed) == (False, False), "it is asked once more where it was"
    old.fail_all()
    assert (old.closed, new.closed) == (True, False)
    assert setting.heard() == [("restarted", "b", "b2")]
    setting.later()
    new.answer("b2")
    assert (setting.heard(), setting.neighbours.boot_of("b")) == ([], "b2")
    assert [e.kind for e in setting.events.page(0, 10).events] == ["peer_moved", "peer_restarted"]


def test_an_address_where_nobody_answers_replaces_none_that_does(setting: Setting) -> None:
    """Any card that was seen last counted: one of an old record, or of somebody who lies, cut a node off for good."""
    old = setting.meet("tcp://1")
    setting.later()
    old.answer("b1")
    wrong = setting.meet("tcp://wrong")
    setting.later()
    old.answer("b1")
    wrong.fail()
    assert (old.closed, wrong.closed) == (False, True)
    for _ in range(10):
        setting.later()
        old.answer("b1")
    assert setting.heard() == []


def test_a_lost_neighbour_is_looked_for_at_both_addresses(setting: Setting) -> None:
    old = setting.meet("tcp://1")
    setting.later(2 * DEADLINE_S)
    assert setting.heard() == [("lost", "b")]
    new = setting.meet("tcp://2")
    assert setting.heard() == []
    for _ in range(3):
        new.fail()
        old.fail()
        setting.later()
    assert (len(new.hellos), len(old.hellos)) == (1, 1)
    old.answer("b1")
    assert setting.heard() == [("back", "b")]
    new.answer("b1")
    assert (old.closed, new.closed) == (False, True)


def test_a_lost_neighbour_is_back_where_it_answers(setting: Setting) -> None:
    old = setting.meet("tcp://1")
    setting.later(2 * DEADLINE_S)
    new = setting.meet("tcp://2")
    new.answer("b1")
    assert setting.heard() == [("lost", "b"), ("back", "b")]
    assert (old.closed, new.closed, setting.neighbours.lost) == (True, False, [])


def test_a_daemon_with_two_addresses_stays_at_the_one_that_is_known_as_long_as_it_answers_there(
    setting: Setting,
) -> None:
    first = setting.meet("tcp://1")
    setting.later()
    first.answer("b1")
    for boot_id in ("b1", "another daemon with its name"):
        other = setting.meet("tcp://other")
        other.answer(boot_id)
        first.answer("b1")
        assert (first.closed, other.closed) == (False, True)
        del setting.peers["tcp://other"]
    other = setting.meet("tcp://other")
    other.answer("b1")
    first.fail_all()
    assert (first.closed, other.closed) == (True, False)
    assert setting.heard() == []


def test_a_hello_says_where_its_sender_is_now(setting: Setting) -> None:
    old = setting.meet("tcp://1")
    setting.later()
    old.answer("b1")
    hello = p.PeerHello(p.PEER_PROTOCOL_VERSION, ckptd.__version__, "b", "b1", {}, "tcp://2")
    setting.neighbours.welcome("b", hello, 0)
    assert list(setting.peers) == ["tcp://1"], "this daemon answers where it is known to be"
    setting.neighbours.welcome("b", msgspec.structs.replace(hello, boot_id="b2"), 0)
    setting.peers["tcp://2"].answer("b2")
    old.fail_all()
    assert setting.heard() == [("restarted", "b", "b2")]
    setting.neighbours.welcome("stranger", msgspec.structs.replace(hello, endpoint="tcp://3"), 0)
    assert setting.known == ["b"]


def test_a_node_that_may_be_at_two_addresses_is_asked_at_both(setting: Setting) -> None:
    old = setting.meet("tcp://1")
    new = setting.meet("tcp://2")
    new.hellos.clear()
    asked = Asked(setting)
    new.questions.pop()(p.encode_peer(HOLDINGS))
    old.fail()
    old.questions.pop()(Fault.DEADLINE)
    assert asked.outcomes == [HOLDINGS]
    asked = Asked(setting)
    for peer in (old, new):
        peer.fail()
        peer.questions.pop()(Fault.DEADLINE)
    assert asked.outcomes == [("deadline", "no answer: deadline")]


def test_a_neighbour_of_another_protocol_version_is_lost_at_once(setting: Setting) -> None:
    peer = setting.meet("tcp://1")
    setting.later()
    refused = p.PeerRefused("protocol", "another version")
    peer.hellos.pop(0)(p.encode_peer(refused))
    assert setting.heard() == [("lost", "b")]


# -- who is forgotten ----------------------------------------------------------------------------


def test_a_node_that_has_no_part_in_a_run_and_does_not_answer_is_forgotten(
    setting: Setting,
) -> None:
    """Each node that a job had replaced was asked for ever, over a connection of its own with three
    descriptors.
    """
    peer = setting.meet("tcp://1")
    setting.later()
    peer.answer("b1")
    setting.in_runs.clear()  # its place was taken
    setting.later(DEADLINE_S)
    assert not peer.closed
    peer.answer("b1")  # it lives, and may hold what somebody looks for
    for _ in range(3):
        setting.later(DEADLINE_S + 1)
        assert setting.known == ["b"]
    setting.later(DEADLINE_S)
    assert (peer.closed, setting.known, setting.neighbours.lost) == (True, [], [])
    assert setting.heard() == [("lost", "b")]
    assert [e.kind for e in setting.events.page(0, 10).events] == ["peer_lost", "peer_forgotten"]


def test_a_node_with_a_part_in_a_run_is_asked_for_ever(setting: Setting) -> None:
    peer = setting.meet("tcp://1")
    for _ in range(50):
        setting.later(DEADLINE_S)
    assert (peer.closed, setting.known) == (False, ["b"])


def test_a_forgotten_node_is_met_again(setting: Setting) -> None:
    setting.in_runs.clear()
    old = setting.meet("tcp://1")
    setting.later(10 * DEADLINE_S)
    assert old.closed
    setting.peers.clear()
    new = setting.meet("tcp://1")
    setting.later()
    new.answer("b2")
    assert setting.known == ["b"]
    assert setting.neighbours.lost == []


def test_no_more_nodes_are_known_than_there_are_descriptors_for(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (128 + 4 * 3, 1 << 20))
    setting.in_runs = {"needed"}
    setting.meet("tcp://needed", "needed")
    for number in range(5):
        setting.later()
        setting.meet(f"tcp://{number}", f"spare{number}")
    assert setting.known == ["needed", "spare3", "spare4"]
    assert [setting.peers[f"tcp://{n}"].closed for n in range(5)] == [True] * 3 + [False] * 2
    setting.in_runs |= {"spare3", "spare4"}
    for _ in range(2):
        setting.neighbours.meet([NodeCard("more", "tcp://more")])
    assert "more" not in setting.known
    told = [e for e in setting.events.page(0, 100).events if e.kind == "too_many_peers"]
    assert [e.level for e in told] == ["error"]
    assert "more is not connected: 3 nodes are" in told[0].message
    setting.in_runs.discard("spare3")
    setting.meet("tcp://more", "more")
    assert setting.known == ["more", "needed", "spare4"]


HOLDINGS = Holdings("b", ())


def test_a_node_that_does_not_answer_a_hello_is_not_waited_for(setting: Setting) -> None:
    """Its answer, if it comes after all, is for nobody."""
    peer = setting.meet("tcp://1")
    asked = Asked(setting)
    peer.fail()
    assert asked.outcomes == [("deadline", "no answer: deadline")]
    peer.questions.pop()(p.encode_peer(HOLDINGS))
    assert len(asked.outcomes) == 1


def test_a_node_that_lives_may_take_its_time_to_say_what_it_holds(setting: Setting) -> None:
    peer = setting.meet("tcp://1")
    asked = Asked(setting)
    peer.answer("b1")
    assert asked.outcomes == []
    peer.questions.pop()(p.encode_peer(HOLDINGS))
    assert asked.outcomes == [HOLDINGS]


def test_a_node_that_refuses_the_hello_lives(setting: Setting) -> None:
    """It is of another version, say, and may answer the question."""
    peer = setting.meet("tcp://1")
    asked = Asked(setting)
    peer.hellos.pop()(p.encode_peer(p.PeerRefused("protocol", "another version", "upgrade")))
    assert asked.outcomes == []
    peer.questions.pop()(p.encode_peer(HOLDINGS))
    assert asked.outcomes == [HOLDINGS]


def test_a_node_that_has_said_what_it_holds_need_not_answer_the_hello(setting: Setting) -> None:
    peer = setting.meet("tcp://1")
    asked = Asked(setting)
    peer.questions.pop()(p.encode_peer(HOLDINGS))
    peer.fail()
    assert asked.outcomes == [HOLDINGS]


def test_who_asks_with_patience_asks_for_no_sign_of_life(setting: Setting) -> None:
    peer = setting.meet("tcp://1")
    asked = Asked(setting, patient=True)
    assert peer.hellos == []
    peer.questions.pop()(Fault.DEADLINE)
    assert asked.outcomes == [("deadline", "no answer: deadline")]
