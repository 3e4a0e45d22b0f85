"""``Checkpointer``: the whole integration, three lines in a training loop.

The loop's top is the snapshot boundary: everything that a step changes (scheduler, scaler, bias updates,
the copy-back from master weights) has happened there. At the optimizer's step the client waits for its own
copies, and for nothing else. Training does not depend on us: after the attach, every failure of ours is a
log line, a counter, and a degraded mode.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import platform
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, Never, Self

import torch
from torch import Tensor, nn

import ckptd
from ckptd.client.capture.ddp_buckets import Buckets
from ckptd.client.capture.object_attributes import ObjectAttributes
from ckptd.client.capture.program import Program, this_program
from ckptd.client.capture.recorder import Recorder
from ckptd.client.capture.step_state import Stateful, StepScalars
from ckptd.client.capture.uncaptured.left_behind import around_loop
from ckptd.client.daemon_link.rank_memory import RankMemory
from ckptd.client.data import Batches, BatchLedger
from ckptd.client.data.loaders import check_loader
from ckptd.client.in_process.rank_links import RankLinks
from ckptd.client.in_process.restarts import InProcessRestarts, in_process_restarts, why_not
from ckptd.client.interchange.starting_weights import load_start, start_unprotected
from ckptd.client.log_lines import get_logger
from ckptd.client.model.live_state import is_compiled
from ckptd.client.model.replicated_params import NOTHING_SHARED, ReplicatedParams, agree_on_sharing
from ckptd.client.options import (
    CheckpointerOptions,
    DaemonOptions,
    LayoutOptions,
    OptionGroups,
    RecoveryOptions,
    RunOptions,
    SnapshotOptions,
    check_keywords,
    daemon_options,
)
from ckptd.client.parking.park_signals import park_on_sigterm
from ckptd.client.parking.parker import Parking
from ckptd.client.phase_clock import PhaseClock
from ckptd.client.pipeline.boundary_log import BoundaryLog, SilentLog, shared_value
from ckptd.client.pipeline.stage_hooks import stages_of
from ckptd.client.ranks.collectives import Collectives
from ckptd.client.recovery.audit_mode import audit_of_environment, under_audit
from ckptd.client.recovery.start import Recovery, newest_window
from ckptd.client.recovery.verification import Certificate, DenseState, certify
from ckptd.client.scalars import TierSteps, scalars_of
from ckptd.client.schedule.expert_losses import ExpertLosses, LostUpdates
from ckptd.client.schedule.measurements import PrecisionProbe, TokenCounter
from ckptd.client.schedule.partial_schedule import durable_text, durable_turns, experts_of_layer
from ckptd.client.schedule.planner import RankContext, needed_memory, own_share_bytes
from ckptd.client.schedule.snapshot_plan import SnapshotPlan, describe_table, operator_costs
from ckptd.client.stats import Stats
from ckptd.client.train_loop import SEAL_WAIT_S, LoopSide, number_of_steps
from ckptd.client.training_state import TrainingState, examine, placement_lines
from ckptd.core.schedule import Ordering
from ckptd.cuda.cuda_engine import make_engine
from ckptd.errors import AttachRefused, DaemonUnavailable
from ckptd.restart_line import NextEpoch

logger = get_logger(__name__)

_ERROR_SHOWN = 200
_ONE_LOOP = (
    "If the program has a loop over steps() for each epoch: write one loop over all steps, and put what "
    "follows an epoch into its body (if (step + 1) % steps_per_epoch == 0: ...)"
)


class Checkpointer:
    """Snapshots every iteration to the node's daemon; after a failure, resumes at the exact bits.

    Create it after model, optimizer and everything in ``state``, and before data iterators: its
    constructor finds and restores a previous run. Then loop over ``steps``.

    Args:
        model: any module; operators (experts, gates, dense parts) are found in it.
        optimizer: the optimizer, or a list of them.
        state: objects with ``state_dict``/``load_state_dict`` by name: schedulers, GradScaler,
            stateful data loaders.
        run: the name of the run, or `RunOptions`: job, rank, world size; defaults come from
            torchrun's environment.
        daemon: ``"auto"`` starts one if none answers; an endpoint (``ipc://…``); None turns
            everything off. Or `DaemonOptions`.
        snapshots: what is captured in which snapshot: policy, window, cost (`SnapshotOptions`).
        recovery: how a run resumes, and how that is verified (`RecoveryOptions`).
        layout: what the structure of model and optimizer does not say by itself (`LayoutOptions`).
    Raises:
        ValueError: an argument is unusable; the message says which and what to do.
        TypeError: an unknown keyword, or a group of options of another type; the message says how to
            pass it.
        AttachRefused: the daemon refuses: memory, another trainer with this rank, another topology;
            with the numbers.
        DaemonUnavailable: no daemon answers.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        state: Mapping[str, Stateful] | None = None,
        *,
        run: str | RunOptions | None = None,
        daemon: str | DaemonOptions | None = "auto",
        snapshots: SnapshotOptions = SnapshotOptions(),
        recovery: RecoveryOptions = RecoveryOptions(),
        layout: LayoutOptions = LayoutOptions(),
        **unknown: Never,
    ) -> None:
        given: OptionGroups = {
            "run": run,
            "daemon": daemon,
            "snapshots": snapshots,
            "recovery": recovery,
            "layout": layout,
        }
        check_keywords("Checkpointer()", {**unknown, **given})
        audit = audit_of_environment()
        self._audit = None if audit is None else audit.folder
        if audit is not None:
            given = under_audit(given, audit)
        self._stats = Stats()
        self._memory: RankMemory | None = None
        self._batches: list[Batches] = []
        self._begin_loop(BatchLedger())
        self.off = daemon_options(given["daemon"]).off
        if self.off:
            if recovery.start_from is not None:
                source = recovery.start_from
                logger.warning("%s", start_unprotected(model, optimizer, layout.masters, source))
            return
        phases = PhaseClock()
        self._options = CheckpointerOptions.of(given)
        self._restarts = in_process_restarts(self._options.recovery.in_process)
        self._optimizer, self._state = optimizer, state
        self._program: Program = {}
        self._start(model, phases)
        atexit.register(_close, weakref.ref(self))

    def _begin_loop(self, ledger: BatchLedger) -> None:
        self._loop = LoopSide(self._stats, ledger)
        self._pipeline = self._loop.pipeline
        self._cleanup = contextlib.ExitStack()
        self.resumed_from: int | None = None

    def _start(self, model: nn.Module, phases: PhaseClock) -> None:
        """Attach, protect the loop, and restore a previous run. A collective call."""
        options, optimizer = self._options, self._optimizer
        snapshots, recovery, layout = options.snapshots, options.recovery, options.layout
        ledger, state = self._loop.ledger, self._state
        self._model = model
        self._subject = subject = examine(model, optimizer, state, options=options, ledger=ledger)
        if self._first_subject is not None:
            subject.begin_as(self._first_subject)
        self._first_subject = subject
        self._binding, self._identity = subject.binding, subject.identity
        self._operators = subject.operators
        # As the script began, also after a restart in this process.
        self._program = self._program or this_program(subject.binding, subject.stateful)
        self._sharing = NOTHING_SHARED
        self._engine = make_engine(subject.device, inline=bool(snapshots.inline_copy))
        partial = snapshots.of_experts
        self._recovery = Recovery(subject, self._engine, self._loop.tape, recovery, self._audit, partial)
        self._ranks = Collectives.of_job(self._identity, node=platform.node())
        shared = subject.sharing if layout.capture_once else NOTHING_SHARED
        needed = needed_memory(self._binding, self._operators, snapshots, shared)
        try:
            try:
                # A rank that is refused must not leave the others waiting for it.
                with self._ranks.all_or_none():
                    memory = self._memory = RankMemory(
                        self._identity,
                        options.daemon,
                        needed,
                        topology=options.run.topology,
                        version=ckptd.__version__,
                        stats=self._stats,
                        phases=phases,
                    )
                    precision, counter = self._observe(model)
            except (AttachRefused, DaemonUnavailable) as error:
                if options.daemon.required:
                    raise
                self._go_on_unprotected(error, model, optimizer)
                return
            self._ranks = self._ranks.on_node(memory.session.node_id)
            if not layout.capture_once:
                memory.replica_groups = subject.sharing.replica_groups()
            if self._identity.world_size > 1:
                own_bytes = own_share_bytes(shared, self._operators, self._binding, snapshots)
                self._sharing = agree_on_sharing(
                    self._binding, shared.replicas, own_bytes, self._ranks, before=self._shared_before
                )
            self._protect(memory, precision, counter)
            if recovery.rehearse:
                self._loop.rehearse()
            if recovery.park:
                self._begin_parking()
            if recovery.in_process is not None:
                links = RankLinks.find(self._ranks)  # on all ranks, whether or not a host is there
                if self._restarts is not None:
                    self._restarts.use(links)
            self._restore(memory)
            self._loop.install(model, self._cleanup, self)
        except BaseException:
            self.close()
            raise

    # -- the loop --------------------------------------------------------------------------------

    def steps(self, total: int, *, start: int = 0) -> Generator[int, None, None]:
        """The steps to run, ``[start, total)``; after a restore they begin where replay must begin.

        Args:
            start: the first step of a new run that resumes nothing of ours (one that continues from
                somebody else's checkpoint).
        Raises:
            ValueError: ``total`` or ``start`` is no number of steps.
            ReplayMismatch: a replayed step did not reproduce the recording (see ``on_mismatch``).
        """
        total, start = (number_of_steps(name, each) for name, each in (("total", total), ("start", start)))
        if not self.off and self._first_total is not None and total > self._first_total:
            logger.warning(
                "NOT RESUMABLE: steps(%d) after steps(%d): a process that starts again comes to the latter "
                "first, and to the code between them again. %s",
                total,
                self._first_total,
                _ONE_LOOP,
            )
            self._first_total = None
        elif not self._looked_around:
            self._first_total = total
        again = self._looked_around
        if not (self.off or self._looked_around):
            self._looked_around = True
            kept = (*self._subject.stateful.values(), *self._batches)
            self._loop.left_behind = around_loop(sys._getframe(1), kept, self._binding)
        while (yield from self._steps_of_this_life(total, start, again=again)):
            gc.collect()  # groups, buckets and mapped memory of the life before are in cycles

    def _steps_of_this_life(self, total: int, start: int, *, again: bool) -> Generator[int, None, bool]:
        """Returns whether this process has restarted, so that another life follows.

        Args:
            again: a loop has asked for steps before.
        """
        loop = self._loop
        loop.replaying.check_whole()
        if self.resumed_from is None and not loop.step:
            loop.step = start
        if self.off:
            if self._closed:
                logger.warning(
                    "this checkpointer is closed: iterations %d to %d are not captured",
                    loop.step,
                    total,
                )
            yield from loop.bodies(range(loop.step, total))
            return False
        first, reached = loop.replaying.span(loop.step)
        # After a localized restart all ranks refuse, or none: they begin at different iterations.
        if self._pipeline.start is not None:
            reached = self._pipeline.start.plan.resume
        if reached > total:
            raise ValueError(
                f"the snapshots of this run reach iteration {reached}, beyond total={total}; pass "
                f"run= a new name to start over. {_ONE_LOOP}"
            )
        loop.step = first
        if first >= total and again:
            logger.warning(
                "steps(%d): this loop runs no step, because all %d have run: total counts the steps of the "
                "whole run, not those of an epoch. %s",
                total,
                first,
                _ONE_LOOP,
            )
        elif first >= total:
            logger.warning(
                "iteration %d of %d is reached already: nothing to run; pass run= a new name to start over",
                first,
                total,
            )
        if self._restarts is None:
            yield from loop.run(range(first, total))
            return False
        with contextlib.closing(loop.run(range(first, total))) as steps:
            for step in steps:
                yield step
                self._restarts.check_used()
        if not loop.over:
            self._restarts.disarm()
        return loop.over

    @contextlib.contextmanager
    def restartable(self) -> Iterator[None]:
        """The whole body of a step: if it fails because another rank has, this process need not end.

        With ``RecoveryOptions(in_process=...)`` and under a host, the process groups are made anew, and the
        state is restored as in a new process; the loop then goes on with the first step that ``steps``
        yields after that. Otherwise, and for errors of this rank's own, an error passes.

        Raises:
            RuntimeError: the state cannot be restored in this process, which must end.
        """
        restarts = None if self.off else self._restarts
        if restarts is not None:
            restarts.used = True
        if restarts is not None and not restarts.settled and self._loop.replaying.replay is None:
            stateful, logs = self._subject.stateful, self._pipeline.log is not None
            found = bool(self._binding.masters) and self._options.layout.masters is None
            obstacle = why_not(
                self._model, self._binding, stateful, self._batches, logs=logs, found_masters=found
            )
            restarts.settle(self._model, obstacle)
        try:
            yield
        except Exception as error:
            epoch = None if restarts is None else restarts.epoch_after(error)
            if restarts is None or epoch is None:
                raise
            self._restart(restarts, epoch, error)

    @property
    def step(self) -> int:
        """The running step, or the next one."""
        return self._loop.step

    @property
    def replaying(self) -> bool:
        """True while steps are replayed: they ran before the failure, and are compared with the record."""
        return self._loop.replaying.frozen

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, **kwargs: Any
    ) -> Tensor:
        """Same as ``torch.nn.utils.clip_grad_norm_``, which is recorded too, however it was imported."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, **kwargs)

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """The body is a forward that does not call the model as a module (Lightning's ``training_step``)."""
        if self.off:
            yield
            return
        self._loop.forward_begins()
        try:
            yield
        finally:
            self._loop.forward_ended()

    def record(self, kind: str, value: Any) -> Any:
        """Keep a value that a replay with frozen operators cannot recompute; a replay returns it."""
        return value if self.off else self._loop.tape.record(kind, value)

    def shared_value(self, name: str, compute: Callable[[], Any]) -> Any:
        """A value that all ranks compute together in this step: a gradient norm over stages, a loss to show.

        ``compute`` is called in normal operation only. A replay, or a rank that runs alone after a
        localized restart, gets the value returned then; so its communication does not join ranks
        that could recover separately.

        Raises:
            ValueError: it returned something that a snapshot cannot hold.
        """
        if self.off:
            return compute()
        return shared_value(name, compute, self._loop.tape, self._pipeline.log)

    def batches(self, loader: Any, *, skip: bool | None = None) -> Iterator[Any]:
        """Iterate over ``loader`` forever, epoch after epoch; a restarted job continues with the next batch.

        The loader need not be in ``state=``. After a failure the batches of the interrupted epoch are
        fetched again up to the position and discarded, so that samples and workers draw the same
        random numbers. Call it for the same loaders in the same order in each start, and fetch within
        the loop's body.

        Args:
            skip: True: a sample depends only on its index and on torch's, numpy's and Python's global
                random generators in this process, so batches are skipped without being created.
                None: only if that is certain (stored tensors, torch's own collation).
        Raises:
            ValueError: ``loader`` cannot be restored to a position; the message says what to do.
        """
        if self.off:
            return Batches(loader)
        own = any(loader is item for item in self._subject.stateful.values())
        check_loader(loader, skip=bool(skip), in_state=own)
        found = Batches(loader, self._loop.ledger, own_state=own, skip=skip)
        self._batches.append(found)
        return found

    def note_batch(self, batch: Any) -> None:
        """Note a batch of this step that does not come from ``batches``: a repeat must get the same one."""
        if not self.off:
            self._loop.ledger.note(batch)

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """In the body (a large all-to-all, say), this node's daemon sends no snapshots to its peers.

        A hint that holds for half a second at most, so that replication cannot starve. Costs about a
        microsecond.
        """
        memory = self._memory
        if memory is not None:
            self._pipeline.want_quiet(memory, "user", True)
        try:
            yield
        finally:
            if memory is not None:
                self._pipeline.want_quiet(memory, "user", False)

    # -- boundaries of a pipeline ----------------------------------------------------------------

    def log_boundaries(
        self, stages: Any, *, limit_bytes: int | None = None, replicate: bool = False
    ) -> SilentLog:
        """Log what these stages send to other stages; returns the log, like ``boundary_log``.

        Call it once, before the loop; ``close`` undoes it.

        Args:
            stages: a schedule of ``torch.distributed.pipelining``, a stage, or several.
        Raises:
            ValueError: there is no stage in ``stages``, or it is logged already.
        """
        found = stages_of(stages)
        log = self.boundary_log(limit_bytes=limit_bytes, replicate=replicate)
        if isinstance(log, BoundaryLog):
            self._cleanup.enter_context(self._pipeline.listen_to(found, log))
            if self._loop.recorder is not None:
                self._loop.recorder.scalars.follow_stages(found)
        return log

    def boundary_log(self, *, limit_bytes: int | None = None, replicate: bool = False) -> SilentLog:
        """The log for a pipeline of your own: call its ``activation`` and ``gradient`` with what you send.

        Only the first call, which makes the log, heeds the arguments.

        Args:
            limit_bytes: the most memory that it may take; None: the daemon's quota.
            replicate: nodes with replicas of this rank's snapshots hold its log, too, so that it
                survives the loss of this node. It takes as much of their memory; a node without
                enough holds no log, and training goes on.
        """
        if self.off:
            return SilentLog()
        if self._pipeline.log is not None:
            return self._pipeline.log
        if self._options.snapshots.of_experts is not None:
            raise ValueError(
                "boundary logs are for replays, and partial snapshots are not replayed: log nothing, or pass "
                "another policy"
            )
        assert self._memory is not None
        log = self._pipeline.open_log(
            self._memory,
            self._subject.device,
            plan=self._plan,
            silent=lambda: self._loop.silent,
            limit_bytes=limit_bytes,
            replicate=replicate,
            alike=self._sharing.ranks_with_same_operators(self._operators, self._identity.rank),
        )
        if self._options.recovery.park is None and self._identity.world_size > 1:
            self._begin_parking()
        return log

    def copy_in_bubbles(self, schedule: Any, *, always: bool = False) -> None:
        """Copy snapshots, and send them to peers, while this rank's pipeline waits for other stages, on CPU.

        What does not fit there is copied beside training, as without this call; so is everything if the
        schedule has no bubbles, which the log says. Call it once, before the loop; ``close`` undoes it.

        Args:
            schedule: of ``torch.distributed.pipelining``.
            always: do not measure whether that is faster than other ways to copy.
        Raises:
            ValueError: ``schedule`` is none, the second call, or ``inline_copy=True``.
        """
        if self.off:
            return
        recorder, memory = self._loop.recorder, self._memory
        assert recorder is not None
        assert memory is not None
        self._cleanup.enter_context(
            self._pipeline.copy_in_bubbles(schedule, recorder, memory, self._subject.device, always=always)
        )

    # -- looking ---------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """Counters since the start: stalls in ms, bytes, snapshots, skipped snapshots by reason."""
        return self._stats.as_dict()

    def scalars(self) -> dict[str, float]:
        """What a logger shows of this rank, by names such as ``ckptd/stall_ms``; empty without a daemon.

        For any step: it costs microseconds, and sends nothing (docs/observability.md has all names).
        """
        if self.off and not self._stats.unprotected:
            return {}
        session, plan = None if self._memory is None else self._memory.session, self._plan()
        tiers = TierSteps() if session is None else TierSteps(session.replicated, session.durable)
        return scalars_of(self._stats, self.step, tiers, lossy=plan is not None and plan.lossy)

    @property
    def lost_updates(self) -> LostUpdates | None:
        """What the recovery with which this process began has lost of experts, of partial snapshots.

        None: nothing was lost. ``lost_updates.tokens`` has the tokens of each expert, with which a model can
        give more capacity to experts that have lost much (MoEtion, section 6).
        """
        recorder = self._loop.recorder
        return None if recorder is None else recorder.scalars.losses.last

    def describe(self) -> str:
        """A table of the operators: kind, bytes anchored and not, phase."""
        if self.off:
            return "ckptd is off (daemon=None)"
        plan, identity = self._plan(), self._identity
        operators, window = self._operators, "window: chosen after the first steps are measured"
        dtypes, owners, schedule = {}, [], None
        if plan is not None:
            operators, dtypes, owners, schedule = (
                plan.operators,
                plan.compute_dtypes,
                plan.owners,
                plan.schedule,
            )
            window = f"window: {schedule.window} ({schedule.reason})"
            if plan.lossy:
                window = f"PARTIAL SNAPSHOTS: a recovery loses updates of experts. {window}"
                if plan.selection_text:
                    window += f". {plan.selection_text}"
                if turns := durable_turns(self._options.snapshots, operators):
                    window += f". {durable_text(turns, schedule.window)}"
        head = [
            f"job {identity.job}, run {identity.run}, rank {identity.rank} of {identity.world_size}",
            f"freezing in replay: {self._recovery.freezing} ({self._recovery.freezing_reason})",
            window,
        ]
        if identity.world_size > 1:
            head += placement_lines(self._binding, self._subject.sharing)
        if self._loop.resumed:
            head.append(self._loop.resumed)
        kept = [o for o in self._subject.stateful.values() if isinstance(o, ObjectAttributes)]
        head += filter(None, (each.describe() for each in kept))
        head += self._pipeline.describe()
        if self._loop.parking is not None:
            head.append(self._loop.parking.describe())
        costs = operator_costs(self._binding, operators, dtypes)
        return describe_table(operators, costs, schedule, owners, head)

    def verify(self, run_step: Callable[[int], Any]) -> Certificate:
        """Replay the newest window in process, and certify that it reproduces the live state.

        Call it between steps (after the optimizer's step, or after the loop), on all ranks at the same
        step. ``run_step(step)`` must do the same as the loop's body, with data from objects in
        ``state=`` or from ``batches``. The live state is restored afterwards.

        Raises:
            ValueError: off, replaying, not all ranks run this iteration, or no window is complete yet
                on all ranks.
        """
        loop, memory = self._loop, self._memory
        recorder = loop.recorder
        if recorder is None or memory is None or loop.replaying.replay is not None:
            raise ValueError("verify() needs a running checkpointer that is not replaying")
        if recorder.plan is not None and recorder.plan.lossy:
            raise ValueError("verify() replays a window, and no replay leads through partial snapshots")
        if (start := self._pipeline.start) is not None:
            raise ValueError(
                "verify() needs all ranks, and not all of them run iterations before "
                f"{start.plan.resume}, after a failure"
            )

        def counted(step: int) -> Any:
            loop.ledger.begin(step)  # the batches are those of the repeated steps
            return run_step(step)

        if loop.parking is not None:
            loop.parking.closed_because("verify() runs")
        recorder.finish()
        memory.session.flush(SEAL_WAIT_S)
        memory.settle_filled(SEAL_WAIT_S)
        with self._pipeline.aside(), recorder.undone():
            suffix = newest_window(memory, self._ranks)
            assert recorder.plan is not None
            images = memory.images(suffix.records)
            replay = self._recovery.replay_of(images, recorder.plan, self._ranks)
            return certify(
                replay,
                DenseState(self._binding, self._subject.stateful),
                loop.tape,
                counted,
                until=loop.step + 1 if loop.stepping else loop.step,
                window=len(images),
                playing=loop.verifying,
                rewind=self._rewind,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Detach from the daemon, which keeps the snapshots. The loop may continue, unless it replays."""
        if self._loop.parking is not None:
            self._loop.parking.leave("closed in the middle of a step")
        if self._restarts is not None:
            self._restarts.disarm()
        self._detach()
        self.off = self._closed = True

    def _detach(self) -> None:
        self._cleanup.close()
        self._loop.close()
        if not self.off:
            self._engine.close()
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    _closed = _looked_around = False
    _first_total: int | None = None  # of the first loop
    _first_subject: TrainingState | None = None  # before a restart in this process
    _shared_before: ReplicatedParams | None = None
    _restarts: InProcessRestarts | None = None

    # -- restarts in this process ----------------------------------------------------------------

    def _restart(self, restarts: InProcessRestarts, epoch: NextEpoch, error: Exception) -> None:
        """Go back to what all ranks have, with those that are left and those that start."""
        logger.warning(
            "step %d ends (%s: %s), and this process restarts: epoch %d begins: %s",
            self._loop.step,
            type(error).__name__,
            str(error)[:_ERROR_SHOWN],
            epoch.number,
            epoch.because,
        )
        traceback.clear_frames(error.__traceback__)  # activations and gradients of the step
        loop, masters = self._loop, self._binding.masters
        loop.over = True
        self._shared_before = self._sharing
        self._detach()
        parameters = {**self._binding.params, **{f"master/{n}": m for n, m in masters.items()}}
        returned, told_s = restarts.move_to(epoch, parameters)
        model = returned if isinstance(returned, nn.Module) else self._model
        self._begin_loop(loop.ledger)
        self._start(model, PhaseClock.of_restart(told_s))
        if self.resumed_from is None:
            self.close()
            raise RuntimeError(
                "there is nothing to go back to: this process ends, so that the run begins anew"
            )
        self._rewind()

    # -- set-up ----------------------------------------------------------------------------------

    def _go_on_unprotected(self, why: Exception, model: nn.Module, optimizer: Any) -> None:
        """The user said so: ``DaemonOptions(required=False)``."""
        source, masters = self._options.recovery.start_from, self._options.layout.masters
        self.close()
        self._closed = False  # the loop runs as one that was never to be protected
        self._stats.unprotected = 1
        if source is not None:
            logger.warning("%s", start_unprotected(model, optimizer, masters, source))
        logger.error(
            "TRAINING IS UNPROTECTED, and begins where the program begins it: no snapshot is taken, none "
            "is resumed from (DaemonOptions(required=False)): %s",
            why,
        )

    def _observe(self, model: nn.Module) -> tuple[PrecisionProbe, TokenCounter]:
        """Watch the model's forwards and its DDP wrappers."""
        options = self._options.snapshots
        # Hooks within a compiled graph would break it: its experts are anchored in the order of the model.
        counted = [] if is_compiled(model) else self._operators
        counter = TokenCounter(model, counted, Ordering(options.ordering), options.capacities)
        self._cleanup.callback(counter.close)
        kept = [getattr(item, "value", item) for item in self._subject.stateful.values()]
        self._buckets = Buckets(model, kept)
        return PrecisionProbe(self._binding.params), counter

    def _protect(self, memory: RankMemory, precision: PrecisionProbe, counter: TokenCounter) -> None:
        context = RankContext(
            binding=self._binding,
            operators=self._operators,
            memory=memory,
            engine=self._engine,
            options=self._options.snapshots,
            stats=self._stats,
            counter=counter,
            precision=precision,
            sharing=self._sharing,
        )
        stateful = self._subject.stateful
        turns = durable_turns(context.options, self._operators)
        if context.options.of_experts is not None:
            self._stats.num_experts = experts_of_layer(context.options, self._operators)
            self._stats.persist_experts = turns.experts if turns else 0
        losses = ExpertLosses(counter, turns)
        scalars = StepScalars(self._binding, stateful, self._loop.tape, self._buckets, self._program, losses)
        self._loop.protect(self._subject, context, Recorder(context, scalars), ranks=self._ranks)

    def _begin_parking(self) -> None:
        recorder = self._loop.recorder
        if self._memory is None or recorder is None:
            return  # snapshots were given up: there is nothing to park with
        parking = Parking(
            self._memory,
            self._binding,
            make_engine(self._subject.device, inline=True),
            self._stats,
            device=self._subject.device,
            restless=recorder.restless,
            park_after_s=self._options.recovery.park_after_s,
        )
        self._loop.park_with(parking)
        self._cleanup.callback(park_on_sigterm(parking))

    def _plan(self) -> SnapshotPlan | None:
        recorder = self._loop.recorder
        return None if recorder is None else recorder.plan

    def _restore(self, memory: RankMemory) -> None:
        started_s = time.perf_counter()
        found = self._recovery.find(memory, self._ranks)
        if found is None:
            with self._ranks.all_or_none():
                if (source := self._options.recovery.start_from) is not None:
                    logger.warning("%s", load_start(self._binding, source))
            return
        if found.apart is not None:
            self._cleanup.callback(found.apart.close)
        self._loop.restore(found, self._buckets, started_s=started_s)
        self._loop.heed_program(found.replay, self._program, self._options.recovery)
        self._operators = found.plan.operators
        self.resumed_from = found.replay.end

    def _rewind(self) -> None:
        for batches in self._batches:
            batches.rewind()


def _close(checkpointer: weakref.ref[Checkpointer]) -> None:
    """At the interpreter's end: an orderly goodbye, so that the daemon does not take the end for a death."""
    found = checkpointer()
    if found is not None and not found.off:
        found.close()
