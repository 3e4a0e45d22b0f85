"""The service of a node in one process: with real memory, without a socket and a network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

from ckptd.config.settings import DaemonConfig
from ckptd.event_log import EventLog
from ckptd.memory.housekeeping import Housekeeper, SlotListener
from ckptd.memory.segment_store import SegmentStore
from ckptd.node.peering import Peering
from ckptd.node.service import Service
from ckptd.node_context import NodeContext, NodeWorkers
from ckptd.transport import messages as m
from ckptd.workers import Workers
from tests.ckptd.running import eventually

__all__ = ["NoWatcher", "OneService"]


class NoWatcher:
    """Processes cannot be watched here."""

    def watch(self, pid: int, ended: Callable[[], None]) -> bool:
        return False

    def has_ended(self, pid: int) -> bool:
        return False

    def forget(self, pid: int) -> None:
        """There is nothing."""


class OneService:
    """A service and what it works with."""

    def __init__(self, folder: Path, config: DaemonConfig, listener: SlotListener | None = None) -> None:
        self.events = EventLog(1000)
        self.store = SegmentStore(folder, 64 << 20, "here", mlock="off", hugepages="off")
        self.workers = Workers("test", 1, 100, lambda: None)
        housekeeper = Housekeeper(config, self.store, self.events, self.workers, self.workers, None, listener)
        node = NodeContext(config, self.store, self.events, lambda work: work())
        both = NodeWorkers(self.workers, self.workers)
        self.peering = Peering(node, both, doubt=housekeeper.doubts.add)
        self.service = Service(node, housekeeper, NoWatcher(), self.peering, stop=Mock())
        self.answers: list[m.Reply] = []

    def ask(self, message: m.Message, by: bytes = b"t") -> m.Reply:
        self.service.handle(by, message, self.answers.append)
        eventually(lambda: self.collected() and bool(self.answers), "an answer")
        return self.answers.pop()

    def collected(self) -> bool:
        self.workers.collect()
        return True

    def close(self) -> None:
        self.peering.close()
        self.workers.close(5.0)
