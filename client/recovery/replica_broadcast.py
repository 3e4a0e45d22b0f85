"""In replay, who holds a recorded tensor hands it to the other ranks that have the same
(``ckptd.client.model.replicated_params``).

What is handed over are the bytes of the snapshot, over the job's own process groups: every rank is
at the top of the same step, or right after the same optimizer's step. From whom an operator comes
is settled once per replay, from what each rank's snapshots hold; whatever each of them planned,
nothing is missed that anybody has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from ckptd.client.model.operators import Operator
from ckptd.client.model.replicated_params import EVERY_RANK, Replicas, ReplicatedParams, identity_of
from ckptd.client.model.snapshot_layout import DTYPES, SAFETENSORS_DTYPES, EntrySource
from ckptd.client.ranks.collectives import Collectives

__all__ = ["Piece", "ReplicaBroadcast", "Take", "arrange"]

_CHUNK_BYTES = 32 << 20
_ALIGNMENT = 64

# A recorded part, and its bytes in host memory.
Piece = tuple[EntrySource, Tensor]
# Puts a part that was received where it belongs; the bytes are on the group's device.
Take = Callable[[EntrySource, Tensor], None]


class _Held(msgspec.Struct, frozen=True):
    """Of one group: which operators there are, those that this rank's snapshots hold, as a bitmap
    in their order, and whether these are all.
    """

    operators: str
    bitmap: bytes
    complete: bool


class _Part(msgspec.Struct, frozen=True, array_like=True):
    kind: str
    name: str
    key: str
    start: int | None
    stop: int | None
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class _Chunk(msgspec.Struct, frozen=True):
    """What the next broadcast of ``nbytes`` bytes holds; no parts: this sender has sent everything.

    ``absent``: parameters without optimizer state of which the sender is the one that knows.
    """

    parts: tuple[_Part, ...] = ()
    nbytes: int = 0
    absent: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Group:
    """A group, and the operators (by their numbers here) that each of its members hands to the others."""

    replicas: Replicas
    senders: dict[int, frozenset[int]]


class ReplicaBroadcast:
    """What this rank hands over and is handed, by group.

    Args:
        rank: this rank's number in the job.
    """

    def __init__(self, rank: int, groups: Sequence[_Group]) -> None:
        self._rank, self._groups = rank, groups
        self.bytes_sent = self.bytes_received = 0

    def __bool__(self) -> bool:
        return bool(self._groups)

    def sends(self) -> frozenset[int]:
        """The operators that this rank hands to others."""
        return frozenset[int]().union(*(g.senders.get(self._rank, ()) for g in self._groups))

    def unlike(self, checksum: Callable[[frozenset[int]], str]) -> list[str]:
        """Where ranks do not have the same now though they should; a collective call of each group,
        equal on its members.

        Args:
            checksum: of what some operators are now.
        """
        found = []
        for group in self._groups:
            operators = frozenset[int]().union(*group.senders.values())
            mine = int(checksum(operators), 16) >> 1
            sums = _Wire(group.replicas).tell(mine)
            if len(set(sums)) > 1:
                found.append(f"what ranks {list(group.replicas.ranks)} have alike, which is not now")
        return found

    def hand(
        self,
        mine: Callable[[frozenset[int]], tuple[Iterable[Piece], Iterable[str]]],
        take: Take,
        *,
        among: frozenset[int] | None = None,
    ) -> set[str]:
        """Every member sends what is its to send; a collective call of each group that has any of it.

        Args:
            mine: of some operators, the parts that are loaded now, and their parameters that have
                no optimizer state.
            among: the operators that are handed over; None: all. The same on all members, as far as
                they have them.
        Returns:
            what others told of parameters that have no optimizer state.
        """
        absent: set[str] = set()
        for group in self._groups:
            wire = _Wire(group.replicas)
            for sender, all_of in sorted(group.senders.items()):
                operators = all_of if among is None else all_of & among
                if not operators:
                    continue
                if sender == self._rank:
                    self.bytes_sent += wire.send(sender, *mine(operators))
                else:
                    nbytes, lacking = wire.receive(sender, take)
                    self.bytes_received += nbytes
                    absent |= lacking
        return absent


def arrange(
    sharing: ReplicatedParams,
    operators: Sequence[Operator],
    owners: Sequence[int],
    ranks: Collectives,
) -> ReplicaBroadcast:
    """Settle from whom each operator comes; a collective call.

    Args:
        owners: of each operator, as this rank's snapshots were planned.
    Raises:
        ValueError: nobody has a part of what this rank needs, or the ranks' snapshots do not fit each other.
    """
    groups = sharing.groups(operators)
    owner_of, rank = dict(enumerate(owners)), ranks.rank

    def held(indices: Sequence[int]) -> _Held:
        flags = [owner_of.get(i, EVERY_RANK) in (EVERY_RANK, rank) for i in indices]
        return _Held(_names_digest([operators[i] for i in indices]), _bitmap(flags), all(flags))

    mine = {group.key: held(indices) for group, indices in groups.items()}
    by_rank = ranks.gather(mine, dict[str, _Held])
    # Only now: a rank that raises before this would leave the others waiting.
    _check_reachable(operators, owners, rank, {i for indices in groups.values() for i in indices})
    found = [
        _settle(group, indices, operators, by_rank, mine[group.key]) for group, indices in groups.items()
    ]
    return ReplicaBroadcast(rank, [g for g in found if g is not None])


def _settle(
    group: Replicas,
    indices: Sequence[int],
    operators: Sequence[Operator],
    by_rank: Sequence[dict[str, _Held]],
    mine: _Held,
) -> _Group | None:
    """Who sends what in a group; None where every member has everything."""
    held = {rank: by_rank[rank].get(group.key) for rank in group.ranks}
    # Then it does not matter how each cut its operators, nor that they are alike.
    if all(h is None or h.complete for h in held.values()):
        return None
    for rank, theirs in held.items():
        if theirs is None or theirs.operators != mine.operators:
            raise ValueError(
                f"the snapshots of this rank rely on those of rank {rank} for "
                f"{operators[indices[0]].name} and others, but those are of "
                "other operators; start with the parallel layout that the run had, or pass run= a new name"
            )
    senders: dict[int, set[int]] = {}
    for place, index in enumerate(indices):
        having = [rank for rank, h in held.items() if h is not None and _has(h.bitmap, place)]
        if not having:
            raise ValueError(
                f"no rank of {list(group.ranks)} has recorded {operators[index].name}; pass run= a "
                "new name to start over"
            )
        if len(having) < len(group.ranks):
            senders.setdefault(min(having), set()).add(index)
    return _Group(group, {rank: frozenset(of) for rank, of in senders.items()})


def _check_reachable(
    operators: Sequence[Operator], owners: Sequence[int], rank: int, shared: set[int]
) -> None:
    for i, owner in enumerate(owners):
        if owner not in (EVERY_RANK, rank) and i not in shared:
            raise ValueError(
                f"{operators[i].name} was captured on rank {owner}, with which this rank shares "
                "nothing now: no wrapper (nor replicated=) "
                "tells that it is replicated; start with the parallel layout that the run had, or "
                "pass run= a new name"
            )


class _Wire:
    """Collectives within one group; what is sent is a header that says what comes, then the bytes,
    until there is nothing left.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._group = replicas.group
        # The backend's name tells it not: "cuda:nccl" has no device type but cuda,
        # "cpu:gloo,cuda:nccl" has both.
        types = {device.type for device in self._group._device_types}
        self._device = torch.device("cpu" if "cpu" in types or not types else min(types))

    def tell(self, number: int) -> list[int]:
        """What each member says."""
        mine = torch.tensor([number], dtype=torch.int64, device=self._device)
        by_rank = [torch.zeros_like(mine) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(by_rank, mine, group=self._group)
        return [int(t.item()) for t in by_rank]

    def send(self, sender: int, pieces: Iterable[Piece], absent: Iterable[str]) -> int:
        total = 0
        names = tuple(sorted(absent))
        for parts, buffer in _packed(pieces):
            self._send_header(sender, _Chunk(parts, buffer.numel(), names))
            dist.broadcast(buffer.to(self._device), src=sender, group=self._group)
            total, names = total + buffer.numel(), ()
        self._send_header(sender, _Chunk(absent=names))
        return total

    def receive(self, sender: int, take: Take) -> tuple[int, set[str]]:
        total, absent = 0, set[str]()
        while True:
            chunk = self._receive_header(sender)
            absent.update(chunk.absent)
            if not chunk.parts:
                return total, absent
            buffer = torch.empty(chunk.nbytes, dtype=torch.uint8, device=self._device)
            dist.broadcast(buffer, src=sender, group=self._group)
            total += chunk.nbytes
            for part in chunk.parts:
                dtype = DTYPES[part.dtype]
                source = EntrySource(part.kind, part.name, part.key, part.start, part.stop, dtype)
                data = buffer[part.offset : part.offset + part.nbytes]
                take(source, data.view(dtype).reshape(part.shape))

    def _send_header(self, sender: int, chunk: _Chunk) -> None:
        data = msgspec.msgpack.encode(chunk)
        size = torch.tensor([len(data)], dtype=torch.int64, device=self._device)
        dist.broadcast(size, src=sender, group=self._group)
        body = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)
        dist.broadcast(body, src=sender, group=self._group)

    def _receive_header(self, sender: int) -> _Chunk:
        size = torch.zeros(1, dtype=torch.int64, device=self._device)
        dist.broadcast(size, src=sender, group=self._group)
        body = torch.empty(int(size.item()), dtype=torch.uint8, device=self._device)
        dist.broadcast(body, src=sender, group=self._group)
        return msgspec.msgpack.decode(body.cpu().numpy().tobytes(), type=_Chunk)


