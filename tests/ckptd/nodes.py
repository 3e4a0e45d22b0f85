"""Daemons of several nodes on loopback addresses.

A `Net` is the nodes and, if asked for, a `FaultProxy` on each directed path between two of them: in
what ranks exchange, the cards are rewritten so that everybody sees the others through its own
proxies. Data streams go through the same proxies: a node tells all its peers one port for them,
where a `_Door` finds out who it is that came.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ckptd.launch import answers
from ckptd.transport.access.keys import Keys, trust
from ckptd.transport.messages import (
    EventInfo,
    Events,
    GetEvents,
    GetPeers,
    GetStatus,
    Peers,
    Status,
)
from tests.ckptd.running import DaemonProcess
from tests.cluster.proxy import FaultProxy

__all__ = ["DEADLINE_S", "PATIENT_S", "PORT", "Net", "Node"]

PORT = 29_471
DATA_PORT = PORT + 1
DEADLINE_S = 1.2
# Where no node is lost: longer than any is slow. A fetch ends when its holder seems to be lost.
PATIENT_S = "60"


class Node(DaemonProcess):
    """A daemon with a fixed name and peer address, over all its lives."""

    def __init__(self, name: str, address: str, **settings: str) -> None:
        self.name, self.address = name, address
        usual = {
            "node_id": name,
            "peer_listen": f"tcp://{address}:{PORT}",
            "peer_data_port": str(DATA_PORT),
            "peer_short_cut": "false",  # else no byte would pass a proxy: all nodes are on this host
            "peer_deadline_s": str(DEADLINE_S),
            "memory": "256MiB",
        }
        super().__init__(**(usual | settings))

    @property
    def keys_dir(self) -> Path:
        return self.runtime_dir / "keys"

    def launch(self) -> None:
        """Start, and wait until it answers (quicker than `ckptctl wait`)."""
        process = self.spawn()
        deadline = time.monotonic() + 60
        while not answers(self.endpoint):
            alive = process.poll() is None and time.monotonic() < deadline
            assert alive, f"{self.name} did not start:\n{self.log_text()}"
            time.sleep(0.02)

    def pause(self) -> None:
        """SIGSTOP: its sockets stay open, and it does nothing."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def unpause(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def lose(self) -> None:
        """The node is gone, with its memory."""
        self.kill()
        shutil.rmtree(self.segment_dir)

    def events(self, kind: str = "") -> list[EventInfo]:
        """What it recorded since its start, of this kind or all."""
        with self.client() as client:
            page = client.ask(GetEvents(limit=10_000), Events)
        return [event for event in page.events if kind in ("", event.kind)]

    def saw(self, kind: str, text: str = "") -> bool:
        """Whether it recorded an event of this kind with this text in it."""
        return any(text in event.message for event in self.events(kind))

    def counters(self) -> dict[str, int]:
        with self.client() as client:
            return client.ask(GetStatus(), Status).counters

    def has_heard(self, other: Node) -> bool:
        """Whether a hello of this life was answered by the other node."""
        with self.client() as client:
            peers = client.ask(GetPeers(), Peers).peers
        return any(peer.node == other.name and peer.free_bytes > 0 for peer in peers)

    def replicas(self, rank: int | None = None) -> list[Path]:
        """The replica files that lie on it, of this rank or all."""
        middle = "*" if rank is None else f"*~r{rank}~*"
        return sorted(self.segment_dir.glob(f"{middle}.rep"))

    def files(self) -> list[Path]:
        """All segments and replicas that lie on it."""
        return sorted(p for p in self.segment_dir.glob("*") if p.suffix in (".seg", ".rep"))


