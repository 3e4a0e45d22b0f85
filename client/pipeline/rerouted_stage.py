"""``ReroutedStage``: a worker of a pipeline runs what a plan gives it, also for a worker that is missing.

The computations are those of ``torch.distributed.pipelining``: its stage, its split backward, its buffers.
What travels where follows from the plan (`ckptd.core.reroute`). Results have the same bits as those of an
undisturbed job, because

- gradients are summed up in one order (`ckptd.client.pipeline.ordered_gradients`);
- a stage's forward of a micro-batch draws from generators seeded by iteration, pipeline, micro-batch and
  stage, whoever runs it, and leaves the generators of its process as they were.

An undisturbed job uses torch's schedule, and this class for both of these: `begin` and `average_gradients`.

Messages go directly between ranks of one process group. `ckptd.client.rerouting` makes another one
when somebody dies or comes back.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

from ckptd.client.capture.stage_shapes import sends_dtensors
from ckptd.client.log_lines import get_logger
from ckptd.client.model.hooks import layered
from ckptd.client.pipeline.ordered_gradients import GradientParts, Part, parts_of, sum_parts
from ckptd.client.rng_state import capture_rng, restore_rng
from ckptd.core.bubbles import ActionKind
from ckptd.core.reroute.reroute_plan import PlanKind, PlannedAction, ReroutePlan

logger = get_logger(__name__)

MicroBatch = tuple[int, int]  # a pipeline and a number
_ACTIVATION, _GRADIENT, _KINDS = 0, 1, 2
_REDUCTION = 16  # tags for messages of the sum of gradients
_TAGS = 2**31


def micro_batch_seed(seed: int, iteration: int, pipeline: int, micro_batch: int, stage: int) -> int:
    """Of a stage's forward: 64 bits that depend on nothing else."""
    key = struct.pack("<5q", seed, iteration, pipeline, micro_batch, stage)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    before = capture_rng()
    # `torch.manual_seed` formats the stack for each of three kinds of devices that might come later.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        yield
    finally:
        restore_rng(before)


def _wait(work: Any) -> None:
    """For the end of a call of gloo."""
    work.wait()


