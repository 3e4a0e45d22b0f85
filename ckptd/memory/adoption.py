"""The segment files that an earlier daemon left: taken over, put aside when they are damaged, tried
again when they cannot be had now.

Only what stands in a file proves that it is damaged. A daemon that has no descriptor or no memory
left, or a filesystem that fails for a moment, says nothing about it: such a file *waits* under its
own name and is tried again. A file that was put aside as ``*.bad`` comes back under its name when
it turns out to be whole, unless that rank has newer segments: then its run went on without it.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ckptd.core.slots.segment_format import SegmentDescriptor
from ckptd.errors import SegmentError
from ckptd.event_log import EventLog
from ckptd.memory.segment_file import Segment, open_segment

__all__ = ["ASIDE", "Adopted", "Adoption", "tell_adopted"]

ASIDE = ".bad"  # the end of what was put aside
_SPARE_DESCRIPTORS = 64  # for the socket, for peers and for trainers: segments wait before these are gone
# Not the path of a regular file: no segment of ours, and none later either.
_NO_FILE = frozenset({errno.ELOOP, errno.EISDIR, errno.ENXIO})


@dataclass(slots=True)
class Adopted:
    """What became of the files at one look."""

    segments: list[Segment] = field(default_factory=list)
    bad: list[tuple[Path, str]] = field(default_factory=list)  # put aside under this name, and why
    back: list[Path] = field(default_factory=list)  # had been put aside, and are whole
    waiting: list[tuple[Path, str]] = field(default_factory=list)  # told once, when it begins
    damaged: list[tuple[Segment, int]] = field(default_factory=list)  # slots of replicas, freed

    def and_then(self, later: Adopted) -> Adopted:
        """Both together."""
        return Adopted(
            self.segments + later.segments,
            self.bad + later.bad,
            self.back + later.back,
            self.waiting + later.waiting,
        )


class Adoption:
    """The files with certain ends in one folder.

    Args:
        superseded: whether what had been put aside is older than what there is of its rank.
    """

    def __init__(
        self,
        folder: Path,
        ends: Collection[str],
        *,
        superseded: Callable[[SegmentDescriptor], bool] = lambda told: False,
    ) -> None:
        self._folder, self._ends, self._superseded = folder, ends, superseded
        self._waiting: set[Path] = set()

    def begin(self) -> Adopted:
        """Look at every file but those that were put aside."""
        return self._look(self._named(""))

    def come_back(self) -> Adopted:
        """Look at what was put aside; what `begin` found is known by now."""
        return self._look(self._named(ASIDE))

    def again(self) -> Adopted:
        """Look at those that waited."""
        return self._look(sorted(self._waiting)) if self._waiting else Adopted()

    def waits_for(self, prefix: str) -> list[str]:
        """The names of the files that wait and begin with this."""
        return sorted(path.name for path in self._waiting if path.name.startswith(prefix))

    def forget(self, prefix: str) -> int:
        """Delete those that wait and begin with this; how many there were."""
        gone = {path for path in self._waiting if path.name.startswith(prefix)}
        for path in gone:
            path.unlink(missing_ok=True)
        self._waiting -= gone
        return len(gone)

    def _named(self, suffix: str) -> list[Path]:
        return sorted(p for end in self._ends for p in self._folder.glob(f"*{end}{suffix}"))

    def _look(self, paths: Iterable[Path]) -> Adopted:
        found = Adopted()
        for path in paths:
            try:
                self._open(path, found)
            except FileNotFoundError:
                self._waiting.discard(path)  # somebody removed it
            except OSError as error:
                if path not in self._waiting:
                    self._waiting.add(path)
                    found.waiting.append((path, error.strerror or str(error)))
        return found

    def _open(self, path: Path, found: Adopted) -> None:
        if path.name.endswith(ASIDE):
            self._restore(path, found)
            return
        try:
            _check_descriptors()
            segment = open_segment(path)
        except (OSError, ValueError, SegmentError) as error:
            if isinstance(error, OSError) and error.errno not in _NO_FILE:
                raise
            aside = path.with_name(path.name + ASIDE)
            path.replace(aside)
            found.bad.append((aside, str(error)))
        else:
            found.segments.append(segment)
        self._waiting.discard(path)

    def _restore(self, path: Path, found: Adopted) -> None:
        """A file that was put aside, if it is whole and its place is free."""
        name = path.with_name(path.name.removesuffix(ASIDE))
        self._waiting.discard(path)
        if name.exists():
            return
        _check_descriptors()
        try:
            segment = open_segment(path, named=name.name)
        except (ValueError, SegmentError):
            return
        except OSError as error:
            if error.errno in _NO_FILE:
                return
            raise
        if self._superseded(segment.descriptor):
            segment.close()
            return
        path.rename(name)
        segment.path = name
        found.segments.append(segment)
        found.back.append(name)


def tell_adopted(events: EventLog, found: Adopted) -> None:
    """Say what was out of the ordinary."""
    for path, why in found.bad:
        events.add("error", "bad_segment", f"{path.name} is put aside: {why}")
    for path, why in found.waiting:
        events.add(
            "error",
            "segment_waits",
            f"{path.name} cannot be opened now ({why}): it stays as it is, is tried again every second, and "
            "its run waits for it; mend the cause, or give it up with `ckptctl forget JOB RUN`",
        )
    for path in found.back:
        events.add("info", "segment_back", f"{path.name} had been put aside, and is whole")


def _check_descriptors() -> None:
    """A segment takes two; the last ones are not for segments.

    Raises:
        OSError: too few are left.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return
    used = len(os.listdir("/proc/self/fd"))
    if used + _SPARE_DESCRIPTORS > limit:
        text = f"{used} of {limit} descriptors are in use; raise the limit of open files"
        raise OSError(errno.EMFILE, text)
