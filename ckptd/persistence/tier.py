"""The third tier of a daemon: every local rank's way to storage, and storage's way back to them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

from ckptd.config.settings import DaemonConfig, parse_bytes
from ckptd.core.persistence.cadence import Cadence
from ckptd.core.persistence.persister import Persister, PersistState
from ckptd.core.sessions import RankKey
from ckptd.memory.segment_file import Segment
from ckptd.node_context import NodeContext
from ckptd.persistence import keeper_wire as w
from ckptd.persistence.keeper_client import StoreChild
from ckptd.persistence.rank_uploads import RankPersistence
from ckptd.persistence.store_link import StoreLink

__all__ = ["StorageTier"]


class StorageTier:
    """All that a daemon does with its store; made only where one is configured.

    Args:
        ranks_of: the ranks of a run that are attached here.
        span_of: how many snapshots the longest suffix of a run has.
        replicas: segments of other nodes, into which a drill may read.
    """

    def __init__(
        self,
        node: NodeContext,
        *,
        ranks_of: Callable[[str, str], Iterable[int]],
        span_of: Callable[[str, str], int],
        replicas: Iterable[Segment],
    ) -> None:
        self._node, self._span_of = node, span_of
        self._ranks: dict[RankKey, RankPersistence] = {}
        self._child = StoreChild(
            configure_of(node.config),
            self,
            post=node.post,
            clock=node.clock,
            nice=node.config.nice,
        )
        self.link = StoreLink(
            self._child,
            post=node.post,
            ranks_of=ranks_of,
            segments=lambda: (*node.store, *replicas),
            boot_id=node.boot_id,
        )

    def join(self, key: RankKey, world_size: int, epoch: int, epoch_start: int) -> None:
        """A local rank takes part in its run, in this epoch."""
        rank = self._ranks.get(key)
        if rank is None:
            config = self._node.config
            cadence = Cadence(config.persist_every, config.persist_every_s)
            rank = self._ranks[key] = RankPersistence(
                key,
                Persister(cadence),
                self._node.store,
                self._child,
                self._node.events,
                span=lambda: self._span_of(key.job, key.run),
                clock=self._node.clock,
            )
        rank.join(world_size, epoch, epoch_start)

    def changed(self, key: RankKey) -> None:
        """The snapshots of a rank changed."""
        if key in self._ranks:
            self._ranks[key].changed()

    def leave(self, key: RankKey) -> None:
        """A trainer ended in order: its newest snapshots are made durable."""
        if key in self._ranks:
            self._ranks[key].flush()

    def forget(self, job: str, run: str) -> None:
        """A run is over: nothing more of it is stored. What is durable stays."""
        for key in [k for k in self._ranks if (k.job, k.run) == (job, run)]:
            self._ranks.pop(key).close()

    def tick(self) -> None:
        """Time passed."""
        self._child.tick()
        self.link.tick()
        for key, rank in list(self._ranks.items()):
            rank.tick()
            if rank.over:
                self._ranks.pop(key).close()

    @property
    def idle(self) -> bool:
        """Whether nothing is on its way."""
        return all(rank.idle for rank in self._ranks.values())

    @property
    def keeper_pid(self) -> int:
        """The process that speaks to the store; 0 if there is none now."""
        return self._child.pid

    def states(self) -> dict[RankKey, PersistState]:
        """How far every local rank is."""
        return {key: rank.state() for key, rank in sorted(self._ranks.items())}

    def close(self) -> None:
        """Stop; what is under way is taken up after the next start."""
        for rank in self._ranks.values():
            rank.close()
        self._child.close()

    # -- from the store keeper -------------------------------------------------------------------

    def keeper_event(self, message: w.KeeperEvent) -> None:
        """It goes to this daemon's log."""
        if message.level == "count":
            self._node.events.count(f"store.{message.kind}", message.amount)
        else:
            self._node.events.add(message.level, message.kind, message.message)

    def settled(self, message: w.Settled) -> None:
        """What became of a checkpoint after a rank's manifest."""
        rank = self._rank(message.rank)
        if rank is not None:
            rank.settled(message)

    def fenced(self, message: w.RankFenced) -> None:
        """A later history was seen after a rank's manifest was written."""
        rank = self._rank(message.rank)
        if rank is not None:
            rank.fenced(message)

    def _rank(self, name: w.RankName) -> RankPersistence | None:
        return self._ranks.get(RankKey(name.job, name.run, name.rank))

    def keeper_died(self, reason: str) -> None:
        """The next keeper knows nothing: every rank begins again."""
        self._node.events.add("error", "store_keeper_died", reason)
        for rank in self._ranks.values():
            rank.keeper_died()


def configure_of(config: DaemonConfig) -> w.Configure:
    """What the store keeper is told first."""
    return w.Configure(
        url=config.store,
        options=json.loads(config.store_options or "{}"),
        backend=config.store_backend,
        threads=config.persist_threads,
        bytes_per_s=parse_bytes(config.persist_bandwidth),
        deadline_s=config.store_deadline_s,
        read_back=config.persist_check == "full",
        retain=w.Retain(config.persist_keep_last, config.persist_keep_every, config.persist_keep_for_s),
        sign_with=config.keys_dir if config.store_sign else "",
        signers=config.keys_dir if config.store_signed_only else "",
    )
