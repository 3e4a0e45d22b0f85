"""The program that began a run (options, script, arguments, data), and how its successor differs.

Each snapshot records it in the step scalars under ``program``. A successor continues with the recorded
options and reports where its own differ. With ``param_groups="script"`` its own count from the iteration
at which the state is complete.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckptd.client.capture.step_state import Stateful
from ckptd.client.log_lines import get_logger
from ckptd.client.model.live_state import LiveState
from ckptd.printable import one_line

logger = get_logger(__name__)

# {"options": [by optimizer {name: [value by group]}], "script": [path, sha256], "arguments": [...],
# "data": {name: text}}
Program = dict[str, Any]

_ARGUMENTS_MAX = 64
_LETTERS_MAX = 200
_DIFFERENCES_MAX = 8
_SECRET = re.compile(r"(?i)^-.*(token|secret|passw|credential|api[-_]?key)")
_PLAIN = (bool, int, float, str, type(None))


def this_program(binding: LiveState, stateful: Mapping[str, Stateful]) -> Program:
    """This process's program; call it before anything is restored."""
    return {
        "options": _options(binding),
        "script": _script(),
        "arguments": _arguments(sys.argv[1:]),
        "data": {name: text for name, item in stateful.items() if (text := _data_of(item)) is not None},
    }


def differences(recorded: Program, here: Program) -> list[str]:
    """The differences in words, with both values; recorded first."""
    found = list(_option_differences(recorded["options"], here["options"]))
    (path, digest), (path_here, digest_here) = recorded["script"], here["script"]
    if digest and digest_here and digest != digest_here:
        was = "" if path == path_here else f" ({path})"
        found.append(f"the script {path_here} has digest {digest_here}, recorded is {digest}{was}")
    if recorded["arguments"] != here["arguments"]:
        before, now = (" ".join(each["arguments"]) or "none" for each in (recorded, here))
        found.append(f"arguments of the command: recorded {_short(before)!r}, here {_short(now)!r}")
    data, data_here = recorded["data"], here["data"]
    found += [
        f"state[{name!r}]: recorded {data[name]}, here {data_here[name]}"
        for name in sorted(data.keys() & data_here.keys())
        if data[name] != data_here[name]
    ]
    more = [f"and {len(found) - _DIFFERENCES_MAX} more"] if len(found) > _DIFFERENCES_MAX else []
    return found[:_DIFFERENCES_MAX] + more


def options_differ(recorded: Program, here: Program) -> bool:
    """True if the script's options of parameter groups differ from the recorded ones."""
    return any(True for _ in _option_differences(recorded["options"], here["options"]))


def apply_options(
    binding: LiveState, stateful: Mapping[str, Stateful], recorded: Program, here: Program
) -> None:
    """Write the script's options into the live parameter groups where they differ from the recorded ones.

    Where a scheduler moves the learning rate, its base becomes the script's, and the current rate is
    scaled by the same factor.
    """
    for optimizer, before, now in zip(binding.optimizers, recorded["options"], here["options"], strict=True):
        for at, group in enumerate(optimizer.param_groups):
            scheduled = "initial_lr" in group
            for name in now:
                old, new = _of_group(before, name, at), _of_group(now, name, at)
                if old == new or (name == "lr" and scheduled):
                    continue
                if name == "initial_lr" and isinstance(old, int | float) and old:
                    _put(group, "lr", group["lr"] * (new / old))
                _put(group, name, tuple(new) if isinstance(group[name], tuple) else new)
    for item in stateful.values():
        _rebase(item)


def _rebase(scheduler: Any) -> None:
    """Set a scheduler's base rates to those of its optimizer's groups."""
    for inner in getattr(scheduler, "_schedulers", ()):
        _rebase(inner)
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", ())
    base = getattr(scheduler, "base_lrs", None)
    if isinstance(base, list) and len(base) == len(groups):
        scheduler.base_lrs = [group.get("initial_lr", group["lr"]) for group in groups]


def _put(group: dict[str, Any], name: str, value: Any) -> None:
    live = group.get(name)
    if isinstance(live, Tensor):
        with torch.no_grad():
            live.fill_(value)
    else:
        group[name] = value


def _options(binding: LiveState) -> list[dict[str, list[Any]]]:
    """By optimizer: the values of each option, one if all its groups have the same."""
    found = []
    for optimizer in binding.optimizers:
        groups = optimizer.param_groups
        names = dict.fromkeys(k for group in groups for k in group if k != "params")
        rows = {name: [_plain(group.get(name)) for group in groups] for name in names}
        known = {name: row for name, row in rows.items() if all(v is not ... for v in row)}
        found.append({n: row[:1] if all(v == row[0] for v in row) else row for n, row in known.items()})
    return found


def _plain(value: Any) -> Any:
    """The value as recorded; `...` if it cannot be compared by value."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 and value.device.type != "meta" else ...
    if isinstance(value, list | tuple):
        parts = [_plain(each) for each in value]
        return ... if ... in parts else parts
    return value if isinstance(value, _PLAIN) else ...


def _option_differences(
    recorded: Sequence[Mapping[str, list[Any]]], here: Sequence[Mapping[str, list[Any]]]
) -> Iterator[str]:
    for number, (before, now) in enumerate(zip(recorded, here, strict=False)):
        of = f" of optimizer {number}" if len(here) > 1 else ""
        for name in now:
            if name in before and before[name] != now[name]:
                old, new = (row[0] if len(row) == 1 else row for row in (before[name], now[name]))
                yield f"{name}{of}: recorded {_short(repr(old))}, here {_short(repr(new))}"


def _of_group(options: Mapping[str, list[Any]], name: str, at: int) -> Any:
    row = options.get(name, [None])
    return row[0] if len(row) == 1 else row[at]


def _script() -> list[str]:
    """Path and digest of the started file; empty if there is none, as in a notebook."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if not file:
        return ["", ""]
    try:
        content = Path(file).read_bytes()
    except OSError:  # it was removed or replaced meanwhile: nothing to compare
        return [str(file), ""]
    return [str(file), hashlib.sha256(content).hexdigest()[:12]]


def _arguments(given: Sequence[str]) -> list[str]:
    """The command's arguments, without secrets, which must not lie in a store."""
    found = []
    for before, each in zip(["", *given], given, strict=False):
        found.append("***" if _SECRET.match(before) and "=" not in before else one_line(each))
    return [each[:_LETTERS_MAX] for each in found[:_ARGUMENTS_MAX]]


def _data_of(item: Any) -> str | None:
    """The data that a loader reads, as far as it says; None if this is no loader."""
    try:
        dataset = getattr(item, "dataset", None)
        if dataset is None:
            return None
        size = getattr(item, "batch_size", None)
        length = f"{len(dataset)} items" if hasattr(dataset, "__len__") else "items without number"
    except Exception as error:  # noqa: BLE001 - the user's own object; what fails is not compared
        logger.debug("the data of a loader is unknown: %r", error)
        return None
    return f"{type(dataset).__name__} of {length}, batch size {size}"


def _short(text: str) -> str:
    return text if len(text) <= _LETTERS_MAX else text[:_LETTERS_MAX] + "…"
