"""A daemon that answers what cannot be meant (of another version, say) is one that is away, not an
error of the job's.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from ckptd.client.daemon_link.session import Session
from ckptd.errors import DaemonUnavailable
from ckptd.transport import messages as m
from ckptd.transport import wire
from ckptd.transport.wire import decode, encode
from tests.client.silent_listener import SilentListener

PIECE = m.FetchPiece(bytes(112), (m.FetchSource("there", "segment", 0),))


class Answers:
    """Answers each message by its type, in a thread; with ``Done`` what is not told. What is in ``first`` is
    answered before that, once.
    """

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"ipc://{folder}/s"
        self.says: dict[type, m.Message] = {
            m.Hello: m.Welcome("1", "here", os.getpid(), str(folder)),
            m.Attach: m.Attached((), 0, 0),
            m.Ping: m.Pong("", attached=True),
        }
        self.first: dict[type, m.Message] = {}
        self._heard: list[type] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    @property
    def heard(self) -> list[type]:
        """Types of the messages that came, in order."""
        return list(self._heard)

    def _serve(self) -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.bind(self.endpoint)
            while not self._over.is_set():
                if router.poll(20):
                    who, *frames = router.recv_multipart()
                    envelope, message = decode(frames)
                    self._heard.append(type(message))
                    kind = type(message)
                    said = self.first.pop(kind, None) or self.says.get(kind, m.Done())
                    router.send_multipart([who, *encode(envelope.id, said)])


@pytest.fixture
def answers(tmp_path: Path) -> Iterator[Answers]:
    found = Answers(tmp_path)
    yield found
    found.close()


def attached(answers: Answers, timeout_s: float = 2) -> Session:
    wish = m.Attach("job", "run", 0, 1, "", 1, 0, "nothing")
    return Session(
        lambda: answers.endpoint,
        wish,
        SilentListener(),
        version="1",
        timeout_s=timeout_s,
    )


@pytest.mark.parametrize(
    ("asks", "text"),
    [
        (lambda session: session.see_run("job", "run", ()), "see run: SeeRun"),
        (lambda session: session.fetch((PIECE,), ()), "fetch: Fetch"),
        (lambda session: session.fetch_state(1), "fetch: GetFetch"),
        (lambda session: session.reserve(4096, 1, b"told"), "reserve: Reserve"),
    ],
)
def test_another_answer_than_the_one_that_was_asked_for_is_said(
    answers: Answers, asks: Callable[[Session], object], text: str
) -> None:
    session = attached(answers)
    try:
        with pytest.raises(DaemonUnavailable, match=f"{text} was answered with Done"):
            asks(session)
    finally:
        session.close()


def test_a_start_waits_for_a_daemon_that_is_being_restarted(answers: Answers) -> None:
    """It had no session when it was asked what there is of the run; the job was refused."""
    seen = m.RunSeen((m.Holdings("here", ()),), ())
    answers.says[m.SeeRun] = seen
    answers.first[m.SeeRun] = m.Refused(m.RefusalCode.NO_SESSION, "no session", "attach first")
    session = attached(answers, timeout_s=60)
    try:
        assert session.see_run("job", "run", ()) == seen
        assert answers.heard.count(m.SeeRun) == answers.heard.count(m.Attach) == 2
        assert session.outages == 1
    finally:
        session.close()


def test_who_is_welcomed_with_something_else_is_not_attached(answers: Answers) -> None:
    answers.says[m.Attach] = m.Done()
    with pytest.raises(DaemonUnavailable, match="answered Attach with Done"):
        attached(answers)


def test_a_placement_too_large_to_be_told_does_not_lose_the_daemon(
    answers: Answers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node = m.ElasticNode("here", 1)
    session = attached(answers)
    try:
        with monkeypatch.context() as small:
            small.setattr(wire, "MAX_BODY_BYTES", 2000)
            session.tell_elastic(m.Elastic(((1,) * 3000,), (node,)))
            assert session.tell("info", "kind", "next", timeout_s=5)
        assert "was not told of the placement" in caplog.text
        assert m.TellElastic not in answers.heard
        session.tell_elastic(m.Elastic(((1,),), (node,)))
        assert session.tell("info", "kind", "next", timeout_s=5)
        assert m.TellElastic in answers.heard
        assert session.connected
        assert session.outages == 0
    finally:
        session.close()
