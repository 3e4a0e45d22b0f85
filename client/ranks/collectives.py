"""All ranks agree, or all raise: at a start or at a boundary every rank contributes a value or an error, and
every rank gets all values, or every rank raises.

Between two collective calls no rank may go on or give up alone: the others would wait for it in the
next one until the process group times out. Whatever may fail on one rank is therefore passed to
`Collectives.agree`, which raises no error before the other ranks know of it.

The calls of a job (`Collectives.of_job`) begin with a barrier in the job's store (`store_barrier`), which
names a rank that does not arrive. The values then travel over the process group: the store would have to
send *world size* squared payloads from one machine. They are tensors on the group's own device, so that
groups of NCCL alone serve, too, and travel in rounds of a bounded size. Nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec
import torch
import torch.distributed as dist

from ckptd.client.identity import Identity
from ckptd.client.ranks.job_link import job_link
from ckptd.client.ranks.store_barrier import DEADLINE_S, StoreBarrier
from ckptd.errors import CkptdError, DaemonUnavailable
from ckptd.units import first_of

T = TypeVar("T")

# Sends this rank's payload, and returns those of all ranks, in their order. A collective call.
Exchange = Callable[[bytes], list[bytes]]

_FAILURES_SHOWN = 4
_TEXT_LIMIT = 2000


class TryAgain(Exception):
    """Raised by the work of one rank: all ranks must begin again. `Collectives.agree` raises it on all."""


class Failure(msgspec.Struct, frozen=True):
    """An error on a rank's node; an empty text: none."""

    node: str = ""
    text: str = ""


_NOTHING = msgspec.msgpack.encode(None)


class _Said(msgspec.Struct, frozen=True, array_like=True):
    """What a rank contributes: a packed value, or a failure, or the request to begin again."""

    value: msgspec.Raw = msgspec.Raw(_NOTHING)
    again: bool = False
    failure: Failure = Failure()


@dataclass(frozen=True, slots=True)
class Outcomes(Generic[T]):
    """The outcomes of all ranks, in their order; the same on every rank but for ``own``.

    Attributes:
        values: None where a rank has none.
        own: this rank's error.
    """

    values: list[T | None]
    failures: list[Failure]
    again: bool
    own: Exception | None

    def raise_failures(self) -> None:
        """Raise on every rank if any rank failed, or if any wants to begin again.

        Raises:
            DaemonUnavailable: names the ranks that failed, and their nodes. An error that is not a
                missing daemon is raised itself on the rank where it happened: its type says what to
                do about it.
            TryAgain: no rank failed, and one wants to begin again.
        """
        failed = [(rank, one) for rank, one in enumerate(self.failures) if one.text]
        own = self.own
        if not failed:
            if isinstance(own, TryAgain):
                raise own
            if self.again:
                raise TryAgain
            return
        kept = own is not None and not isinstance(own, DaemonUnavailable | TryAgain)
        if own is not None and (kept or len(self.failures) == 1):
            raise own
        texts = [f"rank {rank} on node {one.node}: {one.text}" for rank, one in failed]
        raise DaemonUnavailable(_first(texts), operation="recover") from own