class ReroutedStage:
    """This rank's stage in a grid of pipelines.

    Args:
        stage: of ``torch.distributed.pipelining``, on the CPU. It has run in a schedule before, or was made
            with ``input_args`` and ``output_args``.
        ranks: ``[D][P]``, the rank of each worker in ``group``'s job.
        loss_fn: of the last stage's output and a target, as the schedule has it.
        group: a gloo group with all of these ranks; default: the default group.
        seed: of all random numbers in forwards; the same on all ranks.
        me: the rank of this worker in ``ranks``; default: that in the default group.
        exact: the same on all ranks. False: where memory does not suffice for the gradients of single
            micro-batches, keep one sum of all that a worker runs. Bits then differ from an undisturbed job's.
    Raises:
        ValueError: the stage, the group or the grid of ranks cannot be used; says why.
    """

    def __init__(
        self,
        stage: Any,
        ranks: Sequence[Sequence[int]],
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        seed: int = 0,
        exact: bool = True,
        me: int | None = None,
    ) -> None:
        _check_stage(stage, group)
        _check_grid(ranks, stage.num_stages)
        me = dist.get_rank() if me is None else me
        where = [(d, s) for d, row in enumerate(ranks) for s, rank in enumerate(row) if rank == me]
        if len(where) != 1 or where[0][1] != stage.stage_index:
            raise ValueError(f"rank {me} has stage {stage.stage_index}, but is at {where} of {ranks}")
        if stage.is_last and loss_fn is None:
            raise ValueError("the last stage needs loss_fn")
        self.pipeline, self.stage = where[0][0], stage
        self._ranks, self._loss_fn = [list(row) for row in ranks], loss_fn
        self._group: Any = group
        self._numbers: Mapping[int, int] | None = None
        self.finish: Callable[[Any], object] = _wait
        self._seed, self._exact, self._iteration = seed, exact, 0
        self._params = [p for p in stage.submod.parameters() if p.requires_grad]
        self._chunks: list[MicroBatch] = []  # while a plan is run: whose work the stage's chunks are
        self._base = 0
        self._undo = ExitStack()
        self._undo.enter_context(layered(stage, "forward_one_chunk", self._forward))
        if not exact:
            logger.warning(
                "gradients are kept in one sum: re-routing makes bits differ from an undisturbed job"
            )

    def close(self) -> None:
        """Leave the stage as it was."""
        self._undo.close()

    def use(
        self,
        group: Any,
        numbers: Mapping[int, int],
        finish: Callable[[Any], object] = _wait,
    ) -> None:
        """Go on over another group, of those that are there. What arrives late over the last one is lost.

        Args:
            group: of gloo; it need not be known to `torch.distributed`.
            numbers: of ranks in the grid that are in the group: their ranks there.
            finish: waits for the end of a call of the group.
        """
        self._group, self._numbers, self.finish = group, numbers, finish
        # The last group may still write to these.
        self.stage.args_recv_info, self.stage.grad_recv_info = {}, {}
        for param in self._params:
            param.grad = None

    def begin(self, iteration: int) -> None:
        """The top of an iteration, undisturbed or not: random numbers of forwards follow from its number."""
        self._iteration = iteration

    def average_gradients(self) -> None:
        """After torch's schedule, with all workers there: the mean over pipelines, in their order."""
        grads = [p.grad for p in self._params]
        everyone = {d: [(d, 0)] for d in range(len(self._ranks))}
        self._sum({(self.pipeline, 0): grads}, everyone, micro_batches=1)

    def run(
        self,
        plan: ReroutePlan,
        inputs: Callable[[int, int], tuple[Any, ...]],
        targets: Callable[[int, int], Any],
        *,
        epoch: int = 0,
    ) -> dict[MicroBatch, Tensor]:
        """Run this worker's actions; then ``grad`` of its parameters is the mean over all micro-batches.

        Returns as soon as this stage's gradients are there: its optimizer's step waits for no other stage.

        Args:
            inputs, targets: of a micro-batch (pipeline, number); called by the first and the last stage,
                also for other pipelines than this worker's.
            epoch: a number that grows with each plan; messages of another epoch are not taken for this one's.
        Returns:
            Losses by micro-batch, on workers of the last stage.
        Raises:
            ValueError: the plan is for another grid, or a recovery; gradients of an earlier step are there;
                or a forward writes to a buffer, so that it depends on who ran which micro-batch before.
        """
        self._check(plan)
        actions = plan.actions((self.pipeline, self.stage.stage_index))
        own = [a for a in actions if a.kind is ActionKind.FORWARD]
        self._chunks = [(a.pipeline, a.micro_batch) for a in own]
        grid = plan.grid
        span = _KINDS * grid.stages * grid.total + _REDUCTION
        self._base = epoch * span % (_TAGS - span)
        _prepare(self.stage, len(self._chunks))
        iteration = _Iteration(self, plan, inputs, targets)
        try:
            iteration.play(actions)
            parts = self._parts(plan)
            held = iteration.gradients.held
            mine = {part: held[part] for part in parts[self.pipeline]}
            self._sum(mine, parts, micro_batches=grid.micro_batches, base=self._base + span - _REDUCTION)
            iteration.finish()
        finally:
            self._chunks = []
            self.stage.clear_runtime_states()
        return iteration.losses

    # -- messages --------------------------------------------------------------------------------

    def tag(self, plan: ReroutePlan, kind: int, stage: int, micro_batch: MicroBatch) -> int:
        """Of a message into a stage."""
        grid = plan.grid
        number = micro_batch[0] * grid.micro_batches + micro_batch[1]
        return self._base + (kind * grid.stages + stage) * grid.total + number

    def send(self, tensor: Tensor, to: tuple[int, int], tag: int) -> dist.Work | None:
        """Begin to send to a worker."""
        rank = self._ranks[to[0]][to[1]]
        if self._numbers is None:
            return dist.isend(tensor, rank, self._group, tag)
        sent: dist.Work = self._group.send([tensor], self._numbers[rank], tag)
        return sent

    def receive(self, tensor: Tensor, from_: tuple[int, int], tag: int) -> dist.Work | None:
        """Begin to receive from a worker."""
        rank = self._ranks[from_[0]][from_[1]]
        if self._numbers is None:
            return dist.irecv(tensor, rank, self._group, tag)
        received: dist.Work = self._group.recv([tensor], self._numbers[rank], tag)
        return received

    # -- within ----------------------------------------------------------------------------------

    def _check(self, plan: ReroutePlan) -> None:
        grid = plan.grid
        if plan.kind is PlanKind.RECOVER:
            raise ValueError(plan.reason)
        if (grid.pipelines, grid.stages) != (len(self._ranks), self.stage.num_stages):
            raise ValueError(
                f"a plan for {grid.pipelines} x {grid.stages} workers, here are {len(self._ranks)} x "
                f"{self.stage.num_stages}"
            )
        if (self.pipeline, self.stage.stage_index) in grid.failed:
            raise ValueError(
                f"worker {(self.pipeline, self.stage.stage_index)} is missing in this plan: it is here"
            )
        if any(p.grad is not None for p in self._params):
            raise ValueError("gradients of an earlier step are there: call optimizer.zero_grad() first")

    def _parts(self, plan: ReroutePlan) -> dict[int, Sequence[Part]]:
        """What each worker of this stage has summed up."""
        found: dict[int, Sequence[Part]] = {}
        for d in plan.grid.survivors(self.stage.stage_index):
            actions = plan.actions((d, self.stage.stage_index))
            second = [a for a in actions if a.kind is ActionKind.BACKWARD_WEIGHT]
            if self._exact:
                found[d] = parts_of((a.pipeline, a.micro_batch) for a in second)
            else:
                found[d] = [(0, 0)] if second else []
        return found

    def _sum(
        self,
        mine: Mapping[Part, list[Tensor | None]],
        parts: Mapping[int, Sequence[Part]],
        *,
        micro_batches: int,
        base: int = 0,
    ) -> None:
        stage, count = self.stage.stage_index, 0

        def exchange(out: Mapping[int, list[Tensor]], into: Mapping[int, list[Tensor]]) -> None:
            nonlocal count
            tag, count = base + count % _REDUCTION, count + 1
            works = [self.receive(t, (d, stage), tag) for d, ts in into.items() for t in ts]
            works += [self.send(t, (d, stage), tag) for d, ts in out.items() for t in ts]
            for work in works:
                assert work is not None
                self.finish(work)

        sum_parts(
            self._params,
            mine,
            parts,
            self.pipeline,
            exchange,
            micro_batches=micro_batches,
            pipelines=len(self._ranks),
        )

    def _forward(self, below: Callable[..., Any], chunk: int, *args: Any, **kwargs: Any) -> Any:
        """Whoever runs the stage's forward, torch's schedule or a plan."""
        pipeline, number = self._chunks[chunk] if self._chunks else (self.pipeline, chunk)
        seed = micro_batch_seed(self._seed, self._iteration, pipeline, number, self.stage.stage_index)
        versions = [b._version for b in self.stage.submod.buffers()]
        with _seeded(seed):
            output = below(chunk, *args, **kwargs)
        if self._chunks and self._exact:
            for (name, buffer), before in zip(self.stage.submod.named_buffers(), versions, strict=True):
                if buffer._version != before:
                    raise ValueError(
                        f"the forward of stage {self.stage.stage_index} writes to its buffer {name!r}, so it "
                        "depends on which micro-batches ran here before: re-routing cannot keep its bits; "
                        "pass exact=False to do without"
                    )
        return output