def _packed(pieces: Iterable[Piece]) -> Iterator[tuple[tuple[_Part, ...], Tensor]]:
    """Parts side by side in buffers of a bounded size; one that is larger than that gets its own."""
    waiting: list[Piece] = []
    size = 0
    for piece in pieces:
        nbytes = _aligned(piece[1].numel() * piece[1].element_size())
        if waiting and size + nbytes > _CHUNK_BYTES:
            yield _pack(waiting, size)
            waiting, size = [], 0
        waiting.append(piece)
        size += nbytes
    if waiting:
        yield _pack(waiting, size)


def _pack(pieces: Sequence[Piece], size: int) -> tuple[tuple[_Part, ...], Tensor]:
    buffer = torch.zeros(size, dtype=torch.uint8)
    parts, offset = [], 0
    for source, data in pieces:
        nbytes = data.numel() * data.element_size()
        if nbytes:
            buffer[offset : offset + nbytes] = data.contiguous().view(-1).view(torch.uint8)
        parts.append(
            _Part(
                source.kind,
                source.name,
                source.key,
                source.start,
                source.stop,
                SAFETENSORS_DTYPES[data.dtype],
                tuple(data.shape),
                offset,
                nbytes,
            )
        )
        offset += _aligned(nbytes)
    return tuple(parts), buffer


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _names_digest(operators: Sequence[Operator]) -> str:
    identities = [identity_of(op) for op in operators]
    return xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(identities))


def _bitmap(flags: Sequence[bool]) -> bytes:
    value = sum(1 << place for place, flag in enumerate(flags) if flag)
    return value.to_bytes((len(flags) + 7) // 8, "little")


def _has(bitmap: bytes, place: int) -> bool:
    return bool(bitmap[place // 8] >> (place % 8) & 1)
