"""A daemon that a trainer starts for itself: once, whoever asks, and it survives who asked."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.config import runtime_dir
from ckptd.errors import DaemonUnavailable
from ckptd.launch import answers, ensure_daemon
from ckptd.transport.messages import GetStatus, Status
from ckptd.transport.wire import ControlClient
from tests.ckptd.running import ROOT, eventually
from tests.users import STRANGER, needs_users

ASK = (
    "import sys; from ckptd.launch import ensure_daemon; "
    "print(ensure_daemon(sys.argv[1], segment_dir=sys.argv[2], memory='16MiB'))"
)


@pytest.fixture
def folders() -> Iterator[tuple[Path, Path]]:
    """A runtime and a segment folder; a daemon that was started there is ended."""
    runtime = Path(tempfile.mkdtemp(prefix="ckptd-l-"))
    segments = Path(f"/dev/shm/ckptd-test-{secrets.token_hex(6)}")
    yield runtime, segments
    lock = runtime / ".ckptd.lock"
    if lock.exists() and answers(f"ipc://{runtime}/ckptd.sock"):
        os.kill(int(lock.read_text().split()[0]), signal.SIGTERM)
        eventually(lambda: not answers(f"ipc://{runtime}/ckptd.sock"), "the daemon ended")
    shutil.rmtree(runtime, ignore_errors=True)
    shutil.rmtree(segments, ignore_errors=True)


def test_several_ranks_get_one_daemon_that_outlives_them(folders: tuple[Path, Path]) -> None:
    runtime, segments = folders
    command = [sys.executable, "-c", ASK, str(runtime), str(segments)]
    ranks = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    endpoints = {rank.communicate(timeout=60)[0].strip() for rank in ranks}
    assert endpoints == {f"ipc://{runtime}/ckptd.sock"}
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    with ControlClient(endpoints.pop()) as client:
        status = client.ask(GetStatus(), Status)
    assert status.quota_bytes == 16 << 20
    assert (runtime / "ckptd.log").read_text().count("started:") == 1
    assert os.getsid(status.pid) == status.pid  # no signal to the trainers' group reaches it


def test_a_daemon_that_answers_is_used(folders: tuple[Path, Path]) -> None:
    runtime, segments = folders
    first = ensure_daemon(str(runtime), segment_dir=str(segments))
    assert ensure_daemon(str(runtime), segment_dir=str(segments)) == first
    assert (runtime / "ckptd.log").read_text().count("started:") == 1


def test_a_daemon_beside_that_of_a_service_is_told(
    folders: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A trainer without CKPTD_RUNTIME_DIR took half of the memory once more, and nothing said so."""
    runtime, segments = folders
    monkeypatch.delenv("CKPTD_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(runtime_dir, "_RUN", tmp_path)
    (tmp_path / "ckptd").mkdir()
    (tmp_path / "ckptd" / "ckptd.sock").touch()
    ensure_daemon(str(runtime), segment_dir=str(segments))
    assert f"To use the service's, export CKPTD_RUNTIME_DIR={tmp_path}/ckptd" in caplog.text


def test_a_daemon_that_cannot_start_shows_the_end_of_its_log(folders: tuple[Path, Path]) -> None:
    runtime, _ = folders
    with pytest.raises(DaemonUnavailable, match="exited with code 4") as caught:
        ensure_daemon(str(runtime), segment_dir="/proc/segments")
    assert "cannot create the segment folder /proc/segments" in str(caught.value)


def test_a_bad_setting_is_said_before_anything_is_started(folders: tuple[Path, Path]) -> None:
    runtime, _ = folders
    with pytest.raises(DaemonUnavailable, match="memory = 'much'"):
        ensure_daemon(str(runtime), memory="much")
    assert not (runtime / "ckptd.log").exists()


@needs_users
def test_a_folder_that_another_user_made_first_starts_nothing(folders: tuple[Path, Path]) -> None:
    """He may listen there: he is not asked, no daemon is started in his folder, and `ckptctl` says the same."""
    runtime, segments = folders
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{runtime}/ckptd.sock")
        listener.listen()
        os.chown(runtime, STRANGER, STRANGER)
        with pytest.raises(DaemonUnavailable, match=f"owner {STRANGER}, mode 0700.*expected user"):
            ensure_daemon(str(runtime), segment_dir=str(segments))
        done = subprocess.run(
            [sys.executable, "-m", "ckptd.ctl", "status"],
            env=dict(os.environ, CKPTD_RUNTIME_DIR=str(runtime)),
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 3
        assert f"owner {STRANGER}, mode 0700" in done.stderr
        assert sorted(path.name for path in runtime.iterdir()) == ["ckptd.sock"]
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()  # nobody has even connected


def test_a_start_that_never_ends_is_bounded(folders: tuple[Path, Path]) -> None:
    """Another process holds the start lock and does not get on."""
    runtime, segments = folders
    fd = os.open(runtime / ".start.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.raises(DaemonUnavailable, match="has been starting a daemon"):
            ensure_daemon(str(runtime), segment_dir=str(segments), timeout_s=0.3)
    finally:
        os.close(fd)


def test_a_trainer_waits_for_the_daemon_of_another_user_and_starts_none(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Kubernetes and at boot a trainer may come before the daemon of its node; a daemon of its own would
    then be in that one's folders.
    """
    runtime, segments = folders
    runtime.rmdir()
    monkeypatch.setenv("CKPTD_DAEMON_USER", str(STRANGER))
    with pytest.raises(DaemonUnavailable, match=f"user {STRANGER} runs it"):
        ensure_daemon(str(runtime), segment_dir=str(segments), timeout_s=0.3)
    assert not runtime.exists()
    env = dict(os.environ)
    del env["CKPTD_DAEMON_USER"]
    late = f"import time; time.sleep(0.5); {ASK}"
    command = [sys.executable, "-c", late, str(runtime), str(segments)]
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE) as daemon:
        endpoint = ensure_daemon(str(runtime), segment_dir=str(segments))
        assert daemon.stdout is not None
        assert daemon.stdout.read().decode().strip() == endpoint