class _Iteration:
    """One iteration of a plan on this worker."""

    def __init__(
        self,
        owner: ReroutedStage,
        plan: ReroutePlan,
        inputs: Callable[[int, int], tuple[Any, ...]],
        targets: Callable[[int, int], Any],
    ) -> None:
        self._owner, self._plan, self._inputs, self._targets = owner, plan, inputs, targets
        self._stage, self._at = owner.stage, owner.stage.stage_index
        self._chunk = {each: c for c, each in enumerate(owner._chunks)}
        self._arriving: dict[tuple[int, MicroBatch], list[Any]] = {}
        self._leaving: list[Any] = []
        self._loss: dict[MicroBatch, Tensor] = {}
        self.gradients = GradientParts(owner._params, separate=owner._exact)
        self.losses: dict[MicroBatch, Tensor] = {}

    def play(self, actions: Sequence[PlannedAction]) -> None:
        """Run all computations. Receives are begun at once: no sender waits for a busy receiver."""
        self._stage.clear_runtime_states()
        for each, chunk in self._chunk.items():
            if not self._stage.is_first:
                self._expect(_ACTIVATION, each, self._stage.args_recv_info[chunk], self._at - 1)
            if not self._stage.is_last:
                self._expect(_GRADIENT, each, self._stage.grad_recv_info[chunk], self._at + 1)
        run = {
            ActionKind.FORWARD: self._forward,
            ActionKind.BACKWARD_INPUT: self._backward_input,
            ActionKind.BACKWARD_WEIGHT: self._backward_weight,
        }
        for action in actions:
            each = (action.pipeline, action.micro_batch)
            run[action.kind](each, self._chunk[each])

    def finish(self) -> None:
        """Wait until all has been sent."""
        for work in self._leaving:
            self._owner.finish(work)

    def _forward(self, each: MicroBatch, chunk: int) -> None:
        self._await(_ACTIVATION, each)
        args = self._inputs(*each) if self._stage.is_first else ()
        output = self._stage.forward_one_chunk(chunk, args, {}, save_forward_output=False)
        self._send(_ACTIVATION, each, self._stage.get_fwd_send_ops(chunk), self._at + 1)
        if self._stage.is_last:
            assert self._owner._loss_fn is not None
            self._loss[each] = self._owner._loss_fn(output, self._targets(*each))
            self.losses[each] = self._loss[each].detach().clone()

    def _backward_input(self, each: MicroBatch, chunk: int) -> None:
        self._await(_GRADIENT, each)
        self._stage.backward_one_chunk(chunk, loss=self._loss.pop(each, None), full_backward=False)
        self._send(_GRADIENT, each, self._stage.get_bwd_send_ops(chunk), self._at - 1)
        self._stage.bwd_cache.pop(chunk, None)

    def _backward_weight(self, each: MicroBatch, chunk: int) -> None:
        self._stage.backward_weight_one_chunk(chunk)
        self.gradients.take(*each)

    def _expect(self, kind: int, each: MicroBatch, infos: Sequence[Any], stage: int) -> None:
        sender = self._plan.runs_on(*each, stage)
        tag = self._owner.tag(self._plan, kind, self._at, each)
        found = [info.buffer for info in infos if not info.is_root_arg and info.buffer is not None]
        # A buffer that needs gradients may not be written to in place.
        self._arriving[kind, each] = [self._owner.receive(b.detach(), sender, tag) for b in found]

    def _await(self, kind: int, each: MicroBatch) -> None:
        for work in self._arriving.pop((kind, each), ()):
            self._owner.finish(work)

    def _send(self, kind: int, each: MicroBatch, operations: Sequence[Any], stage: int) -> None:
        for operation in operations:
            tag = self._owner.tag(self._plan, kind, stage, each)
            to = self._plan.runs_on(*each, stage)
            self._leaving.append(self._owner.send(operation.tensor.contiguous(), to, tag))


