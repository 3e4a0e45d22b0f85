"""What is killed in an elastic campaign, and when; and how the job is started again."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from multiprocessing.connection import wait
from typing import Protocol

from ckptd.core.slots.slots import SlotState
from ckptd.memory.segment_file import open_segment
from tests.ckptd.nodes import Net, Node
from tests.e2e.bucket import keeper_pid
from tests.e2e.elastic import ElasticRun, Life
from tests.e2e.elastic_watch import STACKS, Phase, Tail

__all__ = ["NOTHING_WHOLE", "Kill", "Killer", "Looks", "Moment", "Round", "Target"]

# As it is raised; what is to come from storage is told in the same words, as a warning.
NOTHING_WHOLE = "ElasticError: find the state to go on from: no iteration is held as a whole"
_LIMIT_S = 100.0
# A rank that was told to end parks before (20 s for its copies at most); one that heard of
# another's failure raises it.
_ENDS_S = 45.0
_START_S = 1.5
_DAEMON_AWAY_S = 1.0
_FIRST_STEPS, _SOME_STEPS = 5, 30
_POLL_S = 0.01


class Target(StrEnum):
    """What is killed."""

    RANK = "rank"
    ALL = "ranks"  # all of them at once
    DAEMON = "daemon"  # is started again while the ranks go on
    HOST = "host"  # ranks and daemon of a node, whose memory stays
    NODE = "node"  # the same, and its memory is gone
    KEEPER = "keeper"  # of a daemon that has a store, which starts another
    NODES = "all nodes"  # with all memory: what is durable is left


class Moment(StrEnum):
    """What the rank that was looked at did then."""

    JOINING = "joining the others"
    LOOKING = Phase.LOOKING
    PLANNING = Phase.PLANNING
    BRINGING = Phase.BRINGING
    VERIFYING = Phase.VERIFYING
    SHIPPING = Phase.SHIPPING
    LOADING = Phase.LOADING
    ATTACHING = Phase.ATTACHING
    FIRST_STEPS = "first steps"
    TRAINING = "training"
    RETIRING = Phase.RETIRING
    TEARDOWN = "the others were told to end"


_PHASES = tuple(Moment(phase) for phase in Phase)
_IN_STARTS = tuple(moment for moment in _PHASES if moment is not Moment.RETIRING)

_WITHOUT_STORE = tuple(moment for moment in _IN_STARTS if moment is not Moment.BRINGING)


@dataclass(frozen=True, slots=True)
class Kill:
    target: Target
    moment: Moment


@dataclass
class Round:
    """What was done to one run, and what is wrong with it (nothing)."""

    seed: int
    nodes: int
    ranks_per_node: int
    sharded: bool = False
    stored: bool = False
    kills: list[Kill] = field(default_factory=list)
    lives: int = 0
    starts: list[int] = field(default_factory=list)
    repeated: list[int] = field(default_factory=list)
    refused_starts: int = 0
    compared: int = 0
    lost: bool = False
    brought: int = 0
    failures: list[str] = field(default_factory=list)


class Looks(Protocol):
    """Who judges the lives."""

    exposed: set[str]

    @property
    def is_durable(self) -> bool:
        """Whether anything is durable now."""

    def lose(self, node: str) -> None:
        """A node's memory is lost."""

    def durable(self) -> None:
        """A life ends or begins: what is durable now must be found from now on."""

    def daemon_away(self) -> None:
        """A daemon is killed while ranks go on."""

    def look(self, life: Life) -> bool:
        """At a life that is over; True: there is no way to go on, as it has to be."""


