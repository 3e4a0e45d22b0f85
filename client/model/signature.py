"""Names, dtypes and shapes of all that is captured: by them a process knows whether a snapshot is
of its model.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any

import torch

from ckptd.client.model.live_state import LiveState, local
from ckptd.client.optimizers.optimizer_probe import StateSpec

__all__ = ["recorded_specs", "signature", "signature_difference"]

_STATE_ROW = re.compile(r"optimizer state (.*) of")


def signature(binding: LiveState) -> list[list[Any]]:
    """Names, dtypes and shapes of everything that is captured."""
    rows: list[list[Any]] = [
        ["optimizer", str(i), type(o).__name__, [len(o.param_groups)]]
        for i, o in enumerate(binding.optimizers)
    ]
    for name, param in binding.params.items():
        rows.append(["parameter", name, str(param.dtype)[6:], list(local(param).shape)])
        rows += [
            [
                _STATE.format(s.key),
                name,
                str(s.dtype)[6:],
                list(local(param).shape if s.shape is None else s.shape),
            ]
            for s in sorted(binding.specs(name), key=lambda s: s.key)
            if s.kind in ("like", "tensor")
        ]
    rows += [
        ["master weights of", n, str(m.dtype)[6:], list(local(m).shape)] for n, m in binding.masters.items()
    ]
    rows += [["buffer", n, str(b.dtype)[6:], list(local(b).shape)] for n, b in binding.buffers().items()]
    return rows


_STATE = "optimizer state {!r} of"


def recorded_specs(binding: LiveState, recorded: Sequence[Sequence[Any]]) -> dict[str, tuple[StateSpec, ...]]:
    """The optimizer state tensors of a signature, by parameter."""
    found: dict[str, tuple[StateSpec, ...]] = {}
    for kind, name, dtype, shape in recorded:
        match = _STATE_ROW.fullmatch(kind)
        if match is None or name not in binding.owner:
            continue
        like = tuple(shape) == tuple(local(binding.held(name)).shape)
        spec = StateSpec(
            ast.literal_eval(match[1]),
            "like" if like else "tensor",
            getattr(torch, dtype),
            None if like else tuple(shape),
        )
        found[name] = (*found.get(name, ()), spec)
    return found


def signature_difference(
    recorded: Sequence[Sequence[Any]], here: Sequence[Sequence[Any]], limit: int = 5
) -> str:
    """The first differences in words; empty if there are none.

    Optimizer state is no difference: what was recorded decides what there is, and a probe need not
    have seen it.
    """
    before = {(kind, name): (dtype, tuple(shape)) for kind, name, dtype, shape in recorded}
    now = {(kind, name): (dtype, tuple(shape)) for kind, name, dtype, shape in here}
    found = []
    for key in dict.fromkeys([*before, *now]):
        if before.get(key) != now.get(key) and not _STATE_ROW.fullmatch(key[0]):
            old, new = (_words(d.get(key)) for d in (before, now))
            found.append(f"{key[0]} {key[1]}: {old} in the snapshot, {new} here")
    more = f"; and {len(found) - limit} more" if len(found) > limit else ""
    return "; ".join(found[:limit]) + more


def _words(value: tuple[str, tuple[int, ...]] | None) -> str:
    return "absent" if value is None else f"{value[0]}{list(value[1])}"
