"""The workers that are there in one epoch of the job, and the connections between them.

Who is there is not found out here: the host says it (`ckptd.host.rerouted_epochs`), as it says that an epoch
begins. A thread hears that, and cuts the connections, so that nobody waits for a worker that has died.

A group is gloo's own, unknown to `torch.distributed`: it is made anew in each epoch, in a thread that can be
left alone if somebody dies meanwhile.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
)

from ckptd.client.in_process.rank_links import RankLinks
from ckptd.client.log_lines import get_logger
from ckptd.client.ranks.collectives import Collectives
from ckptd.cuda.quiet_threads import start_loud, waiting
from ckptd.restart_line import (
    EPOCH_VARIABLE,
    EndLoop,
    JobStart,
    NextEpoch,
    TrainerEnd,
    TrainerSaid,
    epoch_and_absent,
    inherited_line,
)

logger = get_logger(__name__)

_LOOK_S = 0.005
_LOOK_SLOWLY_S = 0.05
_OWN_REFERENCES = 2  # of a local variable, and of the call that counts them
# For how long the reason of an error may be unknown; on another machine, for so much longer as that may be
# silent until its host counts as lost.
_REASON_S = 20.0
_SILENCE = "CKPTD_HOST_SILENCE_S"
# If a connection is cut during a send, gloo may fail to wake its waiter (`UnboundBuffer::waitSend`, seen with
# torch 2.13): the call then lasts as long as its timeout.
_STUCK_S = 5.0
_TIMEOUT_S = 1800.0  # of connecting, and of each message, as in torch
_LENGTH, _PAYLOAD = 2, 3  # tags of an exchange between some of the workers


class Interrupted(Exception):
    """Another epoch has begun: what is under way does not count."""


OF_CALLS = (RuntimeError, OSError, Interrupted)
"""What a call of a group raises if another worker has died."""


@dataclass
class GroupCall:
    """When the call began in which this worker waits for its group; None: it waits for none."""

    begun_s: float | None = None


@dataclass(frozen=True)
class EpochGroup:
    """One worker's place among those of an epoch.

    Attributes:
        numbers: of each rank that is there: its rank in ``group``.
        group: of gloo.
        store: by which they have met; one for each epoch.
    """

    rank: int
    numbers: Mapping[int, int] = field(default_factory=dict)
    group: Any = None
    store: Any = None
    links: RankLinks = field(default_factory=RankLinks)
    call: GroupCall = field(default_factory=GroupCall)

    def finish(self, work: Any) -> None:
        """Wait for the end of a call."""
        self.call.begun_s = time.monotonic()
        try:
            work.wait()
        finally:
            self.call.begun_s = None

    def begin_gather(self, values: Sequence[int]) -> tuple[Any, list[Tensor]]:
        """Begin to tell all some numbers; what they tell is there, by rank in the group, after `finish`."""
        told = [torch.zeros(len(values), dtype=torch.int64) for _ in self.numbers]
        return self.group.allgather([told], [torch.tensor(values, dtype=torch.int64)]), told

    def gather(self, values: Sequence[int]) -> dict[int, list[int]]:
        """What all tell, by rank."""
        work, told = self.begin_gather(values)
        self.finish(work)
        return {rank: told[number].tolist() for rank, number in self.numbers.items()}

    def send(self, tensor: Tensor, rank: int, tag: int) -> None:
        """Send a tensor, and wait until it has left."""
        self.finish(self.group.send([tensor], self.numbers[rank], tag))

    def receive(self, tensor: Tensor, rank: int, tag: int) -> None:
        """Wait for a tensor."""
        self.finish(self.group.recv([tensor], self.numbers[rank], tag))

    def exchange(self, payload: bytes, ranks: Sequence[int]) -> list[bytes]:
        """The payloads of some ranks, this one among them, in their order; a collective call of these."""
        lengths = self._swap(
            {r: torch.tensor([len(payload)]) for r in ranks}, dict.fromkeys(ranks, 1), _LENGTH
        )
        mine = torch.frombuffer(bytearray(payload or b"\0"), dtype=torch.uint8)
        coming = {rank: int(lengths[rank]) for rank in ranks}
        told = self._swap(
            {r: mine for r in ranks if payload}, {r: n for r, n in coming.items() if n}, _PAYLOAD
        )
        return [told[rank].numpy().tobytes() if coming[rank] else b"" for rank in ranks]

    def _swap(self, out: Mapping[int, Tensor], sizes: Mapping[int, int], tag: int) -> dict[int, Tensor]:
        """Send to each rank, and receive so many elements from each; all of one type."""
        dtype = torch.int64 if tag == _LENGTH else torch.uint8
        into = {rank: torch.zeros(size, dtype=dtype) for rank, size in sizes.items()}
        works = [self.group.recv([t], self.numbers[r], tag) for r, t in into.items() if r != self.rank]
        works += [self.group.send([t], self.numbers[r], tag) for r, t in out.items() if r != self.rank]
        for work in works:
            self.finish(work)
        if self.rank in into:
            into[self.rank] = out[self.rank]
        return into


class EpochLine:
    """What the host says, heard by a thread.

    Args:
        epoch: the first.
    Attributes:
        epoch: that this worker is in.
    """

    def __init__(self, line: TrainerEnd, epoch: int) -> None:
        self._line, self.epoch = line, epoch
        self._news: NextEpoch | None = None
        self._urgent = self._ended = self._silent = False
        self._start: str | None = None
        self._links, self._call, self._cut_s = RankLinks(), GroupCall(), 0.0
        self._told = threading.Condition()
        self.say("ready")
        start_loud(self._listen, name="ckptd-reroute")

    def _listen(self) -> None:
        while True:
            try:
                with waiting():
                    news = self._line.receive()
            except OSError as error:
                logger.info("the host is gone: %s", error)
                with self._told:
                    self._silent = True
                    self._told.notify_all()
                return
            if news is None:
                continue
            with self._told:
                if isinstance(news, EndLoop):
                    self._ended = True
                elif isinstance(news, JobStart):
                    self._start = news.start
                else:
                    self._news = news
                    if not (self._urgent or news.at_boundary):
                        self._cut_s = time.monotonic()
                        start_loud(self._end_if_stuck, name="ckptd-stuck")
                    self._urgent |= not news.at_boundary
                    if self._urgent:  # before anybody knows why: those of the next epoch are not among them
                        self._links.cut()
                self._told.notify_all()

    def _end_if_stuck(self) -> None:
        """End this process if its call has not ended although its connections have."""
        with waiting():
            time.sleep(_STUCK_S)
        with self._told:
            begun_s = self._call.begun_s
            since_s = time.monotonic() - max(begun_s or 0.0, self._cut_s)
            stuck = self._urgent and begun_s is not None and since_s > _STUCK_S / 2
        if stuck:
            text = (
                "a call of gloo goes on although its connections were cut: this process ends, to begin again"
            )
            logger.error(text)
            os._exit(1)

    def start(self) -> str:
        """What all workers of this start of the job have in common, and those of no other start; waits for
        it.

        Raises:
            Interrupted: another epoch begins.
            RuntimeError: this host has not met the others.
        """
        with self._told:
            self._told.wait_for(lambda: self._start is not None or self._news or self._silent)
            if self._news is not None:
                raise Interrupted
            if not self._start:
                raise RuntimeError(
                    "the host of this worker has not met those of the others; its log says why"
                )
            return self._start

    def say(self, word: str, because: str = "") -> None:
        """Tell the host (`TrainerSaid`)."""
        self._line.say(TrainerSaid(word, self.epoch, because))

    def use(self, links: RankLinks, call: GroupCall | None = None) -> None:
        """The connections of this epoch, and the call in which this worker is.

        Raises:
            Interrupted: it is over.
        """
        with self._told:
            self._links, self._call = links, call or GroupCall()
            if self._urgent:
                raise Interrupted

    def heard(self) -> int:
        """The newest epoch of which the host has told."""
        with self._told:
            return self._news.number if self._news is not None else self.epoch

    def next_epoch(self, timeout_s: float | None = None) -> NextEpoch | EndLoop | None:
        """Wait for the next epoch, or for the end of the loop, and be in it; None: no news in this time.

        Raises:
            ConnectionError: the host is gone, and so are all further epochs.
        """
        with self._told:
            self._told.wait_for(lambda: self._news or self._ended or self._silent, timeout_s)
            news, self._news = self._news, None
            if news is None:
                if self._silent:
                    raise ConnectionError("the host is gone, so there is no further epoch")
                return EndLoop() if self._ended else None
            self._links.cut()
            self._links, self._urgent = RankLinks(), False
            self.epoch = news.number
        os.environ.update(news.environment)
        self._line.stayed(news.number, ready=True)
        return news


class EpochSeat:
    """This worker's place from one epoch to the next.

    Attributes:
        first_epoch: that this process began with. In a later one than 0 it is back.
        absent: ranks without which the current epoch goes on.
        group: those that are there.
    Raises:
        ValueError: there is no host with ``--reroute``.
    """

    def __init__(self) -> None:
        line, place = inherited_line(), os.environ.get(EPOCH_VARIABLE, "")
        if line is None or not place:
            raise ValueError(
                "this process has no host that would tell it of lost workers: start it with "
                "python -m ckptd.host --reroute script.py"
            )
        self._end = line
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.first_epoch, self.absent = epoch_and_absent(place)
        self.group = EpochGroup(self.rank)
        self._line: EpochLine | None = None

    @property
    def line(self) -> EpochLine:
        """To the host."""
        assert self._line is not None, "take() comes first"
        return self._line

    def take(self) -> None:
        """Tell the host that this worker could come to another epoch; `enter` comes next."""
        self._line = EpochLine(self._end, self.first_epoch)

    def epoch_after(self, error: BaseException) -> NextEpoch:
        """The epoch that begins because of what has caused this error, too; else the error is raised."""
        news = self.line.next_epoch(_REASON_S + float(os.environ.get(_SILENCE) or 0))
        if not isinstance(news, NextEpoch):
            raise error
        return news

    def enter(self, news: NextEpoch | EndLoop | None, settle: Callable[[EpochGroup], None]) -> None:
        """Take part in an epoch, or in a later one; None: the one that this process began with.

        Args:
            settle: comes to a common state with all that are there.
        """
        while True:
            if news is not None:
                logger.info("rank %d: epoch %d", self.rank, self.line.epoch)
                _, self.absent = epoch_and_absent(os.environ[EPOCH_VARIABLE])
                _let_go(self.group.group)
                self.group = EpochGroup(self.rank)
            if self.rank in self.absent:  # the others do not know yet that this worker is back
                news = self.line.next_epoch()
                continue
            present = sorted(set(range(self.world_size)) - self.absent)
            try:
                self.group = meet(self.line, self.rank, present, _TIMEOUT_S)
                settle(self.group)
                return
            except OF_CALLS as error:
                news = self.epoch_after(error)


def meet(line: EpochLine, rank: int, present: Sequence[int], timeout_s: float) -> EpochGroup:
    """Connect to all that are there in this epoch.

    Args:
        rank: this one, one of ``present``.
        timeout_s: of connecting, and of each message.
    Raises:
        Interrupted: the epoch is over.
        RuntimeError: not all came in time, or the hosts have not met.
    """
    # A store may serve all starts of a job (torchrun's does, by default), and has what earlier ones wrote.
    meeting = _Meeting(rank, present, timeout_s, f"ckptd-reroute/{line.start()}/{line.epoch}")
    start_loud(meeting.run, name="ckptd-meet")
    while not meeting.over.wait(_LOOK_S):
        if line.heard() > line.epoch:  # also at a boundary: others may be in that one already
            meeting.left = True
            raise Interrupted
    if meeting.error is not None:
        raise meeting.error
    assert meeting.found is not None
    line.use(meeting.found.links, meeting.found.call)
    return meeting.found


def _let_go(group: Any) -> None:
    """Have a group destroyed in a thread, once nobody uses it any more.

    It waits for its own threads, and one of them may be in a call that goes on (`_STUCK_S`): seen in the
    exchange that begins an iteration, on whose result nobody waits yet.
    """
    start_loud(_destroy_alone, [group], name="ckptd-let-go")


def _destroy_alone(only: list[Any]) -> None:
    group = only.pop()
    while sys.getrefcount(group) > _OWN_REFERENCES:
        with waiting():
            time.sleep(_LOOK_SLOWLY_S)
    del group


class _Meeting:
    """In a thread of its own: torch waits for what may never come, and cannot be told not to."""

    def __init__(self, rank: int, present: Sequence[int], timeout_s: float, prefix: str) -> None:
        self._rank, self._present, self._timeout_s = rank, sorted(present), timeout_s
        self._prefix = prefix
        self.over = threading.Event()
        self.left = False
        self.error: Exception | None = None
        self.found: EpochGroup | None = None

    def run(self) -> None:
        try:
            self.found = self._connect()
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            self.error = error
        self.over.set()

    def _connect(self) -> EpochGroup:
        timeout = timedelta(seconds=self._timeout_s)
        store = PrefixStore(self._prefix, self._store(timeout))
        names = [f"here/{rank}" for rank in self._present]
        store.set(names[self._present.index(self._rank)], "")
        self._await(store, names)
        own = self._present.index(self._rank)
        made = ProcessGroupGloo(PrefixStore("gloo", store), own, len(self._present), timeout)
        group = EpochGroup(self._rank, {r: n for n, r in enumerate(self._present)}, made, store)
        links = RankLinks.find(Collectives(lambda payload: _gathered(group, payload), rank=own))
        return EpochGroup(self._rank, group.numbers, made, store, links)

    def _store(self, timeout: timedelta) -> Store:
        """A store of each epoch's own, as `torch.distributed` promises its callers."""
        served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=not served and self._rank == self._present[0],
            timeout=timeout,
            wait_for_workers=False,
        )

    def _await(self, store: Store, names: list[str]) -> None:
        until = time.monotonic() + self._timeout_s
        look_s = _LOOK_S
        while not store.check(names):
            if self.left:
                raise Interrupted
            if time.monotonic() > until:
                missing = [name.rpartition("/")[2] for name in names if not store.check([name])]
                raise RuntimeError(f"rank {', '.join(missing)} did not come for {self._timeout_s:g} s")
            with waiting():
                time.sleep(look_s)
            look_s = min(2 * look_s, _LOOK_SLOWLY_S)


def _gathered(group: EpochGroup, payload: bytes) -> list[bytes]:
    """An `Exchange` over the group."""
    sizes = [size for (size,) in group.gather([len(payload)]).values()]
    rows = [torch.zeros(max(sizes), dtype=torch.uint8) for _ in sizes]
    mine = torch.frombuffer(bytearray(payload.ljust(max(sizes), b"\0")), dtype=torch.uint8)
    group.group.allgather([rows], [mine]).wait()
    return [row[:size].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]
