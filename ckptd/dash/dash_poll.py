"""Asks the daemon for everything that the view shows, and keeps what earlier answers showed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace

from ckptd.core.recovery.held import HeldRecords
from ckptd.core.slots.ring import Suffix, find_suffix
from ckptd.core.slots.slots import SlotRecord
from ckptd.dash.dash_history import PaceHistory, RunName
from ckptd.dash.dash_view import Answers, DashView, PlacementView, SurveyedRank, placement_of, view_of
from ckptd.errors import RemoteProtocolError
from ckptd.holdings import newest_history
from ckptd.transport import messages as m
from ckptd.transport.wire import ControlClient, RefusedError, RequestTimeout, WireError

SELDOM_S = 10.0  # between two questions whose answers are large
_EVENTS_KEPT = 500
_PAGE = 10_000
_RECOVERIES_KEPT = 256


class DashMemory:
    """Makes views of one daemon's answers, and keeps what earlier ones showed, as much as the page shows."""

    def __init__(self) -> None:
        self._history = PaceHistory()
        self._events = deque[m.EventInfo](maxlen=_EVENTS_KEPT)
        self._recoveries = deque[m.EventInfo](maxlen=_RECOVERIES_KEPT)
        self._boot_id, self._last_seq = "", 0
        self._placements: dict[RunName, PlacementView] = {}
        self.surveys: dict[RunName, dict[int, SurveyedRank]] = {}

    def events_since(self, boot_id: str) -> int:
        """The event after which the daemon that was started under this id is to be asked for more."""
        if boot_id != self._boot_id:  # a restarted daemon counts anew
            self._boot_id, self._last_seq = boot_id, 0
        return self._last_seq

    def place(self, seen: m.SeenElastic) -> None:
        """Note the placements of elastic jobs."""
        self._placements = {(each.job, each.run): placement_of(each.elastic) for each in seen.told}

    def take(
        self, status: m.Status, snapshots: m.Snapshots, peers: m.Peers, page: m.Events, at_s: float
    ) -> Answers:
        """All answers of ``at_s`` (unix time), with what is kept.

        Args:
            page: the events after `events_since`.
        """
        self._last_seq = page.events[-1].seq if page.events else page.last_seq
        self._events.extend(page.events)
        self._recoveries.extend(event for event in page.events if event.kind == "recovery_phases")
        self._history.add(status.sessions, at_s)
        return Answers(
            at_s=at_s,
            status=status,
            snapshots=snapshots,
            peers=peers,
            events=tuple(self._events),
            recoveries=tuple(self._recoveries),
            placements=self._placements,
            paces=self._history.paces(),
            surveys=self.surveys,
        )


class DaemonPoll:
    """The newest view of one daemon, for one thread.

    Args:
        whole_job: every 10 s ask all nodes of the live runs what they hold.
    """

    def __init__(self, client: ControlClient, *, whole_job: bool = False) -> None:
        self._client, self._whole_job = client, whole_job
        self._memory = DashMemory()
        self._seldom_due_s = 0.0
        self._answers: Answers | None = None

    def view(self) -> DashView:
        """Ask, and show the answers; if the daemon does not answer, the last ones with the error.

        Raises:
            WireError, RefusedError, RequestTimeout: it did not answer the first time.
        """
        try:
            self._answers = self._ask()
        except (WireError, RefusedError, RequestTimeout) as error:
            if self._answers is None:
                raise
            self._answers = replace(self._answers, error=str(error))
        return view_of(self._answers)

    def _ask(self) -> Answers:
        ask = self._client.ask
        status = ask(m.GetStatus(), m.Status)
        snapshots = ask(m.GetSnapshots(), m.Snapshots)
        peers = ask(m.GetPeers(), m.Peers)
        since = self._memory.events_since(status.boot_id)
        page = ask(m.GetEvents(since=since, limit=_PAGE), m.Events)
        now_s = time.time()
        if now_s >= self._seldom_due_s:
            self._ask_seldom(status)
            self._seldom_due_s = now_s + SELDOM_S
        return self._memory.take(status, snapshots, peers, page, now_s)

    def _ask_seldom(self, status: m.Status) -> None:
        self._memory.place(self._client.ask(m.GetElastic(), m.SeenElastic))
        live = {(session.job, session.run) for session in status.sessions}
        surveys = {name: self._survey(*name) for name in sorted(live)} if self._whole_job else {}
        self._memory.surveys = surveys

    def _survey(self, job: str, run: str) -> dict[int, SurveyedRank]:
        try:
            return surveyed_ranks(self._client.ask(m.SeeRun(job, run), m.RunSeen))
        except (RefusedError, RequestTimeout, RemoteProtocolError):
            return {}  # what this node knows by itself is shown nevertheless


def surveyed_ranks(seen: m.RunSeen) -> dict[int, SurveyedRank]:
    """Each rank of a run as its nodes know it.

    Raises:
        RemoteProtocolError: a node reported impossible slots.
    """
    held = newest_history(seen)
    records: dict[tuple[int, bool, str], list[HeldRecords]] = {}
    for each in held.snapshots:
        records.setdefault((each.rank, each.own, each.node), []).append(each)
    homes = {rank: member.card.node for member in seen.members for rank in member.ranks}
    homes |= {rank: node for rank, own, node in records if own}
    ends: dict[bool, dict[int, int]] = {True: {}, False: {}}  # of a rank's own snapshots, and of replicas
    for (rank, own, _), found in records.items():
        ends[own][rank] = max(_end(found, held.history.begun), ends[own].get(rank, -1))
    newest = max((record.iteration for each in held.snapshots for record in each.records), default=-1)
    answered = {each.node for each in seen.holdings}
    return {
        rank: SurveyedRank(
            node, ends[True].get(rank, -1), ends[False].get(rank, -1), newest, node not in answered
        )
        for rank, node in homes.items()
    }


def _end(found: list[HeldRecords], begun: Mapping[int, int]) -> int:
    records: list[SlotRecord] = [record for each in found for record in each.records]
    suffix = find_suffix(records, found[0].num_operators, epochs=begun)
    return suffix.end if isinstance(suffix, Suffix) else -1
