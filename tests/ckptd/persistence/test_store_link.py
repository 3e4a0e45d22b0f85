"""The question what is durable, put to store keepers that die over it: real processes, a real folder."""

from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ckptd.memory.segment_file import Segment
from ckptd.persistence import keeper_wire as w
from ckptd.persistence.keeper_client import AWAY, StoreChild
from ckptd.persistence.store_link import StoreLink
from ckptd.transport.messages import GetHoldings, Holdings
from tests.ckptd.persistence.slots import descriptor, segment_store
from tests.ckptd.persistence.test_keeper import Desk, checkpoint

SOON_S = 60.0  # other tests may have the machine, too


class Loop:
    """A daemon's loop with nothing in it but a keeper and the link to what it knows."""

    def __init__(self, url: str) -> None:
        self.posted: queue.Queue[Callable[[], None]] = queue.Queue()
        self.died: list[str] = []
        self.skipped_s = 0.0
        self.attached = [0]
        self.child = StoreChild(
            w.Configure(url, {}, "auto", 2, 0.0, 20.0, False, w.Retain(1, 0, 0.0)),
            self,
            post=self.posted.put,
            clock=self.now_s,
        )
        self.link = StoreLink(
            self.child,
            post=self.posted.put,
            ranks_of=lambda job, run: self.attached,
            durable_of=lambda job, run: -1,
            segments=list,
            boot_id="b",
            clock=self.now_s,
        )

    def keeper_event(self, message: w.KeeperEvent) -> None:
        """Nobody reads a log here."""

    def settled(self, message: w.Settled) -> None:
        """Nothing is committed here."""

    def fenced(self, message: w.RankFenced) -> None:
        """Nothing is committed here."""

    def keeper_died(self, reason: str) -> None:
        self.died.append(reason)

    def now_s(self) -> float:
        return time.monotonic() + self.skipped_s

    def ask(self, *, every_rank: bool = False) -> list[Any]:
        """What comes back; a refusal is a (code, reason)."""
        answers: list[Any] = []

        def failed(code: str, reason: str) -> None:
            answers.append((code, reason))

        self.link.ask(GetHoldings("job", "run", every_rank=every_rank), Holdings, answers.append, failed)
        return answers

    def run_until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SOON_S
        while not done():
            assert time.monotonic() < deadline
            self.child.tick()
            self.link.tick()
            try:
                self.posted.get(timeout=0.05)()
            except queue.Empty:
                continue


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[Segment]:
    told = descriptor(client=msgspec.msgpack.encode({"policy": "partial", "operators": []}))
    made = segment_store(tmp_path / "shm").create(told, 6, 1 << 20)
    yield made
    made.close()


@pytest.fixture
def loop(segment: Segment, tmp_path: Path) -> Iterator[Loop]:
    """Of a daemon that was started again: checkpoint 4 is durable, and its keeper is up."""
    desk = Desk(f"file://{tmp_path}/store")
    desk.open()
    checkpoint(desk, segment, 4)
    made = Loop(f"file://{tmp_path}/store")
    answers = made.ask()
    made.run_until(lambda: bool(answers))
    assert isinstance(answers[0], Holdings)
    yield made
    made.child.close()


def test_what_is_durable_is_told_of_ranks_that_are_attached_here_or_of_all(loop: Loop) -> None:
    """`saved_iterations` and `ckptctl whatif` took a run without trainers here for one without checkpoints."""
    loop.attached = []
    found = {every: loop.ask(every_rank=every) for every in (False, True)}
    loop.run_until(lambda: all(found.values()))
    ranks = {every: [segment.rank for segment in held.segments] for every, (held,) in found.items()}
    assert ranks == {False: [], True: [0]}


def test_a_keeper_that_dies_over_the_question_what_is_durable_is_not_the_end_of_it(
    loop: Loop,
) -> None:
    """The trainer that had asked was refused ("what is durable is not known"), and its job did not
    start, although the next keeper knew half a second later. The second one dies over it, too.
    """
    killed = loop.child.pid
    os.kill(killed, signal.SIGSTOP)  # so that it does not answer before
    answers = loop.ask()
    os.kill(killed, signal.SIGKILL)
    loop.run_until(lambda: loop.child.pid not in (0, killed))
    second = loop.child.pid
    os.kill(second, signal.SIGKILL)  # it takes a while to come up
    loop.run_until(lambda: bool(answers))
    (holdings,) = answers
    assert isinstance(holdings, Holdings), holdings
    assert [(len(segment.slots), segment.partial) for segment in holdings.segments] == [(2, True)]
    assert loop.child.pid not in (0, killed, second)
    assert ["SIGKILL" in reason for reason in loop.died] == [True, True]


def test_what_was_found_long_ago_is_forgotten(segment: Segment, tmp_path: Path) -> None:
    """Each recovery from storage finds other checkpoints: descriptors, headers and manifests of all of them were
    kept, here and in the keeper.
    """
    desk = Desk(f"file://{tmp_path}/store", retain=w.Retain(100, 0, 0.0))
    loop = Loop(f"file://{tmp_path}/store")
    desk.open()
    names = []
    for end in range(4, 100, 4):
        checkpoint(desk, segment, end)
        (newest, *_) = desk.find(0)
        names.append(newest.name)
    (run,) = desk.keeper._runs.values()
    assert names[0] not in run._offered
    assert names[-1] in run._offered
    assert len(run._offered) == 16
    for number in range(100):
        assert loop.link._held(msgspec.structs.replace(newest, name=f"job/run/{number}", end=number))
    assert sorted(loop.link._known) == sorted(f"job/run/{number}" for number in range(36, 100))


def test_a_question_that_no_keeper_lives_to_answer_is_given_up(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None can be started any more: who asked hears of it in time, and once."""
    monkeypatch.setattr("ckptd.persistence.keeper_client.sys.executable", "/nowhere/python")
    os.kill(loop.child.pid, signal.SIGKILL)
    answers = loop.ask()
    loop.run_until(lambda: len(loop.died) > 1)
    assert answers == []
    loop.skipped_s += 200.0
    loop.run_until(lambda: bool(answers))
    assert answers[0][0] == AWAY
    loop.child.tick()
    loop.link.tick()
    assert (len(answers), loop.posted.empty()) == (1, True)
