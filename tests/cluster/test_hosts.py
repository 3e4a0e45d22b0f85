"""Hosts of a cluster on one machine: what is destroyed is gone, what is cut is silent, and nothing
is left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ckptd.running import eventually
from tests.cluster.hosts import Cluster, Host, NotSupported
from tests.cluster.leftovers import REPOSITORY, processes_of

SERVER = """
import socket, sys, threading
listener = socket.create_server((sys.argv[1], 7000))
def serve(peer):
    while data := peer.recv(65536):
        peer.sendall(data)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""
CLIENT = """
import socket, sys
peer = socket.create_connection((sys.argv[1], 7000), timeout=float(sys.argv[2]))
peer.sendall(b"hello")
print("answer", peer.recv(5).decode())
"""


def _serve(host: Host, log: Path) -> subprocess.Popen[bytes]:
    process = host.python("-c", SERVER, host.address, log=log)
    eventually(lambda: _call_works(host.address), f"a server on {host}")
    return process


def _call_works(address: str) -> bool:
    try:
        with socket.create_connection((address, 7000), timeout=1) as peer:
            peer.sendall(b"x")
            return peer.recv(1) == b"x"
    except OSError:
        return False


def _ask(host: Host, other: Host, log: Path, timeout_s: float = 5.0) -> bool:
    """Whether a new connection from one host to the server of the other works."""
    log.unlink(missing_ok=True)
    client = host.python("-c", CLIENT, other.address, str(timeout_s), log=log)
    return client.wait(30) == 0 and "answer hello" in log.read_text()


