"""The wires of a cluster on one machine: network namespaces where the kernel lets us, else loopback
addresses.

With namespaces, every host has an `eth0` of its own on one bridge. The bridge stands in a namespace of its
own too, so that no firewall rule and no route of this machine takes part; the calling process is on
the same bridge with the first address. Everything is plain iproute2: `apt-get install iproute2`.

* A partition is a permanent neighbour entry with a hardware address that nobody has: packets vanish without
  an answer, as they do on a broken wire, in one direction or both. (A blackhole route would answer a
  `connect` at once; a packet filter may not be there.)
* A bandwidth limit is `tc tbf` at both ends of a host's wire. There is no `netem` in many kernels: for
  delays there is `tests.cluster.proxy`.

A host is known here by its index, from 0 on.
"""

from __future__ import annotations

import functools
import os
import random
import shutil
import subprocess
from typing import Protocol

__all__ = [
    "Loopback",
    "Namespaces",
    "Network",
    "NotSupported",
    "best_network",
    "why_no_namespaces",
]

NOBODY = "02:fe:fe:fe:fe:fe"  # a hardware address that no host has
FIRST_HOST = 11  # last byte of the first host's address: two digits, so that names and numbers sort alike
BURST_BYTES = 256 << 10
QUEUE_MS = 100


class NotSupported(RuntimeError):
    """These wires cannot do that; the message says why."""


class Network(Protocol):
    """What hosts are connected by."""

    kind: str
    address: str  # the calling process's own, which all hosts reach
    interface: str  # as a host sees it; for GLOO_SOCKET_IFNAME and the like
    namespaces: tuple[str, ...]

    def address_of(self, host: int) -> str: ...
    def namespace_of(self, host: int) -> str | None: ...
    def plug(self, host: int) -> None: ...
    def unplug(self, host: int) -> None: ...
    def remove(self, host: int) -> None: ...
    def partition(self, host: int, other: int) -> None: ...
    def heal(self, host: int, other: int) -> None: ...
    def limit(self, host: int, bytes_per_s: int | None) -> None: ...


