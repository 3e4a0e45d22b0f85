"""Compares recomputed state with recorded state, bit for bit, and describes the differences."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from ckptd.client import values
from ckptd.client.capture.step_state import Stateful, gather_groups, reproducible
from ckptd.client.daemon_link.snapshot_image import SnapshotImage
from ckptd.client.data.ledger import BATCHES, BatchLedger
from ckptd.client.model.live_state import LiveState, local
from ckptd.client.model.operators import Operator
from ckptd.client.model.snapshot_layout import EntrySource
from ckptd.client.model.waiting_gradients import GRADIENTS
from ckptd.client.optimizers.value_trees import part_of
from ckptd.client.rng_state import capture_rng

_PIECE = 1 << 20  # elements


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """How a tensor differs from the recorded one.

    Attributes:
        param: the parameter to which it belongs; "" if to none.
        elements, differing: how many it has, and how many of them have other bits.
        bits: how many bits differ in all of them.
        ratio: the largest difference, as a multiple of the largest recorded magnitude.
    """

    param: str
    elements: int
    differing: int
    bits: int
    ratio: float


class Differences:
    """Differences in words, with digests of both sides by which a second replay can be compared.

    Attributes:
        texts: one per difference.
        tensors: those of ``texts`` that are of tensors.
    """

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.tensors: dict[str, TensorDifference] = {}
        self._expected, self._got = xxhash.xxh3_128(), xxhash.xxh3_128()

    def __bool__(self) -> bool:
        return bool(self.texts)

    @property
    def expected(self) -> str:
        """The digest of all recorded values that differ."""
        return self._expected.hexdigest()

    @property
    def got(self) -> str:
        """The digest of the values found instead."""
        return self._got.hexdigest()

    def add(self, what: str, expected: Any = b"", got: Any = b"") -> None:
        """Add a difference with its recorded and found bytes."""
        self.texts.append(what)
        for digest, data in ((self._expected, expected), (self._got, got)):
            digest.update(what.encode())
            digest.update(data)

    def add_tensors(self, what: str, recorded: Tensor, live: Tensor, *, param: str = "") -> None:
        """Add a difference of two tensors.

        Args:
            param: the parameter to which they belong.
        """
        self.add(what, _raw(recorded), _raw(live.to(recorded.dtype)))
        if recorded.shape == live.shape:
            self.tensors[what] = _measured(param, recorded, live.to(recorded.dtype))

    def extend(self, others: Differences) -> None:
        """Add all differences of ``others``."""
        if others:
            self.texts += others.texts
            self.tensors |= others.tensors
            self._expected.update(others.expected.encode())
            self._got.update(others.got.encode())


def batch_differences(
    stateful: Mapping[str, Stateful], scalars: Mapping[str, Any], found: Differences
) -> None:
    """Add differing batches; call it first, because everything else follows from them."""
    ledger, recorded = stateful.get(BATCHES), scalars["state"].get(BATCHES)
    if isinstance(ledger, BatchLedger) and recorded is not None:  # absent in what 0.4 recorded
        for what in ledger.differences(values.unpack(recorded)):
            found.add(what, recorded, values.pack(ledger.state_dict()))


def scalar_differences(
    binding: LiveState,
    stateful: Mapping[str, Stateful],
    scalars: Mapping[str, Any],
    found: Differences,
) -> None:
    """Add differences of random state, group options and the user's state from these step scalars."""
    rng, groups = capture_rng(), gather_groups(binding)
    if rng != scalars["rng"]:
        what = (
            "the random number generators (was a data iterator created before Checkpointer, or "
            "other code drawing?)"
        )
        found.add(what, values.pack(scalars["rng"]), values.pack(rng))
    if not values.equal(groups, scalars["groups"]):
        what = "the optimizer's parameter group options (is a scheduler missing in state=?)"
        found.add(what, values.pack(scalars["groups"]), values.pack(groups))
    for name, item in stateful.items():
        if name == BATCHES or not reproducible(item):
            continue
        packed = values.pack(item.state_dict())
        if name == GRADIENTS and name not in scalars["state"]:  # an older snapshot
            continue
        if packed != scalars["state"][name]:
            what = f"state[{name!r}] (was its iterator created before Checkpointer?)"
            found.add(what, scalars["state"][name], packed)


def optimizer_differences(
    binding: LiveState, image: SnapshotImage, names: Collection[str], found: Differences
) -> int:
    """Add differences of 0-dimensional optimizer state from this image.

    Args:
        names: the parameters to compare.
    Returns:
        The number of tensors compared.
    """
    counted, order = 0, image.state_layout()["packed"]
    for source, entry in image.sources():
        if source.kind != "packed":
            continue
        for recorded, (name, key) in zip(image.tensor(entry), order[source.name], strict=True):
            live = part_of(binding.state(name), key) if name in names else None
            if isinstance(live, Tensor):
                counted += 1
                if not same_bits(local(live), recorded):
                    what = f"optimizer state {key} of {name}"
                    found.add_tensors(what, recorded, local(live), param=name)
    return counted


def live_tensor(binding: LiveState, source: EntrySource) -> Tensor | None:
    """The live tensor that an entry records; None if there is none (yet)."""
    if source.kind == "param":
        return local(binding.params[source.name])
    if source.kind == "master":
        return local(binding.masters[source.name])
    if source.kind == "buffer":
        buffer = binding.planned_buffers().get(source.name)
        return None if buffer is None else local(buffer)
    if source.kind == "optim":
        value = part_of(binding.state(source.name), source.key)
        return local(value) if isinstance(value, Tensor) else None
    return None


def describe(operators: Sequence[Operator], piece: EntrySource) -> str:
    """The operator and the tensor of a piece, in words."""
    for op in operators:
        for m in op.members:
            if m.param == piece.name and (
                m.start is None or piece.start is None or m.start <= piece.start < (m.stop or 0)
            ):
                what = f"{piece.kind} {piece.key}".strip()
                return f"operator {op.name}: {what} of {piece.name}"
    return f"{piece.kind} {piece.name}"


def same_bits(live: Tensor, recorded: Tensor) -> bool:
    """True if both are equal to the bit, after rounding to the recorded dtype."""
    host = live.to(recorded.dtype).cpu()
    return host.numel() == 0 or torch.equal(_bits(host.contiguous()), _bits(recorded))


def _measured(param: str, recorded: Tensor, live: Tensor) -> TensorDifference:
    before, now = (t.detach().cpu().reshape(-1) for t in (recorded, live))
    differing = bits = 0
    farthest = largest = 0.0
    # In pieces: as float64 a large tensor takes several times its memory.
    for known, found in zip(before.split(_PIECE), now.split(_PIECE), strict=True):
        changed = _bits(known) ^ _bits(found)
        changed = changed[changed != 0]
        differing += changed.numel()
        bits += int(np.unpackbits(changed.numpy().view(np.uint8)).sum())
        if known.is_complex():
            known, found = torch.view_as_real(known), torch.view_as_real(found)
        known, found = known.double(), found.double()
        largest = max(largest, float(known.abs().nan_to_num(0.0).max()))
        distance = float((found - known).abs().nan_to_num(math.inf).max()) if changed.numel() else 0.0
        farthest = max(farthest, distance)
    ratio = farthest / largest if largest else math.inf
    return TensorDifference(
        param, before.numel(), differing, bits, ratio if math.isfinite(ratio) else sys.float_info.max
    )


def _raw(tensor: Tensor) -> Any:
    host = tensor.detach().cpu()
    return values.bytes_of(host).numpy() if host.numel() else b""


def _bits(tensor: Tensor) -> Tensor:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.reshape(-1).view(integer)
