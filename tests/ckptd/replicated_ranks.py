"""Ranks of one run on one daemon that say that they hold the same parameters, and fill slots."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Self

import msgspec

from ckptd.core.slots.segment_format import ReplicaGroup, encode_descriptor
from ckptd.core.slots.slots import SlotState
from ckptd.memory.segment_file import Segment, open_segment
from ckptd.transport import messages as m
from tests.ckptd.running import MIB, DaemonProcess, attach, descriptor, eventually, fill, state_of

__all__ = ["PARAMS", "ReplicatedRanks"]

PARAMS = ("a", "b", "c", "d", "e")
_SLOTS = 8  # nothing is overwritten before it is stored


class ReplicatedRanks:
    """They are attached for as long as the context lasts."""

    def __init__(self, daemon: DaemonProcess, num_ranks: int = 2, run: str = "replicas") -> None:
        self._daemon, self.ranks, self.run = daemon, tuple(range(num_ranks)), run
        self._segments: list[Segment] = []
        self._open = ExitStack()

    def __enter__(self) -> Self:
        groups = (ReplicaGroup(self.ranks, PARAMS),)
        clients = [self._open.enter_context(self._daemon.client()) for _ in self.ranks]
        for rank, client in zip(self.ranks, clients, strict=True):
            attach(client, run=self.run, rank=rank, world_size=len(self.ranks), needed_bytes=MIB)
            whole = descriptor(run=self.run, rank=rank, world_size=len(self.ranks))
            told = encode_descriptor(msgspec.structs.replace(whole, replica_groups=groups))
            made = client.ask(m.Reserve(MIB // 4, _SLOTS, told), m.Reserved)
            self._segments.append(open_segment(Path(made.segment.path)))
            self._open.callback(self._segments[-1].close)
        node = clients[0].ask(m.GetStatus(), m.Status).node_id
        here = m.Member(m.NodeCard(node), self.ranks, (MIB,) * len(self.ranks))
        for client in clients:
            client.ask(m.Join(0, -1, (here,), 0), m.Done)
        self._clients = clients
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def record(self, iteration: int, unlike: Sequence[tuple[int, str]] = ()) -> None:
        """All ranks fill a slot; ``unlike`` are ranks, and a tensor that only they have so."""
        index = iteration % _SLOTS
        for rank, segment, client in zip(self.ranks, self._segments, self._clients, strict=True):
            tensors = [
                (name, "U8", (8,), (iteration + 100 * ((rank, name) in unlike)).to_bytes(8, "little"))
                for param in PARAMS
                for name in (param, f"optim/exp_avg/{param}")
            ]
            buffer = ("buffer/mean", "U8", (8,), bytes([rank] * 8))  # each rank's own
            fill(segment, index, iteration, tensors=(*tensors, buffer))
            client.send(m.Filled(0, index, iteration))
            eventually(partial(_is_sealed, segment, index), "it is sealed")


def _is_sealed(segment: Segment, index: int) -> bool:
    return state_of(segment, index) is SlotState.SEALED
