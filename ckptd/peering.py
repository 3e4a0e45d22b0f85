"""This node among the others: who can be reached, which runs it takes part in, what it fetches.

Everything here runs on the daemon's loop thread; the fabric's threads hand over what arrives through `post`. Without a peer
listener nothing is connected and snapshots stay on this node; fetching still works for what lies here.

A peer is *lost* when it has not answered a hello for ``peer_deadline_s``; one that answers with another boot id was restarted and knows
neither leases nor tickets of before.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial

import msgspec

import ckptd
from ckptd.config import DaemonConfig, parse_labels
from ckptd.drill import DrillRun
from ckptd.events import EventLog
from ckptd.fabric import make_fabric, static_peers
from ckptd.fetching import DescriptorSearch, FetchJob, FoundDescriptor
from ckptd.hosting import Host, local_holdings
from ckptd.peer_link import PeerLink, Post
from ckptd.replica_store import ReplicaStore
from ckptd.replicas import Promise
from ckptd.ring import SlotState
from ckptd.runs import Run
from ckptd.segments import Segment, SegmentStore
from ckptd.sessions import RankKey
from ckptd.survey import RunSurvey
from ckptd.transport import peer_messages as p
from ckptd.transport.messages import (
    Drill,
    DrillReport,
    FetchPiece,
    FetchSource,
    GetHoldings,
    Holdings,
    HostedReplica,
    Join,
    Member,
    NodeCard,
    Peers,
    PeerStatus,
    RunSeen,
    SeeRun,
)
from ckptd.transport.verbs import Fabric, PeerAddress
from ckptd.workers import Workers

__all__ = ["FoundDescriptor", "Peering"]

logger = logging.getLogger(__name__)

_HELLOS_PER_DEADLINE = 10
_SURVEY_S = 3.0
_SURVEY_SILENT_S = (
    0.5  # one that missed its last hellos is probably what the job is recovering from
)
_MAX_PEERS = 65_536
_RUN_IDLE_S = 3600.0  # a run that joined and has had no segment here since


@dataclass(slots=True)
class _Neighbour:
    card: NodeCard
    link: PeerLink
    last_heard_s: float
    boot_id: str = ""
    lost: bool = False
    asking: bool = False
    next_hello_s: float = 0.0
    free_bytes: int = 0


class Peering:
    """Connections, runs, replicas and fetches of one daemon.

    Raises:
        UnusableFolder: the peer listener cannot be opened, or its security is not configured.
    """

    def __init__(
        self,
        config: DaemonConfig,
        store: SegmentStore,
        events: EventLog,
        *,
        sealers: Workers,
        slow: Workers,
        pool: ThreadPoolExecutor | None,
        post: Post,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._store, self._events = config, store, events
        self._sealers, self._slow, self._post, self._clock = sealers, slow, post, clock
        self.boot_id = secrets.token_hex(8)  # new at each start
        self._map = None if pool is None else pool.map
        self.replicas = ReplicaStore(store)
        self._neighbours: dict[str, _Neighbour] = {}
        self.runs: dict[tuple[str, str], Run] = {}
        self._fetches: dict[tuple[RankKey, int], FetchJob] = {}
        self._drills: list[FetchJob] = []
        self.fabric: Fabric | None = make_fabric(config, store.node_id, self._arrived)
        self._static = static_peers(config)
        self.host: Host | None = None
        if self.fabric is not None:
            self.host = Host(
                self.fabric,
                store,
                self.replicas,
                events,
                promise_of=self._promise_of,
                sealers=sealers,
                slow=slow,
                map_fn=self._map,
                deadline_s=config.peer_deadline_s,
                retain_s=config.retain_detached_s,
                clock=clock,
            )
            events.add("info", "peers", f"peers reach this node at {self.fabric.address.endpoint}")

    @property
    def card(self) -> NodeCard:
        """How others reach this node."""
        labels = parse_labels(self._config.labels)
        if self.fabric is None:
            return NodeCard(self._store.node_id, labels=labels, boot_id=self.boot_id)
        address = self.fabric.address
        return NodeCard(
            self._store.node_id, address.endpoint, address.public_key, labels, self.boot_id
        )

    @property
    def slack(self) -> int:
        """Slots that a trainer's ring should have for snapshots that wait for peers."""
        return 0 if self.fabric is None else self._config.replication_slack

    # -- from the service ------------------------------------------------------------------------

    def join(self, key: RankKey, message: Join) -> None:
        """A local rank tells who takes part in its run."""
        message = self._with_static_peers(message)
        self.meet(member.card for member in message.members)
        if self.host is not None:
            self.host.note_epoch(key.job, key.run, message.epoch, message.epoch_start)
        run = self.runs.get((key.job, key.run))
        if run is None:
            run = self.runs[key.job, key.run] = Run(
                key.job,
                key.run,
                self._config,
                self._store,
                self.replicas,
                self._events,
                link=self.link,
                clock=self._clock,
            )
        run.join(key, message)
        for node, neighbour in self._neighbours.items():
            if neighbour.lost:  # before this epoch began, and still
                run.peer_lost(node, "it has not answered for long")

    def meet(self, cards: Iterable[NodeCard]) -> None:
        """Connect to these nodes."""
        for card in cards:
            if card.node != self._store.node_id and card.endpoint:
                self._meet(card)

    def see_run(self, message: SeeRun, answer: Callable[[RunSeen], None]) -> None:
        """What is held of a run: here, and on nodes that took part before and have no rank now."""
        run = self.runs.get((message.job, message.run))
        known = {*message.known, self._store.node_id}
        cards = [m.card for m in run.members] if run else []
        cards += [card for card in self._static if card.node not in {c.node for c in cards}]
        self.meet(self._static)
        away = [card for card in cards if card.node not in known]
        RunSurvey(
            GetHoldings(message.job, message.run),
            self.holdings(message.job, message.run),
            [
                (card, neighbour.link, self._patience_s(neighbour))
                for card in away
                if (neighbour := self._neighbours.get(card.node)) is not None
            ],
            answer,
            run.members if run else (),
        )

    def _patience_s(self, neighbour: _Neighbour) -> float:
        silent_s = self._clock() - neighbour.last_heard_s
        quiet_s = 2 * self._config.peer_deadline_s / _HELLOS_PER_DEADLINE
        return _SURVEY_SILENT_S if neighbour.lost or silent_s > quiet_s else _SURVEY_S

    def drill(self, message: Drill, answer: Callable[[DrillReport], None]) -> None:
        """Rehearse the recovery of a rank from other nodes than its own."""
        key = RankKey(message.job, message.run, message.rank)
        rehearsal = DrillRun(
            key,
            self._store,
            self.replicas,
            self._slow,
            find_descriptor=self.find_descriptor,
            start_fetch=self._start_drill_fetch,
            answer=answer,
            clock=self._clock,
        )
        self.see_run(SeeRun(message.job, message.run), rehearsal.seen)

    def _start_drill_fetch(
        self, segment: Segment, pieces: Sequence[FetchPiece], finished: Callable[[str], None]
    ) -> FetchJob:
        job = self._fetch_job(segment, pieces, finished)
        self._drills = [d for d in self._drills if not d.over] + [job]
        job.start()
        return job

    def sealed(self, segment: Segment) -> None:
        """A slot of one of our ranks was sealed."""
        run = self.runs.get((segment.key.job, segment.key.run))
        if run is not None:
            run.sealed(segment.key.rank)

    def scrub_with(self, doubt: Callable[[Segment, int, int], None]) -> None:
        """What verifies a slot that a peer found damaged."""
        if self.host is not None:
            self.host.doubt = doubt

    def damaged(self, segment: Segment) -> None:
        """A slot here was quarantined: if it is a replica's, its sender must send it again."""
        if self.host is not None:
            self.host.damaged(segment)

    def leave(self, key: RankKey, *, final: bool) -> None:
        """A trainer ended. Its snapshots stay, and go on to peers, unless its run is over."""
        for (owner, generation), job in list(self._fetches.items()):
            if owner == key:
                job.close("its trainer ended")
                del self._fetches[owner, generation]
        if final:
            self.forget(key.job, key.run)

    def forget(self, job: str, run: str) -> int:
        """End a run here and free its replicas; returns their bytes."""
        found = self.runs.pop((job, run), None)
        if found is not None:
            found.close()
            for neighbour in self._neighbours.values():
                neighbour.link.tell(p.EndRun(job, run))
        freed = 0
        for segment in self.replicas.of_run(job, run):
            freed += segment.file_bytes
            if self.host is not None:
                self.host.remove(segment, "its run was forgotten")
        return freed

    def holdings(self, job: str, run: str) -> Holdings:
        """Everything sealed that this node holds of a run."""
        if self.host is not None:
            return self.host.holdings(job, run)
        return local_holdings(self._store, self.replicas, job, run)

    def find_descriptor(
        self,
        key: RankKey,
        sources: Sequence[FetchSource],
        found: Callable[[FoundDescriptor | str], None],
    ) -> None:
        """The descriptor of a segment that one of these holds; calls back with it, or with why there is none."""
        DescriptorSearch(self._store.node_id, key, sources, self.link, self._local_segment, found)

    def fetch(self, segment: Segment, pieces: Sequence[FetchPiece]) -> FetchJob:
        """Fill a new segment with these pieces."""
        job = self._fetch_job(segment, pieces)
        self._fetches[segment.key, segment.generation] = job
        job.start()
        return job

    def _fetch_job(
        self,
        segment: Segment,
        pieces: Sequence[FetchPiece],
        finished: Callable[[str], None] = lambda reason: None,
    ) -> FetchJob:
        return FetchJob(
            segment,
            pieces,
            node=self._store.node_id,
            link=self.link,
            local=self._local_segment,
            verifiers=self._sealers,
            map_fn=self._map,
            events=self._events,
            clock=self._clock,
            finished=finished,
        )

    def fetch_of(self, key: RankKey, generation: int) -> FetchJob | None:
        return self._fetches.get((key, generation))

    @property
    def fabric_counters(self) -> dict[str, int]:
        """Bytes moved, requests refused, garbage, strangers."""
        if self.fabric is None:
            return {}
        return {f"fabric.{name}": n for name, n in asdict(self.fabric.counters).items() if n}

    def status(self) -> Peers:
        """Everything `ckptctl peers` shows."""
        now_s = self._clock()
        card = self.card
        return Peers(
            node=card.node,
            endpoint=card.endpoint,
            public_key=card.public_key,
            peers=tuple(
                PeerStatus(
                    node,
                    n.card.endpoint,
                    n.card.labels,
                    not n.lost,
                    now_s - n.last_heard_s,
                    n.free_bytes,
                )
                for node, n in sorted(self._neighbours.items())
            ),
            ranks=tuple(s for run in self.runs.values() for s in run.status(now_s)),
            replicas=tuple(_hosted(segment) for segment in self.replicas),
            counters=self.fabric_counters,
        )

    def adopt(self) -> None:
        """Take over the replicas that an earlier daemon left."""
        found, bad = self.replicas.adopt()
        for path, why in bad:
            self._events.add("error", "bad_segment", f"{path.name} is put aside: {why}")
        for segment in found:
            self._events.add("info", "replica_adopted", segment.path.name, segment.key)

    def link(self, node: str) -> PeerLink | None:
        """The connection to a node, None if its address is not known."""
        neighbour = self._neighbours.get(node)
        return None if neighbour is None else neighbour.link

    def tick(self, now_s: float) -> None:
        """Hellos, deadlines, and what time brings to runs, replicas and fetches."""
        for node, neighbour in list(self._neighbours.items()):
            self._look_after(node, neighbour, now_s)
        for run in list(self.runs.values()):
            run.tick()
            if now_s - run.joined_at_s > _RUN_IDLE_S and not self._store.of_run(run.job, run.run):
                # Its segments expired long ago. Replicas of others stay: the host knows when they may go.
                self.runs.pop((run.job, run.run)).close()
        if self.host is not None:
            self.host.tick(now_s)
        for drill in self._drills:
            drill.tick()
        for key, job in list(self._fetches.items()):
            job.tick()
            if job.over and self._store.get(*key) is None:
                del self._fetches[key]

    def wake(self, now_s: float) -> float:
        """Between ticks: try again what is due; returns when to come back (infinity: at the next tick)."""
        return min((run.wake(now_s) for run in self.runs.values()), default=float("inf"))

    def close(self) -> None:
        for job in (*self._fetches.values(), *self._drills):
            job.close("the daemon stops")
        for run in self.runs.values():
            run.close()
        if self.host is not None:
            self.host.close()
        if self.fabric is not None:
            self.fabric.close()

    def _with_static_peers(self, message: Join) -> Join:
        """The configured nodes take part in every run, without ranks."""
        known = {member.card.node for member in message.members}
        lent = tuple(Member(card, ()) for card in self._static if card.node not in known)
        return msgspec.structs.replace(message, members=(*message.members, *lent))

    # -- neighbours ------------------------------------------------------------------------------

    def _meet(self, card: NodeCard) -> None:
        address = PeerAddress(card.node, card.endpoint, card.public_key)
        known = self._neighbours.get(card.node)
        if known is not None and known.link.address == address:
            return
        if self.fabric is None or (known is None and len(self._neighbours) >= _MAX_PEERS):
            return
        if known is not None:
            known.link.close()
        link = PeerLink(self.fabric.peer(address), self._post)
        self._neighbours[card.node] = _Neighbour(card, link, self._clock())

    def _look_after(self, node: str, neighbour: _Neighbour, now_s: float) -> None:
        deadline_s = self._config.peer_deadline_s
        if not neighbour.lost and now_s - neighbour.last_heard_s > deadline_s:
            self._lose(node, neighbour, f"no answer for {deadline_s:g} s")
        if neighbour.asking or now_s < neighbour.next_hello_s:
            return
        neighbour.asking = True
        neighbour.next_hello_s = now_s + deadline_s / _HELLOS_PER_DEADLINE
        labels = parse_labels(self._config.labels)
        neighbour.link.ask(
            p.PeerHello(
                p.PEER_PROTOCOL_VERSION,
                ckptd.__version__,
                self._store.node_id,
                self.boot_id,
                labels,
            ),
            p.PeerWelcome,
            partial(self._heard, node, neighbour),
            partial(self._not_heard, node, neighbour),
            timeout_s=deadline_s,
        )

    def _heard(self, node: str, neighbour: _Neighbour, welcome: p.PeerWelcome) -> None:
        neighbour.asking = False
        neighbour.last_heard_s = self._clock()
        neighbour.free_bytes = welcome.free_bytes
        restarted = bool(neighbour.boot_id) and neighbour.boot_id != welcome.boot_id
        neighbour.boot_id = welcome.boot_id
        if neighbour.lost:
            neighbour.lost = False
            self._events.add("info", "peer_back", f"{node} answers again")
            for run in self.runs.values():
                run.peer_back(node)
        elif restarted:
            self._events.add("info", "peer_restarted", f"the daemon of {node} was restarted")
            if self.host is not None:
                self.host.peer_gone(node)
            for run in self.runs.values():
                run.peer_restarted(node)

    def _not_heard(self, node: str, neighbour: _Neighbour, code: str, reason: str) -> None:
        neighbour.asking = False
        self._events.count(f"hello.{code}")
        if code == "protocol":
            self._lose(node, neighbour, reason)

    def _lose(self, node: str, neighbour: _Neighbour, reason: str) -> None:
        if neighbour.lost:
            return
        neighbour.lost = True
        self._events.add("warning", "peer_lost", f"{node}: {reason}")
        if self.host is not None:
            self.host.peer_gone(node)
        for job in (*self._fetches.values(), *self._drills):
            job.peer_lost(node)
        for run in self.runs.values():
            run.peer_lost(node, reason)

    # -- from the fabric -------------------------------------------------------------------------

    def _arrived(self, peer: str, body: bytes, answer: Callable[[bytes], None]) -> None:
        """On a fabric's thread."""
        self._post(lambda: self._serve(peer, body, answer))

    def _serve(self, peer: str, body: bytes, answer: Callable[[bytes], None]) -> None:
        try:
            message = p.decode_peer(body)
        except ValueError as error:
            self._events.count("peer_garbage")
            answer(p.encode_peer(p.PeerRefused("bad_message", str(error)[:4000])))
            return
        reply = partial(_encoded, answer)
        if isinstance(message, p.PeerHello):
            reply(self._welcome(message))
        elif isinstance(message, p.Floor):
            run = self.runs.get((message.job, message.run))
            if run is not None:
                run.floor_message(peer, message)
            reply(p.PeerDone())
        elif self.host is None or not self.host.serve(peer, message, reply):
            text = f"{type(message).__name__} is no request"
            reply(p.PeerRefused("bad_message", text))

    def _welcome(self, hello: p.PeerHello) -> p.PeerReply:
        if hello.protocol != p.PEER_PROTOCOL_VERSION:
            return p.PeerRefused(
                "protocol",
                f"{hello.node} speaks version {hello.protocol} between daemons, "
                f"{self._store.node_id} version {p.PEER_PROTOCOL_VERSION}",
                "run the same ckptd version on all nodes",
            )
        return p.PeerWelcome(
            p.PEER_PROTOCOL_VERSION,
            ckptd.__version__,
            self._store.node_id,
            self.boot_id,
            parse_labels(self._config.labels),
            max(0, self._store.quota_bytes - self._store.used_bytes),
        )

    def _promise_of(self, job: str, run: str) -> tuple[Promise, int]:
        found = self.runs.get((job, run))
        return (Promise(), 1) if found is None else (found.promise, found.span)

    def _local_segment(self, name: str) -> Segment | None:
        replica = self.replicas.get(name)
        if replica is not None:
            return replica
        return next((s for s in self._store if s.path.name == name), None)


def _hosted(segment: Segment) -> HostedReplica:
    told = segment.descriptor
    sealed = [h.iteration for _, h in segment.headers() if h.state is SlotState.SEALED]
    return HostedReplica(
        segment.path.name,
        told.job,
        told.run,
        told.rank,
        segment.file_bytes,
        len(sealed),
        max(sealed, default=-1),
    )


def _encoded(answer: Callable[[bytes], None], reply: p.PeerReply) -> None:
    answer(p.encode_peer(reply))
