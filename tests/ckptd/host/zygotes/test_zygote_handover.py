"""A zygote is taken over by the next host that torchrun starts in the same place."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.host.host_links import listen
from ckptd.host.zygotes.zygote_handover import (
    ask_for_zygote,
    differing_variable,
    moved_environment,
    wait_for_successor,
)
from tests.ckptd.host.hosting import Hosting, children_of, gone, until
from tests.ports import free_port

LAUNCHED = {"TORCHELASTIC_RUN_ID": "exp", "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}


def test_what_launchers_say_of_places_may_change_and_nothing_else() -> None:
    zygotes = {"RANK": "3", "MASTER_PORT": "29500", "PATH": "/bin", "TORCHELASTIC_ERROR_FILE": "/a"}
    hosts = {"RANK": "2", "MASTER_PORT": "29501", "PATH": "/bin", "CKPTD_HOST_STOP_S": "3"}
    assert differing_variable(zygotes, hosts, set()) == ""
    assert differing_variable(zygotes, hosts, {"RANK", "PATH"}) == "RANK"
    assert differing_variable(zygotes, {**hosts, "PATH": "/usr/bin"}, set()) == "PATH"
    assert differing_variable(zygotes, {**hosts, "OMP_NUM_THREADS": "1"}, set()) == "OMP_NUM_THREADS"
    assert differing_variable({**zygotes, "DEBUG": ""}, hosts, set()) == "DEBUG"


def test_what_imports_have_changed_stays_changed() -> None:
    zygotes = {"RANK": "3", "A": "1", "B": "2"}
    now = {"RANK": "3", "A": "5", "C": "set by an import"}
    assert moved_environment(zygotes, now, {"RANK": "2", "A": "1", "B": "2"}) == {
        "RANK": "2",
        "A": "5",
        "C": "set by an import",
    }


def test_nobody_waits(tmp_path: Path) -> None:
    assert ask_for_zygote(tmp_path, "zygote-1-2-0.sock", {}, []) is None
    (tmp_path / "zygote-1-2-0.sock").touch()
    assert ask_for_zygote(tmp_path, "zygote-1-2-0.sock", {}, []) is None


TRAINS = """
import json, os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *a: sys.exit(7))
print("to stderr", os.environ["RANK"], file=sys.stderr, flush=True)
print(os.getpid(), os.environ["RANK"], os.environ.get("TORCHELASTIC_RESTART_COUNT"), flush=True)
while not os.path.exists("stop"):
    time.sleep(0.01)
"""


@contextlib.contextmanager
def started(hosting: Hosting, *words: str, env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A host, which is ended at the end."""
    with hosting.start(*words, env=env) as host:
        try:
            yield host
        finally:
            host.kill()


def trainer_of(host: subprocess.Popen[str]) -> tuple[int, str]:
    """Its process id and its rank."""
    assert host.stdout is not None
    pid, rank, _ = host.stdout.readline().split()
    return int(pid), rank


def ended(host: subprocess.Popen[str], number: int = signal.SIGTERM) -> str:
    """End a host as torchrun does when it meets anew; its log."""
    host.send_signal(number)
    return host.communicate(timeout=60)[1]


def zygotes() -> list[int]:
    """Those that wait for a host: orphans, or children of a launcher that adopts them."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            try:
                name = (path / "comm").read_text().strip()
                environ = (path / "environ").read_bytes()
            except OSError:
                continue
            if name == "ckptd-zygote" and f"CKPTD_TEST_OF={os.getpid()}".encode() in environ:
                found.append(int(path.name))
    return found


@pytest.fixture
def of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTD_TEST_OF", str(os.getpid()))


@pytest.mark.usefixtures("of_this_test")
def test_the_next_host_uses_the_zygote_of_the_last_one(hosting: Hosting) -> None:
    """In another place of the job. Output, signals, exit codes and further epochs are as under any host."""
    hosting.write("train.py", TRAINS)
    hosting.known("train.py")
    with started(hosting, "train.py", env={**LAUNCHED, "RANK": "0", "WORLD_SIZE": "1"}) as first:
        assert trainer_of(first)[1] == "0"
        log = ended(first)
    assert first.returncode == -signal.SIGTERM, log
    (zygote,) = zygotes()
    second = {**LAUNCHED, "TORCHELASTIC_RESTART_COUNT": "4", "MASTER_ADDR": "127.0.0.1"}
    with started(hosting, "train.py", env=second) as host:
        trainer, _ = trainer_of(host)
        assert zygotes() == [zygote]
        os.kill(trainer, signal.SIGKILL)
        again, _ = trainer_of(host)
        os.kill(again, signal.SIGUSR1)
        third, _ = trainer_of(host)
        assert len({trainer, again, third}) == 3
        hosting.write("stop", "")
        log = host.communicate(timeout=60)[1]
    assert host.returncode == 0, log
    assert "the zygote of the last start is used" in log
    assert "epoch 1 begins: rank 0: SIGKILL" in log
    assert "epoch 2 begins: rank 0: exit code 7" in log
    assert log.count("to stderr 0") == 3
    until(lambda: gone(zygote), "the end of a zygote whose job has succeeded")


@pytest.mark.usefixtures("of_this_test")
def test_a_zygote_goes_with_its_trainer_and_the_host_makes_another(hosting: Hosting) -> None:
    hosting.write("train.py", TRAINS)
    hosting.known("train.py")
    with started(hosting, "train.py", env=LAUNCHED) as first:
        trainer_of(first)
        ended(first)
    (zygote,) = zygotes()
    with started(hosting, "train.py", env=LAUNCHED) as host:
        trainer, _ = trainer_of(host)
        os.kill(zygote, signal.SIGKILL)
        again, _ = trainer_of(host)
        assert gone(trainer)
        assert gone(zygote)
        assert "ckptd-zygote" in children_of(host.pid), "of this host"
        host.kill()
        until(lambda: gone(again), "the end of the trainer")
        host.communicate(timeout=60)
    until(lambda: zygotes() == [], "the end of the zygote")


@pytest.mark.usefixtures("of_this_test")
def test_a_zygote_and_its_trainer_are_killed_and_the_next_epoch_has_a_store(hosting: Hosting) -> None:
    """The server of stores is a child of the zygote, too, and does not die with it."""
    hosting.write("train.py", TRAINS)
    hosting.known("train.py")
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with started(hosting, "train.py", env={**LAUNCHED, **store}) as first:
        trainer_of(first)
        ended(first)
    (zygote,) = zygotes()
    with started(hosting, "train.py", env={**LAUNCHED, **store}) as host:
        trainer, _ = trainer_of(host)
        until(lambda: "ckptd-store" in children_of(zygote), "a server of stores")
        server = children_of(zygote)["ckptd-store"]
        os.kill(trainer, signal.SIGKILL)
        os.kill(zygote, signal.SIGKILL)
        trainer_of(host)
        assert not gone(server)
        hosting.write("stop", "")
        log = host.communicate(timeout=60)[1]
        assert host.returncode == 0, log
    until(lambda: gone(server), "the end of the server")


def test_a_zygote_in_whose_place_another_one_waits_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No host would ever ask it."""
    monkeypatch.setattr("ckptd.host.zygotes.zygote_handover._LOOK_S", 0.05)
    monkeypatch.setattr("ckptd.host.zygotes.zygote_handover._STANDARD", ())
    torchrun = os.pidfd_open(os.getpid())
    waits = threading.Thread(target=wait_for_successor, args=(tmp_path, "zygote-1.sock", torchrun))
    waits.start()
    until((tmp_path / "zygote-1.sock").exists, "a zygote that waits")
    with listen(tmp_path, "zygote-1.sock", socket.SOCK_SEQPACKET):
        waits.join(60)
        assert not waits.is_alive()
        assert (tmp_path / "zygote-1.sock").exists(), "the other's"
    os.close(torchrun)


