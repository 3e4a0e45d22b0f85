"""What several ranks have alike, and which of them captures it (MoC-System, section 4; DESIGN §8).

A parameter is replicated if its wrapper says so (``DistributedDataParallel``, a ``Replicate``
placement of a DTensor, as under HSDP) or the user does; it is never guessed from values. Its
operators are then captured by one rank of the group, and in replay that rank hands to the others
what was recorded (``ckptd.client.recovery.replica_broadcast``).

All members must assign owners alike. They do so from the same numbers, and before the first
snapshot they compare what came out (``ReplicatedParams.fingerprints``). A rank that could not
compare captures everything itself: whatever the others do, nothing is missing.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ckptd.client.log_lines import get_logger
from ckptd.client.model.live_state import LiveState, local, names_with_wrappers
from ckptd.client.model.operators import Operator
from ckptd.client.optimizers.value_trees import plain_parts
from ckptd.client.ranks.collectives import Collectives
from ckptd.core.schedules.policy import OperatorCost
from ckptd.core.schedules.shares import SharedOperator, spread

__all__ = [
    "EVERY_RANK",
    "NOTHING_SHARED",
    "Replicas",
    "ReplicatedParams",
    "agree_on_sharing",
    "checksum",
    "find_replicas",
    "identity_of",
]

logger = get_logger(__name__)

# The owner of what each rank captures for itself.
EVERY_RANK = -1
# Elements: a few hundred MiB at most are needed for a moment, whatever the size of a parameter.
_SUMMED_AT_ONCE = 16 << 20
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Replicas:
    """Ranks that hold the same values of a parameter, or of a shard of it; ``group``: how they
    reach each other.
    """

    ranks: tuple[int, ...]
    group: Any = field(compare=False, hash=False)

    @property
    def key(self) -> str:
        """Names the group: the same on all of its members."""
        return xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(self.ranks))


class _Here(msgspec.Struct, frozen=True):
    """What a rank tells of itself: bytes that it alone captures, and a checksum of what it shares,
    by group.
    """

    own_bytes: int
    groups: dict[str, str]


@dataclass(frozen=True)
class ReplicatedParams:
    """What this rank shares with whom.

    Attributes:
        replicas: of each parameter that several ranks have alike.
        own_bytes: what each rank captures besides; equal on all ranks.
    """

    replicas: Mapping[str, Replicas] = field(default_factory=dict)
    own_bytes: Mapping[int, int] = field(default_factory=dict)

    def group_of(self, operator: Operator) -> Replicas | None:
        """The group all of whose members have this operator; None if it is this rank's own."""
        found = {self.replicas.get(member.param) for member in operator.members}
        return found.pop() if len(found) == 1 else None

    def groups(self, operators: Sequence[Operator]) -> dict[Replicas, list[int]]:
        """The operators of each group by their numbers here, groups in an order that is the same
        wherever they meet.
        """
        found: dict[Replicas, list[int]] = {}
        for i, operator in enumerate(operators):
            if (group := self.group_of(operator)) is not None:
                found.setdefault(group, []).append(i)
        return dict(sorted(found.items(), key=lambda item: item[0].ranks))

    def ranks_with_same_operators(self, operators: Sequence[Operator], rank: int) -> tuple[int, ...]:
        """Other ranks that have all of these operators, as ``rank`` has them."""
        groups = [self.group_of(operator) for operator in operators]
        if not groups or any(group is None for group in groups):
            return ()
        common = set.intersection(*(set(group.ranks) for group in groups if group is not None))
        return tuple(sorted(common - {rank}))

    def mean_costs(self, operators: Sequence[Operator], costs: Sequence[OperatorCost]) -> list[OperatorCost]:
        """What each operator takes in this rank's snapshots, were each shared one cut evenly."""
        found = list(costs)
        for group, indices in self.groups(operators).items():
            for i in indices:
                found[i] = replace(
                    costs[i],
                    anchor_bytes=-(-costs[i].anchor_bytes // len(group.ranks)),
                    compute_bytes=-(-costs[i].compute_bytes // len(group.ranks)),
                )
        return found

    def owners(
        self,
        operators: Sequence[Operator],
        costs: Sequence[OperatorCost],
        phases: Sequence[Sequence[int]],
    ) -> list[int]:
        """The rank that captures each operator, or ``EVERY_RANK``."""
        owners = [EVERY_RANK] * len(operators)
        phase_of = {i: number for number, phase in enumerate(phases) for i in phase}
        for group, indices in self.groups(operators).items():
            shared = [
                SharedOperator(
                    operators[i].name,
                    costs[i].anchor_bytes,
                    costs[i].compute_bytes,
                    phase_of.get(i, 0),
                )
                for i in indices
            ]
            for i, owner in zip(indices, spread(shared, group.ranks, self.own_bytes), strict=True):
                owners[i] = owner
        return owners

    def checksums(self, binding: LiveState) -> dict[Replicas, str]:
        """Of each group one of the values that its parameters and their optimizer state have now."""
        return {g: checksum(binding, names) for g, names in _by_group(self.replicas).items()}

    def fingerprints(
        self,
        operators: Sequence[Operator],
        phases: Sequence[Sequence[int]],
        owners: Sequence[int],
        values: Mapping[Replicas, str] = MappingProxyType({}),
    ) -> dict[Replicas, int]:
        """Of each group a number from 0 to 2^63 - 1: equal where its members have the same
        operators, in the same phases, with the same owners.

        Args:
            values: checksums of the same moment on all ranks.
        """
        phase_of = {i: number for number, phase in enumerate(phases) for i in phase}
        found = {}
        for group, indices in self.groups(operators).items():
            planned = [
                [identity_of(operators[i]), phase_of.get(i, 0), owners[i], len(phases)] for i in indices
            ]
            packed = msgspec.msgpack.encode([planned, values.get(group, "")])
            found[group] = xxhash.xxh3_64_intdigest(packed) >> 1
        return found


NOTHING_SHARED = ReplicatedParams()


def identity_of(operator: Operator) -> list[Any]:
    """What makes an operator the same on two ranks: its name and its rows."""
    return [operator.name, [[m.param, m.start, m.stop] for m in operator.members]]


def find_replicas(
    binding: LiveState, patterns: Mapping[str, Any] | None, rank: int | None = None
) -> dict[str, Replicas]:
    """The parameters that several ranks have alike.

    Args:
        patterns: of parameter names (``fnmatch``), each with the process group or one-dimensional
            ``DeviceMesh`` over which what matches is replicated; None leaves the patterns out, not
            the wrappers.
        rank: this rank's number in the job. Groups go by that of the process group; where it is
            another, nothing is shared.
    Raises:
        ValueError: a pattern that matches nothing, or something that is no group.
    """
    if rank is not None and rank != dist.get_rank():
        logger.warning(
            "rank=%d is rank %d of its process group: it shares nothing with other ranks",
            rank,
            dist.get_rank(),
        )
        return {}
    found = {n: r for n, r in _found_by_wrappers(binding) if len(r.ranks) > 1}
    for name, replicas in _given_by_user(binding, patterns or {}):
        if len(replicas.ranks) > 1:
            found[name] = replicas
        else:
            found.pop(name, None)
    return {name: r for name, r in found.items() if not _spread_by_optimizer(binding, name)}


def _found_by_wrappers(binding: LiveState) -> Iterator[tuple[str, Replicas]]:
    names = {id(param): name for name, param in binding.params.items()}
    for module in binding.model.modules():
        if isinstance(module, DistributedDataParallel):
            replicas = _replicas(module.process_group)
            for name, param in module.module.named_parameters():
                if name not in module.parameters_to_ignore and id(param) in names:
                    yield names[id(param)], replicas
    known: dict[tuple[int, int], Replicas] = {}
    for name, param in binding.params.items():
        mesh = getattr(param, "device_mesh", None)
        axes = [] if mesh is None else _replicated_axes(param)
        if mesh is not None and axes:
            # Of several such axes the longest: a group over all of them would have to be made, by
            # all ranks together.
            axis = max(axes, key=lambda a: (mesh.size(a), -a))
            if (id(mesh), axis) not in known:
                known[id(mesh), axis] = _replicas(mesh.get_group(axis))
            yield name, known[id(mesh), axis]


def _replicated_axes(param: Any) -> list[int]:
    return [axis for axis, placement in enumerate(param.placements) if placement.is_replicate()]


def _given_by_user(binding: LiveState, patterns: Mapping[str, Any]) -> Iterator[tuple[str, Replicas]]:
    plain = names_with_wrappers(binding.model)
    for pattern, over in patterns.items():
        group = over.get_group() if hasattr(over, "get_group") else over
        try:
            replicas = _replicas(group)
        except (ValueError, RuntimeError, TypeError, KeyError) as error:
            raise ValueError(
                f"replicated[{pattern!r}] is {over!r}: pass a process group that this rank is in, "
                f"or a DeviceMesh of one dimension ({error})"
            ) from error
        wanted = plain.get(pattern, pattern)
        names = [n for n in binding.params if fnmatch.fnmatchcase(n, wanted)]
        if not names:
            raise ValueError(
                f"replicated[{pattern!r}]: no parameter has such a name; names look like "
                f"{next(iter(binding.params), '')!r}"
            )
        for name in names:
            yield name, replicas


def _replicas(group: Any) -> Replicas:
    ranks = tuple(sorted(dist.get_process_group_ranks(group)))
    if dist.get_rank() not in ranks:
        raise ValueError("this rank is not in the group")
    return Replicas(ranks, group)


def _spread_by_optimizer(binding: LiveState, name: str) -> bool:
    """Whether its optimizer state is on one rank only (``ZeroRedundancyOptimizer``), or its update
    needs all shards.
    """
    owner = binding.owner.get(name)
    if owner is None:
        return False
    return binding.keepers[owner[0]] is not binding.optimizers[owner[0]] or (name in binding.inseparable)


def agree_on_sharing(
    binding: LiveState, replicas: Mapping[str, Replicas], own_bytes: int, ranks: Collectives
) -> ReplicatedParams:
    """What can be shared: what has the same values on all ranks of its group now. A collective call.

    Args:
        own_bytes: what this rank captures beside what is replicated.
    """
    by_group = _by_group(replicas)
    mine = {g.key: checksum(binding, names) for g, names in by_group.items()}
    found = ranks.gather(_Here(own_bytes, mine), _Here)
    usable: dict[str, Replicas] = {}
    for group, names in by_group.items():
        other = [r for r in group.ranks if found[r].groups.get(group.key) != mine[group.key]]
        if other:
            logger.warning(
                "%d parameters (%s) should be replicated over %d ranks, but are not the same on "
                "rank %d: every rank captures its own",
                len(names),
                names[0],
                len(group.ranks),
                other[0],
            )
        else:
            usable.update(dict.fromkeys(names, group))
    return ReplicatedParams(usable, {rank: here.own_bytes for rank, here in enumerate(found)})


def _by_group(replicas: Mapping[str, Replicas]) -> dict[Replicas, list[str]]:
    found: dict[Replicas, list[str]] = {}
    for name, group in replicas.items():
        found.setdefault(group, []).append(name)
    return found


def checksum(binding: LiveState, names: Sequence[str]) -> str:
    """Of names, shapes and values, of optimizer state too where there is some. They are summed on
    their device.
    """
    shapes: list[Any] = []
    sums: list[Tensor] = []
    for name in names:
        tensors = {"param": binding.params[name]}
        if name in binding.masters:
            tensors["master"] = binding.masters[name]
        state = binding.state(name)
        tensors |= {k: v for k, v in sorted(state.items()) if isinstance(v, Tensor)}
        for kind, tensor in tensors.items():
            # A shard, too, may be made of others.
            for data in (d for part in plain_parts(tensor) for d in plain_parts(local(part))):
                shapes.append([name, kind, str(data.dtype), list(data.shape)])
                sums += _sums(data)
    return xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode([shapes, _numbers(sums)]))


def _sums(data: Tensor) -> list[Tensor]:
    """One number for each part of a tensor: what changes places between parts is noticed.

    A sum of integers widens its input to 64 bits first, and a tensor that is not contiguous is
    copied: of parts, that is little.
    """
    if data.numel() == 0:
        return []
    rows = data.reshape(1) if data.ndim == 0 else data
    per_row = max(rows.numel() // len(rows), 1)
    # Two parts at least.
    step = max(1, min(_SUMMED_AT_ONCE // per_row, -(-len(rows) // 2)))
    found = []
    for part in rows.split(step):
        flat = part.contiguous().view(-1)
        words = flat.view(_WORDS.get(flat.element_size(), torch.uint8))
        found += [w.sum(dtype=torch.int64) for w in words.split(_SUMMED_AT_ONCE)]
    return found


def _numbers(sums: Sequence[Tensor]) -> list[int]:
    """Brought to the host at once, device by device: each transfer waits for the device."""
    found = [0] * len(sums)
    for device in {s.device for s in sums}:
        here = [i for i, s in enumerate(sums) if s.device == device]
        for i, number in zip(here, torch.stack([sums[i] for i in here]).tolist(), strict=True):
            found[i] = number
    return found
