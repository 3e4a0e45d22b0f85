"""ckptd daemons on the hosts of a cluster, as an operator would run and provision them.

A host's runtime and segment folders are its own and go with it; keys are provisioned from outside, as a
deployment does it, and so are there again in the host's next life.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import zmq.auth

from ckptd.config.daemon_config import endpoint_for
from ckptd.launch import answers
from ckptd.transport.access.keys import Keys, trust
from ckptd.transport.messages import EventInfo, Events, GetEvents
from ckptd.transport.wire import ControlClient
from tests.cluster.hosts import Host, clean_environment

__all__ = ["PEER_PORT", "DaemonFailed", "HostDaemon", "exchange_keys", "provision_keys"]

PEER_PORT = 29471
START_TIMEOUT_S = 30.0
CTL_TIMEOUT_S = 60.0
POLL_S = 0.02


class DaemonFailed(RuntimeError):
    """A daemon did not start, or `ckptctl` failed; with what they said."""


class HostDaemon:
    """`ckptd run` on a host; one object for all lives of the host.

    Args:
        folder: outside the host, for the log and the keys.
        peers: replicate to the other hosts' daemons, encrypted; otherwise snapshots stay on the node.
        settings: further settings by key, such as `replicas="2"`.
    """

    def __init__(
        self,
        host: Host,
        folder: Path,
        *,
        peers: bool = True,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.host = host
        self.log = folder / f"{host.name}.ckptd.log"
        self.keys_dir = folder / "keys" / host.name
        self.process: subprocess.Popen[bytes] | None = None
        self.endpoint = endpoint_for(str(host.runtime_dir))
        values = {
            "runtime_dir": str(host.runtime_dir),
            "segment_dir": str(host.segment_dir),
            "node_id": host.name,
            "memory": "1GiB",
            "keys_dir": str(self.keys_dir),
        }
        if peers:
            values["peer_listen"] = f"tcp://{host.address}:{PEER_PORT}"
            values["peer_security"] = "curve"
            # All hosts are this machine; what they send each other is to go over their networks.
            values["peer_short_cut"] = "false"
        if not str(host.segment_dir).startswith("/dev/shm/"):
            values["allow_disk_segments"] = "true"
        values |= settings or {}
        self.env = {f"CKPTD_{key.upper()}": value for key, value in values.items()}
        """What the daemon reads, and with which `ckptctl` and `Checkpointer(daemon="auto")` find it."""

    def start(self) -> None:
        """Start it and wait until it answers.

        Raises:
            DaemonFailed: it does not; with its log.
        """
        self.process = self.host.python("-m", "ckptd", "run", env=self.env, log=self.log)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not answers(self.endpoint):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise DaemonFailed(f"the daemon on {self.host} did not start:\n{self.log_text()}")
            time.sleep(POLL_S)

    def kill(self) -> None:
        """SIGKILL the daemon alone; the host and its memory stay."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(timeout=20)

    def ctl(self, *arguments: str) -> str:
        """What `ckptctl` prints, run against this daemon.

        Raises:
            DaemonFailed: it failed; with what it said.
        """
        done = subprocess.run(
            [sys.executable, "-m", "ckptd.ctl", *arguments],
            env={**clean_environment(), **self.env},
            capture_output=True,
            text=True,
            timeout=CTL_TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            raise DaemonFailed(f"ckptctl {' '.join(arguments)} on {self.host}: {done.stderr}")
        return done.stdout

    def events(self, *kinds: str) -> list[EventInfo]:
        """What it has recorded since its start, of these kinds or all."""
        with ControlClient(self.endpoint, timeout_s=20) as client:
            page = client.ask(GetEvents(limit=10_000), Events)
        return [event for event in page.events if not kinds or event.kind in kinds]

    def log_text(self) -> str:
        """What it has logged, over all lives."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""


def exchange_keys(daemons: Iterable[HostDaemon]) -> None:
    """Make a key pair for every node, and let each trust all others; before the daemons are started."""
    every = list(daemons)
    public = {}
    for daemon in every:
        daemon.ctl("keys", "new")
        public[daemon.host.name] = zmq.auth.load_certificate(daemon.keys_dir / "node.key")[0].decode()
    for daemon in every:
        for name, key in public.items():
            if name != daemon.host.name:
                daemon.ctl("keys", "trust", name, key)


def provision_keys(daemons: Iterable[HostDaemon]) -> None:
    """As `exchange_keys`, without a process for every pair of hosts: those would take a quarter of
    a test's time.
    """
    every = list(daemons)
    public = {daemon.host.name: Keys.create(daemon.keys_dir).public for daemon in every}
    for daemon in every:
        for name, key in public.items():
            if name != daemon.host.name:
                trust(daemon.keys_dir, name, key)
