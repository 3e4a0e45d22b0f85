"""Replicated parameters: the ranks that hold them, and the rank that captures them.

Source: MoC-System §4; DESIGN §8.

A parameter is replicated if its wrapper says so (``DistributedDataParallel``, a ``Replicate`` placement
of a DTensor, as under HSDP) or the user does; never by a guess from values. One rank of the group captures
its operators, and in replay that rank broadcasts the recording to the others
(``ckptd.client.recovery.replica_broadcast``).

All members must assign the same owners. They use the same numbers, and before the first snapshot they
compare the results (``ReplicatedParams.fingerprints``). A rank that could not compare captures everything
itself: whatever the others do, nothing is missing.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterator, Mapping, Sequence
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
from ckptd.core.partial_experts import share_experts
from ckptd.core.schedule import SharedOperator, spread
from ckptd.core.slots.segment_format import MAX_GROUP_RANKS, MAX_REPLICA_GROUPS, ReplicaGroup
from ckptd.core.snapshot_policy import OperatorCost

logger = get_logger(__name__)

# The owner of an operator that each rank captures for itself.
EVERY_RANK = -1
# Elements: a few hundred MiB at most are needed for a moment, whatever the size of a parameter.
_SUMMED_AT_ONCE = 16 << 20
_WORD_BYTES = 8


@dataclass(frozen=True)
class Replicas:
    """Ranks that hold the same values of a parameter or shard, and the process group that connects them."""

    ranks: tuple[int, ...]
    group: Any = field(compare=False, hash=False)

    @property
    def key(self) -> str:
        """A name of the group, equal on all of its members."""
        return xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(self.ranks))


_AS_BEFORE = ""


class _RankShare(msgspec.Struct, frozen=True):
    """Bytes that a rank alone captures, and a checksum of its replicated parameters by group."""

    own_bytes: int
    groups: dict[str, str]


@dataclass(frozen=True)
class ReplicatedParams:
    """The parameters that this rank shares with other ranks.

    Attributes:
        replicas: by parameter.
        own_bytes: what each rank captures besides; equal on all ranks.
    """

    replicas: Mapping[str, Replicas] = field(default_factory=dict)
    own_bytes: Mapping[int, int] = field(default_factory=dict)

    def group_of(self, operator: Operator) -> Replicas | None:
        """The group whose members all have this operator; None if it is this rank's own."""
        found = {self.replicas.get(member.param) for member in operator.members}
        return found.pop() if len(found) == 1 else None

    def mark_of(self, group: Replicas, names: Sequence[str], rank: int) -> str:
        """In place of a checksum of these parameters: whether the group has shared them so far."""
        return _AS_BEFORE if all(self.replicas.get(name) == group for name in names) else f"rank {rank}"

    def replica_groups(self) -> tuple[ReplicaGroup, ...]:
        """By group, what daemons compare if each rank captures its own; as much as a descriptor can hold."""
        groups = sorted(self.by_group().items(), key=lambda item: item[0].ranks)
        known = [
            ReplicaGroup(g.ranks, tuple(names)) for g, names in groups if len(g.ranks) <= MAX_GROUP_RANKS
        ]
        return tuple(known[:MAX_REPLICA_GROUPS])

    def groups(self, operators: Sequence[Operator]) -> dict[Replicas, list[int]]:
        """Indices of each group's operators; groups have the same order on all ranks."""
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
        shared = set.intersection(*(set(group.ranks) for group in groups if group is not None))
        return tuple(sorted(shared - {rank}))

    def mean_costs(self, operators: Sequence[Operator], costs: Sequence[OperatorCost]) -> list[OperatorCost]:
        """The costs in this rank's snapshots if each shared operator were cut evenly."""
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
        *,
        partial: bool = False,
    ) -> list[int]:
        """The rank that captures each operator, or ``EVERY_RANK``.

        Args:
            partial: snapshots have some experts only, and owners outlive windows: all get as many experts,
                whatever they capture besides. By bytes over all, in longer windows one rank would have a
                small part of the experts, and much of what is in each snapshot.
        """
        owners = [EVERY_RANK] * len(operators)
        phase_of = _phase_of(phases)
        for group, all_of in self.groups(operators).items():
            experts = self._experts_of(operators, all_of) if partial else {}
            sizes, turns = [costs[i].anchor_bytes for i in experts], [phase_of.get(i, 0) for i in experts]
            dealt = share_experts(list(experts.values()), sizes, turns, group.ranks)
            for i, owner in zip(experts, dealt, strict=True):
                owners[i] = owner
            indices = [i for i in all_of if i not in experts]
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

    def experts(self, operators: Sequence[Operator]) -> list[tuple[int, frozenset[int]]]:
        """By group, the number of its ranks, and the experts among its operators."""
        groups = self.groups(operators).items()
        found = [(len(g.ranks), frozenset(self._experts_of(operators, of))) for g, of in groups]
        return [(ranks, experts) for ranks, experts in found if experts]

    def _experts_of(self, operators: Sequence[Operator], among: Sequence[int]) -> dict[int, tuple[str, int]]:
        return {i: expert for i in among if (expert := operators[i].expert) is not None}

    def by_group(self) -> dict[Replicas, list[str]]:
        """The parameters of each group, in the same order on all its ranks."""
        return _by_group(self.replicas)

    def checksums(self, binding: LiveState) -> dict[Replicas, str]:
        """A checksum of each group's parameters and their optimizer state, as they are now."""
        return {g: checksum(binding, names) for g, names in self.by_group().items()}

    def fingerprints(
        self,
        operators: Sequence[Operator],
        phases: Sequence[Sequence[int]],
        owners: Sequence[int],
        values: Mapping[Replicas, str] = MappingProxyType({}),
        selectable: Collection[int] = (),
    ) -> dict[Replicas, int]:
        """A number from 0 to 2^63 - 1 by group, equal if members have equal operators, phases and owners.

        Args:
            values: checksums of the same moment on all ranks.
            selectable: the operators whose owners select them.
        """
        phase_of = _phase_of(phases)
        found = {}
        for group, indices in self.groups(operators).items():
            planned = [
                [identity_of(operators[i]), phase_of.get(i, 0), owners[i], len(phases), i in selectable]
                for i in indices
            ]
            packed = msgspec.msgpack.encode([planned, values.get(group, "")])
            found[group] = xxhash.xxh3_64_intdigest(packed) >> 1
        return found


