"""Who takes part in a run, told to nodes that have no rank of it, and learned from them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from ckptd.core.sessions import wrong_members
from ckptd.core.slots.slots import epoch_can_follow
from ckptd.node_context import NodeContext
from ckptd.peers.peer_link import PeerLink
from ckptd.peers.run_records import RunRecords
from ckptd.transport import peer_messages as p
from ckptd.transport.messages import RunRecord

__all__ = ["RunNews"]

logger = logging.getLogger(__name__)

_MAX_WORLD = 1 << 24  # ranks; of a run of others the size is not known


class RunNews:
    """Tells members, and former ones, who takes part; learns it from them.

    Args:
        link: the connection to a node, None if its address is not known.
        note_epoch: told of the epoch of each record that was learned.
    """

    def __init__(
        self,
        node: NodeContext,
        records: RunRecords,
        *,
        link: Callable[[str], PeerLink | None],
        note_epoch: Callable[[str, str, int, int], None],
    ) -> None:
        self._node, self._records, self._link = node, records, link
        self._note_epoch = note_epoch
        # By run and node: the epoch that it was told of.
        self._told: dict[tuple[str, str], dict[str, int]] = {}

    def tell(self, job: str, run: str) -> None:
        """Tell members without ranks, and former ones, until they have answered.

        Whoever recovers without us must know of this epoch, or its own would get a number that is
        not above ours.
        """
        record = self._records.of(job, run)
        if record is None:
            return
        known = self._told.setdefault((job, run), {})
        working = {member.card.node for member in record.members if member.ranks}
        for card in record.cards:
            node = card.node
            link = self._link(node)
            if node in working or link is None or known.get(node, -1) >= record.epoch:
                continue
            link.ask(
                p.TellRun(record),
                p.PeerDone,
                partial(self._knows, known, node, record.epoch),
                partial(self._does_not_know, node),
            )

    def ended(self, job: str, run: str) -> None:
        """The run is over here: nobody is told of it any more."""
        self._told.pop((job, run), None)

    def _knows(self, known: dict[str, int], node: str, epoch: int, _: p.PeerDone) -> None:
        known[node] = max(epoch, known.get(node, -1))

    def _does_not_know(self, node: str, code: str, reason: str) -> None:
        self._node.events.count(f"tell_run.{code}")
        logger.debug("%s was not told who takes part: %s", node, reason)

    def learn_from_member(self, peer: str, record: RunRecord) -> p.PeerReply:
        """One of its members tells who takes part in a run of which no rank is here."""
        if peer not in {member.card.node for member in record.members}:
            return p.PeerRefused("bad_message", f"{peer} does not take part in it")
        return self.learn(peer, record)

    def learn(self, peer: str, record: RunRecord) -> p.PeerReply:
        """A member, of now or before, tells who takes part in a run."""
        if self._node.node_id not in {card.node for card in record.cards}:
            return p.PeerRefused("bad_message", f"{peer} and this node do not both take part in it")
        if wrong := wrong_members(record.members, _MAX_WORLD):
            return p.PeerRefused("bad_message", wrong)
        known = self._records.of(record.job, record.run)
        newest = -1 if known is None else known.newest_epoch
        if not epoch_can_follow(record.newest_epoch, newest):
            return p.PeerRefused("bad_message", f"epoch {record.newest_epoch} after {newest}")
        if known is None or record.epoch >= known.epoch:
            self._records.told(record)
            self._note_epoch(record.job, record.run, record.epoch, record.epoch_start)
        return p.PeerDone()