class Net:
    """Nodes ``n0``, ``n1``, …; with keys each trusts all others.

    Args:
        data: how bytes travel, as in the configuration.
        proxied: put a proxy on every directed path.
        settings: of all daemons; `of` holds those of single ones, by name.
    """

    def __init__(
        self,
        num_nodes: int,
        *,
        curve: bool = False,
        data: str = "stream",
        proxied: bool = False,
        of: dict[str, dict[str, str]] | None = None,
        **settings: str,
    ) -> None:
        a, b = secrets.randbelow(200) + 20, secrets.randbelow(250) + 2
        security = "curve" if curve else "plain"
        settings = {"peer_security": security, "peer_data": data} | settings
        self._doors = [f"127.{a}.{b}.{i + 110}" for i in range(num_nodes)] if proxied else []
        self.nodes = []
        for i in range(num_nodes):
            own = settings | ({"peer_advertise": self._doors[i]} if proxied else {})
            own |= (of or {}).get(f"n{i}", {})
            self.nodes.append(Node(f"n{i}", f"127.{a}.{b}.{i + 10}", **own))
        self._curve = curve
        self._proxies: dict[tuple[str, str], FaultProxy] = {}

    def __getitem__(self, index: int) -> Node:
        return self.nodes[index]

    def path(self, source: Node, target: Node) -> FaultProxy:
        """The proxy through which ``source`` sees ``target``."""
        return self._proxies[source.name, target.name]

    def paths(self, one: Node) -> list[FaultProxy]:
        """All proxies to and from a node."""
        return [proxy for ends, proxy in self._proxies.items() if one.name in ends]

    def seen_from(self, name: str, said: object) -> object:
        """What somebody says, as this node must hear it: with every node card in it changed, wherever it is."""
        if isinstance(said, list):
            return [self.seen_from(name, part) for part in said]
        if not isinstance(said, dict):
            return said
        changed = {key: self.seen_from(name, value) for key, value in said.items()}
        proxy = self._proxies.get((name, str(said.get("node"))))
        if proxy is not None and said.get("endpoint"):
            host, port = proxy.address
            changed["endpoint"] = f"tcp://{host}:{port}"
        return changed

    @contextlib.contextmanager
    def up(self, prepare: Callable[[], None] = lambda: None) -> Iterator[Net]:
        """All daemons run; afterwards everything is gone. ``prepare``: called before they are started."""
        doors: list[_Door] = []
        try:
            if self._curve:
                self._exchange_keys()
            prepare()
            for other, address in zip(self.nodes, self._doors, strict=False):
                others = [node for node in self.nodes if node is not other]
                paths = {one.name: FaultProxy((other.address, PORT)) for one in others}
                self._proxies |= {(name, other.name): path for name, path in paths.items()}
                doors.append(_Door(address, other, others, paths))
            with ThreadPoolExecutor(len(self.nodes)) as pool:
                list(pool.map(Node.launch, self.nodes))
            yield self
            used = [path for path in self._proxies.values() if path.num_connections]
            assert used or not self._proxies, "nothing went through the proxies"
        finally:
            for door in doors:
                door.close()
            for proxy in self._proxies.values():
                proxy.close()
            for node in self.nodes:
                node.clean_up()

    def _exchange_keys(self) -> None:
        public = {}
        for node in self.nodes:
            node.runtime_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            public[node.name] = Keys.create(node.keys_dir).public
        for node in self.nodes:
            for name, key in public.items():
                if name != node.name:
                    trust(node.keys_dir, name, key)


class _Door:
    """Where data streams to one node come in; each goes on through the proxy of the node whose
    daemon made it.
    """

    def __init__(
        self, address: str, node: Node, others: Sequence[Node], paths: Mapping[str, FaultProxy]
    ) -> None:
        self._target, self._others, self._paths = (node.address, DATA_PORT), others, paths
        self._listener = socket.create_server((address, DATA_PORT))
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)

    def _accept(self) -> None:
        while True:
            try:
                near, comes_from = self._listener.accept()
            except OSError:
                return
            pids = {n.process.pid: n.name for n in self._others if n.process is not None}
            name = _owner_of(comes_from, pids)
            if name is None:
                near.close()  # its daemon died meanwhile
            else:
                self._paths[name].take(near, self._target)


def _owner_of(address: tuple[str, int], pids: Mapping[int, str]) -> str | None:
    """Which of these processes has the socket with this local address; None if none has (any more)."""
    here = f"{int.from_bytes(socket.inet_aton(address[0]), 'little'):08X}:{address[1]:04X}"
    lines = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()
    inodes = {fields[9] for line in lines if (fields := line.split())[1] == here}
    for pid, name in pids.items():
        with contextlib.suppress(OSError):
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    if str(fd.readlink())[8:-1] in inodes:
                        return name
    return None
