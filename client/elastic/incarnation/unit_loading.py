"""Units and step scalars put into the live model and optimizers of a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
import torch
from torch import Tensor

from ckptd.client import values
from ckptd.client.capture.program import Program
from ckptd.client.capture.step_state import Stateful, apply_groups
from ckptd.client.elastic.incarnation.optimizer_extras import KeptApart
from ckptd.client.elastic.incarnation.unit_reading import UnitHead
from ckptd.client.model.live_state import LiveState, local
from ckptd.client.model.snapshot_layout import DTYPES
from ckptd.client.optimizers.value_trees import NotCapturable
from ckptd.client.rng_state import restore_rng
from ckptd.core.elastic.incarnations import BUFFER, Unit

__all__ = ["Loader", "check_fits"]

_TOLD = 4
_NO_SHARDS: Mapping[str, int] = MappingProxyType({})


def check_fits(binding: LiveState, held: Sequence[Unit], mine: set[str]) -> None:
    """The model has what is held, and nothing else.

    Args:
        held: the units that this rank is given.
        mine: the parameters that it has.
    Raises:
        ValueError: names what differs.
    """
    given = {unit.param for unit in held if not unit.param.startswith(BUFFER)}
    missing, beyond = sorted(mine - given), sorted(given - mine)
    if not missing and not beyond:
        return
    what = [f"missing: {name}" for name in missing] + [f"unexpected: {name}" for name in beyond]
    more = f"; and {len(what) - _TOLD} more" if len(what) > _TOLD else ""
    raise ValueError(
        f"the state of this run is of another model: {'; '.join(what[:_TOLD])}{more}. "
        "Pass run= a new name to begin anew"
    )


class Loader:
    """Fills one rank's model and optimizers.

    Args:
        stateful: the user's objects by name.
        kept: the rules for what the optimizers keep beside their tensors.
        firsts: of each parameter of which this rank has a shard: the element with which that begins.
    """

    def __init__(
        self,
        binding: LiveState,
        stateful: Mapping[str, Stateful],
        kept: KeptApart,
        firsts: Mapping[str, int] = _NO_SHARDS,
    ) -> None:
        self._binding, self._stateful, self._firsts = binding, stateful, firsts
        self._rules = kept
        self._kept: dict[str, Any] | None = None
        self.whose = -1  # the rank that recorded the step scalars
        self.program: Program = {}  # by whose options, script and data it went
        self._buffers = binding.buffers()
        self._facts: dict[str, dict[str, Any]] = {}
        self._rng: dict[str, Any] | None = None
        self._seed = 0
        self.nbytes = 0

    def clear(self) -> None:
        """Forget what the optimizers keep, and gradients: nothing of the initialisation remains."""
        for keeper in self._binding.keepers:
            keeper.state.clear()
        for name, param in self._binding.params.items():
            param.grad = None
            if name in self._binding.masters:
                self._binding.masters[name].grad = None

    def units(self, stream: bytes | bytearray) -> None:
        """Load units as they travel (`LocalState.unit`), one after the other.

        Raises:
            ValueError: a tensor has another shape or dtype here, or shards of one parameter are not
                of one step.
        """
        view, at = memoryview(stream), 0
        while at < len(view):
            length = int.from_bytes(view[at : at + 4], "little")
            head = msgspec.msgpack.decode(view[at + 4 : at + 4 + length], type=UnitHead)
            at += 4 + length
            self._tell(head.unit.param, values.unpack(head.facts))
            for kind, key, dtype, shape, nbytes in head.parts:
                data = _tensor(view[at : at + nbytes], dtype, shape)
                self._put(head.unit, kind, key, data)
                at += nbytes
                self.nbytes += nbytes

    def scalars(self, packed: bytes | bytearray, rank: int) -> None:
        """Load step scalars: options of parameter groups, the user's state, dense buffers. Random
        state follows in `begin`.

        Args:
            rank: this one. Where they are of another, random generators must not be like that one's.
        """
        received = values.unpack(bytes(packed))
        scalars = received["scalars"]
        apply_groups(self._binding, scalars["groups"])
        for name, item in self._stateful.items():
            if name not in scalars["state"]:
                raise ValueError(
                    f"state[{name!r}] is not in what was recorded, which has "
                    f"{sorted(scalars['state'])}: pass the same state="
                )
            item.load_state_dict(values.unpack(scalars["state"][name]))
        apply_groups(self._binding, scalars["groups"])  # a scheduler's load may touch them
        for name, (dtype, shape, data) in received["buffers"].items():
            if name not in self._buffers:
                raise ValueError(f"the state of this run has a buffer {name}, and the model none")
            _copy(name, local(self._buffers[name]), _tensor(memoryview(data), dtype, shape))
        self._kept, self.whose = received["kept"], received["rank"]
        self._rng = scalars["rng"]
        self.program = scalars.get("program", {})
        self._seed = 0 if received["rank"] == rank else 1 + rank

    def digests(self) -> dict[str, str]:
        """Of what the optimizers kept of no parameter, by path."""
        return {} if self._kept is None else self._rules.digests(self._kept)

    def finish(self) -> None:
        """Complete the optimizers' state: numbers, plain values, the order of keys that the
        optimizer itself has, and all that it kept elsewhere.

        Raises:
            ValueError: an optimizer kept what cannot be brought to a world of other ranks.
        """
        for name, facts in self._facts.items():
            if name not in self._binding.owner or name in self._binding.elsewhere:
                continue
            if facts["absent"]:
                continue  # there was none
            state = self._state(name)
            for key, (dtype, on_host, raw) in facts["numbers"].items():
                number = _tensor(memoryview(raw), dtype, ())
                device = "cpu" if on_host else self._binding.held(name).device
                state[key] = number.to(device)
            state.update(facts["plain"])
            ordered = {k: state[k] for k in facts["keys"] if k in state}
            ordered |= {k: v for k, v in state.items() if k not in ordered}
            self._binding.keeper(name).state[self._binding.held(name)] = ordered
        if self._kept is not None:
            self._finish_kept(self._kept)

    def _finish_kept(self, kept: Mapping[str, Any]) -> None:
        binding, facts = self._binding, self._facts
        names = [n for n in facts if n in binding.owner and n not in binding.elsewhere]
        entries = {n: facts[n]["entries"] for n in names if facts[n]["entries"]}
        keys = {n: facts[n]["deviating"][0] for n in names if facts[n]["deviating"]}
        try:
            fitted = self._rules.fitted({**kept, "entries": entries, "keys": keys})
        except NotCapturable as refused:
            raise ValueError(
                f"the optimizer ({binding.kept.whose}) kept {refused.path}: {refused.why}. Pass "
                "run= a new name to begin anew"
            ) from None
        binding.kept.load(values.pack(fitted, "what the optimizer keeps"), names)

    def begin(self) -> None:
        """The first step is about to run: random state as it was, or, on a rank that there was not,
        one of its own that follows from it.
        """
        if self._rng is None:
            return
        restore_rng(self._rng)
        if self._seed:
            drawn = torch.randint(1 << 31, (self._seed,), dtype=torch.int64)[-1].item()
            torch.manual_seed(int(drawn))

    def _tell(self, name: str, facts: dict[str, Any]) -> None:
        known = self._facts.setdefault(name, facts)
        if name in self._firsts and not values.equal(known, facts):
            raise ValueError(
                f"what the optimizer keeps of {name} beside its elements is not the same in the "
                "shards of all ranks: "
                f"{known} and {facts}; an optimizer of shards must keep the same on each"
            )
        self._facts[name] = facts

    def _put(self, unit: Unit, kind: str, key: str, data: Tensor) -> None:
        binding, name = self._binding, unit.param
        if kind == "buffer":
            _copy(name, local(self._buffers[name.removeprefix(BUFFER)]), data)
            return
        if kind == "optim":
            if self._facts[name]["absent"]:
                return  # there was none: what the image holds in its place is zeros
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
        """The live optimizer state, made (zero) where it does not exist yet."""
        held, state = self._binding.held(name), self._state(name)
        if not isinstance(state.get(key), Tensor):
            like = unit.stop or data.shape == local(held).shape
            state[key] = (
                torch.zeros_like(held, dtype=data.dtype, requires_grad=False)
                if like
                else torch.empty_like(data, device=held.device)
            )
        found: Tensor = state[key]
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
            f"{list(data.shape)} in the state of this run: "
            "pass run= a new name to begin anew"
        )
    with torch.no_grad():
        live.copy_(data)
