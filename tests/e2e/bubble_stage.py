"""A stage of a pipeline whose snapshots are copied, and sent to a peer, in bubbles: a process of its own.

It asks what its daemon asks before it sends a piece of a snapshot, in each forward and in each wait, and
writes the answers of the iterations in which puts wait for bubbles: those at whose top no peer was behind.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining import schedules as torch_schedules

from ckptd.client import Checkpointer, RunOptions, SnapshotOptions
from ckptd.memory.segment_file import open_segment
from ckptd.peers.fabric import QuietGate
from tests.ckptd.running import eventually

STAGES, MICRO_BATCHES, WIDTH = 2, 4, 8
ITERATIONS = 24
FORWARD_S = 5e-3  # the other stage waits so long: longer than what is worth a piece


class Gate:
    """What a daemon would say of a piece of a snapshot; its answers, by what the rank did."""

    def __init__(self, ckpt: Checkpointer) -> None:
        self._ckpt, self._gate = ckpt, QuietGate()
        self._watched: list[Any] = []
        self.answers: dict[str, list[bool]] = {"forward": [], "wait": [], "update": []}

    def top(self) -> None:
        """Follow the segments that there are; puts have time until the peer is not behind."""
        memory = self._ckpt._memory
        assert memory is not None
        paths = [segment.path for segment in memory.table.segments]
        if paths != [str(segment.path) for segment in self._watched]:
            self._watched = [open_segment(Path(path), readonly=True) for path in paths]
            self._gate.watch(self._watched)
        eventually(lambda: memory.table.ring_hint.behind <= 1, "the peer has all but the newest snapshot")

    def ask(self, doing: str) -> None:
        watch = self._ckpt._pipeline._bubbles
        if watch is not None and watch._holds_puts and self._watched:
            self.answers[doing].append(self._gate())


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--rank", type=int)
    options.add_argument("--meet")
    options.add_argument("--endpoint")
    args = options.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.rank)
    dist.init_process_group("gloo", init_method=f"file://{args.meet}", rank=args.rank, world_size=STAGES)
    model = nn.Linear(WIDTH, WIDTH)
    stage = PipelineStage(model, args.rank, STAGES, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=lambda out, target: (out - target).square().mean())
    optimizer = torch.optim.AdamW(model.parameters())
    run = RunOptions(job="bubbles", name="puts", rank=args.rank, world_size=STAGES)
    snapshots = SnapshotOptions(window=1, inline_copy=False)
    ckpt = Checkpointer(model, optimizer, run=run, daemon=args.endpoint, snapshots=snapshots)
    gate = Gate(ckpt)

    def in_forward(module: nn.Module, arguments: Any, output: Tensor) -> None:
        time.sleep(FORWARD_S)
        gate.ask("forward")

    def in_wait(works: Any) -> Any:
        if works:
            gate.ask("wait")
        return wait(works)

    model.register_forward_hook(in_forward)
    wait = torch_schedules._wait_batch_p2p
    torch_schedules._wait_batch_p2p = in_wait  # type: ignore[assignment]
    ckpt.copy_in_bubbles(schedule, always=True)
    batch = torch.randn(MICRO_BATCHES, WIDTH)
    for _ in ckpt.steps(ITERATIONS):
        if args.rank == 0:
            schedule.step(batch)
        else:
            schedule.step(target=batch)
        gate.ask("update")
        optimizer.step()
        optimizer.zero_grad()
        gate.top()
    peer = ckpt._memory
    assert peer is not None
    with ckpt.quiet():
        eventually(
            lambda: peer.table.ring_hint.behind == 0, "what waits for a bubble goes after half a second"
        )
    sys.stdout.write(json.dumps(gate.answers))
    ckpt.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