class Killer:
    """Starts a run again and again, and kills what belongs to it in between.

    Args:
        least: so many nodes have room for all experts.
    """

    def __init__(
        self, found: Round, net: Net, run: ElasticRun, judge: Looks, rng: random.Random, *, least: int
    ) -> None:
        self._found, self._net, self._run, self._judge, self._rng = found, net, run, judge, rng
        self._least = least
        self._seats: list[Node] = []
        self._away: dict[str, int] = {}  # for how many lives more
        self._down: set[str] = set()
        self._began_s = 0.0
        self._daemons_killed = 0  # in this life
        self._emptied = False  # this life began without any memory

    def play(self, kills: int) -> None:
        """Until the kills are used up and the job has ended, or cannot go on."""
        while not self._found.failures:
            life = self._begin()
            ended = self._hurt(life, kills)
            self._judge.durable()
            over = self._judge.look(life)
            if self._found.failures:
                self._found.failures.append(self._held())
            if over or ended:
                return

    def _held(self) -> str:
        """The sealed iterations of everything that the nodes hold, for whoever looks for what broke."""
        lines = []
        for node in self._net.nodes:
            for path in sorted(node.segment_dir.glob("*~*")):
                segment = open_segment(path)
                sealed = sorted(h.iteration for _, h in segment.headers() if h.state is SlotState.SEALED)
                lines.append(f"{node.name} {path.name}: {sealed} floor {segment.ring_hint.floor}")
                segment.close()
        return "\n".join(lines)

    # -- lives -----------------------------------------------------------------------------------

    def _begin(self) -> Life:
        """Nodes that are away for long enough come back; then all ranks are started."""
        for name in list(self._away):
            self._away[name] -= 1
            if self._away[name] < 0:
                del self._away[name]
        here = [node for node in self._net.nodes if node.name not in self._away]
        while len(here) < self._least:
            name = self._rng.choice(sorted(self._away))
            del self._away[name]
            here = [node for node in self._net.nodes if node.name not in self._away]
        for node in here:
            if node.name in self._down:
                node.launch()
                self._down.discard(node.name)
        self._rng.shuffle(here)
        self._seats = [node for node in here for _ in range(self._found.ranks_per_node)]
        self._found.lives += 1
        self._daemons_killed = 0
        self._emptied = all(not list(node.segment_dir.glob("*~*")) for node in here)
        self._began_s = time.monotonic()
        return self._run.life(self._seats)

    def _hurt(self, life: Life, kills: int) -> bool:
        """Kill until the life is over; True if it came to its end by itself."""
        while len(self._found.kills) < kills:
            moment = self._await(life)
            if moment is None:
                break
            target = self._draw()
            self._found.kills.append(Kill(target, moment))
            if target is Target.KEEPER:
                self._daemons_killed += 1
                self._kill_keeper()
                continue
            if target is not Target.DAEMON:
                self._kill(life, target)
                self._tear_down(life, kills)
                return False
            self._daemons_killed += 1
            self._judge.daemon_away()
            self._restart_daemon()
        return self._ended(life)

    def _ended(self, life: Life) -> bool:
        """A life that nobody hurts any more ends in order; or, where a daemon was away at its
        start, on all ranks alike.
        """
        self._wait(life, lambda: all(p.exitcode is not None for p in life.processes) or self._failed(life))
        if self._failed(life):
            # None may be left waiting for the others.
            self._wait(life, lambda: all(p.exitcode is not None for p in life.processes), _ENDS_S)
            codes = [p.exitcode for p in life.processes]
            if any(code != 1 for code in codes):
                raise AssertionError(f"ranks ended with {codes}")
            if NOTHING_WHOLE in life.logs:
                return False  # whether that had to be is judged
            if not self._daemons_killed or "DaemonUnavailable" not in life.logs:
                raise AssertionError(f"ranks ended with {codes}, and no daemon was away")
            self._found.refused_starts += 1
            return False
        return True

    @staticmethod
    def _failed(life: Life) -> bool:
        return any(p.exitcode not in (None, 0) for p in life.processes)

    # -- moments ---------------------------------------------------------------------------------

    def _await(self, life: Life) -> Moment | None:
        """Until the moment drawn; which one it is, since it may be missed. None: the life is over."""
        tail = self._tail(life)
        starting: tuple[Moment, ...] = _IN_STARTS if self._found.stored else _WITHOUT_STORE
        if self._emptied:
            starting = (*starting, *[Moment.BRINGING] * len(starting))
        aim = self._rng.choice(
            (Moment.JOINING, *starting, Moment.FIRST_STEPS, Moment.TRAINING, Moment.RETIRING)
            if len(self._run.lives) > 1
            else (Moment.FIRST_STEPS, *[Moment.TRAINING] * 3, Moment.ATTACHING)
        )
        later_s = self._rng.uniform(0, 0.2)
        if aim is Moment.JOINING:
            left_s = self._began_s + self._rng.uniform(0, _START_S) - time.monotonic()
            time.sleep(max(0.0, left_s))
            return None if self._over(life) else self._now(tail)
        steps = self._rng.randint(1, _FIRST_STEPS)
        if aim is Moment.TRAINING:
            steps = self._rng.randint(_FIRST_STEPS + 1, _SOME_STEPS)
        seen = _Seen()

        def come() -> bool:
            seen.add(tail)
            passed = seen.tops > (_SOME_STEPS if aim is Moment.RETIRING else steps)
            return aim in seen.moments or passed or self._over(life)

        self._wait(life, come)
        if self._over(life):
            return None
        if aim in seen.moments:
            time.sleep(later_s)
            return aim
        return seen.moment

    def _now(self, tail: Tail) -> Moment:
        seen = _Seen()
        seen.add(tail)
        return seen.moment

    def _tail(self, life: Life) -> Tail:
        """Of what some rank tells."""
        part = self._rng.choice(life.parts)
        return Tail(part.folder / f"{part.out}-{part.rank}.jsonl")

    @staticmethod
    def _over(life: Life) -> bool:
        return any(p.exitcode is not None for p in life.processes)

    def _wait(self, life: Life, done: Callable[[], bool], limit_s: float = _LIMIT_S) -> None:
        """Bounded: what hangs tells where."""
        deadline = time.monotonic() + limit_s
        while not done():
            if time.monotonic() > deadline:
                self._hangs(life, f"hangs for {limit_s:.0f} s")
            time.sleep(_POLL_S)

    def _hangs(self, life: Life, how: str) -> None:
        alive = [r for r, p in enumerate(life.processes) if p.exitcode is None]
        for rank in alive:
            pid = life.processes[rank].pid
            assert pid is not None
            os.kill(pid, STACKS)
        time.sleep(1.0)
        kill = self._found.kills[-1] if self._found.kills else None
        raise AssertionError(
            f"life {len(self._run.lives) - 1} {how} on ranks {alive} after {kill}; their stacks are in their logs"
        )

    # -- kills -----------------------------------------------------------------------------------

    def _draw(self) -> Target:
        """A second node is rarely lost before all of it was replicated again."""
        targets = [*[Target.RANK] * 3, Target.ALL, *[Target.HOST] * 2]
        if len(self._run.lives) > 1:
            targets.append(Target.DAEMON)
        if not self._judge.exposed or self._rng.random() < 0.1:
            targets += [Target.NODE] * 4
        if self._found.stored and self._judge.is_durable:
            targets += [Target.KEEPER, *[Target.NODES] * 4]
        return self._rng.choice(targets)

    def _kill(self, life: Life, target: Target) -> None:
        if target is Target.ALL:
            for process in life.processes:
                process.kill()
            return
        if target is Target.NODES:
            for kill in [process.kill for process in life.processes]:
                kill()
            for each in self._net.nodes:
                each.lose()
                self._down.add(each.name)
                self._judge.lose(each.name)
            return
        victim = self._rng.randrange(len(life.parts))
        node = self._seats[victim]
        if target is Target.RANK:
            life.processes[victim].kill()
            return
        doomed = [life.processes[r].kill for r, seat in enumerate(self._seats) if seat is node]
        if node.name not in self._down:
            doomed.append(node.kill)
        self._rng.shuffle(doomed)
        for kill in doomed:
            kill()
        self._down.add(node.name)
        if target is Target.NODE:
            node.lose()
            self._judge.lose(node.name)
            if self._rng.random() < 0.5:
                self._away[node.name] = self._rng.randint(1, 2)

    def _restart_daemon(self) -> None:
        node = self._rng.choice(self._seats)
        node.kill()
        time.sleep(self._rng.uniform(0, _DAEMON_AWAY_S))
        node.launch()

    def _kill_keeper(self) -> None:
        """Of some node's daemon; there is none while it is being started again."""
        node = self._rng.choice(self._seats)
        assert node.process is not None
        if pid := keeper_pid(node.process.pid):
            os.kill(pid, signal.SIGKILL)

    def _tear_down(self, life: Life, kills: int) -> None:
        """As torchrun does; sometimes another is killed meanwhile."""
        wait([p.sentinel for p in life.processes if p.exitcode is None], self._rng.uniform(0, 0.5))
        for process in life.processes:
            if process.exitcode is None:
                process.terminate()
        if self._rng.random() < 0.3 and len(self._found.kills) < kills:
            time.sleep(self._rng.uniform(0, 0.2))
            second = self._rng.choice((Target.RANK, Target.HOST))
            self._found.kills.append(Kill(second, Moment.TEARDOWN))
            self._kill(life, second)
        deadline = time.monotonic() + _ENDS_S
        while any(p.exitcode is None for p in life.processes):
            if time.monotonic() > deadline:
                self._hangs(life, "does not end on SIGTERM")
            time.sleep(_POLL_S)
        odd = [
            p.exitcode for p in life.processes if p.exitcode not in (0, 1, -signal.SIGTERM, -signal.SIGKILL)
        ]
        if odd:
            raise AssertionError(f"ranks ended with {odd}")


class _Seen:
    """What a rank has told so far."""

    def __init__(self) -> None:
        self.moments: set[Moment] = set()
        self.tops = 0
        self.moment = Moment.JOINING

    def add(self, tail: Tail) -> None:
        for told in tail.new():
            if told["event"] == "phase":
                self.moment = Moment(told["phase"])
                self.moments.add(self.moment)
            elif told["event"] == "top":
                self.tops += 1
                self.moment = Moment.TRAINING if self.tops > _FIRST_STEPS else Moment.FIRST_STEPS
