"""The checks of a replay: after a restart (`Verification`), and of a window in process (`certify`).

After a restart, replay runs in the user's own loop, which cannot go back to an earlier step. So if a rank
finds a difference, every rank ends its process, and the daemons keep the finding for the next start. What
that start does follows from all known findings (`ckptd.core.recovery.quarantine`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec
import torch
import xxhash
from torch import Tensor

from ckptd.client import values
from ckptd.client.capture.comparison import Differences
from ckptd.client.capture.object_attributes import ObjectAttributes
from ckptd.client.capture.step_state import Stateful, apply_groups, gather_groups, reproducible
from ckptd.client.daemon_link.rank_memory import RankMemory
from ckptd.client.log_lines import get_logger
from ckptd.client.model.buffer_shapes import BUFFERS
from ckptd.client.model.freezing import Tape
from ckptd.client.model.live_state import LiveState, local
from ckptd.client.model.waiting_gradients import GRADIENTS
from ckptd.client.optimizers.value_trees import flat_state
from ckptd.client.ranks.collectives import Collectives
from ckptd.client.recovery.replay import Replay, ReplayMismatch
from ckptd.client.rng_state import capture_rng, restore_rng
from ckptd.core.recovery.quarantine import (
    ReplayVerdict,
    Used,
    describe_failure,
    judge_replay,
    reason_of,
)
from ckptd.core.slots.segment_format import HINT_DROP_GRADIENTS
from ckptd.transport.messages import RankMismatch, ReplayFailure

logger = get_logger(__name__)

_TEXT_LIMIT = 1000
_RANKS_SHOWN = 16
_DIFFERENCES_SHOWN = 5
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_FIND_OUT = (
    "To find out, call ckpt.verify(run_step) after a few steps of a run that was never "
    "interrupted: if that fails, too, the step is not "
    "deterministic; if not, it is the restart that differs. docs/troubleshooting.md goes through it"
)


@dataclass(frozen=True, slots=True)
class Replayed:
    """The replayed snapshots of this rank.

    Attributes:
        everybody: all ranks replay the same iterations at the same time. Otherwise each decides for itself.
        localized: only some ranks replay, fed from the logs of the others.
    """

    snapshots: tuple[Used, ...]
    everybody: bool
    localized: bool = False


class _Finding(msgspec.Struct, frozen=True):
    """What a rank found at a boundary; ``heeds``: it ends the replay for that (``on_mismatch="raise"``)."""

    found: RankMismatch | None
    heeds: bool


class _Evidence(msgspec.Struct, frozen=True):
    """The snapshots that a rank used, and how its machine differs from the one that recorded them."""

    snapshots: tuple[Used, ...]
    changed: str


class Verification:
    """Follows one replay after a restart.

    Args:
        ranks: all ranks of the job, whether or not they replay.
        on_mismatch: ``raise`` or ``warn``.
        changed: how this machine differs from the one that recorded, as far as it is known to change
            bits; "" if it does not.
        stateful, device: of the job, for the likely causes in the message.
    """

    def __init__(
        self,
        memory: RankMemory,
        ranks: Collectives,
        replayed: Replayed,
        *,
        on_mismatch: str,
        changed: str,
        stateful: Mapping[str, Stateful],
        device: torch.device,
    ) -> None:
        self._memory, self._replayed, self._changed = memory, replayed, changed
        self._stateful, self._device = stateful, device
        self._ranks = ranks if replayed.everybody else Collectives.alone(ranks.node)
        self._raises = on_mismatch == "raise"

    def advance(self, replay: Replay, sent: Differences) -> None:
        """The top of a replayed step. A collective call if all ranks replay.

        Args:
            sent: what the step sent to other stages otherwise than when it ran first.
        Raises:
            ReplayMismatch: what was recomputed is not what was recorded, here or on another rank.
        """
        boundary = replay.next_iteration
        found = replay.advance()
        found.extend(sent)
        mine = _Finding(_mismatch(self._memory.identity.rank, found), self._raises)
        findings = self._ranks.gather(mine, _Finding)
        if any(f.found is not None and f.heeds for f in findings):
            replay.abandon()
            self._fail(boundary, replay.freezing, [f.found for f in findings if f.found is not None])

    def reproduced(self) -> None:
        """The state is dense, and the run goes on from it."""
        if self._memory.failures:
            self._memory.session.tell_replay(None)

    def _fail(self, boundary: int, freezing: str, ranks: Sequence[RankMismatch]) -> None:
        used = tuple(s for s in self._replayed.snapshots if s[0] <= boundary)
        evidence = self._ranks.gather(_Evidence(used, self._changed), _Evidence)
        snapshots = tuple(sorted({snapshot for each in evidence for snapshot in each.snapshots}))
        changed = next((each.changed for each in evidence if each.changed), "")
        result = xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode([(r.rank, r.count, r.got) for r in ranks]))
        failure = ReplayFailure(
            boundary, snapshots, tuple(ranks[:_RANKS_SHOWN]), result, freezing, ReplayVerdict.WIDENED
        )
        if not self._replayed.localized:
            verdict = judge_replay(failure, self._memory.failures, changed=changed)
            failure = msgspec.structs.replace(failure, verdict=verdict)
        reason = reason_of(failure, changed=changed)
        failure = msgspec.structs.replace(failure, reason=reason)
        self._memory.session.tell_replay(failure)
        self._hint(failure)
        logger.error("%s", reason)
        causes = _likely_causes(ranks[0].what, self._changed, self._stateful, self._device)
        raise ReplayMismatch(
            f"{describe_failure(failure)}. Either the step is not deterministic, or the restart "
            f"differs, or memory was corrupted. {reason}; RecoveryOptions(on_mismatch='warn') trains on "
            f"regardless. {causes}"
        )

    def _hint(self, failure: ReplayFailure) -> None:
        """Choose how the next start freezes."""
        if failure.verdict == ReplayVerdict.QUARANTINED:
            # Both replays came to the same result, so gradients were not the cause.
            if any(k.freezing == "inputs" for k in self._memory.failures):
                self._memory.take_back_hint(HINT_DROP_GRADIENTS)
        elif failure.freezing == "inputs":
            # User code may read all gradients in a way that no tap sees; dropping them is exact for it.
            logger.error("the next start of this run replays with freezing 'drop' instead of 'inputs'")
            self._memory.leave_hint(HINT_DROP_GRADIENTS)


def _mismatch(rank: int, found: Differences) -> RankMismatch | None:
    if not found:
        return None
    more = len(found.texts) - 1
    what = found.texts[0][:_TEXT_LIMIT] + (f" and {more} more" if more else "")
    return RankMismatch(rank, what, len(found.texts), found.expected, found.got)


def _likely_causes(what: str, changed: str, stateful: Mapping[str, Stateful], device: torch.device) -> str:
    """What usually causes a mismatch in a job like this one: numbered sentences, the likeliest first."""
    causes = []
    if changed:
        causes.append(f"this process does not run as the one that recorded: {changed}")
    kept = [item for item in stateful.values() if isinstance(item, ObjectAttributes)]
    if left := list(chain.from_iterable(item.left_out() for item in kept)):
        named = ", ".join(left[:_DIFFERENCES_SHOWN])
        causes.append(f"attributes change while they train, and no snapshot has them: {named}")
    if "scheduler" in what:
        causes.append(
            "a scheduler that is not in state=: the line NOT CAPTURED of the run that was recorded names it"
        )
    if "state[" in what:
        causes.append("an object in state= does not give back all that it needs to go on")
    if not any(_is_loader(item) for item in stateful.values()):
        causes.append(
            "the batches are others: the position of a loader that is neither in state= nor read "
            "through ckpt.batches(loader) is not restored"
        )
    elif any(getattr(item, "num_workers", 0) for item in stateful.values()):
        causes.append("the batches are others: samples are made with random numbers in loader workers")
    if device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():
        workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
        causes.append(
            "kernels that are not deterministic: torch.use_deterministic_algorithms(True) names them"
            + ("" if workspace else ", with CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment")
        )
    causes += [
        (
            "something random or timed that no snapshot has (a generator of your own, the clock, an "
            "order of a set)"
        ),
        "the step computes something from all gradients by hand: pass it through ckpt.record(name, value)",
        (
            "memory was corrupted: `ckptctl snapshots` shows what was quarantined, and the machine's "
            "log has its memory errors"
        ),
    ]
    listed = "; ".join(f"({number}) {cause}" for number, cause in enumerate(causes, 1))
    return f"Likely causes, the likeliest first: {listed}. {_FIND_OUT}"


def _is_loader(item: Stateful) -> bool:
    return any(hasattr(item, name) for name in ("dataset", "sampler", "batch_size"))


# -- in process ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Certificate:
    """What a verification compared, and whether everything was identical to the bit."""

    start: int
    end: int
    window: int
    freezing: str
    tensors: int
    nbytes: int
    differences: tuple[str, ...] = ()

    @property
    def identical(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        verdict = "identical to the bit"
        if self.differences:
            verdict = f"DIFFERENT: {', '.join(self.differences[:_DIFFERENCES_SHOWN])}"
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
        self._rng = capture_rng()
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
            if n not in live or n not in self.tensors or not identical(live[n], self.tensors[n])
        ]
        kept = self._binding.kept
        kept.look(kept.specs)
        if values.pack(kept.python()) != self._plain:
            found.append("plain optimizer state")
        if other := kept.difference(self._kept, entries=True):
            found.append(other)
        if capture_rng() != self._rng:
            found.append("random state")
        if not values.equal(gather_groups(self._binding), self._groups):
            found.append("parameter group options")
        found += [
            f"state[{n!r}]"
            for n, item in self._stateful.items()
            # Gradients that wait were compared at each top; here no top may have come yet.
            if n != GRADIENTS and reproducible(item)
            if values.pack(item.state_dict()) != self._packed_state[n]
        ]
        return found

    def restore(self) -> None:
        """Set the live state to this copy."""
        binding = self._binding
        if BUFFERS in self._stateful:  # they have their shapes before they are filled
            self._stateful[BUFFERS].load_state_dict(values.unpack(self._packed_state[BUFFERS]))
        with torch.no_grad():
            for keeper, recorded in zip(binding.keepers, self._optimizer, strict=True):
                keeper.state.clear()
                keeper.state.update(recorded)
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
        restore_rng(self._rng)


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
        rewind: moves data to where its restored state says.
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
            differences = (*replay.mismatches, *live.differences())
    finally:
        tape.take()
        tape.put_back(kept)
        live.restore()
        rewind()
    tensors = len(live.tensors) + replay.compared
    return Certificate(replay.start, until, window, replay.freezing, tensors, live.nbytes, differences)


def identical(a: Tensor, b: Tensor) -> bool:
    """Whether shape, dtype, device and bits are equal. NaN equals the same NaN: bits are compared."""
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    kind = _INTEGERS.get(a.element_size(), torch.uint8)
    return torch.equal(*(values.bytes_of(t.detach()).view(kind) for t in (a, b)))


def _owners(binding: LiveState) -> list[Tensor]:
    return [*binding.params.values(), *binding.masters.values()]


def _tensors(binding: LiveState) -> dict[str, Tensor]:
    found = {n: local(p) for n, p in binding.params.items()}
    found.update({f"master/{n}": local(m) for n, m in binding.masters.items()})
    found.update({f"buffer/{n}": local(b) for n, b in binding.buffers().items()})
    for name in binding.owner:
        found.update(
            {
                f"optim/{key}/{name}": local(value)
                for key, value in flat_state(binding.state(name)).items()
                if isinstance(value, Tensor)
            }
        )
    return found