NOTHING_SHARED = ReplicatedParams()


def _phase_of(phases: Sequence[Sequence[int]]) -> dict[int, int]:
    return {i: number for number, phase in enumerate(phases) for i in phase}


def identity_of(operator: Operator) -> list[Any]:
    """An operator's name and rows, which are equal on two ranks that have the same operator."""
    return [operator.name, [[m.param, m.start, m.stop] for m in operator.members]]


# -- finding them ----------------------------------------------------------------------------------


def find_replicas(
    binding: LiveState, patterns: Mapping[str, Any] | None, rank: int | None = None
) -> dict[str, Replicas]:
    """The parameters that several ranks hold.

    Args:
        patterns: parameter name patterns (``fnmatch``), each with the process group or one-dimensional
            ``DeviceMesh`` over which matching parameters are replicated.
        rank: this rank's number in the job. If the process group has another one, nothing is shared.
    Raises:
        ValueError: a pattern matches nothing, or its value is no group.
    """
    if rank is not None and rank != dist.get_rank():
        logger.warning(
            "rank=%d is rank %d of its process group: it shares nothing with other ranks",
            rank,
            dist.get_rank(),
        )
        return {}
    # A wrapper over one rank may stand within one over several.
    found = {name: replicas for name, replicas in _found_by_wrappers(binding) if len(replicas.ranks) > 1}
    found |= dict(_given_by_user(binding, patterns or {}))
    return {
        name: replicas
        for name, replicas in found.items()
        if len(replicas.ranks) > 1 and not _spread_by_optimizer(binding, name)
    }


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
        placements = enumerate(getattr(param, "placements", ()))
        axes = [axis for axis, placement in placements if placement.is_replicate()]
        if axes:
            mesh: Any = param.device_mesh  # type: ignore[attr-defined]
            # Of several such axes the longest: a group over all of them would have to be made, by
            # all ranks together.
            axis = max(axes, key=lambda a: (mesh.size(a), -a))
            if (id(mesh), axis) not in known:
                known[id(mesh), axis] = _replicas(mesh.get_group(axis))
            yield name, known[id(mesh), axis]


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
        exact = wanted in binding.params
        names = [wanted] if exact else [n for n in binding.params if fnmatch.fnmatchcase(n, wanted)]
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
    """True if one rank alone has its state (``ZeroRedundancyOptimizer``), or its update needs all shards."""
    owner = binding.owner.get(name)
    if owner is None:
        return False
    return binding.keepers[owner[0]] is not binding.optimizers[owner[0]] or name in binding.inseparable


