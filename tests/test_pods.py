"""The pods of the chart, as rendered, in containers: daemon and trainer are apart in users, process numbers,
/dev/shm and files, and share one folder of the node.
"""

from __future__ import annotations

import copy
import json
import os
import secrets
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptd.transport.access.keys import Keys
from tests.chart import ROOT, VALUES, documents, render, why_no_helm
from tests.ckptd.running import eventually
from tests.ckptd.scraped import scrape
from tests.e2e.compare import differences
from tests.long import long
from tests.pods import Pod, why_no_pods
from tests.systemd import Systemd

WHY_NOT = why_no_helm() or why_no_pods()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "they can be started")]
TOTAL, KILL_AT = 60, 40
ALONE = {"peers": {"enabled": False}, "memory": "64Mi"}
# Pods have the network of this machine, and another run of these tests may have some, too.
NETWORK = f"127.{secrets.randbelow(200) + 20}.{secrets.randbelow(250) + 2}"


@pytest.fixture(scope="module")
def machine() -> Iterator[Systemd]:
    with Systemd() as started:
        yield started


def daemon_spec(values: dict[str, Any]) -> dict[str, Any]:
    return dict(render(values)["DaemonSet"]["spec"]["template"]["spec"])


def trainer_spec(folder: str, *arguments: str) -> dict[str, Any]:
    """The example's pod with a small script in it, beside a daemon with this folder."""
    text = (ROOT / "deploy/kubernetes/train.yaml").read_text()
    _, job = documents(text.replace("/var/lib/ckptd", folder))
    spec: dict[str, Any] = copy.deepcopy(job["spec"]["template"]["spec"])
    (container,) = spec["containers"]
    container["env"] = [each for each in container["env"] if each["name"].startswith("CKPTD_")]
    container["env"].append({"name": "OMP_NUM_THREADS", "value": "1"})
    container["command"], container["args"] = ["python3", "-m", "tests.e2e.job"], ["plain", *arguments]
    spec["volumes"].append({"name": "out", "hostPath": {"path": "/srv/out"}})
    container["volumeMounts"].append({"name": "out", "mountPath": "/out"})
    return spec


def probe(pod: Pod, name: str) -> int:
    """The exit code of a probe's command."""
    command = pod.spec["containers"][0][f"{name}Probe"]["exec"]["command"]
    return pod.exec("ckptd", *command).returncode


