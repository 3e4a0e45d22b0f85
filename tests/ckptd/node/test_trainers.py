"""A live rank is its process': nobody else attaches, detaches, drops or fills for it, whatever it
says of itself.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptd.core.sessions import RankKey
from ckptd.memory import locks
from ckptd.node.trainers import OwnerTokens
from ckptd.transport import messages as m
from ckptd.transport.wire import RefusedError
from tests.ckptd.running import (
    ROOT,
    DaemonProcess,
    attach,
    eventually,
    fill,
    own,
    reserve,
    running_daemon,
)

KEY = RankKey("job", "run", 0)

# Says that it is this process, and that it holds the locks of all generations; then acts for the rank.
HOSTILE = """
import json, sys
from ckptd.transport import messages as m
from ckptd.transport.wire import ControlClient, RefusedError
endpoint, pid, token = sys.argv[1:4]
said = {}
with ControlClient(endpoint, 20) as client:
    client.request(m.Hello("test", int(pid)))
    wish = m.Attach("job", "run", 0, 1, "dp1", 1, 8 << 20, "", tuple(range(64)), bytes.fromhex(token))
    for message in (wish, m.Drop(0), m.Fetch((m.FetchPiece(bytes(112), (m.FetchSource("a", "b", 0),)),)), m.Detach(True)):
        try:
            client.request(message)
            said[type(message).__name__] = "done"
        except RefusedError as error:
            said[type(message).__name__] = error.code
    client.send(m.Filled(0, 1, 8))
    client.request(m.Ping())
    said["Filled"] = [error.code for error in client.refusals()]
print(json.dumps(said))
"""
REFUSED = {
    "Attach": "rank_taken",
    "Drop": "no_session",
    "Fetch": "no_session",
    "Detach": "no_session",
    "Filled": ["no_session"],
}


def hostile(daemon: DaemonProcess, pid: int, token: bytes = b"guessed") -> dict[str, Any]:
    """What another process of this user is told that claims to be ``pid``."""
    done = subprocess.run(
        [sys.executable, "-c", HOSTILE, daemon.endpoint, str(pid), token.hex()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("token", [b"", b"guessed"])
def test_a_claimed_process_id_takes_no_rank(token: bytes) -> None:
    """Before, the claim made it the same process on a new connection: the owner lost its session,
    and one Detach its memory.
    """
    with running_daemon() as daemon, daemon.client() as client:
        attach(client)
        segment = reserve(client)
        fd = own(segment)
        fill(segment, 0, 7)
        assert hostile(daemon, os.getpid(), token) == REFUSED
        assert client.ask(m.Ping(), m.Pong).attached
        assert segment.path.exists()
        assert client.ask(m.Detach(), m.Done)
        os.close(fd)


def test_also_not_from_a_daemon_that_was_restarted() -> None:
    """It knows no sessions. Before, it believed who came first and said that it held the owner's locks."""
    with running_daemon() as daemon:
        with daemon.client() as client:
            attach(client)
            segment = reserve(client)
            fd = own(segment)
            daemon.kill()
        daemon.start()
        assert hostile(daemon, os.getpid()) == REFUSED
        with daemon.client() as client:
            attached = attach(client, held=(0,))
            assert [found.generation for found in attached.segments] == [0]
            # Nor from one on whose node the owner has not come back yet.
            assert hostile(daemon, os.getpid()) == REFUSED
        os.close(fd)
        # Its process lives, and has given its lock up: the session is what counts.
        assert hostile(daemon, os.getpid())["Attach"] == "rank_taken"


def test_the_owner_comes_back_on_a_new_connection() -> None:
    """Its connection broke, and the daemon does not know yet: the token says that it is the same process."""
    with running_daemon() as daemon, daemon.client() as one, daemon.client() as two:
        attach(one)
        fd = own(reserve(one))
        attach(two, held=(0,))
        assert two.ask(m.Ping(), m.Pong).attached
        assert not one.ask(m.Ping(), m.Pong).attached
        os.close(fd)


