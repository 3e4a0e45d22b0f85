"""How one checkpoint of partial snapshots is stored, if its trainer asks to store some of the experts with
each: `ckptd.core.durable_experts` decides, from what the newest snapshot and the last manifest say.

The trainer records what it asks for in the step scalars, so that it counts from the next snapshot on and is
the same on all ranks whose options are.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from ckptd.core.durable_experts import (
    DurableChoice,
    DurableTurns,
    Listed,
    choose_durable,
    slots_with_old_copies,
)
from ckptd.core.slots.segment_format import SegmentDescriptor, SlotHeader, decode_descriptor
from ckptd.core.snapshot_policy import PolicyKind
from ckptd.errors import SegmentError
from ckptd.holdings import operators_id, policy_of
from ckptd.storage.checkpoints.manifest import RankManifest
from ckptd.storage.image import ImageView
from ckptd.storage.image_format import ImageError
from ckptd.storage.reduced_image import NewerSnapshots
from ckptd.unpacking import unpack

logger = logging.getLogger(__name__)

_EXPERT = 4  # of a packed operator: [container, index] if it is an expert, else nil


class _Durable(msgspec.Struct, frozen=True):
    experts: int
    of: int
    limit: float | None


class _OfExperts(msgspec.Struct, frozen=True):
    lost_iterations: float
    durable: _Durable | None = None


class _Scalars(msgspec.Struct, frozen=True):
    experts: _OfExperts | None = None


class _Operators(msgspec.Struct, frozen=True):
    operators: list[Any]


_scalars = msgspec.msgpack.Decoder(_Scalars)
_operators = msgspec.msgpack.Decoder(_Operators)


@dataclass(frozen=True, slots=True)
class NewestSnapshot:
    """What the newest snapshot of a checkpoint says.

    Attributes:
        num_slots: of its ring.
        experts: bitmap of the operators that are experts; ``parameters``: their parameters.
    """

    turns: DurableTurns
    window: int
    num_slots: int
    operators_id: str
    experts: int
    parameters: frozenset[str]


@dataclass(frozen=True, slots=True)
class DurablePlan:
    """What a checkpoint stores.

    Attributes:
        another: of the snapshots of the checkpoint, one that anchors other experts than the newest one.
    """

    choice: DurableChoice
    newest: NewestSnapshot
    end: int
    another: NewerSnapshots

    def stores(self, iteration: int) -> bool:
        """Whether the checkpoint stores this snapshot, whole, reduced or bare."""
        return iteration in self.choice.stored

    def stores_bare(self, iteration: int) -> bool:
        """Whether it stores the snapshot without experts."""
        return self.choice.bare and iteration == self.end


def read_newest(
    image: memoryview, header: SlotHeader, descriptor: SegmentDescriptor, num_slots: int
) -> NewestSnapshot | None:
    """None if the trainer did not ask to store some experts only, or if the image cannot be read."""
    try:
        view = ImageView(image)
        if xxhash.xxh3_128_digest(image[: view.data_offset]) != header.header_digest:
            return None
        asked = unpack(_scalars, view.scalars).experts
        if asked is None or asked.durable is None:
            return None
        operators = unpack(_operators, descriptor.client).operators
        experts = {i: op for i, op in enumerate(operators) if op[_EXPERT] is not None}
        parameters = frozenset(member[0] for op in experts.values() for member in op[-1])
    except (ImageError, ValueError, LookupError, TypeError) as error:
        logger.warning(
            "all experts of checkpoint %d are stored: what its newest snapshot says cannot be read (%s)",
            header.iteration,
            error,
        )
        return None
    wanted = asked.durable
    turns = DurableTurns(wanted.experts, wanted.of, wanted.limit, asked.lost_iterations)
    return NewestSnapshot(
        turns,
        descriptor.window,
        num_slots,
        operators_id(descriptor),
        sum(1 << i for i in experts),
        parameters,
    )


def choice_after(last: RankManifest, now: Sequence[Listed], newest: NewestSnapshot) -> DurableChoice | None:
    """What the checkpoint after ``last`` stores; None: all experts, as for a ring that could not go on from
    less.
    """
    if newest.num_slots < slots_with_old_copies(newest.window):
        return None
    try:
        before = decode_descriptor(last.descriptor)
    except SegmentError:
        return None  # another version wrote it
    if policy_of(before) != PolicyKind.PARTIAL or operators_id(before) != newest.operators_id:
        return None
    if last.window != newest.window:
        return None
    if not all(each.image_digest for each in last.snapshots):
        return None  # it was stored with a manifest of version 1
    listed = [Listed(each.iteration, each.phase) for each in last.snapshots]
    return choose_durable(listed, now, newest.window, newest.turns)
