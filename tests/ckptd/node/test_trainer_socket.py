"""Trainers of other users at a socket that this process reads when it likes."""

from __future__ import annotations

import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import Mock

import pytest

from ckptd.config.settings import DaemonConfig
from ckptd.event_log import EventLog
from ckptd.node import trainer_socket
from ckptd.node.trainer_socket import TrainerSocket
from ckptd.node_context import NodeContext
from ckptd.transport import messages as m
from ckptd.transport.access.local_trust import OVERFLOW_UID
from tests.ckptd.running import eventually
from tests.users import GROUP, TRAINER, needs_users, spawn_as

pytestmark = needs_users
IMPORTS = """
import zmq
from ckptd.transport import messages as m
from ckptd.transport.wire import decode, encode
"""
ASK = """
context = zmq.Context()
socket = context.socket(zmq.DEALER)
socket.connect(sys.argv[3])
socket.send_multipart(encode(1, m.Ping()))
_, answer = decode(socket.recv_multipart())
print(repr(answer), flush=True)
sys.stdin.readline()
"""
LAST_WORDS = """
socket.send_multipart(encode(2, m.Report(7, {})))
socket.send_multipart(encode(3, m.Notice("error", "crashed", "out of memory")))
socket.close(linger=-1)
context.term()
"""


@dataclass
class Listening:
    """The socket of a daemon with a trainer group; `heard` are the messages that it served."""

    socket: TrainerSocket
    endpoint: str
    events: EventLog
    heard: list[tuple[m.Message, int, int]] = field(default_factory=list)

    @contextmanager
    def asked_by(self, user: int, script: str = "") -> Iterator[tuple[subprocess.Popen[str], str]]:
        """A process of this user, a member of the group, that was answered; and the answer."""
        process = spawn_as(user, ASK + script, self.endpoint, imports=IMPORTS, groups=(GROUP,))
        stdout = process.stdout
        assert stdout is not None
        try:

            def answered() -> bool:
                self.socket.receive()
                return bool(select.select([stdout], [], [], 0)[0])

            eventually(answered, "it is answered")
            yield process, stdout.readline()
        finally:
            process.communicate("\n", timeout=60)


@pytest.fixture
def listening(request: pytest.FixtureRequest) -> Iterator[Listening]:
    folder = Path(tempfile.mkdtemp(prefix="ckptd-s-", dir="/tmp"))
    folder.chmod(0o755)
    endpoint, events = f"ipc://{folder}/s", EventLog(100)
    isolated = getattr(request, "param", False)
    config = DaemonConfig(listen=endpoint, trainer_group=str(GROUP), isolate_users=isolated)

    def serve(_: bytes, message: m.Message, answer: object, process: int, user: int) -> None:
        made.heard.append((message, process, user))
        if isinstance(message, m.Ping):
            assert callable(answer)
            answer(m.Pong("boot", False))

    made = Listening(
        TrainerSocket(NodeContext(config, Mock(), events, lambda work: work()), GROUP, serve),
        endpoint,
        events,
    )
    made.socket.open()
    try:
        yield made
    finally:
        made.socket.close()
        made.socket.end()
        shutil.rmtree(folder)


def is_connected(endpoint: str) -> bool:
    """Whether the endpoint has a connection that is not closed here; the kernel lists the listener, too."""
    table = Path("/proc/net/unix").read_text(encoding="ascii", errors="replace")
    return table.count(f" {endpoint.removeprefix('ipc://')}\n") > 1


def test_the_last_words_of_a_trainer_are_heard_after_its_connection_is_closed(listening: Listening) -> None:
    with listening.asked_by(TRAINER, LAST_WORDS) as (trainer, said):
        assert said.startswith("Pong")
        assert is_connected(listening.endpoint)
    assert trainer.returncode == 0
    eventually(lambda: not is_connected(listening.endpoint), "its connection is closed here")
    listening.socket.receive()
    assert [message for message, _, _ in listening.heard] == [
        m.Ping(),
        m.Report(7, {}),
        m.Notice("error", "crashed", "out of memory"),
    ]
    assert {(process, user) for _, process, user in listening.heard} == {(trainer.pid, TRAINER)}
    assert [event.kind for event in listening.events.page(0, 100).events] == []


def test_a_bounded_number_of_members_is_remembered(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_socket, "_MAX_MEMBERS", 1)
    with listening.asked_by(TRAINER), listening.asked_by(TRAINER):
        assert len(listening.socket._members) == 1


@pytest.mark.parametrize("listening", [True, False], indirect=True, ids=["apart", "together"])
def test_a_user_without_a_number_is_refused_where_users_are_kept_apart(
    listening: Listening, request: pytest.FixtureRequest
) -> None:
    with listening.asked_by(OVERFLOW_UID) as (process, said):
        if "together" in request.node.name:
            assert said.startswith("Pong")
            return
        assert "not_member" in said
        assert f"the user of process {process.pid} has no number of its own" in said
        assert "uid_map" in said
    assert listening.heard == []
