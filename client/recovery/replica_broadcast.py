"""In replay, the rank that holds a recorded replicated operator sends it to the other ranks that share it
(``ckptd.client.model.replicated_params``).

The bytes of the snapshot travel over the job's own process groups: every rank is at the top of the same
step, or right after the same optimizer's step. The sender of each operator is settled once per replay,
from what each rank's snapshots hold; whatever each of them planned, nothing is missed that any rank has.

Experts that their owners have selected are in other snapshots on each rank. Then the ranks tell each other in
which snapshot they have each operator last, and all take it from the rank with the newest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from ckptd.client.daemon_link.snapshot_image import SnapshotImage
from ckptd.client.model.operators import Operator
from ckptd.client.model.replicated_params import EVERY_RANK, Replicas, ReplicatedParams, identity_of
from ckptd.client.model.snapshot_layout import DTYPES, SAFETENSORS_DTYPES, EntrySource
from ckptd.client.ranks.collectives import Collectives

_CHUNK_BYTES = 32 << 20
# In place of the age of an operator: no snapshot of the suffix anchors it.
_NEVER = 0xFFFF
# Of a header, with its length: what most need.
_HEAD_BYTES = 8 << 10
_LENGTH_BYTES = 8
_ALIGNMENT = 64

# A recorded part, and its bytes in host memory.
Piece = tuple[EntrySource, Tensor]
# Writes a received part where it belongs; the bytes are on the group's device.
Take = Callable[[EntrySource, Tensor], None]


class _Held(msgspec.Struct, frozen=True):
    """What a rank's snapshots hold of one group.

    Args:
        operators: digest of their names, in order, and of the iterations of the suffix.
        bitmap: the operators that are held, in that order.
        complete: whether all are.
        ages: if experts were selected: the snapshots after the newest anchor of each operator, as two bytes
            each, little-endian; `_NEVER`: it has none. Otherwise all ranks have anchors in the same ones.
    """

    operators: str
    bitmap: bytes
    complete: bool
    ages: bytes = b""


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
    """Describes the next broadcast of ``nbytes`` bytes; without parts, none follows.

    ``absent``: parameters without optimizer state, as this sender recorded. ``last``: it has sent everything.
    """

    parts: tuple[_Part, ...] = ()
    nbytes: int = 0
    absent: tuple[str, ...] = ()
    last: bool = True


@dataclass(frozen=True)
class _Group:
    """A group, and the operators (by their numbers here) that each of its members sends to the others.

    ``ages``: of those that were selected, the snapshots after the newest anchor of the sender.
    """

    replicas: Replicas
    senders: dict[int, frozenset[int]]
    ages: dict[int, int] = field(default_factory=dict)


class ReplicaBroadcast:
    """What this rank sends and receives, by group.

    Args:
        rank: this rank's number in the job.
        iterations: of the snapshots that are loaded, newest first, if experts were selected.
    """

    def __init__(self, rank: int, groups: Sequence[_Group], iterations: Sequence[int] = ()) -> None:
        self._rank, self._groups = rank, groups
        self.bytes_sent = 0
        # Bitmaps of operators that others have selected: of all, and by the iteration of the newest anchor.
        self._selected = 0
        self._selected_at: dict[int, int] = {}
        for group in groups:
            for operator in group.ages.keys() - group.senders.get(rank, frozenset()):
                at = iterations[group.ages[operator]]
                self._selected |= 1 << operator
                self._selected_at[at] = self._selected_at.get(at, 0) | 1 << operator

    def anchors(self, image: SnapshotImage) -> int:
        """Bitmap of the operators whose anchors are loaded together with this snapshot. What other ranks have
        selected is anchored in theirs of the same iteration.
        """
        if not self._selected:
            return image.anchors
        return image.anchors & ~self._selected | self._selected_at.get(image.iteration, 0)

    def sends(self) -> frozenset[int]:
        """The operators that this rank sends to others."""
        return frozenset[int]().union(*(g.senders.get(self._rank, ()) for g in self._groups))

    def unlike(self, checksum: Callable[[frozenset[int]], str]) -> list[str]:
        """The groups whose ranks no longer have equal values, in words; a collective call of each group, with
        the same result on its members.

        Args:
            checksum: of the present values of some operators.
        """
        found = []
        for group in self._groups:
            operators = frozenset[int]().union(*group.senders.values())
            sums = _Wire(group.replicas).gather(int(checksum(operators), 16) >> 1)
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
        """Every member sends what it holds; a collective call of each group with such operators.

        Args:
            mine: returns, for some operators, the parts that are loaded now, and their parameters that
                have no optimizer state.
            among: the operators to send; None: all. The same on all members, as far as they have them.
        Returns:
            The parameters that have no optimizer state, as others recorded.
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
                    absent |= wire.receive(sender, take)
        return absent


