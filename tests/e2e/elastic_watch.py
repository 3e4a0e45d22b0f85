"""A rank of an elastic job tells what it is about to do, so that it can be killed just then; and
what it was, to be compared.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash
from torch import Tensor

from ckptd.client.model.snapshot_layout import buffer_of

__all__ = ["STACKS", "Phase", "Tail", "digests", "hold_bringing", "watch"]

_HELD_S = 60.0
STACKS = signal.SIGUSR1
"""Makes a rank write what all its threads are doing into its log."""


class Phase(StrEnum):
    """What a rank does until its first step, and beside its steps."""

    LOOKING = "telling what is held"
    PLANNING = "planning"
    BRINGING = "bringing from storage"
    VERIFYING = "verifying"
    SHIPPING = "shipping"
    LOADING = "loading"
    ATTACHING = "attaching"
    RETIRING = "retiring the worlds before"


class Writes(Protocol):
    """Where it is told."""

    def write(self, event: str, **told: Any) -> None: ...


def watch(log: Writes, phase_ms: float, seed: int) -> None:
    """Tell each phase when it begins, and make it last a random time longer, so that moments within
    it are hit.
    """
    from ckptd.client.elastic.incarnation import incarnation_start, state_transfer
    from ckptd.client.elastic.incarnation.checkpoint_selection import Storage
    from ckptd.client.elastic.incarnation.image_inventory import LocalState
    from ckptd.client.elastic.incarnation.state_transfer import Loader
    from ckptd.client.elastic.job import elastic_job
    from ckptd.client.elastic.job.background_tasks import GarbageCollection

    faulthandler.register(STACKS, all_threads=True)
    rng = random.Random(seed)
    for phase, holder, name in (
        (Phase.LOOKING, incarnation_start, "discover"),
        (Phase.PLANNING, incarnation_start, "plan_incarnation"),
        (Phase.BRINGING, Storage, "bring"),
        (Phase.VERIFYING, LocalState, "open_for"),
        (Phase.SHIPPING, state_transfer, "ship_bytes"),
        (Phase.LOADING, Loader, "scalars"),
        (Phase.ATTACHING, elastic_job, "Checkpointer"),
        (Phase.RETIRING, GarbageCollection, "_forget"),
    ):
        setattr(holder, name, _told(getattr(holder, name), phase, log, rng, phase_ms))


def hold_bringing(log: Writes, gate: Path) -> None:
    """Tell when something is about to be brought from storage, and go on when ``gate`` is there;
    the first time only.
    """
    from ckptd.client.elastic.incarnation.checkpoint_selection import Storage

    bring = Storage.bring

    @functools.wraps(bring)
    def held(*args: Any, **kwargs: Any) -> bool:
        log.write("phase", phase=Phase.BRINGING)
        until = time.monotonic() + _HELD_S
        while not gate.exists() and time.monotonic() < until:
            time.sleep(0.01)
        return bring(*args, **kwargs)

    setattr(Storage, "bring", held)  # noqa: B010 - a method that is replaced


def _told(
    work: Callable[..., Any], phase: Phase, log: Writes, rng: random.Random, phase_ms: float
) -> Callable[..., Any]:
    @functools.wraps(work)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        log.write("phase", phase=phase)
        time.sleep(rng.uniform(0, phase_ms) / 1e3)
        return work(*args, **kwargs)

    return wrapped


def digests(state: Mapping[str, Any]) -> dict[str, str]:
    """Of everything that must be equal wherever it is; random generators are each rank's own."""
    return {name: _digest(value) for name, value in state.items() if name != "rng"}


def _digest(value: Any) -> str:
    if isinstance(value, Tensor):
        with torch.no_grad():
            return xxhash.xxh3_64_hexdigest(buffer_of(value.detach().contiguous().cpu()))
    return xxhash.xxh3_64_hexdigest(repr(value).encode())


class Tail:
    """The lines of a file that came since the last look; a last one that is not whole is left for the next."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def new(self) -> Iterator[dict[str, Any]]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
        whole = data.rfind(b"\n") + 1
        self._at += whole
        for line in data[:whole].splitlines():
            yield json.loads(line)
