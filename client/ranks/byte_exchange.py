"""Bytes between the ranks of a process group: of each rank to all (`gather_bytes`), or of each rank to
each (`ship_bytes`).

They travel as tensors of the group's own device, so that groups of NCCL alone serve, too; and in
rounds, so that no more than a bounded part of them is in the process group's hands at a time.

Shapes: ``R`` ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["gather_bytes", "ship_bytes"]

# What all ranks together gather, or one rank ships, in one round.
_ROUND_BYTES = 64 << 20

Chunks = Sequence[bytes | memoryview]


def gather_bytes(payload: bytes, world_size: int, group: Any = None) -> list[bytes]:
    """The payloads of all ranks, in their order; a collective call of the process group (default:
    that of all).
    """
    device = _device_of(group)
    mine = torch.tensor([len(payload)], dtype=torch.int64, device=device)
    sizes = [int(size) for size in _gathered(mine, world_size, group).flatten().tolist()]
    most = max(sizes)
    # In rounds, so that one long payload does not cost world size times its length of memory.
    width = max(1, min(most, _ROUND_BYTES // world_size))
    parts: list[list[bytes]] = [[] for _ in sizes]
    for start in range(0, most, width):
        length = min(width, most - start)
        piece = payload[start : start + length].ljust(length, b"\0")
        row = torch.frombuffer(bytearray(piece), dtype=torch.uint8).to(device)
        rows = _gathered(row, world_size, group).cpu().numpy()
        for rank, size in enumerate(sizes):
            if size > start:
                parts[rank].append(rows[rank, : size - start].tobytes())
    return [b"".join(found) for found in parts]


def _gathered(mine: Tensor, world_size: int, group: Any) -> Tensor:
    everything = torch.empty((world_size, mine.numel()), dtype=mine.dtype, device=mine.device)
    dist.all_gather(list(everything.unbind()), mine, group=group)
    return everything


def ship_bytes(
    outgoing: Sequence[Chunks], group: Any = None, *, round_bytes: int = _ROUND_BYTES
) -> list[bytearray]:
    """What every rank has sent here, in the order of ranks; a collective call.

    Args:
        outgoing: ``[R]``, for each rank the parts of what it is to get.
    """
    ranks = len(outgoing)
    if ranks == 1:
        return [bytearray(b"".join(outgoing[0]))]
    device = _device_of(group)
    sizes = [sum(map(len, parts)) for parts in outgoing]
    coming = _incoming_sizes(sizes, device, group)
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


def _incoming_sizes(sizes: Sequence[int], device: torch.device, group: Any) -> list[int]:
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


def _round(pieces: Sequence[bytes], counts: Sequence[int], device: torch.device, group: Any) -> list[bytes]:
    sent = torch.frombuffer(bytearray(b"".join(pieces)) or bytearray(1), dtype=torch.uint8)
    sent = sent[: sum(map(len, pieces))].to(device)
    got = torch.empty(sum(counts), dtype=torch.uint8, device=device)
    dist.all_to_all_single(got, sent, list(counts), [len(piece) for piece in pieces], group=group)
    parts = torch.split(got.cpu(), list(counts))
    return [part.numpy().tobytes() for part in parts]


def _device_of(group: Any) -> torch.device:
    """A device whose tensors the process group can send."""
    backends = str(dist.get_backend_config(group))
    names = [pair.split(":")[0] for pair in backends.split(",")]
    if "cpu" in names:
        return torch.device("cpu")
    return torch.device(names[0], torch.accelerator.current_device_index())