class Collectives:
    """The collective calls of one rank: all ranks make the same ones in the same order.

    Args:
        exchange: carries the payloads.
        rank: this one.
        node: its node, as the other ranks name it when something fails here.
    """

    def __init__(self, exchange: Exchange, *, rank: int = 0, node: str = "") -> None:
        self._exchange, self.rank, self.node = exchange, rank, node

    @classmethod
    def of_job(cls, identity: Identity, *, node: str) -> Collectives:
        """Between all ranks of a job."""
        return cls(partial(exchange, identity), rank=identity.rank, node=node)

    @classmethod
    def alone(cls, node: str = "") -> Collectives:
        """For a rank that decides for itself."""
        return cls(lambda payload: [payload], node=node)

    @classmethod
    def of_group(cls, group: Any) -> Collectives:
        """Between the ranks of a process group, without a barrier: collectives run there anyway."""
        said_by_all = partial(gather_bytes, world_size=dist.get_world_size(group), group=group)
        return cls(said_by_all, rank=dist.get_rank(group))

    def on_node(self, node: str) -> Collectives:
        """The same, once the rank's node is known."""
        return Collectives(self._exchange, rank=self.rank, node=node)

    def barrier(self) -> None:
        """Wait until all ranks have arrived."""
        self._exchange(b"")

    def gather(self, value: T, kind: type[T]) -> list[T]:
        """The values of all ranks.

        Args:
            kind: the type of the values, by which they are unpacked.
        """
        said = self._exchange(msgspec.msgpack.encode(value))
        return [msgspec.msgpack.decode(each, type=kind) for each in said]

    def agree(self, work: Callable[[], T], kind: type[T]) -> list[T]:
        """The result of ``work`` on each rank; or all ranks raise.

        Raises:
            DaemonUnavailable: the work of a rank failed; on the rank where it did, that error
                (`Outcomes.raise_failures`).
            TryAgain: the work of a rank raised that, and no rank failed.
        """
        found = self.outcomes(work, kind)
        found.raise_failures()
        return found.values  # type: ignore[return-value]  # no rank failed, so each has one

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Either every rank comes through the block, or every rank raises; a collective call at its end.

        Raises:
            DaemonUnavailable: as `agree`.
        """
        failed: Exception | None = None
        try:
            yield
        except TryAgain as error:  # a block cannot begin again
            failed = DaemonUnavailable(str(error))
            failed.__cause__ = error
        except Exception as error:  # noqa: BLE001 - the other ranks wait to hear of it; raised below
            failed = error
        self._outcomes(_NOTHING, failed, type(None)).raise_failures()

    def outcomes(self, work: Callable[[], T], kind: type[T]) -> Outcomes[T]:
        """As `agree`, for callers that can go on though some ranks failed."""
        packed, failed = _NOTHING, None
        try:
            packed = msgspec.msgpack.encode(work())
        except Exception as error:  # noqa: BLE001 - the other ranks wait to hear of it; kept for the caller
            failed = error
        return self._outcomes(packed, failed, kind)

    def check(self, work: Callable[[], T], kind: type[T], *, what: str, unlike: str = "") -> list[T]:
        """The result of ``work`` on each rank; or all ranks raise the same ``ValueError``.

        Args:
            what: the beginning of the message: what is not done.
            unlike: the problem of a rank whose value is not that of rank 0; empty: values may differ.
        Raises:
            ValueError: the same on every rank.
        """
        found = self.outcomes(work, kind)
        problems = {rank: one.text for rank, one in enumerate(found.failures) if one.text}
        if not problems and unlike:
            first = found.values[0]
            problems = {r: unlike for r, value in enumerate(found.values) if value != first}
        if problems:
            raise refused(what, problems) from found.own
        return found.values  # type: ignore[return-value]  # no rank failed, so each has one

    def _outcomes(self, packed: bytes, failed: Exception | None, kind: type[T]) -> Outcomes[T]:
        mine = _Said(msgspec.Raw(packed))
        if isinstance(failed, TryAgain):
            mine = _Said(again=True)
        elif failed is not None:
            mine = _Said(failure=Failure(self.node, _text_of(failed)))
        try:
            said = self._exchange(msgspec.msgpack.encode(mine))
        except (ValueError, DaemonUnavailable) as error:
            # No process group, or ranks that did not arrive: this rank's own error is the better answer.
            if failed is None:
                raise
            raise failed from error
        heard = [msgspec.msgpack.decode(each, type=_Said) for each in said]
        values = [
            None if one.again or one.failure.text else msgspec.msgpack.decode(one.value, type=kind)
            for one in heard
        ]
        again = any(one.again for one in heard)
        return Outcomes(values, [one.failure for one in heard], again, failed)


def _text_of(error: Exception) -> str:
    """An error as the other ranks show it; with its type if its text may not be clear without it."""
    text, kind = str(error), type(error).__name__
    if not isinstance(error, CkptdError | ValueError | TypeError):
        text = f"{kind}: {text}" if text else kind
    return (text or kind)[:_TEXT_LIMIT]


def _first(texts: Sequence[str]) -> str:
    return first_of(texts, _FAILURES_SHOWN, between="; ", what="more ranks")


def refused(what: str, problems: Mapping[int, str]) -> ValueError:
    """The error that names the first few ranks with problems; a problem that all share is named once."""
    if len(problems) > 1 and len(set(problems.values())) == 1:
        ranks = ", ".join(map(str, list(problems)[:_FAILURES_SHOWN]))
        more = ", …" if len(problems) > _FAILURES_SHOWN else ""
        return ValueError(f"{what}: ranks {ranks}{more}: {next(iter(problems.values()))}")
    return ValueError(f"{what}: {_first([f'rank {r}: {text}' for r, text in problems.items()])}")


# -- the exchange of a job -------------------------------------------------------------------------

_barrier: StoreBarrier | None = None


def exchange(identity: Identity, payload: bytes, *, deadline_s: float = DEADLINE_S) -> list[bytes]:
    """The payloads of all ranks of a job, in their order; a collective call if there are several.

    Raises:
        ValueError: several ranks, and ``torch.distributed`` is not initialised with as many.
        DaemonUnavailable: not all ranks arrived within ``deadline_s``, or one is gone; names it.
    """
    if identity.world_size == 1:
        return [payload]
    link = job_link()
    if link is not None and link.world_size == identity.world_size:
        return link.exchange(payload)
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            f"world_size={identity.world_size}, but torch.distributed is not initialised: call "
            "init_process_group() before Checkpointer, "
            "or, for independent trainers, pass each run=RunOptions(world_size=1, job=...) with a "
            "job of its own"
        )
    if dist.get_world_size() != identity.world_size:
        raise ValueError(
            f"world_size={identity.world_size}, but the process group has {dist.get_world_size()} ranks"
        )
    _barrier_of_job().wait(f"ckptd/{identity.job}/{identity.run}/exchange", deadline_s=deadline_s)
    return gather_bytes(payload, identity.world_size)


def _barrier_of_job() -> StoreBarrier:
    global _barrier  # of the process, as the process group is
    group = dist.distributed_c10d._get_default_group()
    if _barrier is None or not _barrier.is_of(group):
        if _barrier is not None:
            _barrier.close()
        _barrier = StoreBarrier(group)
    return _barrier


def leave_barrier() -> None:
    """The process group is about to end: nobody is watched any longer."""
    global _barrier
    if _barrier is not None:
        _barrier.close()
        _barrier = None


# What all ranks together gather, or one rank ships, in one round.
_ROUND_BYTES = 64 << 20
# Of each payload in the first round, with its length: most need no other. All together have a limit, too.
_FIRST_BYTES = 4 << 10
_FIRST_OF_ALL = 4 << 20
_LENGTH_BYTES = 8

Chunks = Sequence[bytes | memoryview]


def gather_bytes(payload: bytes, world_size: int, group: Any = None) -> list[bytes]:
    """The payloads of all ranks, in their order; a collective call of the process group (default: all)."""
    device = _device_of(group)

    def gathered(piece: bytes, width: int) -> list[memoryview]:
        row = torch.frombuffer(bytearray(piece.ljust(width, b"\0")), dtype=torch.uint8).to(device)
        everything = torch.empty((world_size, width), dtype=torch.uint8, device=device)
        dist.all_gather(list(everything.unbind()), row, group=group)
        return [row.data for row in everything.cpu().numpy()]

    first = max(1, min(_FIRST_BYTES, _FIRST_OF_ALL // world_size))
    length = len(payload).to_bytes(_LENGTH_BYTES, "little")
    heads = gathered(length + payload[:first], _LENGTH_BYTES + first)
    sizes = [int.from_bytes(head[:_LENGTH_BYTES], "little") for head in heads]
    parts = [
        [bytes(head[_LENGTH_BYTES : _LENGTH_BYTES + size])] for head, size in zip(heads, sizes, strict=True)
    ]
    # In rounds, so that one long payload does not cost world size times its length of memory.
    width = max(1, min(max(sizes) - first, _ROUND_BYTES // world_size))
    for start in range(first, max(sizes), width):
        rows = gathered(payload[start : start + width], width)
        for part, row, size in zip(parts, rows, sizes, strict=True):
            part.append(bytes(row[: max(0, size - start)]))
    return [b"".join(part) for part in parts]


def ship_bytes(outgoing: Sequence[Chunks], group: Any = None) -> list[bytearray]:
    """The bytes that each of the ``R`` ranks has sent to this one, in their order; a collective call.

    Args:
        outgoing: ``[R]``, for each rank the parts of what it gets.
    """
    ranks = len(outgoing)
    if ranks == 1:
        return [bytearray(b"".join(outgoing[0]))]
    device = _device_of(group)
    sizes = [sum(map(len, parts)) for parts in outgoing]
    mine = torch.tensor(sizes, dtype=torch.int64, device=device)
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine, group=group)
    coming = [int(size) for size in theirs.tolist()]
    most = torch.tensor([max(*sizes, *coming)], dtype=torch.int64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    width = max(1, _ROUND_BYTES // ranks)
    pieces = [_cut(parts, width) for parts in outgoing]
    received = [bytearray() for _ in outgoing]
    for start in range(0, int(most.item()), width):
        counts = [min(width, max(0, size - start)) for size in coming]
        for rank, piece in enumerate(_round([next(p, b"") for p in pieces], counts, device, group)):
            received[rank] += piece
    return received


def _cut(parts: Chunks, width: int) -> Iterator[bytes]:
    """The parts as pieces of that width, but for the last."""
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
