"""``ElasticJob``: training goes on with the ranks that are there, and no step is trained on twice
or left out.

    job = ElasticJob({"blocks.0.moe": 8, "blocks.1.moe": 8}, slots=4)
    model = build(job)  # its mixture layers are made by job.layer(name, make_expert)
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt = job.checkpointer(model, optimizer, {"sched": sched})
    for step in job.steps(total):
        samples = batches.mine(step, job.rank, job.world_size)
        ...  # losses divided by the size of the global batch
        job.sum_gradients()
        optimizer.step()

Where the experts' optimizer is to be on shards (SwiftMoE) instead of on each replica,
``job.shards(model, make_optimizer)`` comes before the optimizer of the rest, and ``shards.step()``
behind its step.

A *world* is one life of the job: its ranks, and where their experts are. When ranks go or come the
launcher starts all of them again, in a new world: its ranks look what their nodes hold
(`starting`), plan, read what is there, give each other the rest (`shipping`), and go on at one
iteration. Each world is a run of its own for the daemons, which keep it until the next one can be
had without it (`retiring`).
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
from ckptd.client.elastic.incarnation.discovery import Here, Wishes, find_here
from ckptd.client.elastic.incarnation.image_inventory import run_of_incarnation
from ckptd.client.elastic.incarnation.incarnation_start import start_world
from ckptd.client.elastic.incarnation.sharded_job import same_call
from ckptd.client.elastic.incarnation.state_transfer import take_over
from ckptd.client.elastic.incarnation.unit_loading import Loader
from ckptd.client.elastic.incarnation.whole_state import WholeState, whole_state_of
from ckptd.client.elastic.job.background_tasks import BackgroundTasks, make_room
from ckptd.client.elastic.job.dense_gradients import DenseGradients
from ckptd.client.elastic.job.garbage_collection import floor_of
from ckptd.client.elastic.job.job_checks import (
    DENSE,
    check_groups,
    check_options,
    identify_anyway,
    layers_of,
    same_total,
    wrong_arguments,
)
from ckptd.client.elastic.load_history import LoadHistory
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
from ckptd.core.elastic.elastic_types import ExpertPlacement, Loads
from ckptd.core.elastic.incarnation_plan import placement_of, replicas_by_load
from ckptd.core.elastic.incarnations import ExpertLayers
from ckptd.core.slots.segment_format import WORLD_TOPOLOGY
from ckptd.launch import ensure_daemon

__all__ = ["ElasticJob"]

logger = get_logger(__name__)

_COMPARED = (
    "; what is loaded is compared with its digests only: no step is replayed, since other ranks, "
    "or other places of experts, add up in another "
    "order (docs/elastic.md, section 14)"
)


class ElasticJob:
    """One world of an elastic job; making it is a collective call of all its ranks.

    Args:
        layers: the names of the model's mixture layers (modules of `layer`), each with its number
            of experts, which is the same for all.
        slots: how many experts of each layer this rank has room for.
        run: the name of the run, or ``RunOptions``; from torchrun's environment where not given.
        daemon: as for ``Checkpointer``; None: nothing is kept, and every start is the first one.
        placement: on how many nodes experts are, and when they are placed anew (``PlacementOptions``).
    Raises:
        TypeError: a keyword that is none, or a group of options of another type; the message says
            how it is passed.
        ValueError: on all ranks: they were started with other arguments, or something passed is unusable.
        ElasticError: on all ranks: there are fewer slots than experts, or what is held of this run
            is no whole state.
        DaemonUnavailable: on all ranks: a node has no daemon; or the state is to come from storage,
            which does not answer, or is damaged.
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
        # What is wrong here is raised by `start_world` on all ranks: the others would wait for this one.
        self._identity, nameless = identify_anyway(run)
        wrong = nameless or wrong_arguments(layers, slots, placement, self._identity.run)
        counts = [1] if wrong else list(layers.values())
        self.layers = ExpertLayers(() if wrong else tuple(layers), counts[0])
        wishes = Wishes(self._identity.job, self._identity.run, self.layers, placement)
        self._daemon = daemon_options(daemon)
        here = ValueError(wrong) if wrong else self._find_here(slots, placement.domain)
        # Under one name whatever job and run they were given: all come to the same barrier, where
        # they are compared.
        self._ranks = Collectives.of_job(
            replace(self._identity, job="elastic", run="worlds"),
            node=platform.node() if isinstance(here, Exception) else here.seat.node,
        )
        self._world = start_world(here, wishes, self._ranks)
        assert not isinstance(here, Exception), "the world would not have begun"
        self._here = here
        self.plan = self._world.plan
        self._wishes = wishes
        self._history = LoadHistory(len(self.layers.names), self.layers.num_experts)
        self._made: dict[str, ElasticExperts] = {}
        self._layers: list[ElasticExperts] = []
        self._checkpointer: Checkpointer | None = None
        self._loader: Loader | None = None
        self._alongside: BackgroundTasks | None = None
        self._gradients: DenseGradients | None = None
        self._shards: ExpertShards | None = None
        self.again = False
        self.seconds = {**self._world.seconds, "start_s": time.perf_counter() - began}
        compared = "" if self.plan.handover is None else _COMPARED
        logger.warning("world %d: %s%s", self.plan.number, self.plan.reason, compared)

    def _find_here(self, slots: int, domain: str) -> Here | Exception:
        daemon = self._daemon
        if daemon.off:
            return find_here(None, self.rank, slots, domain)
        endpoint = ensure_daemon if daemon.endpoint == "auto" else lambda: str(daemon.endpoint)
        return find_here(endpoint, self.rank, slots, domain)

    # -- where this rank is ----------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self._identity.rank

    @property
    def world_size(self) -> int:
        return self._identity.world_size

    @property
    def start(self) -> int:
        """The step at which this world begins."""
        return self.plan.start

    @property
    def floor(self) -> int:
        """The newest step of this world at whose top all of it is held, with the replicas that were
        asked for; -1: none yet, and a node that is lost now takes the job back to `start`.
        """
        if self._here.folder is None:
            return -1
        run = run_of_incarnation(self._identity.run, self.plan.number)
        return floor_of(self._here.folder, self._identity.job, run, self.rank)

    @property
    def nodes(self) -> tuple[int, ...]:
        """The number of each rank's node."""
        return self.plan.node_of

    def replicas(self, layer: str) -> NDArray[Any]:
        """``[R, E]``: replicas of each expert of a layer on each rank; with shards, as they are
        placed now.
        """
        number = self._number(layer)
        if self._shards is not None:
            return self._shards.placements[layer]
        found: NDArray[Any] = self.plan.replicas_LRE[number]
        return found

    def placements_by_load(self) -> dict[str, NDArray[Any]]:
        """``[R, E]`` by the name of the layer: where the experts of this world would be placed for
        the tokens that they got so far; the same on all ranks. For
        ``shards.step(job.placements_by_load())``: with shards another placement costs nothing to
        send.
        """
        wishes = self._wishes
        found = replicas_by_load(
            self.plan,
            self._history.loads,
            threshold=wishes.placement.threshold,
            max_straggler=wishes.placement.max_straggler,
        )
        return dict(zip(self.layers.names, found, strict=True))

    def _placement(self) -> ExpertPlacement:
        """Where the experts are now, by node."""
        if self._shards is None:
            return self.plan.placement
        return placement_of(self.plan, [self.replicas(name) for name in self.layers.names])

    def _loads(self) -> Loads:
        return self._history.loads

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
            make_expert: makes an expert of that number. What it is initialised with must follow
                from the number, so that all replicas begin alike.
            reduce: as for ``ElasticExperts``; the default goes with losses that are divided by the
                size of the global batch.
        Raises:
            ValueError, DaemonUnavailable: on all ranks: there is no such layer, or an expert could
                not be made on some rank.
        """
        with self._ranks.all_or_none():
            experts = {number: make_expert(number) for number in self.experts(name)}
        made = ElasticExperts(experts, self.replicas(name), nodes=self.nodes, reduce=reduce)
        self._made[name] = made
        return made

    def _number(self, layer: str) -> int:
        if layer not in self.layers.names:
            raise ValueError(f"there is no layer {layer!r}: layers= named {list(self.layers.names)}")
        return self.layers.names.index(layer)

    # -- the state -------------------------------------------------------------------------------

    def shards(
        self,
        model: nn.Module,
        make_optimizer: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer],
        *,
        masters: torch.dtype | None = None,
        make_expert: Callable[[str, int], nn.Module] | None = None,
    ) -> ExpertShards:
        """Put the optimizer of all experts on shards (docs/elastic.md, section 13), instead of on
        each replica; a collective call, before `checkpointer`.

        The experts leave the model's parameters: make the optimizer of the rest after it. What it
        returns is stepped beside that: ``shards.step()``, or ``shards.step(placements)`` for other
        places from now on.

        Args:
            make_optimizer, masters, make_expert: as for ``ExpertShards``.
        Raises:
            ValueError: on all ranks: some call another method; the model has other layers; the
                experts or the optimizer are not fit for shards; this world has shards, or a
                checkpointer, already.
        """
        same_call(self._ranks, "shards()")
        with self._ranks.all_or_none():
            if self._shards is not None or self._checkpointer is not None:
                raise ValueError("call shards() once in a world, and before checkpointer()")
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
        """Load what this rank needs of the state, from its node or from other ranks, and protect it
        from now on; a collective call.

        Snapshots are dense: an expert whose holders are all lost must be had from one snapshot,
        without a replay by ranks that there no longer are.

        Args:
            state: as for ``Checkpointer``. What it holds should be alike on all ranks: a rank gets
                what the rank of its number had, and a rank beyond those that there were what the
                lowest had.
            snapshots: as for ``Checkpointer``, with ``policy="dense"`` and no ``window``.
            recovery: as for ``Checkpointer``; the state is always parked, and ``start_from`` stays None.
            layout: as for ``Checkpointer``, without ``replicated``. With `shards` the names of the
                model's parameters begin with ``model.``.
        Raises:
            TypeError: a keyword that is none, or a group of options of another type.
            ValueError: on all ranks: the model is not that of the state, or has its experts'
                optimizer elsewhere, or an option cannot be chosen.
        """
        same_call(self._ranks, "checkpointer()")
        with self._ranks.all_or_none():
            given = {**unknown, "snapshots": snapshots, "recovery": recovery, "layout": layout}
            check_groups(given)
            check_options(snapshots, recovery, layout)
            if self._checkpointer is not None:
                raise ValueError("this world has a checkpointer: each world has one")
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
            self._loader, seconds = take_over(self._world, whole, self._shards, self.layers, self._ranks)
            self.seconds |= seconds
        if self._shards is not None:
            self._shards.send_weights()  # in the first world, too: weights always are the rounded shards
        self._history.watch(layers)
        self._gradients = DenseGradients(whole.dense_params, layers, self._shards)
        began = time.perf_counter()
        make_room(self._here, self._wishes, self._world, self.rank)
        recorded: Program = {} if self._loader is None else self._loader.program
        from_script = recovery.param_groups == "script"
        if recorded and from_script:
            apply_options(whole.binding, whole.stateful, recorded, here)
        self._checkpointer = self._protect(whole, snapshots, recovery, layout)
        if recorded:
            self._heed_program(recorded, here, from_script=from_script)
        if not self._checkpointer.off:
            # Before the first snapshot: one that no world of other ranks could go on from is not taken.
            self._checkpointer._binding.kept.check_also(whole.kept.check)
        self.seconds["attach_s"] = time.perf_counter() - began
        memory = self._checkpointer._memory
        self._alongside = BackgroundTasks(
            self._here,
            self._wishes,
            self._world,
            self._ranks,
            send=None if memory is None else memory.session.tell_elastic,
            when=self._wishes.placement.when,
            layers=layers,
        )
        return self._checkpointer

    def _heed_program(self, recorded: Program, here: Program, *, from_script: bool) -> None:
        """Say how this program differs from the one that recorded the state, and go by the right
        one's options.
        """
        scripts = f"The script's options count from iteration {self.start} on"
        what = scripts if from_script else RECORDED_COUNTS
        tell_differences(recorded, here, what, rank=self.rank)
        recorder = None if self._checkpointer is None else self._checkpointer._loop.recorder
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
        """The steps of this world. It ends early with ``again`` set where experts are to be placed
        anew: make another ``ElasticJob`` then.

        Raises:
            ValueError: `checkpointer` was not called; on all ranks: they were given other totals,
                and one would end before the others.
        """
        if self._checkpointer is None or self._alongside is None:
            raise ValueError("call checkpointer() before steps(): it loads the state")
        same_total(self._ranks, total)
        if self._loader is not None:
            self._loader.begin()
            self._loader = None
        steps = self._checkpointer.steps(total, start=self.start)
        try:
            yield from self._body(steps, total, self._alongside)
        finally:
            steps.close()

    def _body(self, steps: Iterator[int], total: int, alongside: BackgroundTasks) -> Iterator[int]:
        for step in steps:
            why = alongside.why_anew(step, total, self._placement, self._loads, self.seconds)
            if why is not None:
                logger.warning("experts are placed anew at step %d: %s", step, why)
                self.again = True
                return  # the step has not begun: leaving the loop parks it
            yield step
            self._history.step_over()
            alongside.step_over(step, self._placement, self._loads)

    def sum_gradients(self) -> None:
        """Sum the gradients of the dense part over all ranks, and those of each expert over its
        replicas; a collective call.

        For losses that are divided by the size of the global batch: what comes out are gradients of
        its mean loss. To be called after the last backward of a step, before gradients are clipped.

        Raises:
            ValueError: `checkpointer` was not called.
        """
        if self._gradients is None:
            raise ValueError("call checkpointer() before sum_gradients()")
        self._gradients.sum()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """As torch's, over all parameters of the job, each of which counts once; after
        `sum_gradients`. A collective call.

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
        """End this world: what it holds stays with the daemons."""
        if self._alongside is not None:
            self._alongside.close()
        if self._checkpointer is not None:
            self._checkpointer.close()
        if self._world.local is not None:
            self._world.local.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
