"""Names, dtypes and shapes of all that is captured: by them a process knows whether a snapshot is of its model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckptd.client.binding import Binding, local

__all__ = ["signature", "signature_difference"]


def signature(binding: Binding) -> list[list[Any]]:
    """Names, dtypes and shapes of everything that is captured."""
    rows: list[list[Any]] = [
        ["optimizer", str(i), type(o).__name__, [len(o.param_groups)]]
        for i, o in enumerate(binding.optimizers)
    ]
    for name, param in binding.params.items():
        rows.append(["parameter", name, str(param.dtype)[6:], list(local(param).shape)])
        rows += [
            [_STATE.format(s.key), name, str(s.dtype)[6:], list(s.shape or local(param).shape)]
            for s in sorted(binding.specs(name), key=lambda s: s.key)
            if s.kind in ("like", "tensor")
        ]
    rows += [
        ["master weights of", n, str(m.dtype)[6:], list(local(m).shape)]
        for n, m in binding.masters.items()
    ]
    rows += [
        ["buffer", n, str(b.dtype)[6:], list(local(b).shape)] for n, b in binding.buffers().items()
    ]
    return rows


_STATE = "optimizer state {!r} of"


def signature_difference(
    recorded: Sequence[Sequence[Any]], here: Sequence[Sequence[Any]], limit: int = 5
) -> str:
    """The first differences in words; empty if there are none.

    Optimizer state that was recorded and is not known here is no difference: some optimizers begin to keep it later.
    """
    before = {(kind, name): (dtype, tuple(shape)) for kind, name, dtype, shape in recorded}
    now = {(kind, name): (dtype, tuple(shape)) for kind, name, dtype, shape in here}
    found = []
    for key in dict.fromkeys([*before, *now]):
        late = key not in now and key[0].startswith("optimizer state")
        if before.get(key) != now.get(key) and not late:
            old, new = (_words(d.get(key)) for d in (before, now))
            found.append(f"{key[0]} {key[1]}: {old} in the snapshot, {new} here")
    more = f"; and {len(found) - limit} more" if len(found) > limit else ""
    return "; ".join(found[:limit]) + more


def _words(value: tuple[str, tuple[int, ...]] | None) -> str:
    return "absent" if value is None else f"{value[0]}{list(value[1])}"