def test_the_kernel_says_which_process_a_session_is_of() -> None:
    """It claims to be a process that lives on: before, its rank stayed taken after its end."""
    script = """
import sys
from ckptd.transport import messages as m
from ckptd.transport.wire import ControlClient
client = ControlClient(sys.argv[1], 20)
client.request(m.Hello("test", int(sys.argv[2])))
client.request(m.Attach("job", "run", 0, 1, "dp1", 1, 8 << 20))
print("attached", flush=True)
sys.stdin.read()
"""
    with running_daemon() as daemon, daemon.client() as client:
        process = subprocess.Popen(
            [sys.executable, "-c", script, daemon.endpoint, str(os.getpid())],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "attached\n"
        with pytest.raises(RefusedError, match=f"process {process.pid}") as caught:
            attach(client)
        assert caught.value.code == "rank_taken"
        process.kill()
        process.communicate()
        attach(client)


def test_when_the_owner_is_gone_the_rank_is_free() -> None:
    with running_daemon() as daemon:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.ckptd.running", daemon.endpoint, "run"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        assert hostile(daemon, process.pid) == REFUSED
        process.kill()
        process.communicate()
        fd = os.open(path, os.O_RDWR)
        eventually(lambda: not locks.is_locked(fd, 0, True), "the kernel freed its lock")
        os.close(fd)
        with daemon.client() as client:
            assert len(attach(client).segments) == 1


# Closes its socket, so that the kernel has all of the request once "sent" is printed: what is still in libzmq
# when the process is killed never arrives.
LAST_WORDS = """
import os, sys
import zmq
from ckptd.transport import messages as m
from ckptd.transport.wire import encode
context = zmq.Context()
dealer = context.socket(zmq.DEALER)
dealer.connect(sys.argv[1])
dealer.send_multipart(encode(1, m.Hello("test", os.getpid())))
dealer.recv_multipart()
print("known", flush=True)
sys.stdin.readline()
dealer.send_multipart(encode(2, m.Attach("job", "run", 0, 1, "dp1", 1, 8 << 20)))
dealer.close(linger=-1)
context.term()
print("sent", flush=True)
sys.stdin.read()
"""


def test_a_process_that_has_ended_before_its_attach_is_read_takes_no_rank() -> None:
    """Nothing would tell the daemon of its end: the rank stayed taken until it had been silent for minutes."""
    with running_daemon() as daemon:
        process = subprocess.Popen(
            [sys.executable, "-c", LAST_WORDS, daemon.endpoint],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert daemon.process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "known\n"
        daemon.process.send_signal(signal.SIGSTOP)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "sent\n"
        process.kill()
        process.communicate()
        daemon.process.send_signal(signal.SIGCONT)
        said = f"process {process.pid} has ended before its request"
        eventually(
            lambda: said in daemon.log_text(), "the daemon read the request of the process that has ended"
        )
        with daemon.client() as client:
            attach(client)


def test_tokens_are_kept_for_the_next_daemon_and_not_told(tmp_path: Path) -> None:
    tokens = OwnerTokens(tmp_path)
    assert not tokens.prove(KEY, b"")
    assert not tokens.prove(KEY, b"mine")
    assert tokens.enter(KEY, b"mine", ()) == ""
    assert tokens.prove(KEY, b"mine")
    assert not tokens.prove(KEY, b"yours")
    (file,) = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert b"mine" not in file.read_bytes()
    other = RankKey("job", "run", 1)
    next_one = OwnerTokens(tmp_path)
    assert next_one.prove(KEY, b"mine")
    next_one.enter(other, b"hers", (KEY,))
    assert next_one.prove(KEY, b"mine")
    next_one.enter(other, b"new", ())  # the first rank has no owner any more
    assert not next_one.prove(KEY, b"mine")
    next_one.remove(other)
    assert not OwnerTokens(tmp_path).prove(other, b"new")


def test_who_shows_no_token_cannot_prove_anything(tmp_path: Path) -> None:
    tokens = OwnerTokens(tmp_path)
    tokens.enter(KEY, b"", ())
    assert not tokens.prove(KEY, b"")


def test_a_damaged_file_proves_nothing_and_is_replaced(tmp_path: Path) -> None:
    (tmp_path / ".owners").write_bytes(b"\xc1 not msgpack")
    tokens = OwnerTokens(tmp_path)
    assert not tokens.prove(KEY, b"mine")
    tokens.enter(KEY, b"mine", ())
    assert OwnerTokens(tmp_path).prove(KEY, b"mine")


def test_a_folder_that_is_full_is_said(tmp_path: Path) -> None:
    tokens = OwnerTokens(tmp_path / "gone")
    assert "No such file" in tokens.enter(KEY, b"mine", ())
    assert tokens.prove(KEY, b"mine")  # for as long as this daemon lives
