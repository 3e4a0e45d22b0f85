"""Segments beside the ring: what the boundary log and parked state have in common.

They are asked for in the background, one request at a time, and again some steps after a refusal;
two generations exist at most. What else there is to it (how large they are, when they are given
back, what is said of a refusal) is each kind's own.
"""

from __future__ import annotations

from concurrent.futures import Future

from ckptd.client.daemon_link.generations import Generations
from ckptd.client.daemon_link.mapped_segment import MappedSegment
from ckptd.client.daemon_link.rank_memory import RankMemory
from ckptd.cuda.engine import CopyEngine
from ckptd.errors import DaemonUnavailable
from ckptd.transport.messages import SegmentInfo

__all__ = ["RETRY_STEPS", "AuxiliarySegments"]

RETRY_STEPS = 50
_MAX_GENERATIONS = 2


class AuxiliarySegments:
    """The generations of one kind.

    Args:
        generations: where ``memory`` has them, those of an earlier trainer included.
        engine: copies into them.
    """

    def __init__(self, memory: RankMemory, generations: Generations, engine: CopyEngine) -> None:
        self._memory, self._generations, self._engine = memory, generations, engine
        self._coming: Future[SegmentInfo] | None = None
        self._retry_at = 0
        self.refused = ""

    @property
    def newest(self) -> MappedSegment | None:
        """What is filled next; None as long as nothing is there."""
        return self._generations.newest

    @property
    def _full(self) -> bool:
        """Whether there are as many generations as there may be."""
        return len(self._generations) >= _MAX_GENERATIONS

    def _collect_segment(self) -> MappedSegment | None:
        """What was asked for, ready to be filled; None if nothing was, or it is still on its way.

        Raises:
            AttachRefused: there is no memory for it.
            DaemonUnavailable: the daemon is away, or it cannot be used.
            RuntimeError: it cannot be pinned; it is given back.
        """
        if self._coming is None or not self._coming.done():
            return None
        coming, self._coming = self._coming, None
        segment = self._memory.add_auxiliary(coming.result())
        self._register(segment)
        return segment

    def _register(self, segment: MappedSegment) -> None:
        """Raises RuntimeError if it cannot be pinned; then it is given back."""
        try:
            self._engine.register(segment.memory, segment.regions())
        except RuntimeError:
            self._memory.drop_auxiliary(segment)
            raise

    def _give_back(self, segment: MappedSegment) -> None:
        self._engine.release(segment.memory)
        self._memory.drop_auxiliary(segment)

    def _put_off(self, step: int, error: Exception) -> None:
        """Ask again: soon if it is the daemon that is away."""
        self._retry_at = step + (1 if isinstance(error, DaemonUnavailable) else RETRY_STEPS)

    @property
    def _total_bytes(self) -> int:
        return self._generations.total_bytes
