"""The store keeper as a process: asked, killed, started again."""

from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptd.persistence import keeper_wire as w
from ckptd.persistence.keeper_client import AWAY, BUSY, StoreChild

RANK = w.RankName("job", "run", 0)


class Loop:
    """A daemon's loop with nothing in it but a keeper."""

    def __init__(self, url: str, *, silent_s: float = 45.0) -> None:
        self.posted: queue.Queue[Callable[[], None]] = queue.Queue()
        self.died: list[str] = []
        self.skipped_s = 0.0
        self.child = StoreChild(
            w.Configure(url, {}, "auto", 2, 0.0, 20.0, False, w.Retain(1, 0, 0.0)),
            self,
            post=self.posted.put,
            clock=lambda: time.monotonic() + self.skipped_s,
            silent_s=silent_s,
        )

    def keeper_event(self, message: w.KeeperEvent) -> None:
        """Nobody reads a log here."""

    def settled(self, message: w.Settled) -> None:
        """Nothing is committed here."""

    def fenced(self, message: w.RankFenced) -> None:
        """Nothing is committed here."""

    def keeper_died(self, reason: str) -> None:
        self.died.append(reason)

    def run_until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not done():
            assert time.monotonic() < deadline
            try:
                self.posted.get(timeout=0.1)()
            except queue.Empty:
                continue

    def begin(self, message: Any) -> list[Any]:
        """What comes back; a refusal is a (code, reason)."""
        answers: list[Any] = []
        self.child.ask(message, answers.append, lambda code, reason: answers.append((code, reason)))
        return answers

    def open(self) -> Any:
        answers = self.begin(w.OpenRank(self.child.next_id(), RANK, 1, -1))
        self.run_until(lambda: bool(answers))
        return answers[0]


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    made = Loop(f"file://{tmp_path}/store")
    yield made
    made.child.close()


def test_it_starts_with_the_first_question_and_answers(loop: Loop) -> None:
    assert loop.child.pid == 0
    assert isinstance(loop.open(), w.RunOpened)
    assert loop.child.pid > 0


def test_it_ends_with_the_conversation(loop: Loop) -> None:
    loop.open()
    pid = loop.child.pid
    loop.child.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_what_was_asked_fails_when_it_dies_and_it_is_started_again(loop: Loop) -> None:
    loop.open()
    pid = loop.child.pid
    os.kill(pid, signal.SIGSTOP)  # so that it does not answer before
    answers = loop.begin(w.OpenRank(loop.child.next_id(), RANK, 1, -1))
    os.kill(pid, signal.SIGKILL)
    loop.run_until(lambda: bool(answers))
    code, reason = answers[0]
    assert (code, "SIGKILL" in reason) == (AWAY, True)
    assert len(loop.died) == 1
    assert loop.open()[0] == AWAY  # for a moment
    loop.run_until(lambda: isinstance(loop.open(), w.RunOpened))
    assert loop.child.pid not in (0, pid)


def test_a_keeper_that_does_not_read_holds_up_nothing(loop: Loop) -> None:
    loop.open()
    os.kill(loop.child.pid, signal.SIGSTOP)
    begun = time.monotonic()
    for _ in range(2000):
        loop.begin(w.FindStored(loop.child.next_id(), "job", "run", list(range(500))))
    assert time.monotonic() - begun < 20
    loop.child.close()


def test_what_is_too_much_for_it_is_refused_and_does_not_pass_for_its_death(loop: Loop) -> None:
    """Who asks hears of its death from elsewhere, and waited for that, for ever."""
    loop.open()
    os.kill(loop.child.pid, signal.SIGSTOP)
    for _ in range(4096):
        loop.begin(w.FindStored(loop.child.next_id(), "job", "run", []))
    answers = loop.begin(w.FindStored(loop.child.next_id(), "job", "run", []))
    loop.run_until(lambda: bool(answers))
    assert answers[0][0] == BUSY
    assert loop.died == []
    loop.child.close()


def test_a_store_that_cannot_be_opened_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    loop = Loop(f"file://{tmp_path}/file/store")
    code, reason = loop.open()
    assert code == w.FailureCode.STORE
    assert "cannot be opened" in reason
    loop.child.close()


def test_a_keeper_that_hangs_is_killed_and_what_it_was_asked_fails(tmp_path: Path) -> None:
    """A trainer that started while it hung waited for a quarter of an hour, although its state lay
    in storage.
    """
    loop = Loop(f"file://{tmp_path}/store", silent_s=0.5)
    loop.open()
    os.kill(loop.child.pid, signal.SIGSTOP)
    answers = loop.begin(w.FindStored(loop.child.next_id(), "job", "run", [0]))
    loop.skipped_s += 10.0  # nothing was heard for so long: it is asked

    def refused() -> bool:
        loop.child.tick()
        return bool(answers)

    loop.run_until(refused)
    code, reason = answers[0]
    assert code == AWAY
    assert "has not answered" in reason
    assert len(loop.died) == 1
    loop.child.close()


@pytest.mark.parametrize("usable", [True, False])
def test_a_keeper_that_answers_lives_on_however_long_we_were_stopped(tmp_path: Path, usable: bool) -> None:
    """Also where its store cannot be opened."""
    (tmp_path / "file").write_text("in the way")
    loop = Loop(f"file://{tmp_path}/{'' if usable else 'file/'}store", silent_s=5.0)
    loop.open()
    pid = loop.child.pid
    for _ in range(10):
        loop.skipped_s += 100.0
        loop.child.tick()  # asks
        loop.skipped_s += 100.0
        loop.child.tick()
        loop.open()
    assert loop.child.pid == pid
    assert loop.died == []
    loop.child.close()