def _ip(*words: str) -> None:
    """Run one `ip` or (first word `tc`) command.

    Raises:
        NotSupported: it failed; with what it said.
    """
    command = list(words) if words[0] == "tc" else ["ip", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode != 0:
        raise NotSupported(f"`{' '.join(command)}` failed: {done.stderr.strip()}")


@functools.cache
def why_no_namespaces() -> str:
    """Why namespaces cannot be used here; empty if they can. Tried for real, once per process."""
    if shutil.which("ip") is None:
        return "there is no `ip` command (install iproute2)"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    name = f"ckptd-{os.getpid()}-probe"
    try:
        _ip("netns", "add", name)
    except NotSupported as error:
        return str(error)
    try:
        _ip("-n", name, "link", "add", "br0", "type", "bridge")
        _ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", "eth1")
        _ip("netns", "exec", name, "true")
    except NotSupported as error:
        return str(error)
    finally:
        _ip("netns", "del", name)
    return ""


def best_network(tag: str, num_hosts: int) -> Network:
    """Namespaces if they can be had, else loopback addresses."""
    return Loopback() if why_no_namespaces() else Namespaces(tag, num_hosts)


class Namespaces:
    """One namespace per host, and one for the bridge between them.

    Args:
        tag: unique on this machine; namespaces are named `<tag>-…`. At most 9 characters of it
            are used for the one link in the caller's namespace.
    """

    kind = "network namespaces"
    interface = "eth0"

    def __init__(self, tag: str, num_hosts: int) -> None:
        assert 0 < num_hosts <= 80, "the last byte of the addresses would not do"
        self._tag = tag
        self._net = _free_subnet()
        self._cut: set[tuple[int, int]] = set()
        self._limits: dict[int, int] = {}
        self.address = f"{self._net}.1"
        self._switch = f"{tag}-switch"
        self.namespaces = (self._switch, *[f"{tag}-h{host}" for host in range(num_hosts)])

    def open(self) -> None:
        """Make the bridge, and the caller's own wire to it."""
        own = f"ck{self._tag.rsplit('-', 1)[-1][:9]}"
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "br0", "up")
        _ip("link", "add", own, "type", "veth", "peer", "name", "root", "netns", self._switch)
        _ip("-n", self._switch, "link", "set", "root", "master", "br0", "up")
        _ip("addr", "add", f"{self.address}/24", "dev", own)
        _ip("link", "set", own, "up")

    def address_of(self, host: int) -> str:
        return f"{self._net}.{FIRST_HOST + host}"

    def namespace_of(self, host: int) -> str:
        return self.namespaces[1 + host]

    def plug(self, host: int) -> None:
        """Make the host's namespace and its wire; limits and partitions are as they were."""
        name, port = self.namespace_of(host), f"p{host}"
        _ip("netns", "add", name)
        _ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("-n", name, "link", "set", "lo", "up")
        # The same hardware address in every life: the neighbours need not learn a new one.
        _ip("-n", name, "link", "set", "eth0", "address", f"02:cc:00:00:00:{host:02x}", "up")
        _ip("-n", name, "addr", "add", f"{self.address_of(host)}/24", "dev", "eth0")
        _ip("-n", self._switch, "link", "set", port, "master", "br0", "up")
        if host in self._limits:
            self.limit(host, self._limits[host])
        for here, there in [pair for pair in self._cut if pair[0] == host]:
            self.partition(here, there)

    def unplug(self, host: int) -> None:
        """From now on nothing that the host sends leaves it, not even that its connections end."""
        _ip("-n", self._switch, "link", "set", f"p{host}", "down")

    def remove(self, host: int) -> None:
        """Take the host's namespace away; its processes must be gone. `plug` makes a new one."""
        # The link goes first: the kernel deletes a namespace later, and the name would still be taken.
        _ip("-n", self._switch, "link", "del", f"p{host}")
        _ip("netns", "del", self.namespace_of(host))

    def partition(self, host: int, other: int) -> None:
        """Let everything vanish that the host sends to the other one."""
        self._cut.add((host, other))
        target = (self.address_of(other), "lladdr", NOBODY, "dev", "eth0", "nud", "permanent")
        _ip("-n", self.namespace_of(host), "neigh", "replace", *target)

    def heal(self, host: int, other: int) -> None:
        """Undo `partition`; nothing to do where there is none."""
        if (host, other) in self._cut:
            self._cut.discard((host, other))
            target = (self.address_of(other), "dev", "eth0")
            _ip("-n", self.namespace_of(host), "neigh", "del", *target)

    def limit(self, host: int, bytes_per_s: int | None) -> None:
        """At most so many bytes per second out of the host, and as many into it; None: no limit.

        Raises:
            NotSupported: there is no `tc`, or the kernel has no tbf.
        """
        if shutil.which("tc") is None:
            raise NotSupported("there is no `tc` command (install iproute2)")
        ends = ((self.namespace_of(host), "eth0"), (self._switch, f"p{host}"))
        if bytes_per_s is None:
            if self._limits.pop(host, None) is not None:
                for namespace, device in ends:
                    _ip("tc", "-n", namespace, "qdisc", "del", "dev", device, "root")
            return
        self._limits[host] = bytes_per_s
        rate = ("rate", f"{8 * bytes_per_s}bit", "burst", str(BURST_BYTES))
        for namespace, device in ends:
            qdisc = ("qdisc", "replace", "dev", device, "root", "tbf")
            _ip("tc", "-n", namespace, *qdisc, *rate, "latency", f"{QUEUE_MS}ms")


class Loopback:
    """Addresses 127.x.y.z in the machine's own namespace: hosts are told apart, and nothing more."""

    kind = "loopback addresses"
    interface = "lo"
    namespaces: tuple[str, ...] = ()

    def __init__(self) -> None:
        chosen = random.SystemRandom()
        self._net = f"127.{chosen.randrange(60, 250)}.{chosen.randrange(1, 250)}"
        self.address = f"{self._net}.1"

    def address_of(self, host: int) -> str:
        return f"{self._net}.{FIRST_HOST + host}"

    def namespace_of(self, host: int) -> None:
        return None

    def plug(self, host: int) -> None:
        """Nothing to do: every 127.x.y.z is there."""

    def remove(self, host: int) -> None:
        """Nothing to do."""

    def unplug(self, host: int) -> None:
        raise NotSupported("loopback addresses cannot be unplugged")

    def partition(self, host: int, other: int) -> None:
        raise NotSupported("loopback addresses cannot be partitioned")

    def heal(self, host: int, other: int) -> None:
        """Nothing to do: there is never a partition."""

    def limit(self, host: int, bytes_per_s: int | None) -> None:
        if bytes_per_s is not None:
            raise NotSupported("loopback addresses have no bandwidth limit of their own")


def _free_subnet() -> str:
    """The first three bytes of a private /24 that no interface here has."""
    done = subprocess.run(["ip", "-4", "-o", "addr"], capture_output=True, text=True, check=True, timeout=30)
    chosen = random.SystemRandom()
    for _ in range(100):
        net = f"10.{chosen.randrange(190, 240)}.{chosen.randrange(1, 255)}"
        if f" {net}." not in done.stdout:
            return net
    raise NotSupported("no free subnet was found in 10.190.0.0 to 10.239.255.255")
