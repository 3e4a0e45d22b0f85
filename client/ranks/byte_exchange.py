"""Bytes from every rank to every other, over the job's process group: whatever each has for each.

In rounds, so that no more than a bounded part of it is in the process group's hands at a time; and
as tensors of the group's own device, so that groups of NCCL alone serve, too.

Shapes: ``R`` ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ckptd.client.ranks.rank_exchange import device_of

__all__ = ["ship"]

# What a rank sends in one round.
_ROUND_BYTES = 64 << 20

Chunks = Sequence[bytes | memoryview]


def ship(
    outgoing: Sequence[Chunks], group: Any = None, *, round_bytes: int = _ROUND_BYTES
) -> list[bytearray]:
    """What every rank has sent here, in the order of ranks; a collective call.

    Args:
        outgoing: ``[R]``, for each rank the parts of what it is to get.
    """
    ranks = len(outgoing)
    if ranks == 1:
        return [bytearray(b"".join(outgoing[0]))]
    device = device_of(group)
    sizes = [sum(map(len, parts)) for parts in outgoing]
    coming = _told(sizes, device, group)
    most = torch.tensor([max(*sizes, *coming)], dtype=torch.int64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    width = max(1, round_bytes // ranks)
    pieces = [_cut(parts, width) for parts in outgoing]
    received = [bytearray() for _ in outgoing]
    for start in range(0, int(most.item()), width):
        counts = [min(width, max(0, size - start)) for size in coming]
        for rank, piece in enumerate(_round([next(p, b"") for p in pieces], counts, device, group)):
            received[rank] += piece
    return received


def _told(sizes: Sequence[int], device: torch.device, group: Any) -> list[int]:
    """How much comes from each rank."""
    mine = torch.tensor(sizes, dtype=torch.int64, device=device)
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine, group=group)
    return [int(size) for size in theirs.tolist()]


def _cut(parts: Chunks, width: int) -> Iterator[bytes]:
    """All of it, in pieces of that width but for the last."""
    piece = bytearray()
    for part in parts:
        view = memoryview(part)
        while len(view):
            taken = view[: width - len(piece)]
            piece += taken
            view = view[len(taken) :]
            if len(piece) == width:
                yield bytes(piece)
                piece.clear()
    if piece:
        yield bytes(piece)


def _round(
    pieces: Sequence[bytes], counts: Sequence[int], device: torch.device, group: Any
) -> list[bytes]:
    sent = torch.frombuffer(bytearray(b"".join(pieces)) or bytearray(1), dtype=torch.uint8)
    sent = sent[: sum(map(len, pieces))].to(device)
    got = torch.empty(sum(counts), dtype=torch.uint8, device=device)
    dist.all_to_all_single(got, sent, list(counts), [len(piece) for piece in pieces], group=group)
    parts = torch.split(got.cpu(), list(counts))
    return [part.numpy().tobytes() for part in parts]
