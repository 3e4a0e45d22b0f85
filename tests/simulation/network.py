"""Time, and messages that are late, lost, doubled and out of order."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable

from ckptd.core.replication import target as rep
from tests.simulation.model import DEADLINE_S, Daemon, DaemonDied, Node, WorldConfig

__all__ = ["Network"]


_died = contextlib.suppress(DaemonDied)  # one for all events: it has no state


class Network:
    """The clock, the machines, and what connects them."""

    lost: float = 0.04  # the share of messages that do not arrive
    doubled: float = 0.03  # and of those that arrive twice

    def __init__(self, seed: int, config: WorldConfig) -> None:
        self.seed, self.config = seed, config
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.count = itertools.count(1)
        self.trace: list[str] = []
        self.seen: Counter[str] = Counter()
        self.calm = False
        self.nodes: dict[str, Node] = {}
        self.cut: set[str] = set()
        self.one_way: set[tuple[str, str]] = set()  # nothing gets from the one to the other
        self.silent_s: dict[tuple[str, str], float] = {}  # since when one does not hear the other

    # What those above do about it.

    def peer_lost(self, name: str, peer: str) -> None:
        """The daemon on ``name`` has not heard of ``peer`` for long."""
        raise NotImplementedError

    def peer_back(self, name: str, peer: str) -> None:
        """It hears of it again."""
        raise NotImplementedError

    def peer_restarted(self, name: str, peer: str) -> None:
        """It hears of another boot of it."""
        raise NotImplementedError

    def watch(self) -> None:
        """After every event."""
        raise NotImplementedError

    # Time.

    def later(self, delay_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (self.now_s + delay_s, next(self.count), what))

    def local(self, name: str, delay_s: float, what: Callable[[], None], *, trainer: bool = False) -> None:
        """On a machine, by its own clock; a process that is stopped does it when it goes on."""
        node = self.nodes[name]

        def act() -> None:
            until_s = node.halted_s if trainer else node.frozen_s
            if until_s > self.now_s:
                self.later(until_s - self.now_s + 0.001, act)
            else:
                what()

        self.later(delay_s / (1.0 + node.drift), act)

    def clock(self, name: str) -> float:
        """What the machine's clock shows. No two need agree, so nothing may compare times of two."""
        node = self.nodes[name]
        return node.clock_s + self.now_s * (1.0 + node.drift) if node.clock_s or node.drift else self.now_s

    def is_frozen(self, name: str) -> bool:
        """Whether its daemon is stopped."""
        return self.nodes[name].frozen_s > self.now_s

    def run_until(self, end_s: float) -> None:
        while self.queue and self.queue[0][0] <= end_s:
            self.now_s, _, what = heapq.heappop(self.queue)
            with _died:
                what()
            self.watch()
        self.now_s = end_s

    def tell(self, text: str) -> None:
        self.trace.append(f"{self.now_s:8.3f} {text}")

    def chance(self, share: float) -> bool:
        """Trouble that ends when calm begins."""
        return not self.calm and self.rng.random() < share

    # Messages.

    def reaches(self, a: str, b: str) -> bool:
        if not (self.nodes[a].up and self.nodes[b].up):
            return False
        return a == b or not (a in self.cut or b in self.cut or (a, b) in self.one_way)

    def send(self, a: str, b: str, deliver: Callable[[Daemon], None]) -> None:
        """A message from a to whatever daemon runs on b when it arrives."""
        copies = 1
        if not self.calm:
            draw = self.rng.random()
            copies = 0 if draw < self.lost else 2 if draw < self.lost + self.doubled else 1
        most = 0.05 if self.calm else max(self.nodes[a].delay_s, self.nodes[b].delay_s)

        def arrive() -> None:
            daemon = self.nodes[b].daemon
            if daemon is None or not self.reaches(a, b):
                return
            if self.is_frozen(b):  # it waits in the socket, and is gone with the process
                there = lambda: deliver(daemon) if self.nodes[b].daemon is daemon else None
                self.local(b, 0.0, there)
            else:
                deliver(daemon)

        for _ in range(copies):
            self.later(self.rng.uniform(0.01, most), arrive)

    def ask(
        self,
        a: str,
        b: str,
        serve: Callable[[Daemon], rep.Event],
        answered: Callable[[rep.Event, int], None],
    ) -> None:
        """A request of the daemon on a to b; ``answered`` gets the answer, and which life of b gave it."""
        asker = self.nodes[a].daemon

        def served(daemon: Daemon) -> None:
            event, life = serve(daemon), self.nodes[b].life

            def back(there: Daemon) -> None:
                if there is asker:
                    answered(event, life)

            self.send(b, a, back)

        self.send(a, b, served)

    # Who answers hellos.

    def links_changed(self) -> None:
        """Who cannot be reached is found dead after the deadline; who can, is found soon."""
        for a, b in itertools.permutations(self.nodes, 2):
            if self.boot_of(a, b) != -1:
                self.silent_s.pop((a, b), None)
                soon_s = self.rng.uniform(0.1, 1.0)
                self.later(soon_s, lambda a=a, b=b: self.look(a, b))  # type: ignore[misc]
            elif (a, b) not in self.silent_s:
                self.silent_s[a, b] = self.now_s
                self.later(DEADLINE_S, lambda a=a, b=b: self.look(a, b))  # type: ignore[misc]

    def boot_of(self, a: str, b: str) -> int:
        """The boot of b's daemon, as a would find it now; -1: it does not answer."""
        other = self.nodes[b].daemon
        hears = other is not None and self.reaches(a, b) and self.reaches(b, a) and not self.is_frozen(b)
        return other.boot if hears and other is not None else -1

    def look(self, a: str, b: str) -> None:
        daemon, boot = self.nodes[a].daemon, self.boot_of(a, b)
        if daemon is None:
            return
        if self.is_frozen(a):
            self.local(a, 0.0, lambda: self.look(a, b))
            return
        if boot == -1:
            silent_s = self.now_s - self.silent_s.get((a, b), self.now_s)
            if b not in daemon.lost and silent_s >= DEADLINE_S - 0.01:
                daemon.lost.add(b)
                self.peer_lost(a, b)
            return
        before, daemon.peers[b] = daemon.peers.get(b, boot), boot
        if boot != before:
            self.peer_restarted(a, b)
        if b in daemon.lost:
            daemon.lost.discard(b)
            self.peer_back(a, b)
