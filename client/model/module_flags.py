"""Flags of modules and parameters: ``training`` and ``requires_grad``.

A schedule that unfreezes layers or lets batch norm rest after some steps sets them once; a process that
begins later does not come to that step again. As with attributes, those are captured that have changed since
the start, so that a script which freezes other layers from the beginning is heeded.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckptd.client.model.live_state import LiveState, named_modules

# Its name among the objects of `state=`.
FLAGS = "ckptd.flags"


class ModuleFlags:
    """The flags of a model that have changed since the start: an object for ``state=``.

    A replay does not compare them: if one matters, the weights differ.
    """

    reproducible = False

    def __init__(self, binding: LiveState) -> None:
        self._modules = dict(named_modules(binding.model))
        self._params = binding.params
        self._start = self._training(), self._wanted()

    def begin_as(self, before: ModuleFlags) -> None:
        """The start is that of another object for the same modules."""
        self._start = before._start

    def state_dict(self) -> dict[str, dict[str, bool]]:
        """The flags that have changed, by module and by parameter."""
        training, wanted = self._training(), self._wanted()
        if (training, wanted) == self._start:
            return {}
        return {
            "training": _changed(self._modules, training, self._start[0]),
            "requires_grad": _changed(self._params, wanted, self._start[1]),
        }

    def load_state_dict(self, recorded: Mapping[str, Mapping[str, bool]]) -> None:
        """Set these flags, and all others as they were at the start."""
        training, wanted = recorded.get("training", {}), recorded.get("requires_grad", {})
        for (name, module), first in zip(self._modules.items(), self._start[0], strict=True):
            module.training = training.get(name, first)
        for (name, param), first in zip(self._params.items(), self._start[1], strict=False):
            flag = wanted.get(name, first)
            if param.requires_grad != flag:
                param.requires_grad_(flag)

    def _training(self) -> list[bool]:
        return [module.training for module in self._modules.values()]

    def _wanted(self) -> list[bool]:
        return [param.requires_grad for param in self._params.values()]


def _changed(names: Mapping[str, object], now: list[bool], start: list[bool]) -> dict[str, bool]:
    return {n: a for n, a, b in zip(names, now, start, strict=False) if a != b}
