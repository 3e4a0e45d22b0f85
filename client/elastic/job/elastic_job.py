"""``ElasticJob``: training continues with the ranks that are there, and no step is repeated or skipped.

    job = ElasticJob({"blocks.0.moe": 8, "blocks.1.moe": 8}, slots=4)
    model = build(job)  # its mixture layers are made by job.layer(name, make_expert)
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt = job.checkpointer(model, optimizer, {"sched": sched})
    for step in job.steps(total):
        samples = batches.mine(step, job.rank, job.world_size)
        ...  # losses divided by the size of the global batch
        job.sum_gradients()
        optimizer.step()

To put the experts' optimizer on shards (SwiftMoE) instead of on each replica, call
``job.shards(model, make_optimizer)`` before making the optimizer of the rest, and ``shards.step()``
after its step.

An *incarnation* is one life of the job: its ranks and the placement of their experts. When ranks go
or come, the launcher restarts all of them as a new incarnation: the ranks take the inventory of
their nodes and plan (`incarnation_start`), load their part of the state, send each other the rest
(`state_transfer`), and continue at one iteration. For the daemons each incarnation is a run of its
own, which they keep until the next one is held without it (`background_tasks`).
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, Never, Self

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ckptd.client.capture.program import Program, apply_options, this_program
from ckptd.client.capture.step_state import Stateful
from ckptd.client.checkpointer import Checkpointer
from ckptd.client.elastic import ElasticExperts, ExpertShards
from ckptd.client.elastic.incarnation.incarnation_start import (
    JobSettings,
    LocalNode,
    find_local_node,
    start_incarnation,
)
from ckptd.client.elastic.incarnation.state_transfer import Loader, transfer_state
from ckptd.client.elastic.incarnation.whole_state import LoadHistory, WholeState, same_call, whole_state_of
from ckptd.client.elastic.job.background_tasks import BackgroundTasks, floor_of, make_room
from ckptd.client.elastic.job.global_batch import DenseGradients
from ckptd.client.elastic.job.job_checks import (
    DENSE,
    check_groups,
    check_options,
    identify_anyway,
    layers_of,
    same_total,
    wrong_arguments,
)
from ckptd.client.log_lines import get_logger
from ckptd.client.options import (
    DaemonOptions,
    LayoutOptions,
    PlacementOptions,
    RecoveryOptions,
    RunOptions,
    SnapshotOptions,
    check_keywords,
    daemon_options,
)
from ckptd.client.ranks.collectives import Collectives
from ckptd.client.train_loop import RECORDED_COUNTS, tell_differences
from ckptd.core.elastic.elastic_types import ExpertPlacement
from ckptd.core.elastic.incarnation_plan import placement_of, replicas_by_load
from ckptd.core.elastic.incarnations import ExpertLayers
from ckptd.core.slots.segment_format import WORLD_TOPOLOGY
from ckptd.launch import ensure_daemon
from ckptd.storage.checkpoints.names import run_of_incarnation

logger = get_logger(__name__)

_COMPARED = (
    "; what is loaded is compared with its digests only: no step is replayed, since other ranks, "
    "or other places of experts, add up in another order (docs/elastic.md, section 14)"
)


class ElasticJob:
    """One incarnation of an elastic job; making it is a collective call of all its ranks.

    Args:
        layers: the names of the model's mixture layers (modules of `layer`), each with its number
            of experts, which is the same for all.
        slots: the number of experts of each layer for which this rank has room.
        run: the name of the run, or ``RunOptions``; default: from torchrun's environment.
        daemon: as for ``Checkpointer``; None: nothing is kept, and every start is the first one.
        placement: on how many nodes experts are, and when they are placed anew (``PlacementOptions``).
    Raises:
        TypeError: an unknown keyword, or a group of options of another type; the message says how
            to pass it.
        ValueError: on all ranks: they were started with different arguments, or one is unusable.
        ElasticError: on all ranks: there are fewer slots than experts, or the nodes hold no whole
            state of this run.
        DaemonUnavailable: on all ranks: a node has no daemon; or the state must come from storage,
            which does not answer or is damaged.
    """

    def __init__(
        self,
        layers: Mapping[str, int],
        *,
        slots: int,
        run: str | RunOptions | None = None,
        daemon: str | DaemonOptions | None = "auto",
        placement: PlacementOptions = PlacementOptions(),
        **unknown: Never,
    ) -> None:
        given = {**unknown, "run": run, "daemon": daemon, "placement": placement}
        check_keywords("ElasticJob()", given, ("run", "daemon", "placement"))
        began = time.perf_counter()
        # `start_incarnation` raises what is wrong here on all ranks: the others would wait for this one.
        self._identity, nameless = identify_anyway(run)
        wrong = nameless or wrong_arguments(layers, slots, placement, self._identity.run)
        counts = [1] if wrong else list(layers.values())
        self.layers = ExpertLayers(() if wrong else tuple(layers), counts[0])
        self._settings = JobSettings(self._identity.job, self._identity.run, self.layers, placement)
        self._daemon = daemon_options(daemon)
        node = ValueError(wrong) if wrong else self._find_node(slots, placement.domain)
        # Under one name whatever job and run they were given: all come to the same barrier, where
        # these are compared.
        self._ranks = Collectives.of_job(
            replace(self._identity, job="elastic", run="worlds"),
            node=platform.node() if isinstance(node, Exception) else node.seat.node,
        )
        self._started = start_incarnation(node, self._settings, self._ranks)
        assert not isinstance(node, Exception), "start_incarnation has raised it"
        self._node = node
        self.plan = self._started.plan
        self._history = LoadHistory(len(self.layers.names), self.layers.num_experts)
        self._made: dict[str, ElasticExperts] = {}
        self._layers: list[ElasticExperts] = []
        self._checkpointer: Checkpointer | None = None
        self._loader: Loader | None = None
        self._background: BackgroundTasks | None = None
        self._gradients: DenseGradients | None = None
        self._shards: ExpertShards | None = None
        self.again = False
        self.seconds = {**self._started.seconds, "start_s": time.perf_counter() - began}
        compared = "" if self.plan.handover is None else _COMPARED
        logger.warning("incarnation %d: %s%s", self.plan.number, self.plan.reason, compared)

    def _find_node(self, slots: int, domain: str) -> LocalNode | Exception:
        daemon = self._daemon
        if daemon.off:
            return find_local_node(None, self.rank, slots, domain)
        endpoint = ensure_daemon if daemon.endpoint == "auto" else lambda: str(daemon.endpoint)
        return find_local_node(endpoint, self.rank, slots, domain)

    # -- ranks, nodes, experts ---------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self._identity.rank

    @property
    def world_size(self) -> int:
        return self._identity.world_size

    @property
    def start(self) -> int:
        """The first step of this incarnation."""
        return self.plan.start

    @property
    def floor(self) -> int:
        """The newest step of this incarnation whose state has all its replicas; -1: none yet, and the
        loss of a node takes the job back to `start`.
        """
        if self._node.folder is None:
            return -1
        run = run_of_incarnation(self._identity.run, self.plan.number)
        return floor_of(self._node.folder, self._identity.job, run, self.rank)

    @property
    def nodes(self) -> tuple[int, ...]:
        """The number of each rank's node."""
        return self.plan.node_of

    def replicas(self, layer: str) -> NDArray[Any]:
        """``[R, E]``: the present replicas of each expert of a layer on each rank."""
        if layer not in self.layers.names:
            raise ValueError(f"there is no layer {layer!r}: layers= named {list(self.layers.names)}")
        if self._shards is not None:
            return self._shards.placements[layer]
        found: NDArray[Any] = self.plan.replicas_LRE[self.layers.names.index(layer)]
        return found

    def placements_by_load(self) -> dict[str, NDArray[Any]]:
        """``[R, E]`` by the name of the layer: the placement for the tokens that the experts got so
        far; the same on all ranks.

        For ``shards.step(job.placements_by_load())``: with shards another placement costs nothing
        to send.
        """
        placement = self._settings.placement
        found = replicas_by_load(
            self.plan,
            self._history.loads,
            threshold=placement.threshold,
            max_straggler=placement.max_straggler,
        )
        return dict(zip(self.layers.names, found, strict=True))

    def _placement(self) -> ExpertPlacement:
        """The present placement on nodes."""
        if self._shards is None:
            return self.plan.placement
        return placement_of(self.plan, [self.replicas(name) for name in self.layers.names])

    def experts(self, layer: str) -> list[int]:
        """The experts of a layer that this rank holds."""
        here: list[int] = self.replicas(layer)[self.rank].nonzero()[0].tolist()
        return here

    def layer(
        self,
        name: str,
        make_expert: Callable[[int], nn.Module],
        *,
        reduce: Literal["mean", "sum"] = "sum",
    ) -> ElasticExperts:
        """The mixture layer of that name, with this rank's experts; a collective call.

        Args:
            make_expert: makes the expert of a number. Its initial weights must follow from the
                number, so that all replicas begin equal.
            reduce: as for ``ElasticExperts``; the default goes with losses that are divided by the
                size of the global batch.
        Raises:
            ValueError, DaemonUnavailable: on all ranks: there is no such layer, or a rank could not
                make an expert.
        """
        with self._ranks.all_or_none():
            experts = {number: make_expert(number) for number in self.experts(name)}
        made = ElasticExperts(experts, self.replicas(name), nodes=self.nodes, reduce=reduce)
        self._made[name] = made
        return made

    # -- the state -------------------------------------------------------------------------------

    def shards(
        self,
        model: nn.Module,
        make_optimizer: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer],
        *,
        masters: torch.dtype | None = None,
        make_expert: Callable[[str, int], nn.Module] | None = None,
    ) -> ExpertShards:
        """Put the optimizer of all experts on shards (docs/elastic.md, section 13) instead of on each
        replica; a collective call, before `checkpointer`.

        The experts leave the model's parameters: make the optimizer of the rest after it. The
        result has a step of its own: ``shards.step()``, or ``shards.step(placements)`` for another
        placement from now on.

        Args:
            model: the model, whose mixture layers are those of `layer`.
            make_optimizer: as for ``ExpertShards``.
            masters: as for ``ExpertShards``.
            make_expert: as for ``ExpertShards``.
        Raises:
            ValueError: on all ranks: some call another method; the model has other layers; the
                experts or the optimizer do not allow shards; this incarnation already has shards
                or a checkpointer.
        """
        same_call(self._ranks, "shards()")
        with self._ranks.all_or_none():
            if self._shards is not None or self._checkpointer is not None:
                raise ValueError("call shards() once in an incarnation, and before checkpointer()")
            found = layers_of(model, self.layers, self._made)
            layers = dict(zip(self.layers.names, found, strict=True))
        self._shards = ExpertShards(layers, make_optimizer, masters=masters, make_expert=make_expert)
        return self._shards

    def checkpointer(
        self,
        model: nn.Module,
        optimizer: Any,
        state: Mapping[str, Stateful] | None = None,
        *,
        snapshots: SnapshotOptions = DENSE,
        recovery: RecoveryOptions = RecoveryOptions(),
        layout: LayoutOptions = LayoutOptions(),
        **unknown: Never,
    ) -> Checkpointer:
        """Load this rank's part of the state, from its node or from other ranks, and protect it from
        now on; a collective call.

        Snapshots are dense: an expert whose holders are all lost must come from one snapshot,
        without a replay by ranks that no longer exist.

        Args:
            state: as for ``Checkpointer``. It should be equal on all ranks: a rank gets the state of
                the rank of its number, and a new rank that of the lowest.
            snapshots: as for ``Checkpointer``, with ``policy="dense"`` and no ``window``.
            recovery: as for ``Checkpointer``; the state is always parked, and ``start_from`` stays None.
            layout: as for ``Checkpointer``, without ``replicated``. With `shards` the names of the
                model's parameters begin with ``model.``.
        Raises:
            TypeError: an unknown keyword, or a group of options of another type.
            ValueError: on all ranks: the state is of another model, or has the experts' optimizer
                elsewhere, or an option is the job's own.
        """
        same_call(self._ranks, "checkpointer()")
        with self._ranks.all_or_none():
            given = {**unknown, "snapshots": snapshots, "recovery": recovery, "layout": layout}
            check_groups(given)
            check_options(snapshots, recovery, layout)
            if self._checkpointer is not None:
                raise ValueError("this incarnation has a checkpointer: each has one")
            layers = self._layers = layers_of(model, self.layers, self._made)
            whole = whole_state_of(
                model,
                optimizer,
                state,
                layout.masters,
                self.layers,
                self._history,
                self._shards,
            )
        here = this_program(whole.binding, whole.stateful)  # before anything is loaded
        if self.plan.handover is not None:
            self._loader, seconds = transfer_state(
                self._started, whole, self._shards, self.layers, self._ranks
            )
            self.seconds |= seconds
        if self._shards is not None:
            # In the first incarnation, too: weights always are the rounded shards.
            self._shards.send_weights()
        self._history.watch(layers)
        self._gradients = DenseGradients(whole.dense_params, layers, self._shards)
        began = time.perf_counter()
        make_room(self._node, self._settings, self._started, self.rank)
        recorded: Program = {} if self._loader is None else self._loader.program
        from_script = recovery.param_groups == "script"
        if recorded and from_script:
            apply_options(whole.binding, whole.stateful, recorded, here)
        checkpointer = self._checkpointer = self._protect(whole, snapshots, recovery, layout)
        if recorded:
            self._compare_program(checkpointer, recorded, here, from_script=from_script)
        if not checkpointer.off:
            # Before the first snapshot: one that other ranks could not load is not taken.
            checkpointer._binding.kept.check_also(whole.extras.fitted)
        self.seconds["attach_s"] = time.perf_counter() - began
        self._background = self._tasks_of(checkpointer, layers)
        return checkpointer

    def _tasks_of(self, checkpointer: Checkpointer, layers: list[ElasticExperts]) -> BackgroundTasks:
        memory = checkpointer._memory
        return BackgroundTasks(
            self._node,
            self._settings,
            self._started,
            self._ranks,
            send=None if memory is None else memory.session.tell_elastic,
            when=self._settings.placement.when,
            layers=layers,
        )

    def _compare_program(
        self, checkpointer: Checkpointer, recorded: Program, here: Program, *, from_script: bool
    ) -> None:
        """Report how this program differs from the recorded one, and record the options that count."""
        scripts = f"The script's options count from iteration {self.start} on"
        what = scripts if from_script else RECORDED_COUNTS
        tell_differences(recorded, here, what, rank=self.rank)
        recorder = checkpointer._loop.recorder
        if recorder is not None:
            recorder.scalars.go_by(here if from_script else recorded)

    def _protect(
        self,
        whole: WholeState,
        snapshots: SnapshotOptions,
        recovery: RecoveryOptions,
        layout: LayoutOptions,
    ) -> Checkpointer:
        run = RunOptions(
            name=run_of_incarnation(self._identity.run, self.plan.number),
            job=self._identity.job,
            rank=self.rank,
            world_size=self.world_size,
            topology=WORLD_TOPOLOGY,
        )
        replicated = whole.replicated if self.world_size > 1 else None
        return Checkpointer(
            whole.model,
            whole.optimizers,
            whole.stateful,
            run=run,
            daemon=self._daemon,
            snapshots=snapshots,
            recovery=replace(recovery, park=True),
            layout=replace(layout, replicated=replicated),
        )

    # -- the loop --------------------------------------------------------------------------------

    def steps(self, total: int) -> Generator[int, None, None]:
        """The steps of this incarnation. The iterator ends early with ``again`` set when experts are to
        be placed anew: then make another ``ElasticJob``.

        Raises:
            ValueError: `checkpointer` was not called; on all ranks: they were given other totals,
                and one would end before the others.
        """
        if self._checkpointer is None or self._background is None:
            raise ValueError("call checkpointer() before steps(): it loads the state")
        same_total(self._ranks, total)
        if self._loader is not None:
            self._loader.begin()
            self._loader = None
        steps = self._checkpointer.steps(total, start=self.start)
        try:
            yield from self._body(steps, total, self._background)
        finally:
            steps.close()

    def _body(self, steps: Iterator[int], total: int, background: BackgroundTasks) -> Iterator[int]:
        def loads_LE() -> NDArray[Any]:
            return self._history.loads

        for step in steps:
            why = background.why_anew(step, total, self._placement, loads_LE, self.seconds)
            if why is not None:
                logger.warning("experts are placed anew at step %d: %s", step, why)
                self.again = True
                return  # the step has not begun: leaving the loop parks it
            yield step
            self._history.step_over()
            background.step_over(step, self._placement, loads_LE)

    def sum_gradients(self) -> None:
        """Sum the gradients of the dense part over all ranks, and those of each expert over its
        replicas; a collective call.

        For losses that are divided by the size of the global batch: the results are gradients of
        its mean loss. Call it after the last backward of a step, before gradients are clipped.

        Raises:
            ValueError: `checkpointer` was not called.
        """
        if self._gradients is None:
            raise ValueError("call checkpointer() before sum_gradients()")
        self._gradients.sum()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """As torch's, over all parameters of the job, each counted once; after `sum_gradients`. A
        collective call.

        Returns:
            The norm of all gradients before, float64, the same on all ranks.
        Raises:
            ValueError: `checkpointer` was not called.
        """
        if self._gradients is None:
            raise ValueError("call checkpointer() before clip_grad_norm_()")
        return self._gradients.clip(max_norm)

    def check_replicas(self) -> None:
        """Compare the weights of all replicas of all experts, bit for bit; a collective call.

        Raises:
            CorruptionError: on all ranks, if they differ.
        """
        for layer in self._layers:
            layer.check_replicas()

    def close(self) -> None:
        """End this incarnation; the daemons keep its state."""
        if self._background is not None:
            self._background.close()
        if self._checkpointer is not None:
            self._checkpointer.close()
        if self._started.local is not None:
            self._started.local.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
