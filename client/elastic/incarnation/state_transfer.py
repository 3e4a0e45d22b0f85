"""The transfer of a state into the live model and optimizers of a rank, from its node and other ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
import torch
from torch import Tensor

from ckptd.client import values
from ckptd.client.capture.program import Program
from ckptd.client.capture.step_state import Stateful, apply_groups
from ckptd.client.elastic import ExpertShards
from ckptd.client.elastic.incarnation.image_inventory import LocalState, UnitHead
from ckptd.client.elastic.incarnation.incarnation_start import Started
from ckptd.client.elastic.incarnation.optimizer_extras import OptimizerExtras, check_recorded_equal
from ckptd.client.elastic.incarnation.whole_state import WholeState, check_strategy, firsts_of
from ckptd.client.log_lines import get_logger
from ckptd.client.model.live_state import LiveState, local
from ckptd.client.model.snapshot_layout import DTYPES
from ckptd.client.optimizers.value_trees import NotCapturable, part_of
from ckptd.client.ranks.collectives import Collectives, ship_bytes
from ckptd.client.rng_state import restore_rng
from ckptd.core.elastic.incarnation_plan import Handover
from ckptd.core.elastic.incarnations import BUFFER, ExpertLayers, Unit
from ckptd.units import first_of

logger = get_logger(__name__)

_NAMED = 4
_NO_SHARDS: Mapping[str, int] = MappingProxyType({})


def transfer_state(
    started: Started,
    whole: WholeState,
    shards: ExpertShards | None,
    layers: ExpertLayers,
    ranks: Collectives,
) -> tuple[Loader, dict[str, float]]:
    """Fill the live model as the plan says, on all ranks or none; a collective call.

    Returns:
        The loader, to `begin` when the first step does, and the duration of each part in seconds.
    Raises:
        ValueError: something does not fit the model here.
        DaemonUnavailable: another rank failed.
    """
    handover, rank = started.plan.handover, ranks.rank
    assert handover is not None, "an incarnation that begins has no state"
    num_ranks = len(started.plan.node_of)
    firsts = firsts_of(whole.binding, shards, layers, rank, num_ranks)
    loader = Loader(whole.binding, whole.stateful, whole.extras, firsts)
    with ranks.all_or_none():
        check_strategy(started.shapes, shards, layers)
        mine = [give.unit for give in handover.gives if give.target == rank]
        check_fits(whole.binding, mine, set(whole.binding.params))
        loader.clear()
    state = started.local
    began = time.perf_counter()
    with ranks.all_or_none():
        units, scalars = _outgoing(state, handover, rank, num_ranks)
    received_units, received_scalars = ship_bytes(units), ship_bytes(scalars)
    shipped = time.perf_counter()
    with ranks.all_or_none():
        for give in handover.gives:
            if give.source == rank == give.target:
                assert state is not None, "it was verified"
                loader.units(b"".join(state.unit(give.unit)))
        for stream in received_units:
            loader.units(stream)
        loader.scalars(b"".join(received_scalars), rank)
    check_recorded_equal(loader.digests(), loader.recorder, ranks)
    with ranks.all_or_none():
        loader.finish()
    if state is not None:
        state.close()
    seconds = {"ship_s": shipped - began, "load_s": time.perf_counter() - began}
    logger.info(
        "rank %d loaded %d bytes in %.3f s; ranks sent %d replicas of experts, and %d experts come from "
        "snapshots alone",
        rank,
        loader.nbytes,
        seconds["load_s"],
        handover.expert_moves,
        handover.from_snapshots,
    )
    return loader, seconds


def _outgoing(
    state: LocalState | None, handover: Handover, rank: int, ranks: int
) -> tuple[Sequence[list[bytes | memoryview]], Sequence[list[bytes]]]:
    """For each rank the units and the step scalars that this rank sends to it."""
    units: list[list[bytes | memoryview]] = [[] for _ in range(ranks)]
    scalars: list[list[bytes]] = [[] for _ in range(ranks)]
    if state is not None:
        for give in handover.gives:
            if give.source == rank != give.target:
                units[give.target] += state.unit(give.unit)
        for target, (reader, recorder) in enumerate(handover.scalars):
            if reader == rank:
                scalars[target].append(state.scalars(recorder))
    return units, scalars


def check_fits(binding: LiveState, held: Sequence[Unit], mine: set[str]) -> None:
    """Check that the model has the parameters of the state, and no others.

    Args:
        held: the units that this rank gets.
        mine: its parameters.
    Raises:
        ValueError: names the differences.
    """
    given = {unit.param for unit in held if not unit.param.startswith(BUFFER)}
    missing, beyond = sorted(mine - given), sorted(given - mine)
    if not missing and not beyond:
        return
    what = [f"missing: {name}" for name in missing] + [f"unexpected: {name}" for name in beyond]
    raise ValueError(
        f"the state of this run is of another model: {first_of(what, _NAMED, between='; ')}. "
        "Pass run= a new name to begin anew"
    )


class Loader:
    """Fills one rank's model and optimizers.

    Args:
        stateful: the user's objects by name.
        extras: the rules for state of the optimizers besides tensors.
        firsts: the first element of this rank's shard of each parameter with shards.
    """

    def __init__(
        self,
        binding: LiveState,
        stateful: Mapping[str, Stateful],
        extras: OptimizerExtras,
        firsts: Mapping[str, int] = _NO_SHARDS,
    ) -> None:
        self._binding, self._stateful, self._firsts = binding, stateful, firsts
        self._extras = extras
        self._kept: dict[str, Any] | None = None
        self.recorder = -1  # the rank that recorded the step scalars
        self.program: Program = {}  # that recorded the state
        self._buffers = binding.buffers()
        self._facts: dict[str, dict[str, Any]] = {}
        self._rng: dict[str, Any] | None = None
        self._seed = 0
        self.nbytes = 0

    def clear(self) -> None:
        """Drop the optimizers' state and the gradients: nothing of the initialisation remains."""
        for keeper in self._binding.keepers:
            keeper.state.clear()
        for name, param in self._binding.params.items():
            param.grad = None
            if name in self._binding.masters:
                self._binding.masters[name].grad = None

    def units(self, stream: bytes | bytearray) -> None:
        """Load consecutive units as they are sent (`LocalState.unit`).

        Raises:
            ValueError: a tensor has another shape or dtype here, or shards of one parameter are of
                different steps.
        """
        view, at = memoryview(stream), 0
        while at < len(view):
            length = int.from_bytes(view[at : at + 4], "little")
            head = msgspec.msgpack.decode(view[at + 4 : at + 4 + length], type=UnitHead)
            at += 4 + length
            self._add_facts(head.unit.param, values.unpack(head.facts))
            for kind, key, dtype, shape, nbytes in head.parts:
                data = _tensor(view[at : at + nbytes], dtype, shape)
                self._put(head.unit, kind, key, data)
                at += nbytes
                self.nbytes += nbytes

    def scalars(self, packed: bytes | bytearray, rank: int) -> None:
        """Load step scalars: options of parameter groups, the user's state, dense buffers. `begin`
        restores the random state.

        Args:
            rank: this one. If another rank recorded them, random generators must differ from its.
        """
        received = values.unpack(bytes(packed))
        scalars = received["scalars"]
        apply_groups(self._binding, scalars["groups"])
        for name, item in self._stateful.items():
            if name not in scalars["state"]:
                raise ValueError(
                    f"state[{name!r}] was not recorded, only {sorted(scalars['state'])}: pass the same state="
                )
            item.load_state_dict(values.unpack(scalars["state"][name]))
        apply_groups(self._binding, scalars["groups"])  # a scheduler's load may change them
        for name, (dtype, shape, data) in received["buffers"].items():
            if name not in self._buffers:
                raise ValueError(f"the state of this run has a buffer {name}, and the model none")
            _copy(name, local(self._buffers[name]), _tensor(memoryview(data), dtype, shape))
        self._kept, self.recorder = received["kept"], received["rank"]
        self._rng = scalars["rng"]
        self.program = scalars.get("program", {})
        self._seed = 0 if received["rank"] == rank else 1 + rank

    def digests(self) -> dict[str, str]:
        """Of the optimizers' state of no parameter, by path."""
        return {} if self._kept is None else self._extras.digests(self._kept)

    def finish(self) -> None:
        """Complete the optimizers' state: numbers, plain values, the optimizer's own order of keys,
        and its state of no parameter.

        Raises:
            ValueError: state of an optimizer does not fit an incarnation of other ranks.
        """
        binding = self._binding
        own = {n: f for n, f in self._facts.items() if n in binding.owner and n not in binding.elsewhere}
        for name, facts in own.items():
            if facts["absent"]:
                continue  # the parameter had no state
            state = self._state(name)
            for key, (dtype, on_host, raw) in facts["numbers"].items():
                number = _tensor(memoryview(raw), dtype, ())
                state[key] = number.to("cpu" if on_host else binding.held(name).device)
            state.update(facts["plain"])
            ordered = {k: state[k] for k in facts["keys"] if k in state}
            ordered |= {k: v for k, v in state.items() if k not in ordered}
            binding.keeper(name).state[binding.held(name)] = ordered
        if self._kept is not None:
            self._finish_kept(self._kept, own)

    def _finish_kept(self, kept: Mapping[str, Any], own: Mapping[str, dict[str, Any]]) -> None:
        entries = {n: facts["entries"] for n, facts in own.items() if facts["entries"]}
        keys = {n: facts["deviating"][0] for n, facts in own.items() if facts["deviating"]}
        optimizers = self._binding.kept
        try:
            fitted = self._extras.fitted({**kept, "entries": entries, "keys": keys})
        except NotCapturable as refused:
            raise ValueError(
                f"the optimizer ({optimizers.whose}) kept {refused.path}: {refused.why}. Pass "
                "run= a new name to begin anew"
            ) from None
        optimizers.load(values.pack(fitted, "what the optimizer keeps"), list(own))

    def begin(self) -> None:
        """Restore the random state before the first step; on a new rank, seed generators of its own
        from it.
        """
        if self._rng is None:
            return
        restore_rng(self._rng)
        if self._seed:
            drawn = torch.randint(1 << 31, (self._seed,), dtype=torch.int64)[-1].item()
            torch.manual_seed(int(drawn))

    def _add_facts(self, name: str, facts: dict[str, Any]) -> None:
        known = self._facts.setdefault(name, facts)
        if name in self._firsts and not values.equal(known, facts):
            raise ValueError(
                f"the optimizer's state of {name} besides elements is not the same in the shards of "
                f"all ranks: {known} and {facts}; an optimizer of shards must keep the same on each"
            )
        self._facts[name] = facts

    def _put(self, unit: Unit, kind: str, key: str, data: Tensor) -> None:
        binding, name = self._binding, unit.param
        if kind == "buffer":
            _copy(name, local(self._buffers[name.removeprefix(BUFFER)]), data)
            return
        if kind == "optim":
            if self._facts[name]["absent"]:
                return  # the parameter had no state: the image has zeros in its place
            live = self._state_tensor(name, key, unit, data)
        elif kind == "master":
            live = binding.masters[name]
        else:
            live = binding.params[name]
        whole, first = local(live), self._firsts.get(name, 0)
        _copy(name, whole[unit.start - first : unit.stop - first] if unit.stop else whole, data)

    def _state(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self._binding.keeper(name).state[self._binding.held(name)]
        return found

    def _state_tensor(self, name: str, key: str, unit: Unit, data: Tensor) -> Tensor:
        """The live optimizer state; created, with zeros, if it does not exist yet."""
        held, state = self._binding.held(name), self._state(name)
        found = part_of(state, key)
        if not isinstance(found, Tensor):
            like = unit.stop or data.shape == local(held).shape
            found = state[key] = (
                torch.zeros_like(held, dtype=data.dtype, requires_grad=False)
                if like
                else torch.empty_like(data, device=held.device)
            )
        return found


def _tensor(data: memoryview, dtype: str, shape: Sequence[int]) -> Tensor:
    if not len(data):
        return torch.empty(tuple(shape), dtype=DTYPES[dtype])
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return raw.view(DTYPES[dtype]).reshape(tuple(shape))


def _copy(name: str, live: Tensor, data: Tensor) -> None:
    if live.shape != data.shape or live.dtype != data.dtype:
        raise ValueError(
            f"{name} is {live.dtype} {list(live.shape)} here, and was {data.dtype} "
            f"{list(data.shape)} in the state of this run: pass run= a new name to begin anew"
        )
    with torch.no_grad():
        live.copy_(data)
