"""Options of a checkpointer that a test puts together from several places, field by field."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ckptd.client import (
    DaemonOptions,
    LayoutOptions,
    RecoveryOptions,
    RunOptions,
    SnapshotOptions,
)
from ckptd.client.options import OptionGroups

__all__ = ["grouped"]

_GROUPS = {
    "run": RunOptions,
    "daemon": DaemonOptions,
    "snapshots": SnapshotOptions,
    "recovery": RecoveryOptions,
    "layout": LayoutOptions,
}
_TEXTS = {"run": "name", "daemon": "endpoint"}


def grouped(**values: Any) -> OptionGroups:
    """The groups that have these fields; ``run`` is the run's name, ``daemon`` the endpoint.

    Raises:
        TypeError: no group has a field of that name.
    """
    homes = {field.name: name for name, kind in _GROUPS.items() for field in fields(kind)}
    homes |= {name: name for name in _TEXTS}
    if unknown := values.keys() - homes.keys():
        raise TypeError(f"no option is called {', '.join(sorted(unknown))}")
    found: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        found.setdefault(homes[name], {})[_TEXTS.get(name, name)] = value
    groups: Any = {home: _GROUPS[home](**given) for home, given in found.items()}
    whole: OptionGroups = groups
    return whole
