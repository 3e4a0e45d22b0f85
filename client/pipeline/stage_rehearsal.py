"""The rehearsal of ``torch.distributed.pipelining``, and the modules that it calls.

In its first step, a schedule whose stages have no example inputs and outputs runs every stage once on
uninitialized memory, to learn shapes. A process that resumes does so again in the middle of the run. The
changes in buffers (tokens counted by a router, running statistics) and in generators that torch does not
fork would then differ from the recorded state.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckptd.client.log_lines import get_logger
from ckptd.client.model.hooks import layered
from ckptd.client.model.live_state import LiveState, local
from ckptd.client.rng_state import capture_rng, restore_rng

__all__ = ["callables_of", "rehearsal_tap", "without_trace"]

logger = get_logger(__name__)

_SCHEDULES = "torch.distributed.pipelining.schedules"

# The methods of schedules that rehearse: the first in newer versions of torch, the others (for one stage,
# for several) in older ones.
_SHARED = "_initialize_pp_stages"
_SEPARATE = ("_initialize_stage", "_initialize_stages")


@contextmanager
def rehearsal_tap(around: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Wrap every rehearsal in ``around``, even if pipelining is imported only in the body."""

    def tapped(below: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with around():
            return below(*args, **kwargs)

    with ExitStack() as stack:

        def tap(schedules: ModuleType) -> None:
            for base, name in _rehearsals(schedules):
                stack.enter_context(layered(base, name, tapped))

        imported = sys.modules.get(_SCHEDULES)
        if imported is not None:
            tap(imported)
        else:
            # Not imported here, because that takes seconds, and most runs have no pipeline.
            watch = _ImportWatch(tap)
            sys.meta_path.insert(0, watch)
            stack.callback(watch.remove)
        yield


def _rehearsals(schedules: ModuleType) -> list[tuple[type, str]]:
    """The classes and methods that rehearse in this version of torch; each where it is first defined, so
    that one call is seen once.
    """
    classes = [c for c in vars(schedules).values() if isinstance(c, type)]

    def defining(name: str) -> list[tuple[type, str]]:
        having = [c for c in classes if name in vars(c)]
        return [(c, name) for c in having if not any(name in vars(b) for b in c.__mro__[1:])]

    found = defining(_SHARED) or [each for name in _SEPARATE for each in defining(name)]
    if not found:
        _warn_unknown(torch.__version__)
    return found


@functools.cache  # once for each process
def _warn_unknown(version: str) -> None:
    logger.warning(
        "torch %s: %s has none of %s; if a pipeline schedule learns shapes in its first step, a "
        "resumed run may differ from "
        "the recorded one: give its stages example inputs and outputs",
        version,
        _SCHEDULES,
        ", ".join((_SHARED, *_SEPARATE)),
    )


class _ImportWatch(MetaPathFinder):
    """A finder that reports the import of the schedules' module; it finds no module itself."""

    def __init__(self, imported: Callable[[ModuleType], None]) -> None:
        # Weak: sys.meta_path must not keep a checkpointer that was not closed.
        self._imported = weakref.ref(imported)

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _SCHEDULES or self not in sys.meta_path:
            return None
        # Only the finders after this one: another checkpointer's watch would ask this one again.
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                self._follow(spec.loader)
                return spec
        return None

    def _follow(self, loader: Any) -> None:
        execute = loader.exec_module

        def executed(module: ModuleType) -> None:
            execute(module)
            imported = self._imported()
            if imported is not None and self in sys.meta_path:  # the tap may have ended meanwhile
                imported(module)

        loader.exec_module = executed


@contextmanager
def without_trace(binding: LiveState) -> Iterator[None]:
    """Restore buffers and random state after the body.

    After a forward outside ``no_sync`` DDP expects a backward. None follows, so DDP would take that of
    the first micro-batch, reduce its gradients alone, and sum in another order than in all steps but
    the first of a process.
    """
    rng = capture_rng()
    buffers = {name: local(b).clone() for name, b in binding.buffers().items()}
    with ExitStack() as stack:
        for module in binding.model.modules():
            if isinstance(module, DistributedDataParallel):
                stack.enter_context(module.no_sync())
        yield
    now = binding.buffers()
    with torch.no_grad():
        for name, before in buffers.items():
            local(now[name]).copy_(before)
    restore_rng(rng)


def callables_of(model: nn.Module) -> list[nn.Module]:
    """The modules whose calls are the model's forwards; for a plain container, which cannot be called, its
    children.
    """
    if isinstance(model, nn.ModuleList | nn.ModuleDict) and len(model):
        return [m for child in model.children() for m in callables_of(child)]
    return [model]
