"""Connections to other nodes, and whether they answer.

A neighbour that has not answered a hello for ``peer_deadline_s`` is *lost* until it answers again. One that
answers with another boot id was restarted, and has neither leases nor tickets of before. A neighbour is not
silent because this daemon stood still (stopped, or on a busy machine): it has not been asked, or its answer
lies here unread.

These answers alone, and no clock, decide which of two boots of a node is newer: a node has one daemon at a
time, and a hello is sent only when the one before is over, so each answer is from a boot at least as new as
the last. A message from a boot that did not answer last may be from an earlier one, however late, and is
ignored.

Only such an answer, too, moves a node to another address. Cards come from trainers and from the records of
other nodes, and may be old, or wrong on purpose. So a card with another address is tried beside the known
one, and counts if the node answers there and not at the known one. A node that has moved says so itself, in
its hellos.

A node without a part in any run that does not answer is forgotten: each known node costs a connection with
three descriptors, and on machines that are replaced for months these would be used up.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import ckptd
from ckptd.config.settings import parse_labels
from ckptd.node_context import NodeContext
from ckptd.peers.peer_link import PeerLink
from ckptd.transport import peer_messages as p
from ckptd.transport.messages import Holdings, NodeCard, PeerStatus
from ckptd.transport.verbs import Fabric, Fault, PeerAddress

_HELLOS_PER_DEADLINE = 10
_LEAST_UNANSWERED = 0.25  # of the deadline: for how long at least a hello of a lost neighbour is unanswered
_LATE_TICK_S = 2.0  # twice the time between two ticks: a daemon that ticks later than this stood still
_SURVEY_S = 3.0
# A node that does not even answer a hello: the job is probably recovering from its loss.
_SIGN_OF_LIFE_S = 0.5
_NO_SIGN_OF_LIFE = frozenset(Fault)
_FORGET_DEADLINES = 4  # without an answer, until a node without a part in any run is forgotten
_MAX_PEERS = 65_536
_PEER_DESCRIPTORS = 4  # three for our connection to it, one for its connection to us
_OTHER_DESCRIPTORS = 128  # for trainers, segments and transfers


class NeighbourListener(Protocol):
    """Needs nodes, and is called when they are lost and found."""

    def needed_nodes(self) -> Container[str]:
        """Nodes with a part in a run, and configured ones; others are forgotten when they do not answer."""

    def node_lost(self, node: str, reason: str) -> None:
        """A node does not answer."""

    def node_back(self, node: str) -> None:
        """It answers again."""

    def node_restarted(self, node: str, boot_id: str) -> None:
        """Another daemon answers there."""


# Sends a question; one of ``done(holdings)`` and ``failed(code, reason)`` is called, later.
AskNode = Callable[[p.PeerMessage, Callable[[Holdings], None], Callable[[str, str], None]], None]


class _First:
    """Passes on the first answer, or the last failure of ``ways`` to ask."""

    def __init__(
        self, done: Callable[[Holdings], None], failed: Callable[[str, str], None], ways: int
    ) -> None:
        self._done, self._failed, self._left = done, failed, ways

    def done(self, holdings: Holdings) -> None:
        if self._left:
            self._left = 0
            self._done(holdings)

    def one_less(self, code: str, reason: str) -> None:
        if self._left:
            self._left -= 1
            if not self._left:
                self._failed(code, reason)


class _Way:
    """One way to ask, which fails once."""

    def __init__(self, first: _First) -> None:
        self._first: _First | None = first

    def failed(self, code: str, reason: str) -> None:
        first, self._first = self._first, None
        if first is not None:
            first.one_less(code, reason)


@dataclass(slots=True)
class _Rival:
    """Another address that a node is said to have."""

    card: NodeCard
    link: PeerLink
    answers: int  # of the node at its known address, when it was asked here
    asking: bool = False


@dataclass(slots=True)
class _Neighbour:
    card: NodeCard
    link: PeerLink
    last_heard_s: float
    boot_id: str = ""
    lost: bool = False
    asking: bool = False
    unanswered_s: float | None = None  # since when, by the first hello that has had no answer
    next_hello_s: float = 0.0
    free_bytes: int = 0
    answers: int = 0
    failed: bool = False  # its last hello had no answer
    rival: _Rival | None = None

    @property
    def links(self) -> list[PeerLink]:
        """To every address at which it may be."""
        return [self.link] if self.rival is None else [self.link, self.rival.link]


class Neighbours:
    """Connections by node, kept alive by hellos.

    Args:
        fabric: None without a peer listener: then no node is connected.
    """

    def __init__(
        self,
        here: NodeContext,
        fabric: Fabric | None,
        listener: NeighbourListener,
    ) -> None:
        self._here, self._fabric, self._listener = here, fabric, listener
        self._node, self._events, self._clock = here.node_id, here.events, here.clock
        self._deadline_s = here.config.peer_deadline_s
        self._labels = parse_labels(here.config.labels)
        self._known: dict[str, _Neighbour] = {}
        self._full = False
        self._ticked_s = self._clock()

    @property
    def card(self) -> NodeCard:
        address = PeerAddress(self._node, "") if self._fabric is None else self._fabric.address
        return NodeCard(
            self._node,
            address.endpoint,
            address.public_key,
            self._labels,
            self._here.boot_id,
            self._here.store.quota_bytes,
        )

    @property
    def _hello(self) -> p.PeerHello:
        card = self.card
        return p.PeerHello(
            p.PEER_PROTOCOL_VERSION,
            ckptd.__version__,
            self._node,
            self._here.boot_id,
            self._labels,
            card.endpoint,
            card.public_key,
        )

    @property
    def lost(self) -> list[str]:
        return [node for node, neighbour in self._known.items() if neighbour.lost]

    def meet(self, cards: Iterable[NodeCard]) -> None:
        """Connect to these nodes."""
        cards = [card for card in cards if card.node != self._node and card.endpoint]
        wanted = {card.node for card in cards}
        for card in cards:
            self._meet(card, wanted)

    def link(self, node: str) -> PeerLink | None:
        """The connection to a node, None if its address is not known."""
        neighbour = self._known.get(node)
        return None if neighbour is None else neighbour.link

    def boot_of(self, node: str) -> str:
        """The newest known boot of a node; "" if it never answered."""
        neighbour = self._known.get(node)
        return "" if neighbour is None else neighbour.boot_id

    def look_at(self, node: str) -> None:
        """Send a hello now, unless one is outstanding: another boot of the node has sent something."""
        neighbour = self._known.get(node)
        if neighbour is not None:
            neighbour.next_hello_s = float("-inf")
            self._look_after(node, neighbour, self._clock())

    def tell_all(self, message: p.PeerMessage) -> None:
        for neighbour in self._known.values():
            neighbour.link.tell(message)

    def to_ask(self, cards: Sequence[NodeCard], *, patient: bool = False) -> list[tuple[NodeCard, AskNode]]:
        """The nodes that are connected, and how to ask each.

        Args:
            patient: wait for a node without a sign of life as long as for others.
        """
        return [
            (card, partial(self._ask, neighbour, patient))
            for card in cards
            if (neighbour := self._known.get(card.node)) is not None
        ]

    def _ask(
        self,
        neighbour: _Neighbour,
        patient: bool,
        question: p.PeerMessage,
        done: Callable[[Holdings], None],
        failed: Callable[[str, str], None],
    ) -> None:
        links = neighbour.links
        first = _First(done, failed, len(links))
        for link in links:
            way = _Way(first)
            if not patient:
                no_welcome = partial(_no_welcome, way)
                link.ask(self._hello, p.PeerWelcome, lambda _: None, no_welcome, timeout_s=_SIGN_OF_LIFE_S)
            link.ask(question, Holdings, first.done, way.failed, timeout_s=_SURVEY_S)

    def status(self, now_s: float) -> tuple[PeerStatus, ...]:
        return tuple(
            PeerStatus(
                node,
                n.card.endpoint,
                n.card.labels,
                not n.lost,
                now_s - n.last_heard_s,
                n.free_bytes,
                bool(n.boot_id),
            )
            for node, n in sorted(self._known.items())
        )

    def welcome(self, peer: str, hello: p.PeerHello, free_bytes: int) -> p.PeerReply:
        """The answer to the hello of a peer. One that has moved, or has another key, is asked there."""
        if peer in self._known and hello.endpoint:
            card = NodeCard(peer, hello.endpoint, hello.public_key, hello.labels, hello.boot_id)
            self.meet([card])
        if hello.protocol != p.PEER_PROTOCOL_VERSION:
            return p.PeerRefused(
                "protocol",
                f"{hello.node} speaks version {hello.protocol} between daemons, "
                f"{self._node} version {p.PEER_PROTOCOL_VERSION}",
                "run the same ckptd version on all nodes",
            )
        return p.PeerWelcome(
            p.PEER_PROTOCOL_VERSION,
            ckptd.__version__,
            self._node,
            self._here.boot_id,
            self._labels,
            free_bytes,
        )

    def tick(self, now_s: float) -> None:
        """Send hellos, notice lost nodes, forget nodes that are not needed."""
        needed = self._listener.needed_nodes()
        self._excuse(now_s)
        for node, neighbour in list(self._known.items()):
            silent_s = now_s - neighbour.last_heard_s
            is_long = silent_s > _FORGET_DEADLINES * self._deadline_s
            if node not in needed and neighbour.lost and is_long:
                self._forget(node, f"it has not answered for {silent_s:.0f} s")
            else:
                self._look_after(node, neighbour, now_s)
                if neighbour.rival is not None:
                    self._ask_rival(node, neighbour, neighbour.rival)

    def _excuse(self, now_s: float) -> None:
        """Let the neighbours' time to answer begin again if this daemon stood still."""
        late = now_s - self._ticked_s > max(_LATE_TICK_S, _LEAST_UNANSWERED * self._deadline_s)
        self._ticked_s = now_s
        for neighbour in self._known.values() if late else ():
            if neighbour.unanswered_s is not None:
                neighbour.unanswered_s = now_s

    # -- one of them -----------------------------------------------------------------------------

    def _meet(self, card: NodeCard, wanted: Container[str]) -> None:
        address = PeerAddress(card.node, card.endpoint, card.public_key)
        known = self._known.get(card.node)
        if known is not None and address in [link.address for link in known.links]:
            return
        if self._fabric is None or (known is None and not self._has_room(card.node, wanted)):
            return
        if known is not None and not known.lost and card.boot_id and card.boot_id == known.boot_id:
            return  # this very daemon answers where it is known to be
        link = PeerLink(self._fabric.peer(address), self._here.post, self._here.boot_id)
        if known is None:
            self._known[card.node] = _Neighbour(card, link, self._clock())
            return
        self._drop_rival(known)
        known.rival = _Rival(card, link, known.answers)
        self._ask_rival(card.node, known, known.rival)

    def _ask_rival(self, node: str, neighbour: _Neighbour, rival: _Rival) -> None:
        """Ask whether a node is at its other address, unless it was asked and has time left."""
        if rival.asking:
            return
        rival.asking, rival.answers = True, neighbour.answers
        rival.link.ask(
            self._hello,
            p.PeerWelcome,
            partial(self._rival_heard, node, neighbour, rival),
            partial(self._rival_not_heard, neighbour, rival),
            timeout_s=self._deadline_s,
        )

    def _rival_heard(self, node: str, neighbour: _Neighbour, rival: _Rival, welcome: p.PeerWelcome) -> None:
        if neighbour.rival is not rival or self._known.get(node) is not neighbour:
            return
        rival.asking = False
        if neighbour.answers > rival.answers:
            self._drop_rival(neighbour)
        elif neighbour.lost or neighbour.failed or not neighbour.boot_id:
            self._move(node, neighbour, rival, welcome)
        else:  # it stays where it is known to be, if it answers there: then which boot is newer is not known
            same = welcome.boot_id == neighbour.boot_id  # one daemon with two addresses: nothing is urgent
            neighbour.link.ask(
                self._hello,
                p.PeerWelcome,
                partial(self._heard, node, neighbour, neighbour.link),
                lambda code, reason: self._move(node, neighbour, rival, welcome),
                timeout_s=self._deadline_s if same else _SIGN_OF_LIFE_S,
            )

    def _move(self, node: str, neighbour: _Neighbour, rival: _Rival, welcome: p.PeerWelcome) -> None:
        """Go on with a node at its other address, unless it has answered at the known one meanwhile."""
        if neighbour.rival is not rival or self._known.get(node) is not neighbour:
            return
        before, there = neighbour.card.endpoint, rival.card.endpoint
        neighbour.link.close()
        neighbour.card, neighbour.link, neighbour.rival = rival.card, rival.link, None
        neighbour.asking = False
        how = f"at {there}, no more at {before}" if there != before else f"at {there} with another key"
        self._events.add("info", "peer_moved", f"{node} answers {how}")
        self._heard(node, neighbour, rival.link, welcome)

    def _rival_not_heard(self, neighbour: _Neighbour, rival: _Rival, code: str, reason: str) -> None:
        rival.asking = False
        # One that is lost is looked for at both addresses.
        if neighbour.rival is rival and neighbour.answers > rival.answers:
            self._drop_rival(neighbour)

    def _drop_rival(self, neighbour: _Neighbour) -> None:
        if neighbour.rival is not None:
            neighbour.rival.link.close()
            neighbour.rival = None

    def _has_room(self, node: str, wanted: Container[str]) -> bool:
        """Whether one more node may be connected; the longest silent unneeded node makes room."""
        most = _most_peers()
        needed = self._listener.needed_nodes() if len(self._known) >= most else ()
        while len(self._known) >= most:
            spare = [n for n in self._known if n not in needed and n not in wanted]
            if not spare:
                break
            oldest = min(spare, key=lambda n: self._known[n].last_heard_s)
            self._forget(oldest, f"{node} needs its place")
        full = len(self._known) >= most
        if full and not self._full:
            self._events.add(
                "error",
                "too_many_peers",
                f"{node} is not connected: {most} nodes are, as many as the limit of open files allows; "
                "raise it (LimitNOFILE= in the unit, ulimit -n)",
            )
        self._full = full
        return not full

    def _forget(self, node: str, why: str) -> None:
        """Close the connection; a node that has a part in a run again is connected again."""
        neighbour = self._known[node]
        self._lose(node, neighbour, why)
        del self._known[node]
        self._drop_rival(neighbour)
        neighbour.link.close()
        self._events.add(
            "info", "peer_forgotten", f"{node} has no part in any run here, and {why}: it is closed"
        )

    def _look_after(self, node: str, neighbour: _Neighbour, now_s: float) -> None:
        if not neighbour.lost and self._is_silent(neighbour, now_s):
            self._lose(node, neighbour, f"no answer for {self._deadline_s:g} s{_never(neighbour)}")
        if neighbour.asking or now_s < neighbour.next_hello_s:
            return
        neighbour.asking = True
        if neighbour.unanswered_s is None:
            neighbour.unanswered_s = now_s
        neighbour.next_hello_s = now_s + self._deadline_s / _HELLOS_PER_DEADLINE
        neighbour.link.ask(
            self._hello,
            p.PeerWelcome,
            partial(self._heard, node, neighbour, neighbour.link),
            partial(self._not_heard, node, neighbour, neighbour.link),
            timeout_s=self._deadline_s,
        )

    def _is_silent(self, neighbour: _Neighbour, now_s: float) -> bool:
        since_s, deadline_s = neighbour.unanswered_s, self._deadline_s
        asked = since_s is not None and now_s - since_s > _LEAST_UNANSWERED * deadline_s
        return asked and now_s - neighbour.last_heard_s > deadline_s

    def _heard(self, node: str, neighbour: _Neighbour, link: PeerLink, welcome: p.PeerWelcome) -> None:
        if self._known.get(node) is not neighbour or neighbour.link is not link:
            return  # an answer from its former address
        neighbour.asking, neighbour.failed, neighbour.unanswered_s = False, False, None
        neighbour.answers += 1
        if neighbour.rival is not None and not neighbour.rival.asking:
            self._drop_rival(neighbour)
        neighbour.last_heard_s = self._clock()
        neighbour.free_bytes = welcome.free_bytes
        restarted = bool(neighbour.boot_id) and neighbour.boot_id != welcome.boot_id
        neighbour.boot_id = welcome.boot_id
        if restarted:
            self._events.add("info", "peer_restarted", f"the daemon of {node} was restarted")
            self._listener.node_restarted(node, welcome.boot_id)
        if neighbour.lost:
            neighbour.lost = False
            self._events.add("info", "peer_back", f"{node} answers again")
            self._listener.node_back(node)

    def _not_heard(self, node: str, neighbour: _Neighbour, link: PeerLink, code: str, reason: str) -> None:
        if neighbour.link is not link:
            return
        neighbour.asking, neighbour.failed = False, True
        self._events.count_refusal("hello", code)
        if code == "protocol" and self._known.get(node) is neighbour:
            self._lose(node, neighbour, reason)

    def _lose(self, node: str, neighbour: _Neighbour, reason: str) -> None:
        if neighbour.lost:
            return
        neighbour.lost = True
        self._events.add("warning", "peer_lost", f"{node}: {reason}")
        self._listener.node_lost(node, reason)


def _never(neighbour: _Neighbour) -> str:
    """What to look at if a node has never answered; "" if it has."""
    if neighbour.boot_id:
        return ""
    return (
        f", and never before: is its daemon at {neighbour.card.endpoint}, is the port open, and has each "
        "node the other's key (`ckptctl keys list` on both)?"
    )


def _no_welcome(way: _Way, code: str, reason: str) -> None:
    if code in _NO_SIGN_OF_LIFE:  # else it lives, and refuses the hello
        way.failed(code, reason)


def _most_peers() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return _MAX_PEERS
    return max(1, min(_MAX_PEERS, (limit - _OTHER_DESCRIPTORS) // _PEER_DESCRIPTORS))
