"""The job's store, as threads of ours reach it: each by a connection of its own."""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed as dist

__all__ = ["STORE_ANSWER_S", "job_store", "own_connection"]

STORE_ANSWER_S = 30.0


def job_store() -> Any:
    """The store by which the process group of this job was made."""
    return dist.distributed_c10d._get_default_store()


def own_connection(store: Any, *, answer_s: float | None = None) -> Any:
    """Another client of a store: a thread may be waiting on the shared one.

    Args:
        answer_s: after which a request fails; None: ``STORE_ANSWER_S``.
    Returns:
        The store itself, with the patience that it has, where it cannot be cloned.
    """
    if not hasattr(store, "clone"):
        return store
    own = store.clone()
    own.set_timeout(datetime.timedelta(seconds=answer_s or STORE_ANSWER_S))
    return own
