"""Seeded kills of daemons, store keepers and whole nodes at moments of an upload, against a real S3 server.

``python -m tests.e2e.storage_campaign --kills 100 --seed 7`` prints progress and a table, and fails
if a committed checkpoint is ever damaged, if something is restored that was not committed, if a
single bit of the end differs, or if garbage survives its collection.

A *round* is one run of one or two ranks on one node. While it trains, something is killed when the
store sees a request that was drawn by lot (or lost its answer, or hangs); each time, every byte of
what is committed is verified offline. At last the node is lost with all its memory, and comes back
empty: the run must go on from the newest checkpoint that is committed, and is let go to its end.
Then the garbage is collected.
"""

from __future__ import annotations

import os
import random
import signal
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from multiprocessing.process import BaseProcess
from pathlib import Path

from ckptd.storage.checkpoints.verifier import Severity
from ckptd.transport.messages import Events, GetEvents
from tests.e2e.bucket import (
    JOB,
    Bucket,
    collect,
    keeper_pid,
    orphans,
    puts_manifest,
    puts_object,
)
from tests.e2e.campaigns import play
from tests.e2e.compare import differences
from tests.e2e.harness import DaemonProcess, Jobs, own_daemon
from tests.e2e.test_durable import lose_memory
from tests.storage.fault_proxy import Answer, Fault, FaultProxy, LoseAnswer, Request, Reset, Stall
from tests.storage.s3_server import S3Server

__all__ = ["Kill", "Moment", "References", "Round", "Target", "campaign", "run_round", "table"]

CASES = ("plain", "fused", "masters", "bf16", "batch_norm", "window1", "window7")
TOTAL, HURT_UNTIL = 48, 28  # the last life trains alone for more than any window
_STEP_MS = 120.0
_LIMIT_S = 90.0
_LATER_S = 0.05
_LANDS_S = 0.3  # what was under way through the proxy when its sender died may still arrive


class Target(StrEnum):
    """What is killed."""

    DAEMON = "daemon"
    KEEPER = "keeper"
    NODE = "node"


class Moment(StrEnum):
    """When: as soon as the store sees such a request, and a little later."""

    OBJECT = "an object is put"
    MANIFEST = "a manifest is put"
    LISTING = "the run is listed"
    ANY = "any request"


