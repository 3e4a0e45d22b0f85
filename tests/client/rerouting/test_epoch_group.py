"""A worker hears of epochs, and connects to those that are there."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ckptd.client.rerouting import epoch_group
from ckptd.client.rerouting.epoch_group import (
    EpochGroup,
    EpochLine,
    EpochSeat,
    GroupCall,
    Interrupted,
    meet,
)
from ckptd.restart_line import (
    EPOCH_VARIABLE,
    EndLoop,
    HostEnd,
    JobStart,
    NextEpoch,
    TrainerEnd,
    epoch_and_absent,
    epoch_text,
)
from tests.ckptd.host.hosting import until
from tests.ckptd.restart_ends import inherited_end
from tests.ports import free_port


@pytest.fixture
def host() -> Iterator[HostEnd]:
    end = HostEnd.make()
    yield end
    end.close()


@pytest.fixture
def trainer(host: HostEnd, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainerEnd]:
    with inherited_end(host, monkeypatch) as end:
        yield end


def _offer(host: HostEnd, news: NextEpoch | JobStart | EndLoop) -> None:
    host.receive()
    assert host.offer(os.getpid(), news)


def _begun(host: HostEnd, trainer: TrainerEnd, start: str = "start") -> EpochLine:
    line = EpochLine(trainer, 0)
    _offer(host, JobStart(start))
    return line


def test_an_epoch_is_heard_and_the_next_one_can_be_offered_at_once(
    host: HostEnd, trainer: TrainerEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACE", "old")
    line = EpochLine(trainer, 0)
    assert line.next_epoch(0.0) is None
    _offer(host, NextEpoch(1, {"PLACE": "new"}, "rank 1: SIGKILL"))
    until(lambda: line.heard() == 1, "the news")
    with pytest.raises(Interrupted):
        line.use(EpochGroup(0).links)
    news = line.next_epoch()
    assert isinstance(news, NextEpoch)
    assert (line.epoch, os.environ["PLACE"]) == (1, "new")
    line.use(EpochGroup(0).links)
    assert host.receive() == (os.getpid(), 1)
    line.say("finished")
    host.receive()
    assert [said.word for _, said in host.said] == ["ready", "finished"]
    assert host.offer(os.getpid(), NextEpoch(2, {}, "rank 1 is back", at_boundary=True))
    until(lambda: line.heard() == 2, "the news")
    line.use(EpochGroup(0).links)  # it may end its iteration before
    line.next_epoch()
    _offer(host, EndLoop())
    assert isinstance(line.next_epoch(), EndLoop)


@pytest.mark.parametrize("stuck", [True, False])
def test_a_call_that_outlives_its_connections_ends_the_process(
    host: HostEnd, trainer: TrainerEnd, monkeypatch: pytest.MonkeyPatch, stuck: bool
) -> None:
    """gloo forgets a send now and then whose connection is cut just then: a server stood still for a minute,
    until its host ended the device (`make demo-serving`, 3 of some 100 losses).
    """
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(epoch_group, "_STUCK_S", 0.2)
    line, call = EpochLine(trainer, 0), GroupCall(time.monotonic() if stuck else None)
    line.use(EpochGroup(0).links, call)
    _offer(host, NextEpoch(1, {}, "rank 1: SIGKILL"))
    until(lambda: line.heard() == 1, "the news")
    until(lambda: all(t.name != "ckptd-stuck" for t in threading.enumerate()), "the end of the look")
    assert ended == ([1] if stuck else [])


def test_without_the_host_there_is_no_further_epoch(host: HostEnd, trainer: TrainerEnd) -> None:
    line = EpochLine(trainer, 0)
    host.close()
    with pytest.raises(ConnectionError, match="the host is gone"):
        line.next_epoch()


def test_who_waits_for_the_others_leaves_when_another_epoch_begins(
    host: HostEnd, trainer: TrainerEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    _place(monkeypatch)
    line = EpochLine(trainer, 0)
    _offer(host, NextEpoch(1, {}, "rank 1: SIGKILL"))
    with pytest.raises(Interrupted):
        meet(line, 0, [0, 1], 60.0)


def test_not_all_come_in_time(host: HostEnd, trainer: TrainerEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    _place(monkeypatch)
    line = _begun(host, trainer)
    with pytest.raises(RuntimeError, match=r"rank 1, 3 did not come for 0\.2 s"):
        meet(line, 0, [0, 1, 3], 0.2)


@pytest.mark.parametrize("silence", ["", "60"])
def test_an_error_waits_for_its_reason_as_long_as_a_machine_may_be_silent(
    host: HostEnd, trainer: TrainerEnd, monkeypatch: pytest.MonkeyPatch, silence: str
) -> None:
    """A connection to a machine that has begun anew breaks at once; its host counts as lost only later."""
    monkeypatch.setattr(epoch_group, "_REASON_S", 0.0)
    for name, text in {EPOCH_VARIABLE: "0:", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("CKPTD_HOST_SILENCE_S", silence)
    monkeypatch.setattr(epoch_group, "inherited_line", lambda: trainer)
    seat = EpochSeat()
    seat.take()
    error = RuntimeError("the connection is reset")
    if not silence:
        with pytest.raises(RuntimeError, match="the connection is reset"):
            seat.epoch_after(error)
        return
    lost = NextEpoch(1, {}, "the host of rank 1 is lost")
    later = threading.Timer(0.3, _offer, [host, lost])
    later.start()
    assert seat.epoch_after(error).number == 1
    later.join()


def test_who_came_to_another_start_is_not_here(
    host: HostEnd, trainer: TrainerEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun's store may serve all starts, in which each agent has a count of its own, or none has grown."""
    _place(monkeypatch)
    served = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    line = _begun(host, trainer, "first")
    with pytest.raises(RuntimeError, match=r"rank 1 did not come for 0\.2 s"):
        meet(line, 0, [0, 1], 0.2)
    _offer(host, JobStart("second"))
    until(lambda: line.start() == "second", "the news")
    with pytest.raises(RuntimeError, match=r"rank 0 did not come for 0\.2 s"):
        meet(line, 1, [0, 1], 0.2)
    del served