@pytest.fixture
def namespaces(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, healed and unlimited afterwards; skips where hosts are only addresses."""
    if cluster.network.kind != "network namespaces":
        pytest.skip(f"needs network namespaces, this is {cluster}")
    yield cluster
    for host in cluster.hosts:
        host.heal()
        host.limit(None)
        host.kill_all()


def test_hosts_have_addresses_of_their_own_and_reach_each_other(cluster: Cluster, tmp_path: Path) -> None:
    first, second = cluster.hosts
    assert len({cluster.head.address, first.address, second.address, cluster.address}) == 4
    _serve(first, tmp_path / "server")
    assert _ask(second, first, tmp_path / "client")
    first.kill_all()
    assert not _ask(second, first, tmp_path / "client")


def test_a_destroyed_host_loses_every_descendant_and_its_memory(cluster: Cluster, tmp_path: Path) -> None:
    """Also a process in a session of its own, started by one that has ended; the other host keeps
    what it has.
    """
    first, second = cluster.hosts
    for host in (first, second):
        (host.segment_dir / "segment").write_bytes(b"memory")
        (host.runtime_dir / "node_id").write_bytes(b"name")
    orphan = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)"
    first.python("-c", orphan, log=tmp_path / "orphan").wait(20)
    kept = second.start(["sleep", "600"], log=tmp_path / "kept")
    eventually(lambda: bool(first.pids()), "the orphan runs")
    first.destroy()
    assert first.pids() == set()
    assert not first.segment_dir.exists()
    assert not first.runtime_dir.exists()
    first.boot()
    assert list(first.segment_dir.iterdir()) == []
    assert list(first.runtime_dir.iterdir()) == []
    assert (second.segment_dir / "segment").read_bytes() == b"memory"
    assert kept.poll() is None
    second.kill_all()
    assert kept.poll() == -signal.SIGKILL


def test_connections_of_a_destroyed_host_end_at_once(cluster: Cluster, tmp_path: Path) -> None:
    first, _ = cluster.hosts
    _serve(first, tmp_path / "server")
    with socket.create_connection((first.address, 7000), timeout=10) as peer:
        peer.sendall(b"x")
        assert peer.recv(1) == b"x"
        first.destroy()
        first.boot()
        with contextlib.suppress(ConnectionResetError):  # the kernel's other way to say it
            assert peer.recv(1) == b""


def test_a_host_without_power_says_nothing(namespaces: Cluster, tmp_path: Path) -> None:
    first, _ = namespaces.hosts
    _serve(first, tmp_path / "server")
    with socket.create_connection((first.address, 7000), timeout=10) as peer:
        peer.sendall(b"x")
        assert peer.recv(1) == b"x"
        first.destroy(silent=True)
        peer.settimeout(0.5)
        with pytest.raises(TimeoutError):
            peer.recv(1)
    first.boot()
    _serve(first, tmp_path / "server")  # its address works again in its next life


def test_a_partition_is_silent_and_heals(namespaces: Cluster, tmp_path: Path) -> None:
    """New and old connections hang, the head and this process still reach both; afterwards all is as before."""
    first, second = namespaces.hosts
    _serve(first, tmp_path / "server")
    assert _ask(second, first, tmp_path / "client")
    first.partition([second])
    assert not _ask(second, first, tmp_path / "client", timeout_s=1)
    assert "timed out" in (tmp_path / "client").read_text()
    assert _ask(namespaces.head, first, tmp_path / "client")
    assert _call_works(first.address)
    first.heal()
    assert _ask(second, first, tmp_path / "client")


def test_a_partition_outlasts_a_reboot(namespaces: Cluster, tmp_path: Path) -> None:
    first, second = namespaces.hosts
    first.partition([second])
    first.destroy()
    first.boot()
    _serve(first, tmp_path / "server")
    assert not _ask(second, first, tmp_path / "client", timeout_s=1)
    first.heal()
    assert _ask(second, first, tmp_path / "client")


def test_bandwidth_is_limited_both_ways_and_freed(namespaces: Cluster, tmp_path: Path) -> None:
    """4 MiB there and back at 8 MiB/s each way: half a second, less what the bucket lets through at once."""
    first, _ = namespaces.hosts
    _serve(first, tmp_path / "server")

    def seconds() -> float:
        begun, size, sent = time.monotonic(), 4 << 20, 0
        with socket.create_connection((first.address, 7000), timeout=20) as peer:
            while sent < size:
                peer.sendall(bytes(1 << 16))
                left = 1 << 16
                while left:
                    left -= len(peer.recv(left))
                sent += 1 << 16
        return time.monotonic() - begun

    first.limit(8 << 20)
    limited = seconds()
    assert limited > 0.4
    first.limit(None)
    assert seconds() < limited / 2


def test_without_namespaces_hosts_are_addresses_and_say_so(tmp_path: Path) -> None:
    with Cluster(2, kind="loopback") as cluster:
        first, second = cluster.hosts
        assert str(cluster) == "a cluster of 2 hosts on loopback addresses (asked for)"
        assert {h.address.partition(".")[0] for h in cluster.hosts} == {"127"}
        _serve(first, tmp_path / "server")
        assert _ask(second, first, tmp_path / "client")
        with pytest.raises(NotSupported, match="partition"):
            first.partition([second])
        with pytest.raises(NotSupported, match="bandwidth"):
            first.limit(1000)
        with pytest.raises(NotSupported, match="unplugged"):
            first.destroy(silent=True)
        first.destroy()
        first.boot()
        assert first.pids() == set()
        assert not _ask(second, first, tmp_path / "client")


OWNER = """
import json, os, sys, time
from pathlib import Path
from tests.cluster.hosts import Cluster
with Cluster(1) as cluster:
    host = cluster.hosts[0]
    host.start(["sleep", "600"], log=Path(os.devnull))
    names = {"folder": str(host.segment_dir.parent), "marker": host.marker, "namespaces": cluster.network.namespaces}
    print(json.dumps(names), flush=True)
    if sys.argv[1] == "error":
        raise RuntimeError("something went wrong in the block")
    time.sleep(600)
"""


@pytest.mark.parametrize("end", ["error", "kill"])
def test_nothing_is_left_however_the_owner_ends(end: str) -> None:
    """By an exception in the block, or by SIGKILL, after which only the guardian can clean up."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, end],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with owner:
        assert owner.stdout is not None
        names = json.loads(owner.stdout.readline())
        if end == "kill":
            owner.kill()
        owner.wait(30)
    eventually(lambda: not Path(names["folder"]).exists(), "its folders are gone")
    assert processes_of(names["marker"], None) == set()
    paths = [Path("/run/netns", name) for name in names["namespaces"]]
    eventually(lambda: not any(path.exists() for path in paths), "its namespaces are gone")
