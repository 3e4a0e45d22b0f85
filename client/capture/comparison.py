"""Compares recomputed state with recorded state, bit for bit, and describes the differences."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

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
from ckptd.client.optimizers.value_trees import part_of
from ckptd.client.rng_state import capture_rng

__all__ = [
    "Differences",
    "batch_differences",
    "describe",
    "live_tensor",
    "optimizer_differences",
    "same_bits",
    "scalar_differences",
]


class Differences:
    """Differences in words, with digests of both sides by which a second replay can be compared.

    Attributes:
        texts: one per difference.
    """

    def __init__(self) -> None:
        self.texts: list[str] = []
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

    def add_tensors(self, what: str, recorded: Tensor, live: Tensor) -> None:
        """Add a difference of two tensors."""
        self.add(what, _raw(recorded), _raw(live.to(recorded.dtype)))

    def extend(self, others: Differences) -> None:
        """Add all differences of ``others``."""
        if others:
            self.texts += others.texts
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
                    found.add_tensors(f"optimizer state {key} of {name}", recorded, local(live))
    return counted


def live_tensor(binding: LiveState, source: EntrySource) -> Tensor | None:
    """The live tensor that an entry records; None if there is none (yet)."""
    if source.kind == "param":
        return local(binding.params[source.name])
    if source.kind == "master":
        return local(binding.masters[source.name])
    if source.kind == "buffer":
        return local(binding.buffers()[source.name])
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


def _raw(tensor: Tensor) -> Any:
    host = tensor.detach().cpu()
    return values.bytes_of(host).numpy() if host.numel() else b""


def _bits(tensor: Tensor) -> Tensor:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.reshape(-1).view(integer)
