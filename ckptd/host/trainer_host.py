"""The host of one rank: starts its trainer, waits for it, and starts the next one when the job begins anew.

One thread, one loop: it sleeps until a child ends, a signal arrives, or the zygote, the coordinator or
another host has said something. Only for hangs it looks twice a second (`ckptd.host.hangs`). What follows
from an event is in `ckptd.host.epochs`; other hosts are the affair of `ckptd.host.coordinator` in rank 0, and
of `ckptd.host.member` in the others.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import zlib
from collections import deque
from collections.abc import Collection
from pathlib import Path
from types import FrameType
from typing import Any

from ckptd.config.runtime_dir import (
    UnusableFolder,
    builtin_runtime_dir,
    default_runtime_dir,
    private_folder,
)
from ckptd.host.coordinator import Coordinator
from ckptd.host.epochs import HostEvent, HostLife, HostState
from ckptd.host.hangs.trainer_watch import TrainerWatch
from ckptd.host.host_links import remove_dead_sockets
from ckptd.host.host_loop import HostLoop
from ckptd.host.host_options import HostOptions, place_without
from ckptd.host.member import JobMember
from ckptd.host.process_control import (
    HostProcess,
    adopt_orphans,
    end_group,
    has_terminal,
    hear_of_children,
    name_process,
    send,
    spawn,
    status_text,
)
from ckptd.host.signal_witness import WITNESSED, SignalWitness, pending_in
from ckptd.host.zygotes.preload import environment_set_by, names_in, read_record, write_record
from ckptd.host.zygotes.script_main import script_file
from ckptd.host.zygotes.zygote_handover import waiting_name, warm_name
from ckptd.host.zygotes.zygote_link import ZygoteLink, start_zygote, take_over_zygote
from ckptd.restart_line import (
    EPOCH_VARIABLE,
    LINE_VARIABLE,
    EndLoop,
    HostEnd,
    JobStart,
    NextEpoch,
    TrainerSaid,
    epoch_text,
)

logger = logging.getLogger(__name__)

Message = dict[str, Any]

# The exit code of a host whose job ends because another host was lost (EX_TEMPFAIL of sysexits.h: try again).
HOST_LOST = 75
_ENDING = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM}
# A signal to a whole process group or cgroup reaches the zygote within this time, if it does.
_WITNESS_S = 0.1
_ANSWER_S = 1.0
# A trainer that can restart in its process comes to another epoch within this time, or ends: so long may
# last what no message interrupts, such as a forward pass.
_STAY_S = 5.0
# In a job that re-routes, where what it has may be needed: longer. As long as an iteration if nobody waits.
_REROUTED_STAY_S = 60.0
_BOUNDARY_S = 3600.0
# A zygote that imports longer than this hangs.
_IMPORT_S = 300.0
# When it is read what a trainer has imported: most of it is imported at the start.
_RECORD_AFTER_S = (4.0, 20.0, 90.0)
_ZYGOTES_MAX = 8  # that died or became old; then trainers are started plainly
_IMPORTS_MAX_BYTES = 4 << 20


class TrainerHost:
    """One host. `run` returns when it is over.

    Raises:
        UnusableFolder: the runtime folder cannot be used.
        OSError: a socket for the other hosts cannot be made.
    """

    def __init__(self, options: HostOptions) -> None:
        self._options = options
        self._rank = options.rank  # now; nodes may have been lost
        self._life = HostLife()
        self._folder = hosts_folder()
        self._own_session = os.getsid(0) == os.getpid() and not has_terminal()
        self._loop = HostLoop()
        self._trainer: HostProcess | None = None
        self._status: int | None = None  # of the last trainer
        self._environment: dict[str, str] = {EPOCH_VARIABLE: epoch_text(0, ())} if options.reroute else {}
        self._deferred: deque[Message] = deque()
        if options.rank == 0:
            remove_dead_sockets(self._folder)
        kind = Coordinator if options.rank == 0 else JobMember
        self._job: Coordinator | JobMember = kind(options, self._folder, self._loop, self._obey)
        self._watch = TrainerWatch(options, self._loop, self._job.tell)
        self._line = HostEnd()
        self._absent: set[int] = set()  # in a job that re-routes: without whom this epoch goes on
        self._said_ready = self._needless = False
        self._start: str | None = None  # which of the job this is, from the coordinator; "": it never said
        self._patience = 1
        self._zygote: ZygoteLink | None = None
        self._zygotes = 0
        self._script_file = script_file(options.script)
        self._record = self._folder / record_name(self._script_file, os.getcwd())
        self._imports = os.memfd_create("imports")
        self._imported = 0
        self._looks = list(_RECORD_AFTER_S)
        self._plain_because = "" if options.may_fork else "--no-fork"
        self._everything, self._unfit = True, ""
        self._unclaimed: dict[int, int] = {}  # children that ended while a trainer was being forked
        self._signals: list[int] = []
        self._witness: SignalWitness | None = None  # where there is no zygote
        self._ended_by: int | None = None  # a signal

    # -- the loop ---------------------------------------------------------------------------------

    def run(self) -> int:
        """Host the rank until the job is over here; the wait status with which this process shall end."""
        self._set_up()
        try:
            self._prepare()
            self._advance()
            while self._life.state is not HostState.OVER:
                self._loop.turn()
                self._advance()
        finally:
            self._tear_down()
        if self._life.stopped:
            self._forget_error()  # a consequence: torchrun reports the earliest error as the cause
            return HOST_LOST << 8
        if self._needless:
            return 0
        if self._status is None:
            return int(self._ended_by or 1 << 8)
        return self._status

    def _set_up(self) -> None:
        name_process("ckptd-host")
        adopt_orphans()
        self._wake, writer = socket.socketpair()
        for end in (self._wake, writer):
            end.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._writer = writer
        for number in (signal.SIGCHLD, *WITNESSED):
            if number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _note)
        hear_of_children()
        self._loop.watch(self._wake, self._on_wake)
        if self._options.launched:
            agent = os.getppid()
            self._agent = os.pidfd_open(agent)
            self._loop.watch(self._agent, self._on_agent)
            if os.getppid() != agent:
                self._on_agent()
        try:
            self._line = HostEnd.make()
            self._loop.watch(self._line, self._on_line)
        except OSError as error:
            logger.warning("rank %d: no trainer can restart in its process: %s", self._rank, error)

    def _prepare(self) -> None:
        self._job.begin()
        self._choose_modules()
        self._new_zygote()

    def _tear_down(self) -> None:
        self._keep_imports()
        if self._zygote is not None and self._may_be_started_again:
            self._loop.forget(self._zygote)
            self._zygote.leave_behind(self._folder, waiting_name(self._options), self._agent)
        elif self._zygote is not None:
            self._drop_zygote()
        if self._trainer is not None:  # an error of ours
            send(self._trainer, signal.SIGKILL, group=True)
        if self._witness is not None:
            self._witness.close()
        self._job.close()
        self._watch.close()
        self._line.close()
        signal.set_wakeup_fd(-1)
        for end in (self._wake, self._writer):
            end.close()

    @property
    def _may_be_started_again(self) -> bool:
        """By torchrun, soon, in this place: then the zygote is of use."""
        succeeded = self._status == 0 and self._ended_by is None and not self._life.stopped
        zygote = self._zygote
        usable = zygote is not None and zygote.ready and not zygote.forking and self._trainer is None
        return self._options.launched and self._own_session and usable and not succeeded

    @property
    def _inherited(self) -> list[int]:
        """The descriptors that trainers inherit."""
        line = self._line.descriptor
        return [*self._watch.descriptors, *([line] if line >= 0 else [])]

    # -- what happens to this process -------------------------------------------------------------

    def _on_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in self._wake.recv(4096):
                if number != signal.SIGCHLD:
                    self._on_signal(number)
        self._reap()

    def _reap(self) -> None:
        """Wait for every child that has ended: the trainer, the zygote, and orphans of either."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self._trainer is not None and pid == self._trainer.pid:
                self._on_trainer_end(self._trainer, status)
            elif self._zygote is not None and pid == self._zygote.process.pid:
                self._zygote.reaped = status_text(status)  # its socket may still have an answer
            elif self._zygote is not None and self._zygote.forking:
                self._unclaimed[pid] = status

    def _on_agent(self) -> None:
        self._loop.forget(self._agent)
        logger.warning("rank %d: torchrun has died; the trainer ends", self._rank)
        self._leave("torchrun has died", signal.SIGTERM)
        self._pass_on([signal.SIGTERM])
        self._loop.after(self._options.stop_s, self._kill_trainer)

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if number in _ENDING:
            logger.info("rank %d: %s: the trainer ends, and no other begins", self._rank, name)
            self._leave(f"its host got {name}", number)
        self._signals.append(number)
        self._loop.after(_WITNESS_S, self._question_zygote)

    def _leave(self, why: str, number: int) -> None:
        """There is no further epoch here."""
        self._ended_by = number
        self._job.tell({"told": "leaving", "why": why})
        self._obey({"order": "abandon", "because": why})

    def _question_zygote(self) -> None:
        """Did the signals reach every process of the job? Then the trainer has them already."""
        if self._zygote is not None and self._zygote.ready:
            self._zygote.ask_for_signals()
            self._loop.after(_ANSWER_S, self._forward)
        elif self._zygote is not None:  # it imports, and answers later
            self._forward_but(pending_in(self._zygote.process.pid))
        elif self._witness is not None:
            self._witness.ask()
            self._loop.after(_ANSWER_S, self._forward)
        else:
            self._forward()

    def _on_witness(self) -> None:
        assert self._witness is not None
        if (seen := self._witness.receive()) is not None:
            self._forward_but(seen)
            return
        self._loop.forget(self._witness)
        self._witness.close()
        self._witness = None

    def _forward_but(self, seen: Collection[int]) -> None:
        """All but those that the trainer has, too."""
        self._loop.cancel(self._forward)
        self._signals = [number for number in self._signals if number not in seen]
        self._forward()

    def _forward(self) -> None:
        if self._zygote is not None and self._zygote.forking:
            self._loop.after(_WITNESS_S, self._forward)  # there is no trainer yet to which they could go
            return
        self._pass_on(self._signals)
        self._signals.clear()

    def _pass_on(self, numbers: list[int]) -> None:
        if self._trainer is not None:
            asked = self._loop.is_timed(self._kill_trainer)
            for number in numbers:
                if number != signal.SIGTERM or not asked:  # see `_end_trainer`
                    send(self._trainer, number, group=True)

    # -- other hosts ------------------------------------------------------------------------------

    def _obey(self, message: Message) -> None:
        """An order of the coordinator. While a trainer is being forked it waits: that takes milliseconds."""
        if self._zygote is not None and self._zygote.forking:
            self._deferred.append(message)
            return
        rank, state = self._rank, self._life.state
        if message["order"] == "start":
            self._tell_start(message["start"])
        elif message["order"] == "release":
            if state in (HostState.COMPLETED, HostState.DISMISSED):
                self._life.handle(HostEvent.RELEASE)
        elif message["order"] == "abandon":
            if state not in (HostState.ALONE, HostState.OVER) and self._ended_by is None:
                logger.warning("rank %d: no further restart here: %s", rank, message["because"])
            self._life.handle(HostEvent.ABANDON)
            self._tell_start(self._start or "")
        elif message["order"] == "stop":
            self._stop(message["because"])
        elif message["order"] == "report":
            self._watch.answer(int(message["inquiry"]))
        elif message["order"] == "end_loops":
            self._end_loop(needless=self._options.rank in message["absent"])
        elif self._options.rank in message["without"]:
            self._stop(f"it goes on without this node: {message['because']}")
        else:
            self._begin(message)

    def _begin(self, message: Message) -> None:
        before = self._life.epoch
        self._life.begin(int(message["epoch"]))
        if self._life.epoch == before:
            return
        self._patience = int(message["patience"])
        self._absent = set(message["absent"])
        self._environment = self._environment_of(message)
        because = message["because"]
        if (now := int(self._environment.get("RANK", self._rank))) != self._rank or message["without"]:
            because += f"; {self._environment['WORLD_SIZE']} ranks are left, and this is rank {now} of them"
        logger.warning("rank %d: epoch %d begins: %s", self._rank, self._life.epoch, because)
        self._rank = now
        if not self._offer_epoch(message):
            self._end_trainer()

    def _offer_epoch(self, message: Message) -> bool:
        """Let the trainer come to this epoch in its process; False if that is not possible."""
        trainer, because = self._trainer, message["because"]
        if trainer is None or not message["staying"] or self._watch.stopped:
            return False
        at_boundary = bool(message["at_boundary"])
        epoch = NextEpoch(self._life.epoch, self._environment, because, at_boundary)
        if not self._line.offer(trainer.pid, epoch):
            return False
        patient_s = _BOUNDARY_S if at_boundary else _REROUTED_STAY_S
        self._loop.after(patient_s if self._options.reroute else _STAY_S, self._end_trainer)
        return True

    def _tell_start(self, start: str) -> None:
        """Which start of the job this is; a trainer that re-routes connects to those of the same one."""
        self._start = start
        if self._options.reroute and self._trainer is not None:
            self._line.offer(self._trainer.pid, JobStart(start))  # else as soon as it can hear that

    def _end_loop(self, *, needless: bool) -> None:
        """All iterations are done; a trainer that has not taken its place yet has nothing left to do. Its
        host stays as long as the others: it may be the coordinator's.
        """
        if self._trainer is not None and not needless:
            self._line.offer(self._trainer.pid, EndLoop())
        elif needless:
            self._needless = True
            logger.info("rank %d: all iterations are done, without this trainer", self._rank)
            self._life.handle(HostEvent.DISMISS)
            self._end_trainer()

    def _on_line(self) -> None:
        stayed, trainer = self._line.receive(), self._trainer
        while self._line.said:
            pid, said = self._line.said.pop(0)
            if trainer is not None and trainer.pid == pid and self._options.reroute:
                self._pass_word(said)
        if stayed is None or trainer is None or trainer.pid != stayed[0]:
            return
        if self._life.state is not HostState.STOPPING or stayed[1] != self._life.epoch:
            return  # that epoch is over, too, and the trainer was told to end
        self._loop.cancel(self._end_trainer)
        self._life.handle(HostEvent.STAY)
        self._forget_error()
        self._watch.end()
        self._watch.prepare(self._life.epoch, self._patience)
        self._watch.begin(trainer.pid)
        logger.info("rank %d: epoch %d: trainer %d has stayed", self._rank, self._life.epoch, trainer.pid)
        self._job.tell({"told": "started", "epoch": self._life.epoch})

    def _pass_word(self, said: TrainerSaid) -> None:
        """Of a trainer, to the coordinator. That it could come to another epoch is news if it is absent."""
        if said.word == "ready" and self._start is not None:
            self._tell_start(self._start)
        if said.word == "ready" and self._options.rank not in self._absent:
            return
        self._said_ready |= said.word == "ready"
        word = {"told": "said", "word": said.word, "epoch": said.epoch, "why": said.because}
        self._job.tell(word)

    def _environment_of(self, message: Message) -> dict[str, str]:
        """What the trainers of this epoch have in their environments, and this process has not."""
        restarts = self._options.restarts_before + self._life.epoch
        environment = {"TORCHELASTIC_RESTART_COUNT": str(restarts)}
        if message["port"]:
            environment["MASTER_PORT"] = str(message["port"])
            environment["TORCHELASTIC_USE_AGENT_STORE"] = str(bool(message["served"]))
            if message["address"]:
                environment["MASTER_ADDR"] = message["address"]
        if self._options.reroute:
            environment[EPOCH_VARIABLE] = epoch_text(self._life.epoch, message["absent"])
        return environment | place_without(os.environ, message["without"], message["without_nodes"])

    def _stop(self, because: str) -> None:
        before = self._life.stopped
        self._life.handle(HostEvent.STOP)
        if self._life.stopped and not before:
            logger.warning("rank %d: the job ends here, for a new start: %s", self._rank, because)
            self._end_trainer()

    def _end_trainer(self) -> None:
        """Once only: a second SIGTERM would cut its parking short."""
        if self._trainer is not None and not self._loop.is_timed(self._kill_trainer):
            send(self._trainer, signal.SIGTERM)
            if self._watch.stopped:
                send(self._trainer, signal.SIGCONT)  # or it would not get the other signal
            self._loop.after(self._options.stop_s, self._kill_trainer)

    # -- the trainer ------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Start a trainer if one is missing and can be started."""
        if self._life.state is not HostState.STARTING or self._trainer is not None:
            return
        if self._zygote is not None and (self._zygote.forking or not self._zygote.ready):
            return
        if self._life.epoch:
            self._forget_error()
        self._watch.prepare(self._life.epoch, self._patience)
        environment = {**self._environment, **self._watch.environment}
        if self._line.descriptor >= 0:
            environment[LINE_VARIABLE] = str(self._line.descriptor)
        if self._zygote is not None:
            self._zygote.fork(environment, self._imports)
            return
        trainer = spawn(
            self._options.script.command,
            {**os.environ, **environment},
            own_session=self._own_session,
            keep=self._inherited,
        )
        self._started(trainer, "started")

    def _forget_error(self) -> None:
        """What `record` has written is of an earlier trainer, or no cause."""
        if self._options.error_file:
            with contextlib.suppress(OSError):
                os.unlink(self._options.error_file)

    def _started(self, trainer: HostProcess, how: str) -> None:
        self._trainer, self._said_ready = trainer, False
        self._watch.begin(trainer.pid)
        self._life.handle(HostEvent.START)
        logger.info("rank %d: epoch %d: trainer %d %s", self._rank, self._life.epoch, trainer.pid, how)
        self._job.tell({"told": "started", "epoch": self._life.epoch})
        if self._looks and how == "forked":
            self._loop.after(self._looks[0], self._look_at_imports)
        while self._deferred:
            self._obey(self._deferred.popleft())
        status = self._unclaimed.pop(trainer.pid, None)
        self._unclaimed.clear()
        if status is not None:
            self._on_trainer_end(trainer, status)

    def _on_trainer_end(self, trainer: HostProcess, status: int) -> None:
        self._trainer, self._status = None, status
        self._watch.end()
        self._loop.cancel(self._kill_trainer)
        self._loop.cancel(self._end_trainer)
        state, epoch = self._life.state, self._life.epoch
        failed = os.waitstatus_to_exitcode(status) != 0
        if failed and trainer.leads:
            end_group(trainer.pid)  # workers of its data loaders, which hold memory and devices
        if self._zygote is not None:
            self._zygote.forget_group()
        self._life.handle(HostEvent.FAIL if failed else HostEvent.COMPLETE)
        # One that was to stay is missed, too, as soon as others count on it.
        missed = self._options.rank not in self._absent or self._said_ready
        on_its_way = self._options.reroute and state is HostState.STOPPING and failed and missed
        if on_its_way:
            self._absent.add(self._options.rank)
            self._environment[EPOCH_VARIABLE] = epoch_text(epoch, self._absent)
        if state is HostState.RUNNING or on_its_way:
            why = status_text(status)
            if failed:
                logger.warning("rank %d: trainer %d has failed: %s", self._rank, trainer.pid, why)
            self._job.tell({"told": "failed" if failed else "completed", "epoch": epoch, "why": why})

    def _kill_trainer(self) -> None:
        if self._trainer is not None:
            logger.warning(
                "rank %d: trainer %d has not ended within %g s: SIGKILL",
                self._rank,
                self._trainer.pid,
                self._options.stop_s,
            )
            send(self._trainer, signal.SIGKILL)  # its group follows when it has ended

    # -- the zygote -------------------------------------------------------------------------------

    def _choose_modules(self) -> None:
        _, self._unfit = read_record(self._record)
        self._everything = not self._unfit
        if self._unfit:
            logger.info("rank %d: only torch is imported ahead: %s", self._rank, self._unfit)
        if set_early := environment_set_by(self._script_file):
            self._plain_because = (
                f"{self._script_file} sets {', '.join(set_early)} and imports afterwards; set it in the "
                "environment of the job instead"
            )

    def _new_zygote(self) -> None:
        if self._zygotes >= _ZYGOTES_MAX:
            self._plain_because = self._plain_because or f"{self._zygotes} zygotes have ended"
        if self._plain_because:
            self._plainly_from_now_on()
            return
        self._zygotes += 1
        if self._zygotes == 1 and self._takes_over():
            return
        try:
            self._zygote = start_zygote(
                self._options.script,
                self._record if self._everything else None,
                environment={**os.environ, **self._environment},
                own_session=self._own_session,
                keep=self._inherited,
            )
        except OSError as error:
            self._plain_because = f"no zygote could be started: {error}"
            self._plainly_from_now_on()
            return
        self._loop.watch(self._zygote, self._on_zygote)
        self._loop.after(_IMPORT_S, self._zygote_hangs)

    def _takes_over(self) -> bool:
        """Whether a zygote waits for this start: that of the last one here, or one that was made ahead."""
        if not (self._options.launched and self._own_session):
            return False
        options = self._options
        for name, which in (
            (waiting_name(options), "of the last start"),
            (warm_name(options.script, options.local_rank), "that was started ahead"),
        ):
            found = take_over_zygote(self._folder, name, keep=self._inherited)
            if isinstance(found, ZygoteLink):
                self._zygote = found
                logger.info("rank %d: the zygote %s is used: %d modules", self._rank, which, found.modules)
                self._loop.watch(found, self._on_zygote)
                self._job.use(found)
                return True
            if found:
                logger.info("rank %d: the zygote %s is not used: %s", self._rank, which, found)
        return False

    def _plainly_from_now_on(self) -> None:
        logger.warning(
            "rank %d: trainers are started plainly, not forked: %s", self._rank, self._plain_because
        )
        self._job.use(None)
        with contextlib.suppress(OSError):  # no process is left: signals are passed on in any case
            self._witness = SignalWitness(own_session=self._own_session)
            self._loop.watch(self._witness, self._on_witness)

    def _on_zygote(self) -> None:
        assert self._zygote is not None
        answer = self._zygote.receive()
        if answer is None:
            if self._trainer is not None and not self._zygote.is_child:
                self._on_trainer_end(self._trainer, signal.SIGKILL)
            self._replace_zygote(f"the last one has ended ({self._zygote.reaped or 'no status yet'})")
        elif "ready" in answer:
            self._loop.cancel(self._zygote_hangs)
            if pending_in(self._zygote.process.pid):
                self._zygote.ask_for_signals()  # while it imported they were seen, and are done with
            logger.info(
                "rank %d: a zygote has %d modules after %.1f s",
                self._rank,
                self._zygote.modules,
                answer["took_s"],
            )
            self._job.use(self._zygote)
        elif "ended" in answer:
            if self._trainer is not None and self._trainer.pid == answer["ended"]:
                self._on_trainer_end(self._trainer, answer["status"])
        elif "forked" in answer:
            self._started(HostProcess(answer["forked"], self._own_session), "forked")
        elif "signals" in answer:
            self._forward_but(answer["signals"])
        elif "unfit" in answer:
            self._on_unfit(answer["unfit"])
        elif "stale" in answer:
            self._replace_zygote(answer["stale"])
        elif "failed" in answer:
            self._plain_because = f"no trainer could be forked: {answer['failed']}"
            self._replace_zygote(self._plain_because)

    def _on_unfit(self, reason: str) -> None:
        """With everything imported it must not be forked; with torch alone it may be; else plainly."""
        assert self._zygote is not None
        if self._everything and (self._imported or read_record(self._record)[0]):
            self._unfit, self._imported, self._looks = reason, 0, []
            self._save_record([])
            self._everything = False
        else:
            self._plain_because = reason
        if self._zygote.is_child:
            self._replace_zygote(reason)
            return
        # Its trainer lives as long as it does. Asked for the next one, it says that it is stale.
        self._loop.cancel(self._zygote_hangs)
        self._zygote.ready = True

    def _zygote_hangs(self) -> None:
        self._everything, self._looks = False, []
        if self._zygote is not None and not self._zygote.is_child:
            send(self._zygote.process, signal.SIGKILL)  # and so its trainer; then its socket is at its end
            return
        self._replace_zygote(f"it has imported for {_IMPORT_S:g} s")

    def _replace_zygote(self, reason: str) -> None:
        logger.info("rank %d: a new zygote is needed: %s", self._rank, reason)
        self._drop_zygote()
        self._new_zygote()
        while self._deferred:
            self._obey(self._deferred.popleft())

    def _drop_zygote(self) -> None:
        assert self._zygote is not None
        self._loop.cancel(self._zygote_hangs)
        self._loop.forget(self._zygote)
        self._zygote.end()
        self._zygote = None

    # -- what the trainer imports -----------------------------------------------------------------

    def _look_at_imports(self) -> None:
        """Let the zygote import what the trainer has imported since its start."""
        if self._looks:
            self._looks.pop(0)
        if self._looks:
            self._loop.after(self._looks[0], self._look_at_imports)
        size = os.fstat(self._imports).st_size
        imports = self._zygote is not None and self._zygote.ready
        if size > self._imported and imports and not self._unfit:
            assert self._zygote is not None
            self._imported = size
            self._keep_imports()
            self._zygote.import_more(self._imports)
            self._loop.after(_IMPORT_S, self._zygote_hangs)

    def _keep_imports(self) -> None:
        """Write the record for the next start; one host of a machine does."""
        if self._unfit or self._options.local_rank:
            return
        known, _ = read_record(self._record)
        now = names_in(os.pread(self._imports, _IMPORTS_MAX_BYTES, 0))
        if not set(now) <= set(known):
            self._save_record(list(dict.fromkeys([*known, *now])))

    def _save_record(self, names: list[str]) -> None:
        try:
            write_record(self._record, names, self._unfit)
            for other in self._folder.glob(f"{self._record.name.split('-')[0]}-*.imports"):
                if other != self._record:  # of the script as it was before
                    other.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("rank %d: %s cannot be written: %s", self._rank, self._record, error)


def hosts_folder() -> Path:
    """A private folder: in that of the daemon, or in this user's if the daemon runs as another.

    Raises:
        UnusableFolder: there is none.
    """
    usual, own = default_runtime_dir(), builtin_runtime_dir(os.environ)
    try:
        folder = private_folder(usual, "runtime folder")
    except UnusableFolder:
        if own == usual:
            raise
        folder = private_folder(own, "runtime folder")
    return private_folder(str(folder / "host"), "folder of the hosts")


def record_name(script: str, folder: str) -> str:
    """The file that keeps what a script imports; another one if the script is changed.

    Args:
        folder: in which it is started.
    """
    try:
        info = os.stat(script)
        mark = f"{info.st_mtime_ns}-{info.st_size}"
    except OSError:
        mark = "none"
    return f"{zlib.crc32(os.fsencode(f'{script} {sys.executable} {folder}')):08x}-{mark}.imports"


def _note(number: int, frame: FrameType | None) -> None:
    """The wakeup descriptor has it already."""
