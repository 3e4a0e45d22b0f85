"""``verify()``: replay a window in process and compare the outcome with the live state, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ckptd.client import values
from ckptd.client.capture.step_state import Stateful, apply_groups, gather_groups, reproducible
from ckptd.client.model.freezing import Tape
from ckptd.client.model.live_state import LiveState, local
from ckptd.client.recovery.replay import Replay
from ckptd.client.rng_state import capture_rng, restore_rng

__all__ = ["Certificate", "DenseState", "certify"]


@dataclass(frozen=True, slots=True)
class Certificate:
    """What a verification compared, and whether everything was identical to the bit."""

    start: int
    end: int
    window: int
    freezing: str
    tensors: int
    nbytes: int
    differences: tuple[str, ...] = field(default=())

    @property
    def identical(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        verdict = (
            "identical to the bit" if self.identical else f"DIFFERENT: {', '.join(self.differences[:5])}"
        )
        return (
            f"replayed iterations {self.start}..{self.end - 1} from {self.window} sparse snapshots "
            f"(freezing: {self.freezing}): "
            f"{self.tensors} tensors, {self.nbytes} bytes, random state, groups and user state {verdict}"
        )


class DenseState:
    """A full copy of the live training state, to compare with and to go back to."""

    def __init__(self, binding: LiveState, stateful: Mapping[str, Stateful]) -> None:
        self._binding, self._stateful = binding, stateful
        self.tensors = {name: t.clone() for name, t in _tensors(binding).items()}
        self._grads = {id(p): None if p.grad is None else p.grad.clone() for p in _owners(binding)}
        self._optimizer = [{p: dict(s) for p, s in o.state.items()} for o in binding.keepers]
        binding.kept.look(binding.kept.specs)
        self._plain = values.pack(binding.kept.python())
        self._kept = binding.kept.gather()
        self.rng = capture_rng()
        self._groups = gather_groups(binding)
        self._packed_state = {name: values.pack(item.state_dict()) for name, item in stateful.items()}

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    def differences(self) -> list[str]:
        """The names of everything in the live state that is not identical to this copy."""
        live = _tensors(self._binding)
        found = [
            n
            for n in dict.fromkeys([*self.tensors, *live])
            if n not in live or n not in self.tensors or not _same(live[n], self.tensors[n])
        ]
        kept = self._binding.kept
        kept.look(kept.specs)
        if values.pack(kept.python()) != self._plain:
            found.append("plain optimizer state")
        if other := kept.difference(self._kept, entries=True):
            found.append(other)
        if capture_rng() != self.rng:
            found.append("random state")
        if not values.equal(gather_groups(self._binding), self._groups):
            found.append("parameter group options")
        found += [
            f"state[{n!r}]"
            for n, item in self._stateful.items()
            if reproducible(item) and values.pack(item.state_dict()) != self._packed_state[n]
        ]
        return found

    def restore(self) -> None:
        """Put the live state back to this copy."""
        binding = self._binding
        with torch.no_grad():
            for keeper, recorded in zip(binding.keepers, self._optimizer, strict=True):
                keeper.state.clear()
                for param, state in recorded.items():
                    keeper.state[param] = state
            for name, tensor in _tensors(binding).items():
                tensor.copy_(self.tensors[name])
        for name, plain in values.unpack(self._plain).items():
            binding.state(name).update(plain)
        for param in _owners(binding):
            param.grad = self._grads[id(param)]
        for name, item in self._stateful.items():
            item.load_state_dict(values.unpack(self._packed_state[name]))
        apply_groups(binding, self._groups)
        binding.kept.load(self._kept, list(binding.owner))
        restore_rng(self.rng)


def certify(
    replay: Replay,
    live: DenseState,
    tape: Tape,
    run_step: Callable[[int], Any],
    *,
    until: int,
    window: int,
    playing: Callable[[Replay], AbstractContextManager[None]],
    rewind: Callable[[], None],
) -> Certificate:
    """Run a replay up to ``until`` and compare; the live state is put back, whatever happens.

    Args:
        window: how many snapshots are replayed.
        playing: in its body the loop's hooks are those of the replay.
        rewind: data goes on from where its restored state says.
    """
    kept = tape.take()
    try:
        with playing(replay):
            replay.load_state()
            replay.load_tensors()
            rewind()
            replay.begin_first_step()
            for step in range(replay.start, until):
                if step == replay.next_iteration:
                    replay.advance()
                run_step(step)
            if until == replay.next_iteration:
                replay.advance()
            differences = [*replay.mismatches, *live.differences()]
    finally:
        tape.take()
        tape.put_back(kept)
        live.restore()
        rewind()
    return Certificate(
        replay.start,
        until,
        window,
        replay.freezing,
        len(live.tensors) + replay.compared,
        live.nbytes,
        tuple(differences),
    )


def _owners(binding: LiveState) -> list[Tensor]:
    return [*binding.params.values(), *binding.masters.values()]


def _tensors(binding: LiveState) -> dict[str, Tensor]:
    found = {n: local(p) for n, p in binding.params.items()}
    found.update({f"master/{n}": local(m) for n, m in binding.masters.items()})
    found.update({f"buffer/{n}": local(b) for n, b in binding.buffers().items()})
    for name in binding.owner:
        found.update(
            {f"optim/{k}/{name}": local(v) for k, v in binding.state(name).items() if isinstance(v, Tensor)}
        )
    return found


def _same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(values.bytes_of(a), values.bytes_of(b))
