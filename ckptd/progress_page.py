"""The page in which a trainer shows its host how far it is: a few numbers in memory that both map.

No thread writes it, and no message is sent: a trainer that is stopped, or whose interpreter is stuck, shows
that by the fact that nothing changes. The host makes the page; the trainer inherits its descriptor, whose
number is in the environment.
"""

from __future__ import annotations

import mmap
import os
import struct
from enum import IntEnum
from functools import cache
from typing import NamedTuple, Self

PAGE_VARIABLE = "CKPTD_HOST_PROGRESS"
_MAGIC = b"ckptd\0p1"
_FIELDS = struct.Struct("=QqBB")  # beats, step, whether one runs, stage
_BYTES = 4096


class StepStage(IntEnum):
    """What a step has come to, in its order; with accumulated gradients the middle ones alternate."""

    TOP = 0
    FORWARD = 1
    BACKWARD = 2
    UPDATE = 3


_STAGES = frozenset(StepStage)


class StepProgress(NamedTuple):
    """What a trainer shows.

    Attributes:
        beats: how many steps have begun in its life, those of replays included.
        step: that began last; -1: none.
        running: the loop is in that step; False before and after a loop.
    """

    beats: int = 0
    step: int = -1
    running: bool = False
    stage: StepStage = StepStage.TOP


class ProgressPage:
    """One page. The trainer writes, the host reads.

    Attributes:
        descriptor: that the trainer inherits; -1 on its side.
    """

    def __init__(self, page: mmap.mmap, descriptor: int = -1) -> None:
        self._page, self.descriptor = page, descriptor
        self._shown = StepProgress()

    @classmethod
    def make(cls) -> Self:
        """A page for a trainer that is to be started.

        Raises:
            OSError: there is no memory.
        """
        descriptor = os.memfd_create("ckptd-progress")
        try:
            os.ftruncate(descriptor, _BYTES)
            page = cls(mmap.mmap(descriptor, _BYTES), descriptor)
        except OSError:
            os.close(descriptor)
            raise
        page.reset()
        return page

    def reset(self) -> None:
        """Another trainer is to be started."""
        self._page[: len(_MAGIC)] = _MAGIC
        self._write(StepProgress())

    def read(self) -> StepProgress:
        """What the trainer shows now; nothing if its script has written over it."""
        beats, step, running, stage = _FIELDS.unpack_from(self._page, len(_MAGIC))
        if self._page[: len(_MAGIC)] != _MAGIC or stage not in _STAGES:
            return StepProgress()
        return StepProgress(beats, step, bool(running), StepStage(stage))

    def begins(self, step: int) -> None:
        """A step begins."""
        self._write(StepProgress(self._shown.beats + 1, step, running=True))

    def reaches(self, stage: StepStage) -> None:
        """The running step has come to this stage."""
        self._write(self._shown._replace(stage=stage))

    def left(self, step: int) -> None:
        """The loop is left, after or in this step."""
        self._write(StepProgress(self._shown.beats, step))

    def _write(self, progress: StepProgress) -> None:
        self._shown = progress
        _FIELDS.pack_into(self._page, len(_MAGIC), *progress)


@cache
def inherited_page() -> ProgressPage | None:
    """That of this process's host; None: there is none.

    What this process starts does not find it. Whatever else may have got its number is not written to.
    """
    text = os.environ.pop(PAGE_VARIABLE, "")
    if not text.isdecimal():
        return None
    try:
        if os.pread(int(text), len(_MAGIC), 0) != _MAGIC:
            return None
        return ProgressPage(mmap.mmap(int(text), _BYTES))
    except (OSError, ValueError):
        return None