_MATCH: dict[Moment, Callable[[Request], bool]] = {
    Moment.OBJECT: puts_object(),
    Moment.MANIFEST: puts_manifest,
    Moment.LISTING: lambda request: "list-type" in request.query,
    Moment.ANY: lambda request: True,
}
_FAULTS: tuple[Fault | None, ...] = (None, None, Stall(), LoseAnswer(), Reset(500), Answer(503))


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill: what, when, what the request met, and how many checkpoints were committed by then."""

    target: Target
    moment: Moment
    fault: str
    committed: int


@dataclass
class Round:
    """What was done to one run, and what is wrong with it (nothing)."""

    case: str
    seed: int
    num_ranks: int
    kills: list[Kill] = field(default_factory=list)
    resumed_from: list[int] = field(default_factory=list)  # -1: from the beginning
    refused_starts: int = 0  # because the daemon or the keeper died meanwhile
    collected: int = 0
    failures: list[str] = field(default_factory=list)


class _Run:
    """The run of a round: its lives, the store behind its daemon, and what hurts them."""

    def __init__(
        self, found: Round, jobs: Jobs, daemon: DaemonProcess, bucket: Bucket, proxy: FaultProxy
    ) -> None:
        self._round, self._jobs, self._daemon = found, jobs, daemon
        self._bucket, self._proxy = bucket, proxy
        self._rng = random.Random(f"{found.case} {found.seed}")
        self.name = f"{found.case}-{found.seed}"
        self._progress = jobs.folder / f"{self.name}.progress"
        self._ranks: list[tuple[BaseProcess, Path]] = []
        self._lives = 0

    def start(self) -> None:
        """A life of all ranks; initialised otherwise, unless there is nothing yet to come back to."""
        seed = 1000 + self._lives if self._bucket.committed(self.name) else 1
        self._lives += 1
        self._progress.unlink(missing_ok=True)
        options = ["--run", self.name, "--seed", str(seed), "--step-ms", str(_STEP_MS)]
        self._ranks = start_ranks(
            self._jobs, self._round, *options, daemon=self._daemon.endpoint, progress=self._progress
        )

    def hurt(self, kills: int) -> None:
        """So many kills, or fewer if training came too far before there was an occasion; the last
        one takes the node.
        """
        while len(self._round.kills) < kills and self._kill():
            pass
        self._wait(lambda: bool(self._bucket.committed(self.name)))
        self._note(Target.NODE, Moment.ANY, None)
        self._lose_node()

    def end(self) -> list[Path]:
        """The final states, once all ranks have ended in order."""
        outs = [self._jobs.end(process, out, timeout_s=_LIMIT_S) for process, out in self._ranks]
        expected = self._round.resumed_from[-1]
        for out in outs:
            resumed = self._jobs.report(out)["resumed_from"]
            if resumed != (None if expected < 0 else expected):
                text = f"resumed from {resumed}; the newest that was committed is {expected}"
                self._round.failures.append(f"{text}\n{self._jobs.log(out)}")
        return outs

    def verify(self) -> None:
        """Every byte that is committed, past the daemon."""
        report = self._bucket.verify(self.name)
        self._round.failures += [str(f) for f in report.findings if f.severity is Severity.ERROR]

    def settle(self) -> None:
        """The end becomes durable; then the garbage is collected, and nothing is left but the
        newest checkpoint.
        """
        self._wait(lambda: self._bucket.committed(self.name)[:1] == [TOTAL], training=False)
        if self._round.failures:
            self._round.failures.append(self._story())
        self._daemon.kill()
        self.verify()
        store = self._bucket.open()
        try:
            self._round.collected = collect(store, JOB, self.name)
            self._round.failures += [f"garbage: {key}" for key in orphans(store, JOB, self.name)]
        finally:
            store.close()
        self.verify()
        if (left := self._bucket.committed(self.name)) != [TOTAL]:
            self._round.failures.append(f"after collecting, {left} are committed")

    def _story(self) -> str:
        """What the daemon has told since its last start."""
        events = self._daemon.ask(GetEvents(limit=10_000), Events).events
        return "\n".join(["events:", *(f"  {e.level} {e.kind}: {e.message}" for e in events)])

    def close(self) -> None:
        for process, _ in self._ranks:
            process.kill()
            process.join()

    # -- kills -----------------------------------------------------------------------------------

    def _kill(self) -> bool:
        """Kill at a moment of an upload; False if there was none in time."""
        moment = self._rng.choice((Moment.OBJECT, Moment.OBJECT, *Moment))
        fault = self._rng.choice(_FAULTS)
        target = self._rng.choice((Target.DAEMON, Target.DAEMON, Target.KEEPER, Target.NODE))
        nth, later_s = self._rng.randint(1, 5), self._rng.uniform(0, _LATER_S)
        if not self._await(moment, fault, nth):
            return False
        time.sleep(later_s)
        self._note(target, moment, fault)
        if target is Target.KEEPER:
            assert self._daemon.process is not None
            if pid := keeper_pid(self._daemon.process.pid):
                os.kill(pid, signal.SIGKILL)
        elif target is Target.DAEMON:
            self._daemon.kill()
            self.verify()
            self._daemon.start()
        else:
            self._lose_node()
        return True

    def _note(self, target: Target, moment: Moment, fault: Fault | None) -> None:
        told = "-" if fault is None else type(fault).__name__
        committed = len(self._bucket.committed(self.name))
        self._round.kills.append(Kill(target, moment, told, committed))

    def _lose_node(self) -> None:
        """Everything on it is gone; it comes back empty, and the run goes on from what is durable."""
        self.close()
        self._daemon.kill()
        time.sleep(_LANDS_S)
        self.verify()
        self._round.resumed_from.append(max(self._bucket.committed(self.name), default=-1))
        lose_memory(self._daemon)
        self.start()

    def _await(self, moment: Moment, fault: Fault | None, nth: int) -> bool:
        """Until the store has seen ``nth`` more such requests; the last of them meets ``fault``."""
        matches = _MATCH[moment]
        before, seen, gone = self._proxy.count(matches), 0, False

        def is_last(request: Request) -> bool:
            nonlocal seen
            seen += not gone and matches(request)
            return seen == nth and matches(request)

        if fault is not None:
            self._proxy.inject(fault, is_last)
        found = self._wait(lambda: self._proxy.count(matches) >= before + nth)
        gone = True
        return found

    def _wait(self, done: Callable[[], bool], *, training: bool = True) -> bool:
        """Until it is so; False if training came too far before, or (bounded) it never was."""
        deadline = time.monotonic() + _LIMIT_S
        while not done():
            if time.monotonic() > deadline:
                self._round.failures.append("waited in vain")
                return False
            if training and (self._step() >= HURT_UNTIL or not self._revived()):
                return False
            time.sleep(0.01)
        return True

    def _revived(self) -> bool:
        """Start again, as torchrun does, what could not begin because its daemon or the store
        keeper was killed just then.
        """
        ended = [(p, out) for p, out in self._ranks if p.exitcode not in (None, 0)]
        if not ended:
            return True
        log = self._jobs.log(ended[0][1])
        if "DaemonUnavailable" not in log or self._step() >= 0:
            self._round.failures.append(f"ended with {ended[0][0].exitcode}:\n{log}")
            return False
        self._round.refused_starts += 1
        self.close()
        self.start()
        return True

    def _step(self) -> int:
        try:
            return int(self._progress.read_text().split()[0])
        except FileNotFoundError:
            return -1


def start_ranks(
    jobs: Jobs, found: Round, *options: str, daemon: str = "none", progress: Path | None = None
) -> list[tuple[BaseProcess, Path]]:
    """The ranks of a round's run: one, or several under DDP."""
    together = ["--store", str(jobs.folder / f"meeting-{uuid.uuid4().hex[:8]}")]
    started = []
    for rank in range(found.num_ranks):
        own = ["--progress", str(progress)] if progress is not None and rank == 0 else []
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(found.num_ranks),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        started.append(
            jobs.start(
                found.case,
                *("--total", str(TOTAL), *options, *own),
                *(together if found.num_ranks > 1 else []),
                daemon=daemon,
                environment=environment if found.num_ranks > 1 else None,
            )
        )
    return started


