"""A stretch of a trace with real processes: hosts of this machine are destroyed and come back empty
at its times, while a job trains on them.

A host (`tests.cluster`) has an address, memory and processes of its own: a torchrun agent, one
rank, and for the elastic strategies a daemon. A loss is SIGKILL of everything of it, in the middle
of whatever it does. torchrun starts the ranks of what is left again; how long that takes is
measured, not assumed.

Strategies, each with code that trains:

- **ours**: `ElasticJob`; state is parked, and each snapshot has a replica on another host. If too
  many hosts go at once, it starts again from disk;
- **lazarus_alone**: the same `ElasticJob` and placement, with daemons that replicate nothing. What
  survivors hold moves in memory, an expert that lost every replica takes the job back to disk.
  Lazarus does this without a restart of processes and without daemons; here parked states (and
  snapshots on their own host, which hold nothing that these do not) stand for the memory of its
  processes;
- **fixed_reconfigured**: groups of expert parallelism of a fixed size over plain torch; each change
  starts it again from disk with as many groups as there are hosts for;
- **fixed_checkpoints**: the same, on a fixed number of hosts: with fewer it waits, the others are spares.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.spot.jobs import HOST
from bench.spot.model import Job
from bench.spot.strategies import Elastic, Fixed
from bench.spot.trace import Membership, Trace, memberships
from ckptd.demo.lab import SHARED_CORES, Event, read_events
from examples.moe_elastic.model import EXPERTS
from tests.cluster.daemons import HostDaemon, provision_keys
from tests.cluster.hosts import Cluster, Host, clean_environment
from tests.cluster.torchrun import SETTINGS, TorchrunJob

__all__ = ["Places", "Played", "Setting", "Strategy", "play", "strategies", "undisturbed"]

MEET = (
    "is_host=0,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=7200,last_call_timeout=3,"
    "read_timeout=15"
)
MEMORY = "256MiB"
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Setting:
    """What all strategies have alike.

    Args:
        every: steps between states on disk; where a reconfiguration is the rule five times that (Lazarus, §6.1: 50 and 250).
        group: hosts that share the experts in fixed expert parallelism.
    """

    stretch: Trace
    hosts: int
    seed: int
    batch: int
    sample_ms: float
    every: int
    slots: int = 4
    group: int = 2

    def __post_init__(self) -> None:
        if self.hosts < max(self.group, -(-EXPERTS // self.slots)):
            raise ValueError(f"{self.hosts} hosts: too few for {EXPERTS} experts")
        if self.stretch.most > self.hosts:
            raise ValueError(f"the stretch has {self.stretch.most} hosts, of at most {self.hosts}")

    @property
    def membership(self) -> tuple[Membership, ...]:
        """Which hosts go and come, by numbers of which none comes twice."""
        return memberships(self.stretch, self.seed)


@dataclass(frozen=True, slots=True)
class Strategy:
    """A program, how torchrun starts it, and what it is in the simulation.

    Args:
        replicas: of snapshots, with a daemon on each host; None: no daemons.
        fewest: hosts that it needs.
    """

    program: tuple[str, ...]
    every: int
    nnodes: str
    fewest: int
    replicas: int | None
    simulated: Callable[[Job], Elastic | Fixed]

    def predicted(self, job: Job) -> Elastic | Fixed:
        """For the simulation: it saves as often, and training waits for that, as the programs do it."""
        found = self.simulated(job)
        found.every, found.blocking = self.every, True
        return found


def strategies(setting: Setting) -> dict[str, Strategy]:
    """All four, by name."""
    hosts, group = setting.hosts, setting.group
    need, world = -(-EXPERTS // setting.slots), hosts // group * group
    elastic = ("bench.spot.elastic_job", "--slots", str(setting.slots))
    fixed = ("bench.spot.fixed_job", "--group", str(group))
    often, seldom = setting.every, 5 * setting.every
    hosted = ("ckptd.host", "--min-ranks", str(need), "--max-restarts", "1000", "-m", *elastic)
    return {
        "ours": Strategy(hosted, often, f"{need}:{hosts}", need, 1, lambda job: Elastic(job, snapshots=True)),
        "lazarus_alone": Strategy(
            elastic, seldom, f"{need}:{hosts}", need, 0, lambda job: Elastic(job, snapshots=False)
        ),
        "fixed_reconfigured": Strategy(
            fixed,
            often,
            f"{group}:{hosts}",
            group,
            None,
            lambda job: Fixed(job, group=group, reconfigures=False),
        ),
        "fixed_checkpoints": Strategy(
            fixed,
            often,
            str(world),
            world,
            None,
            lambda job: Fixed(job, group=world, reconfigures=False),
        ),
    }


@dataclass(frozen=True, slots=True)
class Played:
    """What was told.

    Args:
        events: of all ranks.
        begun_s: when the stretch began, as unix time.
        late_s: how late hosts were gone, or there, at most.
        agents: torchrun agents that ended by themselves and were started again.
    """

    events: list[Event]
    begun_s: float
    late_s: float
    agents: int


def play(setting: Setting, strategy: Strategy, folder: Path, say: Callable[[str], None]) -> Played:
    """Play the stretch under a strategy.

    Args:
        folder: empty; for logs and states.
    Raises:
        JobFailed, DaemonFailed: the rendezvous store ended, or a daemon did not start.
    """
    with Cluster(setting.hosts) as cluster:
        stage = _Stage(setting, strategy, cluster, folder)
        try:
            stage.job.start(hosts=[])
            begun_s, begun = time.time(), time.monotonic()
            late_s = 0.0
            for event in setting.membership:
                stage.wait_until(begun + event.at_s)
                stage.change(event)
                late_s = max(late_s, time.monotonic() - begun - event.at_s)
                say(f"{event.at_s:5.0f} s: {len(stage.places.where)} hosts, {stage.last_step() + 1} steps")
            stage.wait_until(begun + setting.stretch.end_s)
        finally:
            stage.job.stop()
        return Played(stage.events(), begun_s, late_s, stage.agents)


class Places:
    """Which host stands for which node of the trace, by number: a node that comes takes the host
    that has been free longest, which is empty.
    """

    def __init__(self, hosts: int) -> None:
        self._free = list(range(hosts))
        self.where: dict[int, int] = {}

    def change(self, event: Membership) -> tuple[list[int], list[int]]:
        """The hosts that are lost, and those that come."""
        lost = [self.where.pop(node) for node in sorted(event.lost)]
        self._free += lost
        came = [self._free.pop(0) for _ in event.came]
        self.where |= dict(zip(event.came, came, strict=True))
        return lost, came


class _Stage:
    """The job over a cluster of which some hosts are there."""

    def __init__(self, setting: Setting, strategy: Strategy, cluster: Cluster, folder: Path) -> None:
        self._log, saves = folder / "events", folder / "saves"
        self._log.mkdir()
        saves.mkdir()
        self._hosts, self.places = cluster.hosts, Places(setting.hosts)
        self.agents = 0
        # Hosts that import ahead, by the event with which they came: they join together.
        self._warming: list[dict[Host, Any]] = []
        self._warms = "ckptd.host" in strategy.program
        self._daemons = _daemons(strategy, cluster, folder)
        provision_keys(daemon for daemon in self._daemons.values() if strategy.replicas)
        command = [
            *("-m", "--", *strategy.program, "--log", str(self._log), "--saves", str(saves)),
            *("--every", str(strategy.every), "--batch-size", str(setting.batch)),
            *("--sample-ms", str(setting.sample_ms)),
        ]
        self.job = TorchrunJob(
            cluster,
            command,
            nnodes=strategy.nnodes,
            folder=folder,
            env=self._environment,
            settings={**SETTINGS, "--rdzv-conf": MEET},
        )

    def _environment(self, host: Host) -> Mapping[str, str]:
        daemon = self._daemons.get(host.name)
        return {**SHARED_CORES, HOST: host.name, **(daemon.env if daemon else {})}

    def wait_until(self, at: float) -> None:
        """Until that time of the monotonic clock; agents that end by themselves are started again,
        as a node's supervisor does it.

        An agent ends if another one vanishes while they meet.
        """
        while (left := at - time.monotonic()) > 0:
            warming = {host for hosts in self._warming for host in hosts}
            for hosts in [h for h in self._warming if all(p.poll() is not None for p in h.values())]:
                self._warming.remove(hosts)
                for host in hosts:
                    self.job.join(host)
            for host in (self._hosts[number] for number in self.places.where.values()):
                if host not in warming and not self.job.alive(host):
                    self.agents += 1
                    self.job.join(host)
            self.job.check()
            time.sleep(min(POLL_S, left))

    def change(self, event: Membership) -> None:
        lost, came = ([self._hosts[n] for n in some] for some in self.places.change(event))
        for host in lost:
            host.destroy()
            self.job.lost(host)
            for hosts in self._warming:
                hosts.pop(host, None)
        for host in came:
            if not host.up:
                host.boot()
        daemons = [self._daemons[host.name] for host in came if host.name in self._daemons]
        with ThreadPoolExecutor(max(1, len(daemons))) as pool:
            list(pool.map(HostDaemon.start, daemons))
        if self._warms:
            self._warming.append({host: self.job.warm(host) for host in came})
            return
        for host in came:
            self.job.join(host)

    def events(self) -> list[Event]:
        return [e for path in sorted(self._log.iterdir()) for e in read_events(path)]

    def last_step(self) -> int:
        return max((e["step"] for e in self.events() if e["event"] == "step"), default=-1)


def _daemons(strategy: Strategy, cluster: Cluster, folder: Path) -> dict[str, HostDaemon]:
    if strategy.replicas is None:
        return {}
    settings = {"memory": MEMORY, "replicas": str(strategy.replicas)}
    peers = strategy.replicas > 0
    return {h.name: HostDaemon(h, folder, peers=peers, settings=settings) for h in cluster.hosts}


def undisturbed(steps: int, batch: int, folder: Path, *, timeout_s: float) -> dict[int, float]:
    """The losses, by step, of one process with all experts and the whole batch, without ckptd."""
    own = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [
        *(sys.executable, "-m", "examples.moe_elastic.train", "--daemon", "none"),
        *("--log", str(folder), "--steps", str(steps), "--slots", str(EXPERTS)),
        *("--batch-size", str(batch)),
    ]
    env = {**clean_environment(), **SHARED_CORES, **own}
    subprocess.run(command, env=env, check=True, timeout=timeout_s)
    return _losses(read_events(folder / "alone.jsonl"))


def _losses(events: Iterable[Event]) -> dict[int, float]:
    return {e["step"]: e["loss"] for e in events if e["event"] == "step"}
