"""Modules and parameters that a step makes, replaces or renames: no process that starts again has them.

Pruning and parametrizations move a parameter to another name and put a hook in its place, a new head takes
the place of the first one, a layer is added. A replay then differs, long after. torch calls hooks for what is
registered with a module, so this costs nothing until a step does that.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from ckptd.client.model.live_state import LiveState, named_modules, named_parameters

_ADVICE = (
    "a process that starts again has it as it was at the start. Do it before Checkpointer (prune.identity, "
    "parametrizations, new layers), and let the step set values only "
    "(docs/integration.md#what-changes-while-it-trains)"
)


@dataclass(frozen=True, slots=True)
class TreeChange:
    """What has changed.

    Attributes:
        text: what, and what to do.
        ends: whether a snapshot from here on leads nowhere.
    """

    text: str
    ends: bool


class ModuleTree:
    """The modules of a model, and their parameters, as at the start."""

    def __init__(self, binding: LiveState) -> None:
        self._binding = binding
        self._modules = dict(named_modules(binding.model))
        self._ids = frozenset(map(id, self._modules.values()))
        self._touched = False
        self._told = set[str]()

    def watch(self, keep: contextlib.ExitStack) -> None:
        """Watch from now on; closing ``keep`` ends it."""
        for register in (
            torch_module.register_module_parameter_registration_hook,
            torch_module.register_module_module_registration_hook,
        ):
            keep.callback(register(self._registers).remove)

    def top(self) -> TreeChange | None:
        """The top of a step: what is otherwise than at the start, and was not told yet."""
        if not self._touched:
            return None
        self._touched = False
        params = dict(named_parameters(self._binding.model))
        for name in self._binding.owner:
            was, now = self._binding.params[name], params.get(name)
            # A sharded one is another one while it is gathered.
            if name.startswith("extra/") or now is was or (hasattr(was, "to_local") and now is not None):
                continue
            return self._tell(f"parameter {name}: a step has replaced or renamed it", ends=True)
        modules = dict(named_modules(self._binding.model))
        for name, module in modules.items():
            if self._modules.get(name) is not module:
                known = name in self._modules
                how = "replaced" if known else "added"
                # One that a forward makes when it is first called may do no harm.
                return self._tell(f"module {name} ({type(module).__name__}): a step has {how} it", ends=known)
        return None

    def _tell(self, what: str, *, ends: bool) -> TreeChange | None:
        if what in self._told:
            return None
        self._told.add(what)
        return TreeChange(f"NOT RECOVERABLE: {what}, and {_ADVICE}", ends)

    def _registers(self, module: nn.Module, name: str, value: Any) -> None:
        if id(module) in self._ids:
            self._touched = True