def agree_on_sharing(
    binding: LiveState,
    replicas: Mapping[str, Replicas],
    own_bytes: int,
    ranks: Collectives,
    *,
    before: ReplicatedParams | None = None,
) -> ReplicatedParams:
    """The parameters with equal values on all ranks of their group now. A collective call.

    Args:
        own_bytes: bytes that this rank captures besides replicated parameters.
        before: of the last life of this process, whose values are those of a step that was cut off. What was
            equal then is so again as soon as it is restored.
    """
    by_group = _by_group(replicas)
    mine = {
        g.key: checksum(binding, names) if before is None else before.mark_of(g, names, ranks.rank)
        for g, names in by_group.items()
    }
    found = ranks.gather(_RankShare(own_bytes, mine), _RankShare)
    usable: dict[str, Replicas] = {}
    for group, names in by_group.items():
        told = {r: found[r].groups.get(group.key) for r in group.ranks}
        known = [text for text in told.values() if text != _AS_BEFORE]
        reference = known[0] if mine[group.key] == _AS_BEFORE and known else mine[group.key]
        other = [r for r, text in told.items() if text not in (reference, _AS_BEFORE)]
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
    return ReplicatedParams(usable, {rank: share.own_bytes for rank, share in enumerate(found)})


def _by_group(replicas: Mapping[str, Replicas]) -> dict[Replicas, list[str]]:
    found: dict[Replicas, list[str]] = {}
    for name, group in replicas.items():
        found.setdefault(group, []).append(name)
    return found


# -- checksums -------------------------------------------------------------------------------------


def checksum(binding: LiveState, names: Sequence[str]) -> str:
    """A checksum of names, shapes and values, including optimizer state, summed on the tensors' devices."""
    shapes: list[Any] = []
    sums: list[Tensor] = []
    for name in names:
        tensors = {"param": binding.params[name]}
        if name in binding.masters:
            tensors["master"] = binding.masters[name]
        state = binding.state(name)
        tensors |= {k: v for k, v in sorted(state.items()) if isinstance(v, Tensor)}
        for kind, tensor in tensors.items():
            # A shard, too, may be made of other tensors.
            for data in (d for part in plain_parts(tensor) for d in plain_parts(local(part))):
                shapes.append([name, kind, str(data.dtype), list(data.shape)])
                sums += _sums(data)
    return xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode([shapes, _numbers(sums)]))


def _sums(data: Tensor) -> list[Tensor]:
    """One number for each part of a tensor, at least two: so an exchange of parts is noticed."""
    count = data.numel()
    if count == 0:
        return []
    parts: Sequence[Tensor] = (data,)
    if count > _SUMMED_AT_ONCE and data.ndim > 1:
        parts = data.split(max(_SUMMED_AT_ONCE // (count // len(data)), 1))
    found = []
    for part in parts:
        for words in _words(part.contiguous().view(-1)):
            step = min(_SUMMED_AT_ONCE, -(-len(words) // 2))
            found += [w.sum(dtype=torch.int64) for w in words.split(step)]
    return found


def _words(flat: Tensor) -> list[Tensor]:
    """All bits of a flat tensor as integers of 64 bits, and those of the rest.

    A sum of shorter integers widens them first, which takes sixty times as long on a CPU. Where the tensor
    lies in its storage makes no difference to the words, because it may lie elsewhere on another rank.
    """
    size, count = flat.element_size(), flat.numel()
    if flat.storage_offset() * size % _WORD_BYTES:
        flat = flat.clone()
    whole = count * size // _WORD_BYTES * _WORD_BYTES // size
    if whole == count:
        return [flat.view(torch.int64)]
    rest = flat[whole:].view(torch.uint8)
    return [flat[:whole].view(torch.int64), rest] if whole else [rest]


def _numbers(sums: Sequence[Tensor]) -> list[int]:
    """The sums on the host, with one transfer per device: each transfer waits for the device."""
    found = [0] * len(sums)
    for device in {s.device for s in sums}:
        here = [i for i, s in enumerate(sums) if s.device == device]
        for i, number in zip(here, torch.stack([sums[i] for i in here]).tolist(), strict=True):
            found[i] = number
    return found
