"""A job of several ranks over several nodes, whose trainers, daemons and keepers die at failpoints.

Everything is real: daemons with peers over loopback addresses, replicas, a store, ranks that meet over gloo. One
rank's death ends all, and all begin again, as torchrun would have it.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from ckptd.errors import DaemonUnavailable
from ckptd.saved import SavedIteration, saved_iterations
from ckptd.transport.messages import Done, Forget, GetPeers, Peers
from ckptd.transport.wire import ControlClient
from tests.ckptd.nodes import Net, Node
from tests.ckptd.running import FRESH
from tests.e2e.bucket import Bucket
from tests.e2e.compare import differences
from tests.e2e.harness import Jobs
from tests.e2e.ranks import Ranks
from tests.failpoints.beside import (
    NO_ANSWER,
    Beside,
    Command,
    ServiceManager,
    ask_beside,
    command,
    damage_front,
    damage_headers,
    flip_bits,
    flip_replicas,
    let_time_pass,
    put_aside,
    sealed,
    start_another,
)
from tests.failpoints.runtime import CLOCK_STEPS_S, ERRORS, Arm, Fired, arm, disarm, fired
from tests.programs import Program
from tests.storage.s3_server import S3Server

__all__ = [
    "BUCKET",
    "CASES",
    "GRADIENTS",
    "LOGGED",
    "OPTIONS",
    "PEERS",
    "SETTINGS",
    "Layout",
    "Round",
    "Strike",
    "Training",
    "undisturbed",
]

CASES = ("plain", "fused_drop", "masters", "bf16", "zero_first", "dense", "tensor_lr", "strided")
# How bytes travel between nodes: with keys?, `peer_data`, `peer_short_cut`.
PEERS = {
    "streams": (False, "stream", "false"),
    "encrypted": (True, "stream", "false"),
    "chunks": (False, "zmq", "false"),
    "encrypted chunks": (True, "zmq", "false"),
    "one host": (False, "stream", "true"),
}
# Pipelines with boundary logs, of which one stage can come back without the others: their numbers of ranks.
LOGGED = {
    "localized/replicas": 4,
    "localized/replicated_logs": 4,
    "localized/interleaved": 3,
    "localized/own_norm": 4,
    "pipeline/in_bubbles": 2,  # has no logs, and copies while a stage waits
}
BUCKET = "a bucket"  # of an S3 server, in place of a folder
# How daemons can be set up; what they are set to.
SETTINGS: dict[str, dict[str, str]] = {
    "a service manager": {},
    "segments on a disk": {"allow_disk_segments": "true"},
    "a group": {"trainer_group": str(os.getgid())},
    "users apart": {"trainer_group": str(os.getgid()), "isolate_users": "true"},
    "many scrubs": {"scrub_interval_s": "1"},
    "whole checks": {"persist_check": "full", "persist_keep_last": "1"},
    "users apart later": {"trainer_group": str(os.getgid())},
    BUCKET: {},
}
# What is set in every daemon but a node's first.
LATER: dict[str, dict[str, str]] = {"users apart later": {"isolate_users": "true"}}
# Of the trainers.
OPTIONS: dict[str, tuple[str, ...]] = {
    "each captures": ("--set", "capture_once=false"),
    "verified": ("--verify",),
    "asyncio": ("--wakeup",),
}
GRADIENTS = "gradients"  # the case of a dense job whose peers compute its snapshots
TOTAL = 400
STEP_MS = 15
WINDOW = 4
SOON_S = 120.0  # within it, everything is back, however slow the machine is
ENDS_S = 600.0  # for all iterations: a busy machine may do one a second
PARKS_S = 5.0
SAME_S = 1.0
FIRES_S = 2.0  # for a point that is reached while a job trains
RESUMED = re.compile(r"resuming at iteration (\d+)")
# Of a start in which a fetch ends because a daemon did.
NOT_BROUGHT = ("could not be brought here", "the daemon was restarted: start again")
# Of a start whose replay does not come to what was recorded: the second one quarantines that.
NOT_REPRODUCED = ("This is the first failure", "Two replays had the same result")
TORN_AFTER = 3  # iterations of the next life
TOGETHER = re.compile(r"all ranks run together again from iteration (\d+)")  # of a localized recovery
JOB = "e2e"  # of tests.e2e.job


@dataclass(frozen=True, slots=True)
class Layout:
    """Who is there.

    Attributes:
        peers: how bytes travel between nodes (`PEERS`).
        parks: whether ranks have memory to park in; those that live get SIGTERM before they are killed.
        setting: how daemons are set up (`SETTINGS`); "": as usual.
        option: what trainers do besides (`OPTIONS`); "": nothing.
    """

    case: str
    num_nodes: int
    num_ranks: int
    replicas: int
    stores: bool
    peers: str = "streams"
    parks: bool = False
    setting: str = ""
    option: str = ""

    def __str__(self) -> str:
        more = [name for name, has in (("a store", self.stores), ("parking", self.parks)) if has]
        more += [text for text in (self.setting, self.option) if text]
        return ", ".join(
            (
                f"{self.case}: {self.num_ranks} ranks on {self.num_nodes} nodes",
                f"{self.replicas} replicas, {self.peers}",
                *more,
            )
        )

    @property
    def options(self) -> tuple[str, ...]:
        """Of every rank."""
        words = [f"replicas={self.replicas}"]
        if self.case == GRADIENTS:
            words += ['policy="dense"', "window=null", 'to_peers="gradients"']
        else:
            words += [f"window={WINDOW}"]
        if self.parks:
            words += ["park=true"]
        return (*(word for one in words for word in ("--set", one)), *OPTIONS.get(self.option, ()))

    @property
    def trained(self) -> str:
        """The case of `tests.e2e.cases`."""
        return "plain" if self.case == GRADIENTS else self.case

    @property
    def total(self) -> int:
        """Iterations, if a round is not ended before; those of a pipeline are slow."""
        return TOTAL // 4 if self.case in LOGGED else TOTAL

    @property
    def whole(self) -> int:
        """How many sealed slots on a node are enough for a rank to go back."""
        return 1 if self.case in (GRADIENTS, "dense") else WINDOW


@dataclass(slots=True)
class Strike:
    """What was planned, and what came of it.

    Attributes:
        fired: who did it; None if nobody came there in time.
        forced: what was killed beforehand, so that points of a start are reached.
        also: the daemon that was killed at once, beside.
        beside: what else happened to the job at once.
        lost_node: the node whose memory was taken or damaged, too, or as many as there are replicas; "all"
            where storage has what is needed.
        then: whether the second half of the plan was done.
        went_back: iterations lost that had been recoverable a moment before, because a node was lost.
        refused: a start that failed with an error for the injected one.
    """

    arm: Arm
    fired: Fired | None = None
    forced: str = ""
    also: str = ""
    beside: Beside | None = None
    then: bool = False
    lost_node: str = ""
    went_back: int = 0
    refused: bool = False


@dataclass
class Round:
    """One job, its strikes, and what is wrong (nothing)."""

    layout: Layout
    seed: int
    strikes: list[Strike] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    lives: int = 0
    logs: str = ""  # all of them, if something is wrong


def undisturbed(jobs: Jobs, layout: Layout) -> list[Path]:
    """The ends of the ranks of a job that nobody hurts, without daemons."""
    ranks = Ranks(
        jobs,
        "none",
        "--seed",
        "1",
        case=layout.trained,
        world_size=layout.num_ranks,
        total=layout.total,
        daemon="none",
    )
    return ranks.end(timeout_s=ENDS_S)


class Wrong(Exception):
    """What should not be."""


class Training:
    """The job of a round; use as a context manager.

    Args:
        plans: where processes find what to do (see `tests.failpoints.runtime`).
    """

    def __init__(self, layout: Layout, seed: int, jobs: Jobs, plans: Path, store: Path) -> None:
        self.round = Round(layout, seed)
        self._jobs, self._plans, self._store = jobs, plans, store
        self._rng = random.Random(f"{layout} {seed}")
        self._run = f"f{seed:x}-{self._rng.randrange(1 << 30):x}"
        self._hold = jobs.folder / f"{self._run}.hold"
        curve, data, short_cut = PEERS[layout.peers]
        self._store_url, self._store_options = f"file://{store}", "{}"
        self._net = Net(
            layout.num_nodes, curve=curve, data=data, peer_short_cut=short_cut, peer_deadline_s="2"
        )
        often = {"store": f"file://{store}", "persist_every": "4", "persist_every_s": "0"}
        for node in self._net.nodes:
            node.settings["FAILPOINTS_WHO"] = node.name
            node.command = [*FRESH]  # its modules are compiled as it imports them
            own = SETTINGS.get(layout.setting, {})
            node.settings |= {f"CKPTD_{key.upper()}": value for key, value in own.items()}
            if "allow_disk_segments" in own:
                node.segment_dir = node.folder / "segments"
                node.settings["CKPTD_SEGMENT_DIR"] = str(node.segment_dir)
            if layout.stores:
                node.settings |= {f"CKPTD_{key.upper()}": value for key, value in often.items()}
        self._ranks: Ranks | None = None
        self._stack = contextlib.ExitStack()
        self._floor = -1  # the newest iteration that was recoverable before a strike
        self._is_durable = False  # whether storage alone had something to go back to, before a strike
        self._promised = -1  # `_promise`, before a strike
        self._has_ended = False  # this life, by the campaign itself
        self._resumes_at = -1  # of this life: at least
        self._moved = 0  # by how many nodes ranks are away from where they began
        self._tear_at = -1  # the snapshot that this life's rank 0 records wrong
        self._others: list[tuple[Node, subprocess.Popen[bytes]]] = []  # daemons beside those of the nodes
        self._command: Command | None = None  # of an operator
        self._manager: ServiceManager | None = None
        self._ending: subprocess.Popen[bytes] | Program | None = None  # a daemon that was told to

    def __enter__(self) -> Self:
        self._hold.touch()
        disarm(self._plans)
        if self.round.layout.setting == BUCKET:
            self._use_bucket()
        if self.round.layout.setting == "a service manager":
            self._manager = ServiceManager(self._net.nodes)
            self._stack.callback(self._manager.close)
        self._stack.enter_context(self._net.up())
        self._stack.callback(self._end_others)
        self._stack.callback(self._end_command)
        self._stack.callback(self._end_ranks)
        return self

    def _use_bucket(self) -> None:
        server = S3Server.start()
        self._stack.callback(server.stop)
        settings = Bucket(server).settings()
        self._store_url, self._store_options = settings["store"], settings["store_options"]
        for node in self._net.nodes:
            node.settings |= {f"CKPTD_{key.upper()}": value for key, value in settings.items()}

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        disarm(self._plans)
        if kind is not None or self.round.failures:
            self.round.logs = self.logs
        self._stack.close()

    # -- looking ---------------------------------------------------------------------------------

    def _progress(self, rank: int) -> Path:
        return self._jobs.folder / f"{self._run}.{rank}.progress"

    def _step(self, rank: int) -> tuple[int, bool]:
        try:
            step, replaying = self._progress(rank).read_text().split()
        except (FileNotFoundError, ValueError):
            return -1, True
        return int(step), replaying == "1"

    def _trains(self) -> bool:
        """Whether every rank has begun an iteration that is no replay."""
        return all(not self._step(rank)[1] for rank in range(self.round.layout.num_ranks))

    def _saved(self) -> list[SavedIteration]:
        """To what all ranks can go back, as some node sees it."""
        found: list[SavedIteration] = []
        for node in self._net.nodes:
            with contextlib.suppress(DaemonUnavailable):
                found += saved_iterations(JOB, self._run, daemon=node.endpoint)
        return found

    def _recoverable(self) -> int:
        """The newest iteration to which all ranks can go back, as some node sees it; -1: none."""
        return max((saved.iteration for saved in self._saved()), default=-1)

    def _comes_back(self, floor: int, strike: Strike | None) -> int:
        """The newest iteration that is recoverable, once it is not before ``floor``: daemons that were started
        again see each other, and what the others hold, after a moment; -1 if it never comes.
        """
        deadline = time.monotonic() + SOON_S
        while (best := self._recoverable()) < floor and time.monotonic() < deadline:
            self._start_daemons(strike)
            self._look(strike)
        return best if best >= floor else -1

    def _until_the_same(self) -> int:
        """The newest iteration that is recoverable, once it no longer changes: what ended a moment ago is still
        sealed.
        """
        best, since = self._recoverable(), time.monotonic()
        while time.monotonic() < since + SAME_S:
            time.sleep(0.05)
            if (now := self._recoverable()) != best:
                best, since = now, time.monotonic()
        return best

    def _is_replicated(self) -> bool:
        """Whether each rank has a whole window on enough other nodes."""
        wanted = self.round.layout.replicas
        for rank in range(self.round.layout.num_ranks):
            whole = sum(
                len(sealed(path)) >= self.round.layout.whole
                for node in self._net.nodes
                for path in node.replicas(rank)
            )
            if whole < wanted:
                return False
        return True

    def _promise(self) -> int:
        """The state on which all ranks have agreed, if each has all its copies: as many nodes as there are
        replicas may be lost at once. Else -1.
        """
        found: dict[int, int] = {}
        for node in self._net.nodes:
            with contextlib.suppress(DaemonUnavailable), ControlClient(node.endpoint, timeout_s=5) as client:
                for status in client.ask(GetPeers(), Peers).ranks:
                    if (status.run, status.kind) == (self._run, "snapshots") and status.wanted:
                        counted = [target.node for target in status.targets if target.counted]
                        whole = len(counted) == self.round.layout.replicas and all(
                            self._holds(name, status.rank, status.floor) for name in counted
                        )
                        found[status.rank] = status.floor if whole else -1
        return min(found.values()) if len(found) == self.round.layout.num_ranks else -1

    def _holds(self, node: str, rank: int, end: int) -> bool:
        """Whether the replicas of a rank on a node have all of this state: a target that has just taken the place of
        another counts, and has nothing yet.
        """
        there = next(n for n in self._net.nodes if n.name == node)
        found = {iteration for path in there.replicas(rank) for iteration in sealed(path)}
        return found >= {*range(end - self.round.layout.whole + 1, end + 1)}

    # -- the job ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """The first life, until a failure would not lose all."""
        self._start(seed=1)
        self._until(self._trains, "the first iteration of all ranks")
        self._until(lambda: self._recoverable() >= 0, "a state to go back to")
        self._protect()

    def _protect(self) -> None:
        self._until(self._is_replicated, "replicas of all ranks")

    def _start(self, seed: int) -> None:
        for rank in range(self.round.layout.num_ranks):
            self._progress(rank).unlink(missing_ok=True)
        layout, nodes = self.round.layout, self._net.nodes
        each: dict[int, tuple[str, ...]] = {
            rank: (
                *("--daemon", nodes[(rank + self._moved) % len(nodes)].endpoint),
                *("--progress", str(self._progress(rank))),
            )
            for rank in range(layout.num_ranks)
        }
        if self._tear_at >= 0:
            each[0] = (*each[0], "--tear-at", str(self._tear_at))
        self.round.lives += 1
        self._has_ended = False
        self._ranks = Ranks(
            self._jobs,
            self._run,
            *("--seed", str(seed), "--hold", str(self._hold), "--step-ms", str(STEP_MS)),
            *layout.options,
            case=layout.trained,
            world_size=layout.num_ranks,
            total=layout.total,
            each=each,
        )

    def _end_ranks(self) -> None:
        """One has died, so all end: as torchrun would end them, where they can park, and else at once."""
        if self._ranks is None:
            return
        self._has_ended = True
        if self.round.layout.parks:
            for process, _ in self._ranks.started:
                process.terminate()
            deadline = time.monotonic() + PARKS_S
            for process, _ in self._ranks.started:
                process.join(max(0.0, deadline - time.monotonic()))
        self._ranks.kill()

    def finish(self, reference: list[Path], plan: Arm | None = None) -> Strike | None:
        """Let it go to its end, and compare; a plan is for points that are reached there alone."""
        disarm(self._plans)
        self._mend(None)
        strike = None if plan is None else Strike(plan)
        if plan is None or strike is None:
            self._hold.unlink()
            assert self._ranks is not None
            outs = self._ranks.end(timeout_s=ENDS_S)
        else:
            self.round.strikes.append(strike)
            arm(self._plans, plan)
            self._hold.unlink()
            outs = self._ends_hurt(strike)
        for out in outs:
            theirs = reference[int(out.stem.partition("-")[0].removeprefix("rank"))]
            self.round.failures += [f"{out.stem} differs: {name}" for name in differences(theirs, out)]
        return strike

    def forget(self, strike: Strike | None) -> None:
        """The run is over: its memory is freed, as `ckptctl forget` does; also of what was hurt at the end."""
        for node in self._net.nodes:
            with contextlib.suppress(*NO_ANSWER), ControlClient(node.endpoint, timeout_s=5) as client:
                client.ask(Forget(JOB, self._run), Done)
            self._start_daemons(strike)
        time.sleep(1.2)  # a tick
        if strike is not None and strike.fired is None:
            strike.fired = disarm(self._plans)
        self._start_daemons(strike)

    def _ends_hurt(self, strike: Strike) -> list[Path]:
        """The ends of those that came to it: who was hurt may not have."""
        assert self._ranks is not None
        deadline = time.monotonic() + ENDS_S
        while any(process.exitcode is None for process, _ in self._ranks.started):
            self._start_daemons(strike)
            if strike.fired is None:
                strike.fired = fired(self._plans)
                if strike.fired is not None and strike.arm.action == "stop":
                    time.sleep(0.5)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(strike.fired.pid, signal.SIGCONT)
            dead = [p for p, _ in self._ranks.started if p.exitcode]
            if dead and (any(p.exitcode == -signal.SIGKILL for p in dead) or _excused(strike, "trainer")):
                time.sleep(1.0)  # those who were at their end, too, come to it; others fail in a collective
                self._ranks.kill()
            elif dead or time.monotonic() > deadline:
                raise Wrong(f"not all ranks came to their end:\n{self._story()}")
            time.sleep(0.05)
        return [out for process, out in self._ranks.started if process.exitcode == 0]

    @property
    def over(self) -> bool:
        """Whether it is at its last iteration, where nothing happens any more."""
        return any(
            self._step(rank)[0] >= self.round.layout.total - 2 for rank in range(self.round.layout.num_ranks)
        )

    # -- strikes ---------------------------------------------------------------------------------

    def can(self, beside: Beside) -> bool:
        """Whether it may happen to this job, now: what it takes must be somewhere else, too."""
        layout = self.round.layout
        if beside.loses:
            return self._promise() >= 0 if layout.replicas else any(s.durable for s in self._saved())
        if beside is Beside.MOVE:
            return layout.num_nodes > 1
        if beside is Beside.TORN:  # what has replays, and none that a part of the ranks runs
            return layout.case not in (*LOGGED, GRADIENTS, "dense")
        if beside is Beside.LIAR:
            promised = self._promise() if layout.replicas else -1
            # A start from the replicas makes what storage has after them outdated, before they prove wrong.
            stored = any(s.durable and s.iteration <= promised for s in self._saved())
            return promised >= 0 and (layout.replicas > 1 or stored)
        has = {
            Beside.PARK: layout.parks,
            Beside.AGE: layout.stores and layout.setting != BUCKET,
            Beside.VERIFY: layout.stores,
        }
        return has.get(beside, True)

    def strike(self, plan: Arm, beside: Beside | None = None) -> Strike:
        """Arm a point, wait until somebody is hurt there, and until all train again.

        Args:
            beside: what else happens (see `can`).

        Raises:
            Wrong: they do not, or not as they should.
        """
        strike = Strike(plan, beside=beside)
        self.round.strikes.append(strike)
        saved = self._saved()
        self._floor = max([self._floor, *(s.iteration for s in saved)])
        self._is_durable = any(s.durable for s in saved)
        self._promised = self._promise()
        arm(self._plans, plan)
        if beside is not None:
            self._happens(beside, strike)
        if beside is not None and beside.ends_ranks:
            self._mend(strike)
            self._fires(strike, FIRES_S)
        elif self._command is not None:
            self._await_command(strike)
        elif not self._fires(strike, FIRES_S if plan.often or beside is not None else 0.1):
            own = "trainers" if plan.process == "trainer" else "a daemon"
            strike.forced = self._rng.choice((own, own, "both"))
            if strike.forced != "a daemon":
                self._end_ranks()
            if strike.forced != "trainers":
                self._a_daemon().kill()
            self._mend(strike)
            self._fires(strike, FIRES_S)
        if strike.fired is not None:
            self._hurt(strike)
        if strike.fired is not None and plan.then is not None:
            self._fires(strike, FIRES_S, "then")
        strike.then = fired(self._plans, "then") is not None
        late = disarm(self._plans)
        if strike.fired is None and late is not None:
            strike.fired = late
            self._hurt(strike)
        if beside is Beside.FOLDER:
            self._end_ranks()  # they train on in memory that nobody else sees
        self._mend(strike)
        self._end_others()
        self._end_command()
        if self._ending is not None:
            self._ending.wait(SOON_S)  # as soon as all is stored
            self._ending = None
            self._mend(strike)
        if strike.lost_node:
            self._protect()
        elif self._comes_back(self._floor, strike) < 0:
            now = self._recoverable()
            raise Wrong(f"iteration {self._floor} was recoverable, {now} is now:\n{self._story()}")
        return strike

    def _happens(self, beside: Beside, strike: Strike) -> None:
        """Do it, to some node."""
        node = self._a_daemon()
        if beside.ends_ranks:
            self._end_ranks()
        if beside is Beside.ASIDE:
            # Until they had ended, newer snapshots could take the place of what is not promised.
            self._floor = self._until_the_same()
            if self._floor < self._promised:
                raise Wrong(f"{self._promised} was promised, {self._floor} is there:\n{self._story()}")
        if beside is Beside.MOVE:
            self._moved += self._rng.randrange(1, self.round.layout.num_nodes)
        elif beside in (Beside.END, Beside.RELOAD):
            assert node.process is not None
            node.process.send_signal(signal.SIGTERM if beside is Beside.END else signal.SIGHUP)
            self._ending = node.process if beside is Beside.END else None
        elif beside is Beside.AGE:
            let_time_pass(self._store)
        elif beside is Beside.SECOND:
            self._others.append((node, start_another(node)))
        elif beside in (Beside.PARK, Beside.DRILL):
            rank = self._rng.randrange(self.round.layout.num_ranks)
            ask_beside(node, beside, JOB, self._run, rank)
        elif beside.is_command:
            store = self._store_url, self._store_options
            self._command = command(beside, node, run=(JOB, self._run), store=store)
        elif beside is Beside.FOLDER:
            shutil.rmtree(node.segment_dir, ignore_errors=True)  # files come while it is removed
            strike.lost_node = node.name
        elif beside is Beside.LIAR:
            self._lose_beside_a_liar(strike)
        elif beside is Beside.ASIDE:
            node.kill()
            put_aside(node, self._rng)
        elif beside is Beside.TORN:
            self._record_wrong(strike)
        else:
            node.kill()
            harms = {Beside.FLIP: flip_bits, Beside.FRONT: damage_front, Beside.HEADER: damage_headers}
            strike.lost_node = f"{node.name} {harms[beside](node, self._rng)}"

    def _lose_beside_a_liar(self, strike: Strike) -> None:
        """A node is lost, and no replica on another is right, whose daemon does not know it."""
        liar = self._rng.choice([node for node in self._net.nodes if node.replicas()] or self._net.nodes)
        node = self._rng.choice([other for other in self._net.nodes if other is not liar])
        node.kill()
        shutil.rmtree(node.segment_dir)
        flipped = flip_replicas(liar)
        if self.round.layout.replicas > 1 and self._promised >= 0:
            strike.lost_node = f"{node.name} ({flipped} replicas of {liar.name} are wrong)"
        else:
            strike.lost_node = "all"  # but for storage

    def _record_wrong(self, strike: Strike) -> None:
        """A life that goes past an iteration whose snapshot has a wrong weight, if it is not hurt before."""
        last = self.round.layout.total - 2
        newest = max(self._step(rank)[0] for rank in range(self.round.layout.num_ranks))
        self._tear_at = min(newest + TORN_AFTER, last - 1)
        self._mend(strike)
        deadline, past = time.monotonic() + SOON_S, min(self._tear_at + 2, last)
        while not all(self._step(rank)[0] >= past for rank in range(self.round.layout.num_ranks)):
            self._start_daemons(strike)
            self._look(strike)
            if self._someone_died(strike):
                break
            if time.monotonic() > deadline:
                raise Wrong(f"not past iteration {past} {SOON_S:g} s later:\n{self._story()}")
            time.sleep(0.05)
        self._tear_at = -1
        self._end_ranks()
        strike.lost_node = "a snapshot that is right"

    def _await_command(self, strike: Strike) -> None:
        """Until a process of `ckptctl` was hurt, or all have ended."""
        assert self._command is not None
        deadline = time.monotonic() + SOON_S
        while not self._fires(strike, 0.1) and time.monotonic() < deadline:
            if self._command.poll() is not None:
                return

    def _end_command(self) -> None:
        if self._command is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._command.pid, signal.SIGKILL)  # some of it may be stopped
        self._command.wait()
        self._command = None

    def _end_others(self) -> None:
        """Daemons that were started beside end by themselves; one that was stopped there does not."""
        while self._others:
            _, process = self._others.pop()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
            process.kill()
            process.wait()

    def _fires(self, strike: Strike, within_s: float, what: str = "fired") -> bool:
        deadline = time.monotonic() + within_s
        while (found := fired(self._plans, what)) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if what == "fired":
            strike.fired = strike.fired or found
        return found is not None

    def _look(self, strike: Strike | None) -> None:
        """Whether the plan has met somebody in a start."""
        if strike is not None and strike.fired is None and self._fires(strike, 0.02):
            self._hurt(strike)

    def _hurt(self, strike: Strike) -> None:
        """What follows from what was done there."""
        assert strike.fired is not None
        action = "kill" if strike.then else strike.arm.action
        if action == "stop":
            time.sleep(self._rng.choice((0.05, 0.5, 3.0)))
            with contextlib.suppress(ProcessLookupError):
                end = self._rng.random() < 0.5
                os.kill(strike.fired.pid, signal.SIGKILL if end else signal.SIGCONT)
                action = "kill" if end else action
        if action == "kill":
            self._await_end(strike.fired.pid)  # it said so a moment before
        if action not in ("delay", *CLOCK_STEPS_S) and self._rng.random() < 0.15:
            node = self._a_daemon()
            node.kill()
            strike.also = node.name
        is_daemon = strike.arm.process == "daemon"
        if (
            is_daemon
            and strike.arm.action == "kill"
            and self.round.layout.replicas
            and strike.beside is None
            and self._rng.random() < 0.3
        ):
            node = next(n for n in self._net.nodes if n.name == strike.fired.who)
            assert node.process is not None
            if node.process.pid != strike.fired.pid:  # killed in its start, and started again since
                node.kill()
            node.process.wait(SOON_S)
            others = [n for n in self._net.nodes if n is not node]
            most = self.round.layout.replicas if self._promised >= 0 and not strike.also else 1
            beside = self._rng.sample(others, self._rng.randrange(most))
            for other in beside:
                other.kill()
            self._end_ranks()  # some were on them
            for lost in (node, *beside):
                shutil.rmtree(lost.segment_dir)
            strike.lost_node = " and ".join(lost.name for lost in (node, *beside))
        elif (
            is_daemon
            and strike.arm.action == "kill"
            and self._is_durable
            and strike.beside is None
            and self._rng.random() < 0.3
        ):
            self._end_ranks()
            for node in self._net.nodes:
                node.kill()
                shutil.rmtree(node.segment_dir)
            strike.lost_node = "all"

    def _await_end(self, pid: int) -> None:
        """Until its parent, of which some is this process, has been told."""
        assert self._ranks is not None
        for node in self._net.nodes:
            if node.process is not None and node.process.pid == pid:
                node.process.wait(SOON_S)
        for process, _ in self._ranks.started:
            if process.pid == pid:
                process.join(SOON_S)

    def _a_daemon(self) -> Node:
        return self._rng.choice(self._net.nodes)

    def _mend(self, strike: Strike | None) -> None:
        """Start what is dead, until all train.

        Raises:
            Wrong: something ended by itself, or does not come back.
        """
        deadline = time.monotonic() + SOON_S
        while True:
            self._start_daemons(strike)
            if self._someone_died(strike):
                self._end_ranks()
                self._again(strike)
            elif self._trains():
                self._check_resumed()
                return
            self._look(strike)
            if time.monotonic() > deadline:
                raise Wrong(f"not all ranks trained {SOON_S:g} s later:\n{self._story()}")
            time.sleep(0.02)

    def _check_resumed(self) -> None:
        """Every rank of this life went back to the same iteration, which is none before what was recoverable;
        or began where it was parked, and all are together again at the same one.
        """
        assert self._ranks is not None
        logs = [self._jobs.log(out) for _, out in self._ranks.started]
        found = {TOGETHER.search(log) or RESUMED.search(log) for log in logs}
        resumed = {-1 if match is None else int(match[1]) for match in found}
        if len(resumed) != 1 or min(resumed) < self._resumes_at:
            raise Wrong(f"{self._resumes_at} was recoverable, ranks resumed at {resumed}:\n{self._story()}")

    def _someone_died(self, strike: Strike | None) -> bool:
        assert self._ranks is not None
        if self._has_ended:
            return True
        codes = {process.exitcode for process, _ in self._ranks.started} - {None}
        mine = {-signal.SIGKILL}
        if codes - mine:
            self._look(strike)
        excused = _excused(strike, "trainer") or self._lost_its_holder(strike) or self._met_wrong(strike)
        if codes - mine and not excused:
            # Others fail in a collective when one of them is killed: the killed one is seen a moment later.
            time.sleep(0.3)
            codes = {process.exitcode for process, _ in self._ranks.started} - {None}
            if not codes & mine:
                raise Wrong(f"a trainer ended by itself, {codes}:\n{self._story()}")
        elif codes - mine and strike is not None:
            strike.refused = True
        return bool(codes)

    def _lost_its_holder(self, strike: Strike | None) -> bool:
        """Whether a rank of this start says that nobody can bring what it needs, because a daemon was hurt, or what
        a node holds is wrong: the next start plans anew.
        """
        assert self._ranks is not None
        if strike is None:
            return False
        hurt = strike.fired is not None and strike.arm.process == "daemon"
        return (hurt or strike.beside is Beside.LIAR) and any(
            text in self._ranks.logs for text in NOT_BROUGHT
        )

    def _met_wrong(self, strike: Strike | None) -> bool:
        """Whether the replay of this start did not come to what was recorded, and that was recorded wrong."""
        assert self._ranks is not None
        is_wrong = strike is not None and strike.beside is Beside.TORN
        return is_wrong and any(text in self._ranks.logs for text in NOT_REPRODUCED)

    def _start_daemons(self, strike: Strike | None) -> None:
        for node in self._net.nodes:
            assert node.process is not None
            code = node.process.poll()
            if code is None:
                continue
            self._look(strike)
            if code == 0 and strike is not None and strike.beside is Beside.END:
                pass  # as it was told to
            elif code != -signal.SIGKILL:
                if not _excused(strike, "daemon"):
                    raise Wrong(f"the daemon {node.name} ended with {code}:\n{node.log_text()[-4000:]}")
                assert strike is not None
                strike.refused = True
            time.sleep(self._rng.uniform(0, 0.5))
            for other_node, process in self._others:
                if other_node is node:
                    process.kill()  # it would be the node's daemon
                    process.wait()
            later = LATER.get(self.round.layout.setting, {})
            node.settings |= {f"CKPTD_{key.upper()}": value for key, value in later.items()}
            if self._manager is not None:
                self._manager.hand_over(node)
            with contextlib.suppress(
                AssertionError
            ):  # hurt again in its start: the next round of `_mend` sees it
                node.launch()

    def _again(self, strike: Strike | None) -> None:
        """The next life, from another initialisation where there is a state to go back to."""
        if strike is not None and strike.beside is Beside.TORN and strike.lost_node:
            self._floor = best = min(
                0, self._comes_back(0, strike)
            )  # what counts is older than what is there
        elif strike is not None and strike.lost_node:
            promised = -1 if strike.lost_node == "all" else self._promised
            best = self._comes_back(max(0, promised), strike)
            if strike.beside is not None and strike.beside.is_damage and promised < 0:
                best = min(0, best)  # memory seems to have more than is right there, and comes before storage
            strike.went_back = max(0, self._floor - best)
            # What is newer than the promise may go until the start: hosts keep no more than is promised.
            self._floor = best = min(best, promised) if promised >= 0 else best
        else:
            best = self._comes_back(self._floor, strike)
        if best < 0:
            was = f"iteration {max(0, self._floor)} was recoverable ({self._promised} was promised)"
            raise Wrong(f"{was}, and {self._recoverable()} is now:\n{self._story()}")
        self._resumes_at = best
        self._start(seed=1000 + self.round.lives)

    def _until(self, reached: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + SOON_S
        while not reached():
            self._start_daemons(None)
            if self._someone_died(None):
                raise Wrong(f"ranks were killed before {what}:\n{self._story()}")
            if time.monotonic() > deadline:
                raise Wrong(f"{what}: not within {SOON_S:g} s\n{self._story()}")
            time.sleep(0.05)

    @property
    def logs(self) -> str:
        """All that the daemons and this life's ranks have written."""
        of_ranks = "" if self._ranks is None else self._ranks.logs
        return "\n".join([*(f"-- log of {n.name}\n{n.log_text()}" for n in self._net.nodes), of_ranks])

    def _story(self) -> str:
        assert self._ranks is not None
        daemons = "\n".join(f"-- log of {node.name}\n{node.log_text()[-3000:]}" for node in self._net.nodes)
        return f"{self._ranks.logs[-8000:]}\n{daemons}"


def _excused(strike: Strike | None, process: str) -> bool:
    """Whether a process of this kind was given an error, and may have ended for it with a message."""
    return (
        strike is not None
        and strike.fired is not None
        and strike.arm.action in ERRORS
        and strike.arm.process == process
    )
