"""Whether trainers ask the daemon to leave the network to them for a moment.

Asked before every chunk that is put, on the fabric's thread; a hint in shared memory, so that a
trainer can say so in a microsecond. The fabric holds puts back for half a second at most: whoever
forgets to take the hint back costs no more.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckptd.memory.segment_file import Segment

__all__ = ["QuietGate"]


class QuietGate:
    """Open unless a trainer of this node asks for quiet."""

    def __init__(self) -> None:
        self._segments: tuple[Segment, ...] = ()

    def watch(self, segments: Iterable[Segment]) -> None:
        """Heed the hints of these, and no others (loop thread)."""
        self._segments = tuple(segments)

    def __call__(self) -> bool:
        return not any(_asks(segment) for segment in self._segments)


def _asks(segment: Segment) -> bool:
    try:
        return segment.quiet
    except ValueError:  # unmapped by the loop thread meanwhile: its trainer asks for nothing any more
        return False