def _prepare(stage: Any, chunks: int) -> None:
    """Buffers for so many micro-batches."""
    stage.has_backward = True
    if stage._stage_meta.inputs is None or stage._stage_meta.outputs is None:
        stage._stage_meta.inputs = stage._user_meta.inputs
        stage._stage_meta.outputs = stage._user_meta.outputs
    if len(stage.args_recv_info) >= chunks and len(stage.grad_recv_info) >= chunks:
        return
    from torch.distributed.pipelining._utils import InferenceMode  # not in older versions

    if stage._inference_mode is None:
        stage._inference_mode = InferenceMode.STATIC
    stage._setup_forward_recv_info(chunks, True)
    stage._setup_forward_send_info()
    if stage._inference_mode == InferenceMode.STATIC:
        stage._prepare_backward_infra(chunks)
    else:
        stage._setup_backward_recv_info(chunks)


def _check_grid(ranks: Sequence[Sequence[int]], stages: int) -> None:
    lengths = {len(row) for row in ranks}
    if lengths != {stages}:
        raise ValueError(
            f"pipelines of {sorted(lengths)} stages, and a stage of {stages}: all pipelines must have "
            "the same stages"
        )
    flat = [rank for row in ranks for rank in row]
    if len(set(flat)) < len(flat):
        raise ValueError(f"a rank is in the grid twice: {ranks}; each runs one stage")


def _check_stage(stage: Any, group: dist.ProcessGroup | None) -> None:
    why = ""
    if not isinstance(stage, PipelineStage) or not hasattr(stage, "_user_meta"):
        why = "it is no PipelineStage of torch 2.12 or newer"
    elif isinstance(stage.submod, DistributedDataParallel | FSDPModule):
        why = "its module is wrapped for data parallelism: pass the module itself"
    elif stage.dw_builder is not None:
        why = "its dw_builder computes gradients of parameters in a way of its own"
    elif sends_dtensors(stage):
        why = "DTensors cross its boundaries"
    elif stage._user_meta.outputs is None and stage._stage_meta.outputs is None:
        why = "what it sends is not known: run a step of a schedule first, or pass input_args and output_args"
    elif torch.device(stage.device).type != "cpu" or "gloo" not in dist.get_backend(group):
        why = "messages out of order need gloo, and tensors on the CPU"
    if why:
        raise ValueError(f"stage {getattr(stage, 'stage_index', '?')} cannot be re-routed: {why}")