class References:
    """The ends of undisturbed runs, each trained once."""

    def __init__(self, folder: Path) -> None:
        own = folder / "undisturbed"
        own.mkdir()
        self._jobs = Jobs(own, "none")
        self._known: dict[tuple[str, int], list[Path]] = {}

    def of(self, found: Round) -> list[Path]:
        """Per rank."""
        key = found.case, found.num_ranks
        if key not in self._known:
            started = start_ranks(self._jobs, found)
            self._known[key] = [self._jobs.end(p, out, timeout_s=_LIMIT_S) for p, out in started]
        return self._known[key]


def run_round(found: Round, kills: int, folder: Path, server: S3Server, ends: References) -> None:
    """Hurt one run ``kills`` times (fewer where there is no occasion), and look at all that it leaves."""
    bucket, own = Bucket(server), folder / f"round-{found.seed}"
    own.mkdir()
    with (
        FaultProxy(server.port) as proxy,
        own_daemon(*bucket.flags(endpoint=proxy.endpoint, timeout_s=3.0)) as daemon,
    ):
        run = _Run(found, Jobs(own, daemon.endpoint), daemon, bucket, proxy)
        try:
            run.start()
            run.hurt(kills)
            outs = run.end()
            for rank, (reference, out) in enumerate(zip(ends.of(found), outs, strict=True)):
                names = differences(reference, out)
                found.failures += [f"rank {rank} differs: {name}" for name in names]
            run.settle()
        except AssertionError as error:  # a job that hung, or ended as it should not
            found.failures.append(str(error))
        finally:
            run.close()


def campaign(
    kills: int, seed: int, folder: Path, say: Callable[[str], object], *, per_round: int = 5
) -> list[Round]:
    """Rounds until at least ``kills`` kills were made."""
    rounds: list[Round] = []
    done = 0
    server = S3Server.start()
    ends = References(folder)
    try:
        while done < kills:
            number = len(rounds)
            case, ranks = ("drop", 2) if number % 3 == 1 else (CASES[number % len(CASES)], 1)
            found = Round(case, seed + number, ranks)
            run_round(found, min(per_round, kills - done), folder, server, ends)
            rounds.append(found)
            done += len(found.kills)
            outcome = "identical" if not found.failures else f"FAILED: {found.failures[0]}"
            say(
                f"[{done}/{kills}] {case}, {ranks} ranks, seed {found.seed}: {len(found.kills)} kills, "
                f"resumed from {found.resumed_from}, {found.collected} keys collected, {outcome}\n"
            )
    finally:
        server.stop()
    return rounds


def table(rounds: Sequence[Round]) -> str:
    """Kills by moment and target, and the failures."""
    kills = [kill for found in rounds for kill in found.kills]
    counts = Counter((kill.moment, kill.target) for kill in kills)
    lines = [f"{'killed when':24}" + "".join(f"{target:>9}" for target in Target)]
    lines += [
        f"{moment:24}" + "".join(f"{counts[moment, target]:9}" for target in Target) for moment in Moment
    ]
    losses = [end for found in rounds for end in found.resumed_from]
    failed = [found for found in rounds if found.failures]
    lines.append(
        f"{len(kills)} kills in {len(rounds)} runs, {len(losses)} times all memory was lost "
        f"({sum(end < 0 for end in losses)} times before anything was committed), "
        f"{sum(found.collected for found in rounds)} keys collected, {len(failed)} failed runs"
    )
    lines += [f"FAILED {f.case} seed {f.seed}: {text}" for f in failed for text in f.failures]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a campaign; 1 if anything was not as it has to be."""
    return play("tests.e2e.storage_campaign", campaign, table, argv, kills=100)


if __name__ == "__main__":
    raise SystemExit(main())
