"""The process groups of a process that restarts in place: they end, and what holds them is of no use."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any, Never

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ckptd.client.in_process.rank_links import RankLinks
from ckptd.client.ranks.collectives import leave_barrier


def calls_so_far() -> int:
    """How many collective calls the default group has made; -1: it does not count them."""
    if not dist.is_available() or not dist.is_initialized():
        return -1
    try:
        group: Any = dist.distributed_c10d._get_default_group()
        return int(group._get_sequence_number_for_group())
    except RuntimeError:  # a backend without such numbers
        return -1


def abort_groups(links: RankLinks) -> None:
    """Let whatever waits in a collective call fail; from any thread.

    NCCL has an abort. gloo has none, but it notices that its connections end.
    """
    for group in _groups():
        if "gloo" not in group.name():
            group.abort()
    links.cut()


def leave_groups() -> None:
    """End all process groups, and retire the wrappers that use them.

    Raises:
        RuntimeError: a backend does not let go.
    """
    leave_barrier()
    if not (dist.is_available() and dist.is_initialized()):
        return
    # torch 2.13 may deadlock if a wrapper has the last reference to a group of gloo.
    groups = list(_groups())
    for wrapper in _wrappers():
        _retire(wrapper)
    dist.destroy_process_group()
    groups.clear()


def _groups() -> Iterator[Any]:
    if dist.is_available() and dist.is_initialized():
        yield from list(dist.distributed_c10d._world.pg_map)


def _wrappers() -> list[DistributedDataParallel]:
    """All of this process, wherever they are kept: no model knows what wraps it."""
    return [each for each in gc.get_objects() if isinstance(each, DistributedDataParallel)]


def _retire(wrapper: DistributedDataParallel) -> None:
    """Its hooks would still reduce gradients, over groups that are no more; and it must not be called."""
    parts = vars(wrapper)
    if (reducer := parts.get("reducer")) is not None:
        reducer._remove_autograd_hooks()
    for name in ("reducer", "logger", "process_group"):
        parts.pop(name, None)
    parts["forward"] = _retired


def _retired(*args: Any, **kwargs: Any) -> Never:
    raise RuntimeError(
        "this DistributedDataParallel is from before the restart, and its process group has ended: the "
        "function in RecoveryOptions(in_process=...) must make a new one, and the loop must call that "
        "(declare the variable `nonlocal` or `global` in the function)"
    )
