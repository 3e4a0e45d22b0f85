"""``Checkpointer``: the whole integration, three lines in a training loop.

The loop's top is the snapshot boundary: everything that a step changes (scheduler, scaler, bias updates, the copy-back from
master weights) has happened there. At the optimizer's step the client waits for its own copies, and for nothing else.
Training does not depend on us: after the attach, every failure of ours is a log line, a counter, and a degraded mode.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import logging
import os
import platform
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ckptd.client.agreement import all_or_none
from ckptd.client.arguments import (
    all_operators,
    check_options,
    check_parking,
    check_state,
    needed_memory,
    own_share_bytes,
)
from ckptd.client.binding import Binding, local
from ckptd.client.boundary_log import BoundaryLog
from ckptd.client.buckets import Buckets
from ckptd.client.certificate import Certificate, DenseState
from ckptd.client.closures import before_update
from ckptd.client.data import Batches
from ckptd.client.describe import describe_table
from ckptd.client.exchange import exchange
from ckptd.client.freeze import Tape, choose_freezing, clip_norm_tap, scaler_tap
from ckptd.client.guard import Guard
from ckptd.client.hooks import ModuleHook
from ckptd.client.identity import identify
from ckptd.client.memory import RankMemory
from ckptd.client.names import is_compiled
from ckptd.client.operators import Grouping
from ckptd.client.park_signals import park_on_sigterm
from ckptd.client.parking import Parking
from ckptd.client.pipeline_part import PipelinePart
from ckptd.client.placement import check_sharded, placement_lines
from ckptd.client.plan import operator_costs
from ckptd.client.popularity import TokenCounter
from ckptd.client.precision import PrecisionProbe
from ckptd.client.probe import unwrap_optimizer
from ckptd.client.provision import Options
from ckptd.client.recorder import Recorder
from ckptd.client.recovery import Recovery, Resumption, newest_window
from ckptd.client.rehearsal import callables_of, rehearsal_tap, without_trace
from ckptd.client.replay import Replay
from ckptd.client.scalars import Stateful
from ckptd.client.shared_values import shared_value
from ckptd.client.sharing import NOTHING_SHARED, Sharing, find_replicas, meet_sharing
from ckptd.client.silent_log import SilentLog
from ckptd.client.snapshot_image import SnapshotImage
from ckptd.client.stages import stages_of
from ckptd.client.start_from import load_start, start_unprotected
from ckptd.client.stats import Stats
from ckptd.cuda.select import make_engine
from ckptd.launch import ensure_daemon
from ckptd.schedules.schedule import Ordering

__all__ = ["Checkpointer"]

logger = logging.getLogger(__name__)

_SEAL_WAIT_S = 5.0


class Checkpointer:
    """Snapshot every iteration to the node's daemon; after a failure, resume at the exact bits.

    Create it when model, optimizer and everything in ``state`` exist, and before data iterators are created: it is here that
    a previous run is found and restored. Then loop over ``steps``.

    Args:
        model: any module; operators (experts, gates, dense parts) are found in it.
        optimizer: the optimizer, or a list of them.
        state: anything with ``state_dict``/``load_state_dict`` by name: schedulers, GradScaler, stateful data loaders.
        job, run, rank, world_size: who this is; from torchrun's environment where not given.
        daemon: ``"auto"`` starts one if none answers; an endpoint (``ipc://…``); None turns everything off.
        policy: ``"sliding"`` (sparse, any W consecutive snapshots recover), ``"aligned"`` (windows as in MoEvement), or
            ``"dense"`` (everything, every ``every`` iterations).
        window: W; None measures and chooses the smallest that fits.
        ordering: how expert popularity is measured: hard, soft, decayed, capacity (``capacities`` by operator name).
        operators: the user's own grouping (see ``discover_operators``).
        masters: ``{parameter name: fp32 master}`` where the optimizer holds separate masters; None finds them by value.
        freeze: ``"auto"``, ``"drop"`` or ``"inputs"``: how operators are frozen in replay.
        on_mismatch: ``"raise"`` or ``"warn"`` when a replayed step does not reproduce what was recorded.
        max_overhead: on CPU, the share of an iteration that copies may take (it decides the window).
        inline_copy: copy in the training thread, beside it, or (None) whichever is measured to be faster; CPU only.
        nan_check_every: look for NaN in the weights of every that many snapshots (0: never).
        replicas: on how many other nodes each snapshot is kept; None leaves it to the daemons' configuration.
        keep_floor: while replication is behind by more than the ring has room for, keep the newest snapshot that all ranks have replicated, and leave out
            newer ones until there is more memory. Otherwise it is given away where other nodes hold it, and the loss of one of those may be the loss of all.
        replicated: what several ranks have alike though no wrapper tells: patterns of parameter names, each with the process
            group (or one-dimensional ``DeviceMesh``) over which what matches is replicated.
        capture_once: what several ranks have alike is captured by one of them (bytes are spread evenly); False: by each.
        start_from: a model to begin with where there is nothing to resume from: a folder or file of safetensors with the
            model's own names, or what ``ckptctl import`` tells. With optimizer state, where it has one.
        topology: any text that must be equal for a restart to be accepted (a parallel layout, say).
        park: keep memory into which this rank's whole state is copied when the job is torn down (docs/parking.md); None: where
            this run logs boundaries and has several ranks.
        park_after_s: a step that lasts longer is parked, too; None: much longer than steps have lasted so far.
        timeout_s: how long to wait for the daemon at the start.
    Raises:
        ValueError: something passed is unusable; the message says what and what to do.
        AttachRefused: the daemon refuses: memory, another trainer with this rank, another topology; with the numbers.
        DaemonUnavailable: no daemon answers.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        state: Mapping[str, Stateful] | None = None,
        *,
        job: str | None = None,
        run: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        daemon: str | None = "auto",
        policy: str = "sliding",
        window: int | None = None,
        every: int = 1,
        ordering: str = "hard",
        capacities: Mapping[str, float] | None = None,
        operators: Grouping | None = None,
        masters: Mapping[str, Tensor] | None = None,
        freeze: str = "auto",
        on_mismatch: str = "raise",
        topology: str = "",
        max_overhead: float = 0.01,
        inline_copy: bool | None = None,
        nan_check_every: int = 16,
        replicas: int | None = None,
        keep_floor: bool = False,
        replicated: Mapping[str, Any] | None = None,
        capture_once: bool = True,
        start_from: str | os.PathLike[str] | None = None,
        park: bool | None = None,
        park_after_s: float | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        self._stats = Stats()
        self._tape = Tape()
        self._replay: Replay | None = None
        self._resume: Replay | None = None
        self._recorder: Recorder | None = None
        self._memory: RankMemory | None = None
        self._pipeline = PipelinePart(self._stats)
        self._guard: Guard | None = None
        self._parking: Parking | None = None
        self._park, self._park_after_s = park, park_after_s
        self._batches: list[Batches] = []
        self._cleanup = contextlib.ExitStack()
        self._step = 0
        self.resumed_from: int | None = None
        self.off = daemon is None
        self._start_from = start_from
        if self.off:
            if start_from is not None:
                logger.warning("%s", start_unprotected(model, optimizer, masters, start_from))
            return
        check_options(policy, window, every, on_mismatch, ordering, daemon)
        check_parking(park, park_after_s)
        self._stateful = check_state(state)
        optimizers = [
            unwrap_optimizer(o)
            for o in (optimizer if isinstance(optimizer, list | tuple) else [optimizer])
        ]
        self._binding = Binding(model, optimizers, masters)
        check_sharded(self._binding)
        if policy != "dense" and (reasons := self._binding.dependent()):
            raise ValueError(
                f"sparse snapshots need an optimizer that updates each parameter independently: {'; '.join(reasons)}. "
                "Pass policy='dense' to capture everything in every snapshot"
            )
        self._identity = identify(job, run, rank, world_size)
        freezing, why = choose_freezing(
            model,
            masters=bool(self._binding.masters),
            wanted=freeze,
            world_size=self._identity.world_size,
            spread=bool(self._binding.elsewhere),
        )
        self._operators = all_operators(model, self._binding, operators)
        self._options = Options(
            policy,
            window,
            every,
            Ordering(ordering),
            capacities,
            max_overhead,
            nan_check_every,
            inline_copy,
        )
        # Told by structure, so the same on all ranks; `_restore` needs it whatever is captured from now on.
        told = Sharing()
        if self._identity.world_size > 1 and dist.is_available() and dist.is_initialized():
            told = Sharing(find_replicas(self._binding, replicated, self._identity.rank))
        self._sharing = NOTHING_SHARED
        device = next((local(p).device for p in self._binding.params.values()), torch.device("cpu"))
        self._device, self._on_mismatch = device, on_mismatch
        self._engine = make_engine(device, inline=bool(inline_copy))
        self._recovery = Recovery(
            self._binding,
            self._engine,
            identity=self._identity,
            stateful=self._stateful,
            tape=self._tape,
            freezing=freezing,
            freezing_reason=why,
            on_mismatch=on_mismatch,
            sharing=told,
            operators=self._operators,
        )
        self._meet = partial(exchange, self._identity)
        needed, text = needed_memory(
            self._binding,
            self._operators,
            policy,
            window,
            told if capture_once else NOTHING_SHARED,
        )
        try:
            # A rank that is refused must not leave the others waiting for it.
            with all_or_none(self._meet, platform.node()):
                self._memory = RankMemory(
                    self._identity,
                    ensure_daemon if daemon == "auto" else lambda: str(daemon),
                    needed_bytes=needed,
                    needed_text=text,
                    topology=topology,
                    version=importlib.metadata.version("ckptd"),
                    replicas=replicas,
                    keeps_floor=keep_floor,
                    timeout_s=timeout_s,
                    stats=self._stats,
                )
                self._precision = PrecisionProbe(self._binding.params)
                # Hooks within a compiled graph would break it: its experts are anchored in the order of the model.
                counted = [] if is_compiled(model) else self._operators
                self._counter = TokenCounter(model, counted, self._options.ordering, capacities)
                self._cleanup.callback(self._counter.close)
                self._buckets = Buckets(model)
            if self._identity.world_size > 1:
                shared = told if capture_once else NOTHING_SHARED
                own_bytes = own_share_bytes(shared, self._operators, self._binding, policy)
                self._sharing = meet_sharing(self._binding, shared.replicas, own_bytes, self._meet)
            self._guard = Guard(self._memory.session, self._stats)
            self._recorder = self._make_recorder()
            if park:
                self._begin_parking()
            self._restore()
            self._install(model)
            atexit.register(_close, weakref.ref(self))
        except BaseException:
            self.close()
            raise

    # -- the loop --------------------------------------------------------------------------------

    def steps(self, total: int, *, start: int = 0) -> Generator[int, None, None]:
        """The steps to run, ``[start, total)``; after a restore it begins where replay must begin.

        Args:
            start: the first step of a run that resumes nothing of ours and has not begun (one that goes on from a checkpoint of
                somebody else's).
        Raises:
            ReplayMismatch: a replayed step did not reproduce what was recorded (see ``on_mismatch``).
        """
        self._check_whole()
        if self.resumed_from is None and not self._step:
            self._step = start
        if self.off:
            if self._closed:
                logger.warning(
                    "this checkpointer is closed: iterations %d to %d are not captured",
                    self._step,
                    total,
                )
            yield from self._body(range(self._step, total))
            return
        first = self._resume.start if self._resume is not None else self._step
        # After a localized restart all ranks refuse, or none: they begin at different iterations.
        reached = -1 if self._resume is None else self._resume.end
        if self._pipeline.start is not None:
            reached = self._pipeline.start.plan.resume
        if reached > total:
            raise ValueError(
                f"the snapshots of this run reach iteration {reached}, beyond total={total}; pass run= a new name to start over"
            )
        self._step = first
        if first >= total:
            logger.warning(
                "iteration %d of %d is reached already: nothing to run; pass run= a new name to start over",
                first,
                total,
            )
        for step in self._body(range(first, total)):
            self._top(step)
            self._pipeline.begin(step, replaying=self._replay is not None)
            yield step
        self._top(self._step)
        self._finish()

    def _body(self, steps: range) -> Iterator[int]:
        """Count the steps whose body is over, also where the loop is left in the middle of one."""
        for step in steps:
            self._step, self._updated = step, False
            try:
                yield step
            except GeneratorExit:
                if self._parking is not None:
                    self._parking.leave(f"the loop is left in the middle of step {step}")
                # A body that has updated the weights counts as done: the next loop must not do it again.
                self._step += self._updated or self.off
                done = self._updated and self._replay is None
                (self._pipeline.end if done else self._pipeline.abandon)()
                raise
            self._step = step + 1

    @property
    def step(self) -> int:
        """The step that runs, or the next one."""
        return self._step

    @property
    def replaying(self) -> bool:
        """Whether this step is replayed with part of the operators frozen."""
        return self._replay is not None and not self._replay.dense

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, **kwargs: Any
    ) -> Tensor:
        """``torch.nn.utils.clip_grad_norm_``; that one is recorded too, however it was imported."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, **kwargs)

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """The body is a forward of the model; said where the model is not called as a module, as in Lightning's ``training_step``."""
        if self.off:
            yield
            return
        self._forward_begins()
        try:
            yield
        finally:
            self._forward_ended()

    def record(self, kind: str, value: Any) -> Any:
        """Keep a value that a replay with frozen operators could not recompute; in replay, the recorded one is returned."""
        return value if self.off else self._tape.record(kind, value)

    def shared_value(self, name: str, compute: Callable[[], Any]) -> Any:
        """What all ranks compute together in this step and all have alike: a gradient norm over all stages, a loss to show.

        ``compute`` is called in normal life only. A replay, or a rank that runs alone after a localized restart, gets what it
        returned then; so what it communicates does not join ranks that could recover apart.

        Raises:
            ValueError: it returned something that a snapshot cannot hold.
        """
        return (
            compute() if self.off else shared_value(name, compute, self._tape, self._pipeline.log)
        )

    def batches(self, loader: Any) -> Iterator[Any]:
        """Iterate over ``loader`` for ever, epoch after epoch, from wherever its restored state says; survives ``verify``."""
        found = Batches(loader)
        self._batches.append(found)
        return found

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """While the body runs (a large all-to-all, say), this node's daemon sends no snapshots to its peers.

        A hint: it holds for half a second at most, so that replication cannot starve. Costs about a microsecond.
        """
        table = self._memory.table if self._memory is not None else None
        if table is not None:
            table.ask_quiet(True)
        try:
            yield
        finally:
            if table is not None:
                table.ask_quiet(False)

    # -- boundaries of a pipeline ----------------------------------------------------------------

    def log_boundaries(
        self, stages: Any, *, limit_bytes: int | None = None, replicate: bool = False
    ) -> SilentLog:
        """Log what these stages send to other stages: a schedule of ``torch.distributed.pipelining``, a stage, or several.

        Call it once, before the loop; ``close`` undoes it. Returns the log, as ``boundary_log`` does.

        Raises:
            ValueError: there is no stage in ``stages``, or it is logged already.
        """
        found = stages_of(stages)
        log = self.boundary_log(limit_bytes=limit_bytes, replicate=replicate)
        if isinstance(log, BoundaryLog):
            self._cleanup.enter_context(self._pipeline.listen_to(found, log))
            if self._recorder is not None:
                self._recorder.stages += found
        return log

    def boundary_log(self, *, limit_bytes: int | None = None, replicate: bool = False) -> SilentLog:
        """The log for a pipeline of your own: call its ``activation`` and ``gradient`` with what you send.

        Args:
            limit_bytes: the most that it may take; None leaves it to the daemon's quota. Counts where the log is made, as does the next one.
            replicate: whether the nodes that hold replicas of this rank's snapshots are to hold its log, too: it is then to be had when this
                node is lost. Takes as much of their memory; one that has none holds no log, and training goes on.
        """
        if self.off:
            return SilentLog()
        if self._pipeline.log is not None:
            return self._pipeline.log
        assert self._memory is not None
        log = self._pipeline.open_log(
            self._memory,
            self._device,
            plan=lambda: None if self._recorder is None else self._recorder.plan,
            silent=lambda: self._rehearses or self._verifies,
            on_mismatch=self._on_mismatch,
            limit_bytes=limit_bytes,
            replicate=replicate,
            alike=self._sharing.alike(self._operators, self._identity.rank),
        )
        if self._park is None and self._identity.world_size > 1:
            self._begin_parking()
        return log

    # -- looking ---------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """Counters since the start: stalls in ms, bytes, snapshots, what was skipped and why."""
        return self._stats.as_dict()

    def describe(self) -> str:
        """A table of the operators: kind, bytes anchored and not, phase."""
        if self.off:
            return "ckptd is off (daemon=None)"
        plan = self._recorder.plan if self._recorder is not None else None
        operators = plan.operators if plan is not None else self._operators
        dtypes = plan.compute_dtypes if plan is not None else {}
        costs = operator_costs(self._binding, operators, dtypes)
        head = [
            f"job {self._identity.job}, run {self._identity.run}, rank {self._identity.rank} of {self._identity.world_size}",
            f"freezing in replay: {self._recovery.freezing} ({self._recovery.freezing_reason})",
            f"window: {plan.schedule.window} ({plan.schedule.reason})"
            if plan is not None
            else "window: chosen after the first steps are measured",
        ]
        if self._identity.world_size > 1:
            head += placement_lines(self._binding)
        head += self._pipeline.describe()
        if self._parking is not None:
            head.append(self._parking.describe())
        owners = plan.owners if plan is not None else []
        return describe_table(
            operators, costs, plan.schedule if plan is not None else None, owners, head
        )

    def verify(self, run_step: Callable[[int], Any]) -> Certificate:
        """Replay the newest window in process and compare with the live state: a certificate that anyone can rerun.

        Call it between steps (after the optimizer's step, or after the loop), on all ranks at the same step. ``run_step(step)``
        must do what the loop's body does, with data that comes from objects in ``state=`` (or from ``batches``). The live state is
        put back afterwards.

        Raises:
            ValueError: off, replaying, not all ranks run this iteration, or there is no complete window yet (that all ranks have).
        """
        recorder, memory = self._recorder, self._memory
        if recorder is None or memory is None or self._replay is not None:
            raise ValueError("verify() needs a running checkpointer that is not replaying")
        if (start := self._pipeline.start) is not None:
            raise ValueError(
                f"verify() needs all ranks, and not all of them run iterations before {start.plan.resume}, after a failure"
            )
        if self._parking is not None:
            self._parking.closed_because("verify() runs")
        recorder.finish()
        memory.session.flush(_SEAL_WAIT_S)
        memory.settle_filled(_SEAL_WAIT_S)
        with self._pipeline.aside():
            suffix = newest_window(memory, self._meet)
            images = memory.images(suffix.records)
            until = self._step + 1 if self._stepping else self._step
            return self._certify(images, until, run_step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Detach from the daemon, which keeps the snapshots. The loop may go on unprotected, unless it is being replayed."""
        if self._parking is not None:
            self._parking.leave("closed in the middle of a step")
        self._cleanup.close()
        if self._parking is not None:
            self._parking.close()
            self._parking = None
        self._pipeline.close()
        if self._replay is not None:
            # The patches of a replay must not outlive it, and what is still frozen is not the run's state.
            self._replay.abandon()
            self._replay = self._resume = self._first = None
            self._left_in_replay = True
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None
        if not self.off:
            self._engine.close()
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        self.off = self._closed = True

    # -- at the boundaries -----------------------------------------------------------------------

    _left_in_replay = False
    _resumed: Resumption | None = None

    def _check_whole(self) -> None:
        if self._left_in_replay:
            raise ValueError(
                "this Checkpointer was closed in the middle of a replay: part of the model is not restored; "
                "create a new one, which begins the replay again"
            )

    def _top(self, step: int) -> None:
        self._check_whole()
        self._pipeline.end()
        if self._memory is not None:
            self._pipeline.come_together(step, self._memory, self._wait_for_all)
        replay = self._replay
        recorder = self._recorder
        if self._resume is not None:
            # The first step after a restore: the loop, and the iterators it needs, exist now.
            self._resume.begin_first_step()
            self._resume = None
            self._started = time.perf_counter()
        elif replay is not None and step == replay.next_iteration:
            self._stats.replayed_steps += 1
            assert self._memory is not None
            self._recovery.advance(replay, self._memory)
        if replay is not None:
            if recorder is not None:
                recorder.watch()
            if replay.dense:
                self._recovered(replay)
            return
        if recorder is not None:
            self._stepping = False
            self._survive(recorder, recorder.top, step)
            self._stepping = True
        else:
            self._tape.take()  # given up: what the taps still record is for nobody

    def _wait_for_all(self) -> None:
        if self._parking is not None:
            # Who is told to end here is not to wait for a top that may be far; what was parked before stays.
            self._parking.closed_because("not all ranks have come to where they run together")
        self._meet(b"")

    def _survive(self, recorder: Recorder, work: Callable[..., object], *args: object) -> None:
        assert self._guard is not None
        if not self._guard.run(recorder, self._step, work, *args):
            self._recorder = None

    def _recovered(self, replay: Replay) -> None:
        self._replay = None
        if self._resumed is not None:
            # Only now is the newest snapshot certain to be here: it may have come from another node meanwhile.
            self._resumed.plan.use_phases(replay.newest_scalars["phases"])
            if self._recorder is not None:
                # Absent in what 0.4 recorded.
                stride = replay.newest_scalars.get("stride", 1)
                self._recorder.go_on(replay.end, self._resumed.phase, stride)
            self._resumed = None
        self._counter.enabled = True
        if self._recorder is not None:
            self._recorder.replayed()
            if replay.mismatches:
                self._recorder.break_chain()
            rng_forward = replay.newest_scalars.get("rng_forward")
            self._survive(self._recorder, self._recorder.recovered, replay.end, rng_forward)
        self._stats.replay_s = time.perf_counter() - self._started
        self._stats.verified_tensors += replay.compared
        text = (
            f"recovered at iteration {replay.end}: {self._stats.replayed_steps} iterations replayed in {self._stats.replay_s:.2f} s "
            f"(freezing: {replay.freezing}), {replay.compared} comparisons, {len(replay.mismatches)} mismatches"
        )
        logger.info("%s", text)
        if self._memory is not None:
            self._memory.session.notice("info", "recovered", text)

    def _finish(self) -> None:
        self._stepping = False
        if self._parking is not None:
            self._parking.closed_because("the loop is over")
        if self._recorder is not None:
            self._recorder.finish()
        if self._memory is not None:
            # The last snapshot must not depend on how soon the process ends now.
            if not self._memory.session.flush(_SEAL_WAIT_S):
                logger.warning("the last snapshot was not finished within %.0f s", _SEAL_WAIT_S)
            self._memory.session.report(self._step, self._stats.as_dict())

    _stepping = False
    _updated = False
    _closed = False
    _started = 0.0

    def _before_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        return before_update(args, kwargs, self._weights_are_about_to_change)

    def _weights_are_about_to_change(self) -> None:
        if self._replay is not None:
            self._replay.before_optimizer_step()
        if self._recorder is not None:
            self._survive(self._recorder, self._recorder.before_optimizer_step)
        # In a replay there is no moment that could end, and the next top opens none: nobody is to wait for it.
        if self._parking is not None and self._replay is None:
            self._parking.before_update()

    def _after_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._updated = True
        index = next(i for i, o in enumerate(self._binding.optimizers) if o is optimizer)
        if self._replay is not None:
            self._replay.after_optimizer_step(index)
        if self._recorder is not None:
            self._recorder.after_optimizer_step(index)

    def _forward_begins(self, *called: Any) -> None:
        if self._rehearses or torch._C._current_graph_task_id() != -1:
            return  # no forward of a step; or recomputation inside a backward
        if self._recorder is not None:
            self._survive(self._recorder, self._recorder.first_forward)
        first, self._first = self._first, None
        if first is not None:
            first.first_forward()
        if self._parking is not None:
            self._parking.first_forward()
        self._precision.enter()

    _first: Replay | None = None
    _rehearses = _verifies = False

    @contextlib.contextmanager
    def _rehearsing(self) -> Iterator[None]:
        """A pipeline's schedule runs its stages to learn their shapes, in the first step of every process."""
        resumed = self._first is not None
        self._rehearses = True
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(self._pipeline.aside())
                if resumed:
                    stack.enter_context(without_trace(self._binding))
                yield
        finally:
            self._rehearses = False

    def _forward_ended(self, *called: Any) -> None:
        self._precision.leave()

    # -- set-up ----------------------------------------------------------------------------------

    def _install(self, model: nn.Module) -> None:
        """Hooks and taps; undone by ``close``."""
        keep = self._cleanup
        for optimizer in self._binding.optimizers:
            keep.callback(optimizer.register_step_pre_hook(self._before_optimizer_step).remove)
            keep.callback(optimizer.register_step_post_hook(self._after_optimizer_step).remove)
        begins, ended = ModuleHook(self._forward_begins), ModuleHook(self._forward_ended)
        for module in callables_of(model):
            keep.callback(module.register_forward_pre_hook(begins).remove)
            keep.callback(module.register_forward_hook(ended, always_call=True).remove)
        keep.enter_context(rehearsal_tap(self._rehearsing))
        keep.enter_context(clip_norm_tap(self._tape))
        for item in self._stateful.values():
            if hasattr(item, "_unscale_grads_"):
                keep.enter_context(scaler_tap(item, self._tape))

    def _make_recorder(self) -> Recorder:
        assert self._memory is not None
        return Recorder(
            self._binding,
            self._operators,
            self._memory,
            self._engine,
            stateful=self._stateful,
            tape=self._tape,
            stats=self._stats,
            options=self._options,
            counter=self._counter,
            precision=self._precision,
            buckets=self._buckets,
            sharing=self._sharing,
        )

    def _begin_parking(self) -> None:
        if self._memory is None or self._recorder is None:
            return  # snapshots were given up: there is nothing to park with
        self._parking = self._recorder.parking = Parking(
            self._memory,
            self._binding,
            make_engine(self._device, inline=True),
            self._stats,
            device=self._device,
            restless=self._recorder.restless,
            park_after_s=self._park_after_s,
        )
        self._cleanup.callback(park_on_sigterm(self._parking))

    # -- restoring -------------------------------------------------------------------------------

    def _restore(self) -> None:
        memory, recorder = self._memory, self._recorder
        assert memory is not None
        assert recorder is not None
        started = time.perf_counter()
        found = self._recovery.find(memory)
        if found is None:
            with all_or_none(self._meet, memory.session.node_id):
                if self._start_from is not None:
                    logger.warning("%s", load_start(self._binding, self._start_from))
            return
        if found.apart is not None:
            self._cleanup.callback(found.apart.close)
        replay = found.replay
        with all_or_none(self._meet, memory.session.node_id):
            replay.load_state()
        # Ranks hand over tensors from here on: whoever fails before must not leave the others waiting.
        with all_or_none(self._meet, memory.session.node_id):
            replay.load_tensors()
            layouts = replay.bucket_layouts
        self._buckets.put_back(layouts, self._meet)
        if replay.buffer_senders is not None:
            self._buckets.send_next(replay.buffer_senders)
        self._operators = found.plan.operators
        self._resume = self._first = self._replay = replay
        self._resumed = found
        self._counter.enabled = False
        for segment in memory.table.segments:
            self._engine.register(segment.memory, segment.regions())
        recorder.resume(found.plan, last=replay.end, phase=found.phase, sharing=found.sharing)
        if found.apart is not None:
            stages = replay.oldest_scalars.get("stages", {})
            with all_or_none(self._meet, memory.session.node_id):
                recorder.stage_shapes = self._pipeline.run_apart(
                    self._identity.rank, found.apart, stages
                )
        self.resumed_from = replay.end
        self._stats.restore_s = time.perf_counter() - started
        self._stats.restored_bytes = replay.bytes_loaded
        text = (
            f"resuming at iteration {replay.end}, replay begins at {replay.start}: {found.reason}; "
            f"loaded {replay.bytes_loaded} bytes in {self._stats.restore_s:.3f} s, freezing: {replay.freezing}"
        )
        # A warning, so that it is seen without any logging set-up: the run does not begin at its beginning.
        logger.warning("%s", text)
        memory.session.notice("info", "restored", text)

    def _certify(
        self, images: Sequence[SnapshotImage], until: int, run_step: Callable[[int], Any]
    ) -> Certificate:
        recorder, self._recorder = self._recorder, None
        assert recorder is not None
        assert recorder.plan is not None
        self._verifies = True
        live = DenseState(self._binding, self._stateful)
        kept = self._tape.take()
        replay = self._recovery.replay_of(images, recorder.plan, self._meet, on_mismatch="warn")
        self._counter.enabled = False
        self._replay = replay
        try:
            replay.load_state()
            replay.load_tensors()
            self._rewind()
            replay.begin_first_step()
            self._first = replay
            for step in range(replay.start, until):
                if step == replay.next_iteration:
                    replay.advance()
                run_step(step)
            if until == replay.next_iteration:
                replay.advance()
            differences = [*replay.mismatches, *live.differences()]
        finally:
            replay.abandon()
            self._replay = self._first = None
            self._tape.take()
            self._tape.put_back(kept)
            live.restore()
            self._rewind()
            self._counter.enabled = True
            self._recorder = recorder
            self._verifies = False
        return Certificate(
            replay.start,
            until,
            len(images),
            replay.freezing,
            len(live.tensors) + replay.compared,
            live.nbytes,
            tuple(differences),
        )

    def _rewind(self) -> None:
        for batches in self._batches:
            batches.rewind()


def _close(checkpointer: weakref.ref[Checkpointer]) -> None:
    """At the interpreter's end: an orderly goodbye, so that the daemon does not take the end for a death."""
    found = checkpointer()
    if found is not None and not found.off:
        found.close()
