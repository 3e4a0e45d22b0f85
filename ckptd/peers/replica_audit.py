"""Digests of ranks that should hold the same values are compared, and what differs is reported.

Each daemon tells the digests of a snapshot that it has sealed to the daemon of the lowest of the ranks that
hold these tensors; there they are compared (`ckptd.core.replication.replica_comparison`). Nothing waits for
that, and a message that is lost costs the comparison of one snapshot. On the daemon's loop thread.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from ckptd.core.replication.replica_comparison import (
    Differing,
    Diverged,
    Finding,
    RankDigests,
    ReplicaComparison,
)
from ckptd.core.sessions import RankKey
from ckptd.event_log import EventLog
from ckptd.memory.segment_file import Segment
from ckptd.memory.slot_digests import SealOutcome
from ckptd.peers.peer_link import Holder
from ckptd.transport import peer_messages as p
from ckptd.transport.messages import ComparedRanks, Member
from ckptd.units import first_of

_MAX_GROUPS = 4096  # of one run
_NAMED = 3

_Groups = dict[str, ReplicaComparison]


class ReplicaAudit:
    """The comparisons of all runs of this node.

    Args:
        members_of: the nodes of a run and their ranks; empty before a rank has joined.
        epoch_of: the epoch that a rank of this node has joined; -1: none has.
        link: the connection to a node, if there is one.
    """

    def __init__(
        self,
        node: str,
        events: EventLog,
        *,
        members_of: Callable[[str, str], Sequence[Member]],
        epoch_of: Callable[[str, str], int],
        link: Callable[[str], Holder | None],
    ) -> None:
        self._node, self._events = node, events
        self._members_of, self._epoch_of, self._link = members_of, epoch_of, link
        self._runs: dict[tuple[str, str], _Groups] = {}
        self._ranks: dict[tuple[str, str, str], tuple[int, ...]] = {}  # of groups that are compared here

    def digested(self, segment: Segment, outcome: SealOutcome) -> None:
        """A snapshot of a rank of this node was sealed: compare it, or have it compared."""
        key = segment.key
        for found in outcome.replicated:
            ranks, group = found.of.ranks, found.of.group
            told = RankDigests(
                key.rank, len(ranks), outcome.epoch, outcome.iteration, found.of.number, found.digests
            )
            node = self._node_of(key, min(ranks))
            if node == self._node:
                comparison = self._comparison(key.job, key.run, group)
                if comparison is not None:
                    self._ranks[key.job, key.run, group] = ranks
                    comparison.name(told.tensors, found.of.names, found.of.dtypes)
                    self._report(key.job, key.run, comparison.note(told))
            elif (link := self._link(node)) is not None:
                self._events.count("replicas.sent_bytes", len(told.digests))
                link.tell(_message(key, group, told))

    def heard(self, peer: str, message: p.TellDigests) -> p.PeerReply:
        """A node tells the digests of one of its ranks.

        They are kept until all ranks' are there, so only those of groups that a rank of this node has named
        are taken. What comes before its first snapshot of an epoch may be lost.
        """
        if why := self._objection(peer, message):
            return p.PeerRefused("forbidden", why)
        comparison = self._comparison(message.job, message.run, message.group)
        if comparison is not None:
            told = RankDigests(
                message.rank,
                message.num_ranks,
                message.epoch,
                message.iteration,
                message.tensors,
                message.digests,
            )
            self._report(message.job, message.run, comparison.note(told, own=False))
        return p.PeerDone()

    def _objection(self, peer: str, message: p.TellDigests) -> str:
        """Why these digests are not compared; "": they are."""
        job, run, rank = message.job, message.run, message.rank
        if self._node_of(RankKey(job, run, rank), rank) != peer:
            return f"rank {rank} does not run on {peer}"
        ranks = self._ranks.get((job, run, message.group), ())
        if rank not in ranks or message.num_ranks != len(ranks):
            return f"no rank of this node is in a group {message.group!r} of {message.num_ranks} with {rank}"
        if message.epoch > (epoch := self._epoch_of(job, run)):
            return f"epoch {message.epoch} has not begun here: {epoch} is the newest"
        return ""

    def keep(self, runs: Container[tuple[str, str]]) -> None:
        """Forget all other runs: they are over here."""
        for run in [run for run in self._runs if run not in runs]:
            del self._runs[run]
            self._ranks = {name: ranks for name, ranks in self._ranks.items() if name[:2] != run}

    def status(self) -> tuple[ComparedRanks, ...]:
        """What is compared on this node, for `ckptctl peers`."""
        return tuple(
            ComparedRanks(
                job,
                run,
                ranks,
                comparison.compared_up_to,
                tuple(sorted(comparison.differing)[:_NAMED]),
                len(comparison.differing),
                tuple(sorted(comparison.diverged)),
            )
            for (job, run, group), ranks in sorted(self._ranks.items())
            if (comparison := self._runs[job, run].get(group)) is not None
        )

    def _node_of(self, key: RankKey, rank: int) -> str:
        members = self._members_of(key.job, key.run)
        return next((m.card.node for m in members if rank in m.ranks), "")

    def _comparison(self, job: str, run: str, group: str) -> ReplicaComparison | None:
        groups = self._runs.setdefault((job, run), {})
        if group not in groups and len(groups) >= _MAX_GROUPS:
            self._events.count("replicas.too_many_groups")
            return None
        return groups.setdefault(group, ReplicaComparison())

    def _report(self, job: str, run: str, findings: Sequence[Finding]) -> None:
        for found in findings:
            if isinstance(found, Differing):
                key = RankKey(job, run, min(_in_minority(found), default=found.ranks[0]))
                self._events.add("error", "replicas_differ", f"{job}/{run}: {_differing(found)}", key)
            elif isinstance(found, Diverged):
                key = RankKey(job, run, found.ranks[0])
                self._events.add("warning", "replicas_diverged", f"{job}/{run}: {_diverged(found)}", key)
            else:
                self._events.count("replicas.equal")


def _message(key: RankKey, group: str, told: RankDigests) -> p.TellDigests:
    return p.TellDigests(
        key.job,
        key.run,
        key.rank,
        group,
        told.num_ranks,
        told.epoch,
        told.iteration,
        told.tensors,
        told.digests,
    )


def _differing(found: Differing) -> str:
    names = [_odd(name, ranks) for name, ranks in sorted(found.odd.items())]
    before = "before the schedule changed" if found.equal_at < 0 else f"at iteration {found.equal_at}"
    text = (
        f"iteration {found.iteration}: the ranks {_listed(found.ranks)} should hold the same values and do "
        f"not: {first_of(names, _NAMED, what='more tensors')}. They were the same {before}"
    )
    if odd := _in_minority(found):
        return f"{text}: suspect the accelerator and the memory of rank {_listed(odd)}"
    return f"{text}. No value is that of most ranks: which of them is wrong is not known"


def _in_minority(found: Differing) -> list[int]:
    return sorted({rank for ranks in found.odd.values() for rank in ranks})


def _odd(name: str, ranks: Sequence[int]) -> str:
    return f"{name} (rank {_listed(ranks)} against the others)" if ranks else name


def _diverged(found: Diverged) -> str:
    families = ", ".join(found.families)
    return (
        f"iteration {found.iteration}: {families}: most tensors are not the same on the ranks "
        f"{_listed(found.ranks)}, or some never were. That is no flipped bit: an optimizer that draws random "
        "numbers, local SGD, or an update that one rank skipped. They are compared again once they are equal"
    )


def _listed(ranks: Sequence[int]) -> str:
    return first_of(ranks, 8)
