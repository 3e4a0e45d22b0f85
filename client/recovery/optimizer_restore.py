"""Recorded optimizer state and masters, put into the live optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ckptd.client.capture.step_state import apply_packed
from ckptd.client.daemon_link.snapshot_image import SnapshotImage
from ckptd.client.model.live_state import LiveState, local
from ckptd.client.model.snapshot_layout import DTYPES, EntrySource, Rows

__all__ = ["load_scalar_state", "round_frozen_masters", "state_tensor"]


def state_tensor(binding: LiveState, source: EntrySource, recorded: Tensor) -> Tensor:
    """The live optimizer state tensor for a recorded one, created (zero) where it does not exist yet."""
    held = binding.held(source.name)
    state = binding.keeper(source.name).state[held]
    if not isinstance(state.get(source.key), Tensor):
        # All rows of a whole tensor are about to be loaded: zeros would be written for nothing.
        if source.start is not None:
            state[source.key] = torch.zeros_like(held, dtype=recorded.dtype, requires_grad=False)
        elif recorded.shape == local(held).shape:
            state[source.key] = torch.empty_like(held, dtype=recorded.dtype, requires_grad=False)
        else:
            state[source.key] = torch.empty_like(recorded, device=held.device)
    found: Tensor = state[source.key]
    return found


def load_scalar_state(
    binding: LiveState, image: SnapshotImage, scalars: dict[str, Any], names: Sequence[str]
) -> None:
    """0-dimensional and plain state of newly activated parameters; the key order is the optimizer's own.

    Args:
        scalars: the step scalars of the image.
        names: of the parameters.
    """
    layout = image.state_layout()
    packed = {s.dtype: image.tensor(entry) for s, entry in image.sources() if s.kind == "packed"}
    for name in names:
        held = binding.held(name)
        keeper = binding.keeper(name)
        state = keeper.state[held]
        for key, (dtype, on_host) in layout["scalars"].get(name, {}).items():
            if not isinstance(state.get(key), Tensor):
                device = "cpu" if on_host else held.device
                state[key] = torch.zeros((), dtype=DTYPES[dtype], device=device)
        for key, value in scalars["python"].get(name, {}).items():
            state[key] = value
        ordered = {k: state[k] for k in layout["keys"].get(name, ()) if k in state}
        ordered.update({k: v for k, v in state.items() if k not in ordered})
        keeper.state[held] = ordered
    apply_packed(binding, packed, names, layout["packed"])


def round_frozen_masters(binding: LiveState, frozen: Rows) -> None:
    """A frozen master holds the rounded weight: the user's own copy-back then leaves the weight as
    recorded.
    """
    with torch.no_grad():
        for name, ranges in frozen.items():
            if name not in binding.masters or name in binding.elsewhere:
                continue
            master, param = local(binding.masters[name]), local(binding.params[name])
            for start, stop in ranges:
                if param.ndim:
                    master[start:stop].copy_(param[start:stop])
                else:
                    master.copy_(param)
