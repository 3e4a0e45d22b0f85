"""Finds the ranks that this rank communicates with in a step: over logged boundaries, and otherwise.

Ranks that communicate otherwise recover together: nobody could replay one rank's part of an all-reduce
without the others. Every process group counts its operations, also those that DDP begins in C++: what
remains of that count over a step after single sends and receives were collectives. Sends and receives
are seen one by one, with their peers: as many of them as the boundary log reports are the pipeline's.

Backends differ in whether they count single sends and receives, too (gloo does); each of them shows it.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist

from ckptd.client.log_lines import get_logger
from ckptd.client.model.hooks import layered

logger = get_logger(__name__)

_METHODS = {"send": "sent", "recv": "received", "recv_anysource": "from_anybody"}
_UNKNOWN = -1


class Communication:
    """The communication seen in this process's steps.

    Attributes:
        neighbours: ranks with which logged messages are exchanged.
        joined: other ranks that this one communicates with, each with the reason.
        observed: True once a whole step was seen.
    """

    def __init__(self) -> None:
        self.neighbours: set[int] = set()
        self.joined: dict[int, str] = {}
        self.observed = False
        # A pipeline by hand may send and receive in hooks, which run on the backward's thread.
        self._lock = threading.RLock()
        self._running = False
        self._aside = 0
        self._counts: dict[Any, int] = {}
        self._single: Counter[Any] = Counter()
        # Operations by direction and peer: reported beforehand, and seen.
        self._reported: Counter[tuple[str, int]] = Counter()
        self._seen: Counter[tuple[str, int]] = Counter()
        self._stack = ExitStack()
        if dist.is_available() and dist.is_initialized():
            reference = weakref.ref(self)
            for method, direction in _METHODS.items():
                self._stack.enter_context(
                    layered(dist.ProcessGroup, method, partial(_single, reference, direction))
                )

    # -- the life of a step ----------------------------------------------------------------------

    def begin(self) -> None:
        """The top of a step."""
        self._running = True
        for counter in (self._single, self._reported, self._seen):
            counter.clear()
        self._counts = _counts()

    def end(self) -> None:
        """The step is complete: its operations count."""
        if not self._running:
            return
        self._running, self.observed = False, True
        for group, count in _counts().items():
            before = self._counts.get(group, count)
            if _UNKNOWN in (count, before) or count - before > self._single[group]:
                self._join_group(group, certain=count != _UNKNOWN)
        for (direction, peer), times in self._seen.items():
            if times > self._reported[direction, peer]:
                self._join(peer, f"{direction} by itself, not with the boundary log")

    def abandon(self) -> None:
        """The step was left in its middle."""
        self._running = False

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Operations in the body do not join ranks: a repeat of the step does not perform them."""
        before = _counts() if self._running else {}
        self._aside += 1
        try:
            yield
        finally:
            self._aside -= 1
            if self._running and not self._aside:
                for group, count in _counts().items():
                    self._counts[group] = self._counts.get(group, 0) + count - before.get(group, 0)

    def close(self) -> None:
        """Stop listening."""
        self._stack.close()

    # -- reports ---------------------------------------------------------------------------------

    def sends(self, peers: Iterable[int]) -> None:
        """One logged send to each of these ranks follows."""
        self._report("sent", peers)

    def receives(self, peers: Iterable[int]) -> None:
        """One receive from each of these ranks follows, which could be fed."""
        self._report("received", peers)

    def all_of(self, group: Any, why: str) -> None:
        """Join all ranks of a process group (None: the default one)."""
        for rank in dist.get_process_group_ranks(group):
            self._join(rank, why)

    def _report(self, direction: str, peers: Iterable[int]) -> None:
        with self._lock:
            for peer in peers:
                self.neighbours.add(peer)
                self._reported[direction, peer] += 1

    # -- observations ----------------------------------------------------------------------------

    def single(self, direction: str, group: Any, peer: int, do: Callable[[], Any]) -> Any:
        """Perform a send or a receive, and note it."""
        if not self._running or self._aside:
            return do()
        before = _count(group)
        result = do()
        try:
            with self._lock:
                self._single[group] += _count(group) - before
                if direction == "from_anybody":
                    self.all_of(group, "received from whoever sends")
                else:
                    self._seen[direction, dist.get_global_rank(group, peer)] += 1
        except Exception as error:
            # We are within a call of the user's that has succeeded. The peer is unknown, so it may
            # be any rank.
            logger.warning("cannot tell with whom this rank communicates", exc_info=error)
            self.all_of(None, f"a message whose peer is unknown ({error})")
        return result

    def _join_group(self, group: Any, *, certain: bool) -> None:
        ranks = dist.get_process_group_ranks(group)
        name = getattr(group, "group_desc", "") or getattr(group, "group_name", "")
        what = "collectives over" if certain else "perhaps collectives (its backend does not tell) over"
        self.all_of(group, f"{what} process group {name!r} of {len(ranks)} ranks")

    def _join(self, rank: int, why: str) -> None:
        if rank != dist.get_rank() and rank not in self.joined:
            self.joined[rank] = why
            logger.info("recovers together with rank %d: %s", rank, why)


def _single(
    reference: weakref.ref[Communication],
    direction: str,
    below: Callable[..., Any],
    group: Any,
    tensors: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    communication = reference()
    do = partial(below, group, tensors, *args, **kwargs)
    if communication is None:
        return do()
    peer = args[0] if args else -1
    return communication.single(direction, group, peer, do)


def _counts() -> dict[Any, int]:
    """The number of operations so far in each process group of this rank."""
    if not dist.is_available() or not dist.is_initialized():
        return {}
    return {group: _count(group) for group in list(dist.distributed_c10d._world.pg_map)}


def _count(group: Any) -> int:
    """The sum over the backends of all kinds of devices; ``_UNKNOWN`` if they do not count."""
    try:
        return sum(
            int(group._get_backend(device)._get_sequence_number_for_group()) for device in group._device_types
        )
    except (AttributeError, RuntimeError, TypeError):
        return _UNKNOWN