@pytest.mark.parametrize("gone", [True, False])
def test_whose_host_does_not_meet_the_others_waits_for_nobody(
    host: HostEnd, trainer: TrainerEnd, monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    _place(monkeypatch)
    line = EpochLine(trainer, 0)
    if gone:
        host.close()
    else:
        _offer(host, JobStart(""))
    with pytest.raises(RuntimeError, match="has not met those of the others"):
        meet(line, 0, [0, 1], 60.0)


def test_those_that_are_there_exchange_numbers_and_tensors(
    host: HostEnd, trainer: TrainerEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks are those of the grid, also where some are missing."""
    _place(monkeypatch)
    line, found = _begun(host, trainer), dict[int, tuple[dict[int, list[int]], float]]()

    def work(rank: int) -> None:
        group = meet(line, rank, [1, 2, 5], 60.0)
        got = torch.zeros(2)
        if rank == 5:
            group.send(torch.full((2,), 5.0), 1, 7)
        elif rank == 1:
            group.receive(got, 5, 7)
        found[rank] = group.gather([rank, 10 * rank]), float(got.sum())

    workers = [threading.Thread(target=work, args=(rank,)) for rank in (1, 2, 5)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    told = {rank: [rank, 10 * rank] for rank in (1, 2, 5)}
    assert found == {1: (told, 10.0), 2: (told, 0.0), 5: (told, 0.0)}


def test_the_epoch_in_a_trainers_environment() -> None:
    assert epoch_and_absent(epoch_text(3, {5, 1})) == (3, frozenset({1, 5}))
    assert epoch_and_absent(epoch_text(0, ())) == (0, frozenset())
    with pytest.raises(ValueError, match="CKPTD_HOST_EPOCH='' names no epoch"):
        epoch_and_absent("")


def _place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    for name, text in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{free_port()}",
        "GLOO_SOCKET_IFNAME": "lo",
    }.items():
        monkeypatch.setenv(name, text)


def test_a_group_that_cannot_be_destroyed_holds_up_nobody() -> None:
    """A call in it may go on until its timeout, though its connections were cut."""

    class Group:
        def __del__(self) -> None:
            destroyed.append(threading.current_thread().name)
            goes_on.wait(60)

    destroyed, goes_on = list[str](), threading.Event()
    group = Group()
    epoch_group._let_go(group)
    time.sleep(0.1)
    assert not destroyed, "somebody uses it"
    del group
    until(lambda: destroyed, "its end")
    goes_on.set()
    assert destroyed == ["ckptd-let-go"]


def test_some_of_those_that_are_there_exchange_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any length, and while the others do something else."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{free_port()}", "GLOO_SOCKET_IFNAME": "lo"}
    for name, text in place.items():
        monkeypatch.setenv(name, text)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    found: dict[int, list[list[bytes]]] = {}

    def take_part(rank: int) -> None:
        meeting = epoch_group._Meeting(rank, [0, 1, 3], 60, "here")
        meeting.run()
        assert meeting.found is not None
        if rank:
            payloads = [b"", b"a" * 1000 * rank, b"" if rank == 1 else b"b"]
            found[rank] = [meeting.found.exchange(payload, [3, 1]) for payload in payloads]
        groups.append(meeting.found)
        together.wait(60)  # nobody leaves before

    together, groups = threading.Barrier(3), list[EpochGroup]()
    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in (0, 1, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found[1] == found[3] == [[b"", b""], [b"a" * 3000, b"a" * 1000], [b"b", b""]]