def arrange(
    sharing: ReplicatedParams,
    operators: Sequence[Operator],
    owners: Sequence[int],
    ranks: Collectives,
    suffix: Sequence[SnapshotImage] = (),
) -> ReplicaBroadcast:
    """Settle the sender of each operator; a collective call.

    Args:
        owners: of each operator, as this rank's snapshots were planned.
        suffix: the snapshots that are loaded, newest first, if experts were selected.
    Raises:
        ValueError: no rank has a part of what this rank needs, or the ranks' snapshots do not fit each other.
    """
    groups, rank = sharing.groups(operators), ranks.rank
    iterations = [image.iteration for image in suffix]

    def held(indices: Sequence[int]) -> _Held:
        flags = [i >= len(owners) or owners[i] in (EVERY_RANK, rank) for i in indices]
        # Only ranks with snapshots of the same iterations can load them together.
        identities = msgspec.msgpack.encode([[identity_of(operators[i]) for i in indices], iterations])
        bitmap = sum(1 << place for place, flag in enumerate(flags) if flag)
        packed = bitmap.to_bytes((len(flags) + 7) // 8, "little")
        ages = _ages(indices, suffix) if suffix else b""
        return _Held(xxhash.xxh3_64_hexdigest(identities), packed, all(flags), ages)

    mine = {group.key: held(indices) for group, indices in groups.items()}
    by_rank = ranks.gather(mine, dict[str, _Held])
    # Only now: a rank that raises before this would leave the others waiting.
    _check_reachable(operators, owners, rank, {i for indices in groups.values() for i in indices})
    found = [
        _settle(group, indices, operators, by_rank, mine[group.key]) for group, indices in groups.items()
    ]
    return ReplicaBroadcast(rank, [g for g in found if g is not None], iterations)


def _ages(indices: Sequence[int], suffix: Sequence[SnapshotImage]) -> bytes:
    """As of `_Held`."""
    ages = np.full(len(indices), _NEVER, "<u2")
    for age in reversed(range(len(suffix))):
        anchors = suffix[age].anchors
        ages[[place for place, i in enumerate(indices) if anchors >> i & 1]] = age
    return ages.tobytes()


def _settle(
    group: Replicas,
    indices: Sequence[int],
    operators: Sequence[Operator],
    by_rank: Sequence[dict[str, _Held]],
    mine: _Held,
) -> _Group | None:
    """The senders of a group; None if every member has everything."""
    held = {rank: by_rank[rank].get(group.key) for rank in group.ranks}
    ages = {rank: np.frombuffer(h.ages, "<u2").tolist() for rank, h in held.items() if h is not None}
    selected = all(ages.values())
    # Then it does not matter how each cut its operators, nor that they are equal.
    complete = all(h is None or h.complete for h in held.values())
    if complete and not (selected and len({h.ages for h in held.values() if h is not None}) > 1):
        return None
    bitmaps: dict[int, int] = {}
    for rank, theirs in held.items():
        if theirs is None or theirs.operators != mine.operators:
            raise ValueError(
                f"the snapshots of this rank rely on those of rank {rank} for "
                f"{operators[indices[0]].name} and others, but those are of "
                "other operators or iterations; start with the parallel layout that the run had, or pass "
                "run= a new name"
            )
        bitmaps[rank] = int.from_bytes(theirs.bitmap, "little")
    senders: dict[int, set[int]] = {}
    taken: dict[int, int] = {}
    for place, index in enumerate(indices):
        having = [rank for rank, bitmap in bitmaps.items() if bitmap >> place & 1]
        if selected:
            having = [rank for rank in having if ages[rank][place] != _NEVER]
        if not having:
            raise ValueError(
                f"no rank of {list(group.ranks)} has recorded {operators[index].name}; pass run= a "
                "new name to start over"
            )
        if selected:
            newest = min(ages[rank][place] for rank in having)
            having = [rank for rank in having if ages[rank][place] == newest]
        if len(having) < len(group.ranks):
            senders.setdefault(min(having), set()).add(index)
            if selected:
                taken[index] = newest
    return _Group(group, {rank: frozenset(of) for rank, of in senders.items()}, taken)


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
    """Collectives within one group. A sender sends headers with their bytes, until nothing is left."""

    def __init__(self, replicas: Replicas) -> None:
        self._group = replicas.group
        # Not by the backend's name: "cuda:nccl" has no device type but cuda, "cpu:gloo,cuda:nccl"
        # has both.
        types = {device.type for device in self._group._device_types}
        self._device = torch.device("cpu" if "cpu" in types or not types else min(types))

    def gather(self, number: int) -> list[int]:
        """The numbers of all members."""
        mine = torch.tensor([number], dtype=torch.int64, device=self._device)
        by_rank = [torch.zeros_like(mine) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(by_rank, mine, group=self._group)
        return [int(t.item()) for t in by_rank]

    def send(self, sender: int, pieces: Iterable[Piece], absent: Iterable[str]) -> int:
        total = 0
        names = tuple(sorted(absent))
        packed = _packed(pieces)
        following = next(packed, None)
        if following is None:
            self._send_header(sender, _Chunk(absent=names))
        while following is not None:
            (parts, buffer), following = following, next(packed, None)
            self._send_header(sender, _Chunk(parts, buffer.numel(), names, last=following is None))
            dist.broadcast(buffer.to(self._device), src=sender, group=self._group)
            total, names = total + buffer.numel(), ()
        return total

    def receive(self, sender: int, take: Take) -> set[str]:
        absent = set[str]()
        last = False
        while not last:
            chunk = self._received_header(sender)
            last = chunk.last
            absent.update(chunk.absent)
            if chunk.parts:
                self._receive_parts(sender, chunk, take)
        return absent

    def _receive_parts(self, sender: int, chunk: _Chunk, take: Take) -> None:
        buffer = self._received(sender, chunk.nbytes)
        for part in chunk.parts:
            dtype = DTYPES[part.dtype]
            source = EntrySource(part.kind, part.name, part.key, part.start, part.stop, dtype)
            data = buffer[part.offset : part.offset + part.nbytes]
            take(source, data.view(dtype).reshape(part.shape))

    def _send_header(self, sender: int, chunk: _Chunk) -> None:
        """In one broadcast; what does not fit, in a second one."""
        data = msgspec.msgpack.encode(chunk)
        head = len(data).to_bytes(_LENGTH_BYTES, "little") + data[:_HEAD_BYTES].ljust(_HEAD_BYTES, b"\0")
        for piece in (head, data[_HEAD_BYTES:]):
            if piece:
                body = torch.frombuffer(bytearray(piece), dtype=torch.uint8).to(self._device)
                dist.broadcast(body, src=sender, group=self._group)

    def _received_header(self, sender: int) -> _Chunk:
        head = self._received(sender, _LENGTH_BYTES + _HEAD_BYTES).cpu().numpy().tobytes()
        size, data = int.from_bytes(head[:_LENGTH_BYTES], "little"), head[_LENGTH_BYTES:]
        if size > _HEAD_BYTES:
            data += self._received(sender, size - _HEAD_BYTES).cpu().numpy().tobytes()
        return msgspec.msgpack.decode(data[:size], type=_Chunk)

    def _received(self, sender: int, size: int) -> Tensor:
        buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        dist.broadcast(buffer, src=sender, group=self._group)
        return buffer


def _packed(pieces: Iterable[Piece]) -> Iterator[tuple[tuple[_Part, ...], Tensor]]:
    """Pack parts into buffers of a bounded size; a part that is larger than that gets its own."""
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
        where = (source.kind, source.name, source.key, source.start, source.stop)
        parts.append(_Part(*where, SAFETENSORS_DTYPES[data.dtype], tuple(data.shape), offset, nbytes))
        offset += _aligned(nbytes)
    return tuple(parts), buffer


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