@pytest.mark.usefixtures("of_this_test")
def test_a_killed_host_takes_a_zygote_that_it_took_over_along(hosting: Hosting) -> None:
    hosting.write("train.py", TRAINS)
    hosting.known("train.py")
    for _ in range(2):
        with started(hosting, "train.py", env=LAUNCHED) as host:
            trainer, _ = trainer_of(host)
            ended(host)
    with started(hosting, "train.py", env=LAUNCHED) as host:
        trainer, _ = trainer_of(host)
        log = ended(host, signal.SIGKILL)
    assert "the zygote of the last start is used" in log
    until(lambda: gone(trainer) and zygotes() == [], "the end of the trainer and of the zygote")


@pytest.mark.usefixtures("of_this_test")
@pytest.mark.parametrize("what", ["environment", "read", "script"])
def test_a_zygote_that_does_not_fit_is_not_used(hosting: Hosting, what: str) -> None:
    """Its environment is another, or an import has remembered the rank; or another script is started."""
    hosting.write("library/remembers.py", "import os; rank = os.environ['LOCAL_WORLD_SIZE']")
    hosting.write("script/train.py", f"import remembers\n{TRAINS}")
    hosting.known("script/train.py", modules=["json", "remembers"])
    path = f"{hosting.environment()['PYTHONPATH']}:{hosting.folder / 'library'}"
    env = {**LAUNCHED, "PYTHONPATH": path, "LOCAL_WORLD_SIZE": "1"}
    with started(hosting, "script/train.py", env=env) as host:
        trainer_of(host)
        ended(host)
    words = ["script/train.py"]
    if what == "environment":
        env["OMP_NUM_THREADS"] = "3"
    elif what == "read":
        env["LOCAL_WORLD_SIZE"] = "2"
    else:
        words.append("--another")
    with started(hosting, *words, env=env) as host:
        trainer_of(host)
        hosting.write("stop", "")
        log = host.communicate(timeout=60)[1]
    assert "the zygote of the last start is used" not in log
    expected = {"environment": "OMP_NUM_THREADS differs", "read": "LOCAL_WORLD_SIZE differs", "script": ""}
    assert expected[what] in log
    assert re.search(r"a zygote has \d+ modules", log)
    for pid in zygotes():  # of the script without the option: it waits for its own next host
        assert what == "script"
        os.kill(pid, signal.SIGKILL)


LAUNCHER = """
import subprocess, sys, time
with subprocess.Popen(sys.argv[1:], start_new_session=True) as host:
    print(host.pid, flush=True)
    host.wait()
time.sleep(600)
"""


@pytest.mark.usefixtures("of_this_test")
def test_a_zygote_that_waits_ends_with_torchrun(hosting: Hosting) -> None:
    hosting.write("train.py", TRAINS)
    hosting.known("train.py")
    command = [sys.executable, "-c", LAUNCHER, sys.executable, "-m", "ckptd.host", "train.py"]
    environment = hosting.environment(**LAUNCHED)
    with subprocess.Popen(
        command, cwd=hosting.folder, env=environment, stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        host = int(launcher.stdout.readline())
        launcher.stdout.readline()
        os.kill(host, signal.SIGTERM)
        until(lambda: gone(host), "the end of the host")
        (zygote,) = zygotes()
        launcher.kill()
        until(lambda: gone(zygote), "the end of the zygote")
    assert list((hosting.runtime / "host").glob("zygote-*.sock")) == []