def status(pod: Pod) -> dict[str, Any]:
    done = pod.exec("ckptd", "ckptctl", "status", "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


class Pods:
    """Those of one test on a node; what is left of them is killed."""

    def __init__(self, machine: Systemd) -> None:
        self.machine = machine
        self.out = machine.root / "srv/out"
        self._started: list[Pod] = []
        machine.run("install", "-d", "-m", "1777", "/srv/out")

    def daemon(self, values: dict[str, Any], node: str = "node-1", **more: Any) -> Pod:
        """Started, and past its startup probe."""
        pod = Pod(self.machine, daemon_spec(values), node, **{"address": f"{NETWORK}.1", **more})
        self._started.append(pod)
        pod.start("ckptd")
        eventually(lambda: probe(pod, "startup") == 0, "it answers")
        return pod

    def trainer(self, out: str, *arguments: str, folder: str = "/var/lib/ckptd") -> Pod:
        """Started; it writes its final state to this file."""
        files = ("--out", f"/out/{out}.pt", "--progress", f"/out/{out}.progress")
        spec = trainer_spec(folder, "--total", str(TOTAL), *files, *arguments)
        pod = Pod(self.machine, spec, "node-1")
        self._started.append(pod)
        pod.start("train")
        return pod

    def reached(self, out: str) -> int:
        """The step of a trainer; -1 before the first one."""
        path = self.out / f"{out}.progress"
        return int(path.read_text().split()[0]) if path.exists() else -1

    def close(self) -> None:
        for pod in self._started:
            if pod.is_running:
                pod.signal(signal.SIGKILL)
        self.machine.run("find", "/srv/out", "-mindepth", "1", "-delete")


@pytest.fixture
def pods(machine: Systemd) -> Iterator[Pods]:
    made = Pods(machine)
    yield made
    made.close()


@pytest.mark.parametrize("host_pid", [False, pytest.param(True, marks=long)])
def test_a_trainers_pod_resumes_from_the_memory_of_the_daemons_pod(
    pods: Pods, tmp_path: Path, host_pid: bool
) -> None:
    """The trainer is killed, then the daemon's pod is replaced, as by an upgrade."""
    values = {**ALONE, "hostPID": host_pid}
    daemon = pods.daemon(values)
    with_daemon = ("--daemon", "auto", "--run", f"r{host_pid:d}", "--step-ms", "20")
    first = pods.trainer("first", *with_daemon, "--linger-at", str(KILL_AT))
    eventually(lambda: pods.reached("first") == KILL_AT, "it has come there")
    (session,) = status(daemon)["sessions"]
    assert session["watched_by"] == ("pidfd" if host_pid else "owner-lock")
    assert first.signal(signal.SIGKILL) == 128 + signal.SIGKILL
    eventually(lambda: not status(daemon)["sessions"], "its death is noticed")
    assert daemon.signal(signal.SIGTERM) == 0
    daemon = pods.daemon(values)
    assert probe(daemon, "readiness") == probe(daemon, "liveness") == 0
    assert status(daemon)["counters"]["event.adopted"] >= 1
    assert scrape(f"{NETWORK}.1:9464")
    again, reference = pods.trainer("again", *with_daemon, "--seed", "7"), pods.trainer("reference")
    assert again.end() == 0, again.log
    assert reference.end() == 0, reference.log
    assert json.loads((pods.out / "again.json").read_text())["resumed_from"] > KILL_AT - 6
    for name in ("again.pt", "reference.pt"):
        shutil.copy(pods.out / name, tmp_path)
    assert differences(tmp_path / "again.pt", tmp_path / "reference.pt") == []


@long
def test_a_daemon_that_is_only_busy_lives(pods: Pods) -> None:
    daemon = pods.daemon(ALONE)
    pid = daemon.pid
    os.kill(pid, signal.SIGSTOP)
    going_on = threading.Timer(8, os.kill, (pid, signal.SIGCONT))
    going_on.start()
    assert probe(daemon, "liveness") == 0, "it answers late"
    going_on.join()
    os.kill(pid, signal.SIGSTOP)
    assert probe(daemon, "liveness") == 1, "it does not answer for half a minute"
    os.kill(pid, signal.SIGCONT)
    assert probe(daemon, "liveness") == 0


@long
def test_nodes_trust_each_other_by_the_secret(pods: Pods) -> None:
    """Made as docs/kubernetes.md says; the pod of a node without keys says what is missing."""
    nodes = {"node-1": f"{NETWORK}.1", "node-2": f"{NETWORK}.2"}
    made = Path(tempfile.mkdtemp(prefix="ckptd-keys-"))
    for node in nodes:
        Keys.create(made / node)
        for end in ("key", "key_secret"):
            shutil.copy(made / node / f"node.{end}", pods.machine.root / f"srv/out/{node}.{end}")
    shutil.rmtree(made)
    pods.machine.run("cp", "-rT", "/srv/out", "/srv/secret")
    pods.machine.run("chmod", "-R", "a+rX", "/srv/secret")
    more = {"secret_folders": {"ckptd-keys": "/srv/secret"}}
    started = []
    for node, address in nodes.items():
        others = ",".join(f"{other}=tcp://{at}:7077" for other, at in nodes.items() if other != node)
        values = VALUES | {"memory": "64Mi", "hostFolder": f"/var/lib/{node}", "settings": {"peers": others}}
        started.append(pods.daemon(values, node, address=address, **more))

    options = ("--daemon", "auto", "--run", "r", "--step-ms", "20", "--linger-at", str(KILL_AT))
    pods.trainer("replicated", *options, folder="/var/lib/node-1")
    replicas = pods.machine.root / "var/lib/node-2/memory/segments"
    eventually(lambda: list(replicas.glob("*.rep")) != [], "the other node holds a replica")
    done = started[0].exec("ckptd", "ckptctl", "peers", "--json")
    assert json.loads(done.stdout)["encryption"] == "AES-256-GCM"
    with pytest.raises(AssertionError, match=r"the Secret ckptd-keys has no node-3\.key"):
        pods.daemon(VALUES | {"memory": "64Mi", "hostFolder": "/var/lib/node-3"}, "node-3", **more)


def test_a_node_without_its_tmpfs_is_refused(pods: Pods) -> None:
    """With ``mount: false`` no container is privileged, and none would put snapshots on a disk."""
    with pytest.raises(AssertionError, match="no tmpfs is mounted at /var/lib/other/memory"):
        pods.daemon({**ALONE, "mount": False, "hostFolder": "/var/lib/other"})
    pods.machine.run("mkdir", "-p", "/var/lib/other/memory")
    pods.machine.run("mount", "-t", "tmpfs", "-o", "size=64M,mode=0755", "ckptd", "/var/lib/other/memory")
    daemon = pods.daemon({**ALONE, "mount": False, "hostFolder": "/var/lib/other"})
    assert status(daemon)["quota_bytes"] == 64 << 20
