"""A cluster on one machine: hosts with addresses, memory and processes of their own that can be destroyed.

A host is a network namespace (see `tests.cluster.network`; where those cannot be had, an address
127.x.y.z), a folder in memory for segments, a folder for sockets, keys and logs of daemons, and the
processes that were started in it with all their descendants. What a test kills is always a whole
host or one of its own processes. Everything goes at the end of the `with` block, and a guardian
process removes it even if this process is SIGKILLed.

    with Cluster(4) as cluster:
        print(cluster)                       # which kind of network is used, and why
        process = cluster.hosts[0].start(["python", "-m", "http.server"], log=folder / "log")
        cluster.hosts[1].partition([cluster.hosts[0]])
        cluster.hosts[0].destroy()           # processes, memory and runtime folder are gone
        cluster.hosts[0].boot()              # a new, empty host with the same name and address

Hosts are `hosts[0]` to `hosts[n-1]`, and `head`, which stands for what survives (a rendezvous store, a
reference). The calling process reaches all of them, and they reach it at `cluster.address`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

from tests.cluster.forked_torchrun import ForkedModule
from tests.cluster.leftovers import MARKER, REPOSITORY, Guardian, Leftovers, kill_processes
from tests.cluster.leftovers import processes_of as _processes_of
from tests.cluster.network import (
    Loopback,
    Namespaces,
    Network,
    NotSupported,
    best_network,
    why_no_namespaces,
)

__all__ = ["Cluster", "Host", "NotSupported", "clean_environment"]

# What an outer daemon, torchrun or test harness may have left in our environment is not the hosts' affair.
FOREIGN_PREFIXES = ("CKPTD_", "TORCHELASTIC_", "GLOO_", "MASTER_", "GROUP_", "ROLE_", "LOCAL_")
FOREIGN_NAMES = frozenset({"RANK", "WORLD_SIZE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"})


def clean_environment() -> dict[str, str]:
    """Our environment without what would tell a host about another job, and with this repository on the path."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(FOREIGN_PREFIXES) and name not in FOREIGN_NAMES
    }
    env["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *filter(None, [env.get("PYTHONPATH")])])
    return env


class Host:
    """One host; made by `Cluster`. A method that needs the host up asserts that it is."""

    def __init__(
        self, network: Network, index: int, name: str, tag: str, segments: Path, runtime: Path
    ) -> None:
        self.name, self.index = name, index
        self.address = network.address_of(index)
        self.interface = network.interface
        self.segment_dir, self.runtime_dir = segments / name, runtime / name
        self.up = False
        self.marker = f"{tag}.{name}"
        self._network = network
        self._cut: set[int] = set()
        self._processes: list[subprocess.Popen[bytes] | ForkedModule] = []

    def __repr__(self) -> str:
        return f"<{self.name} {self.address} {'up' if self.up else 'down'}>"

    def boot(self) -> None:
        """Make the host: no process, empty folders, the address that it always has."""
        assert not self.up, f"{self.name} is up already"
        self._network.plug(self.index)
        for folder in (self.segment_dir, self.runtime_dir):
            folder.mkdir(mode=0o700)
        self.up = True

    def start(
        self, argv: Sequence[str], env: Mapping[str, str] | None = None, *, log: Path
    ) -> subprocess.Popen[bytes]:
        """Start a process in the host, in a session of its own; output is appended to `log`."""
        assert self.up, f"{self.name} is down: boot() it first"
        namespace = self._network.namespace_of(self.index)
        inside = ["ip", "netns", "exec", namespace] if namespace else []
        with log.open("ab") as sink:
            process = subprocess.Popen(
                [*inside, *argv],
                cwd=REPOSITORY,
                env={**clean_environment(), MARKER: self.marker, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def python(
        self, *arguments: str, env: Mapping[str, str] | None = None, log: Path
    ) -> subprocess.Popen[bytes]:
        """Start this Python in the host with these arguments."""
        return self.start([sys.executable, *arguments], env, log=log)

    def module(
        self, *words: str, env: Mapping[str, str] | None = None, log: Path, forked: bool
    ) -> subprocess.Popen[bytes] | ForkedModule:
        """Start ``python -m`` with these words in the host; forked where it can be (`ForkedModule`)."""
        namespace = self._network.namespace_of(self.index)
        if namespace is None or not forked:
            return self.python("-m", *words, env=env, log=log)
        assert self.up, f"{self.name} is down: boot() it first"
        told = {**clean_environment(), MARKER: self.marker, **(env or {})}
        process = ForkedModule(namespace, words, told, log=log)
        self._processes.append(process)
        return process

    def pids(self) -> set[int]:
        """All live processes of the host, descendants of descendants included."""
        return _processes_of(self.marker, self._network.namespace_of(self.index))

    def kill_all(self) -> None:
        """SIGKILL every process of the host; its memory and its folders stay."""
        kill_processes(self.marker, self._network.namespace_of(self.index))
        for process in self._processes:
            process.wait(timeout=20)
        self._processes.clear()

    def destroy(self, *, silent: bool = False) -> None:
        """The node is gone, with its processes and its memory; `boot` makes a new, empty one.

        Args:
            silent: like a power failure, peers are not told: their connections hang until a deadline of theirs.
                Otherwise like a crash, the kernel ends the connections, which peers see at once.
        Raises:
            NotSupported: `silent`, and the network cannot do it.
        """
        assert self.up, f"{self.name} is down already"
        if silent:
            self._network.unplug(self.index)
        self.kill_all()
        self._network.remove(self.index)
        for folder in (self.segment_dir, self.runtime_dir):
            shutil.rmtree(folder)
        self.up = False

    def partition(self, others: Iterable[Host], *, both_ways: bool = True) -> None:
        """Nothing arrives any more between this host and the others (or only not from it to them),
        without a word.

        Raises:
            NotSupported: the network cannot do it.
        """
        for other in others:
            assert other is not self, "a host cannot be partitioned from itself"
            self._network.partition(self.index, other.index)
            if both_ways:
                self._network.partition(other.index, self.index)
            self._cut.add(other.index)

    def heal(self) -> None:
        """Undo every `partition` of this host."""
        for other in self._cut:
            self._network.heal(self.index, other)
            self._network.heal(other, self.index)
        self._cut.clear()

    def limit(self, bytes_per_s: int | None) -> None:
        """Bound what the host sends and receives, in bytes per second each; None: no bound.

        Raises:
            NotSupported: the network cannot do it.
        """
        self._network.limit(self.index, bytes_per_s)


class Cluster:
    """`num_hosts` hosts and a head, all up, as long as the `with` block runs.

    Args:
        kind: `best` takes namespaces where they can be had; `namespaces` and `loopback` insist.
    Raises:
        NotSupported: on entry, if what was insisted on cannot be had.
    """

    def __init__(self, num_hosts: int, *, kind: str = "best") -> None:
        assert kind in ("best", "namespaces", "loopback"), kind
        self._num_hosts, self._kind = num_hosts, kind
        self.why = ""
        self.hosts: list[Host] = []

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._open(stack)
            self._stack = stack.pop_all()
        return self

    def _open(self, stack: contextlib.ExitStack) -> None:
        tag = f"ckptd-{os.getpid()}-{secrets.token_hex(3)}"
        self.network = self._choose(tag)
        segments, runtime = _folders(tag)
        names = [*[f"host{index}" for index in range(self._num_hosts)], "head"]
        every = [Host(self.network, index, name, tag, segments, runtime) for index, name in enumerate(names)]
        leftovers = Leftovers(
            hosts=tuple(host.marker for host in every),
            namespaces=self.network.namespaces,
            folders=(str(segments), str(runtime)),
        )
        stack.callback(Guardian(leftovers).dismiss)
        stack.callback(_reap, every)
        stack.callback(leftovers.remove)
        if isinstance(self.network, Namespaces):
            self.network.open()
        for host in every:
            host.boot()
        *self.hosts, self.head = every
        self.address = self.network.address

    def _choose(self, tag: str) -> Network:
        self.why = "asked for" if self._kind == "loopback" else why_no_namespaces()
        if self._kind == "loopback":
            return Loopback()
        if self._kind == "namespaces" and self.why:
            raise NotSupported(self.why)
        return best_network(tag, self._num_hosts + 1)

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def __str__(self) -> str:
        text = f"a cluster of {self._num_hosts} hosts on {self.network.kind}"
        return f"{text} ({self.why})" if self.why else text


def _folders(tag: str) -> tuple[Path, Path]:
    """Where the hosts' segments live, in memory if there is room for some, and their short-named
    runtime folders.
    """
    shm = Path("/dev/shm")
    in_memory = shm.is_dir() and shutil.disk_usage(shm).free > 1 << 28
    segments = Path(tempfile.mkdtemp(prefix=f"{tag}-", dir=shm if in_memory else None))
    return segments, Path(tempfile.mkdtemp(prefix=f"{tag}-"))


def _reap(hosts: Iterable[Host]) -> None:
    for host in hosts:
        host.kill_all()
