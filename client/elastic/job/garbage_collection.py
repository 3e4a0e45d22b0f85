"""Worlds that are over give their memory back: once the world that went on from them can be had
without them, or at once where nothing was ever promised of them. Otherwise starts that fail one
after the other would fill the memory, and the world that comes through at last would have none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from ckptd.client.daemon_link.mapped_segment import SlotFile
from ckptd.client.elastic.incarnation.image_inventory import run_of_incarnation, world_files
from ckptd.client.log_lines import get_logger
from ckptd.core.slots.segment_names import FILE_ENDS
from ckptd.errors import DaemonUnavailable, SegmentError
from ckptd.launch import connect
from ckptd.transport.control.messages import Done, Forget
from ckptd.transport.control.wire import ControlClient, RefusedError, RequestTimeout, WireError

__all__ = ["GarbageCollection", "floor_of", "forget", "needless"]

logger = get_logger(__name__)

_TIMEOUT_S = 10.0
_LOOK_STEPS = 5


def floor_of(folder: Path, job: str, run: str, rank: int) -> int:
    """The newest iteration at which every rank of a run has what was promised, as this rank's
    daemon has told; -1: none.
    """
    found = -1
    for path in folder.glob(f"{job}~{run}~r{rank}~g*{FILE_ENDS['snapshots']}"):
        try:
            found = max(found, SlotFile(path, "snapshots").ring_hint.floor)
        except (OSError, SegmentError) as error:
            logger.info("%s tells no floor: %s", path.name, error)
    return found


def needless(folder: Path, job: str, run: str, chosen: int) -> list[str]:
    """The runs of worlds that need not be kept while another one begins.

    Kept are the world ``chosen`` from which it goes on (-1: from none), and the newest one that was
    held as often as it was to be: the first may be parked in one place only, and the loss of that
    is not to lose what was promised before.
    """
    floors: dict[int, int] = {}
    for world, file in world_files(folder, job, run):
        own = (
            file.path.suffix == FILE_ENDS["snapshots"]
        )  # nobody tells floors to replicas, or to what is parked
        floors[world] = max(floors.get(world, -1), file.ring_hint.floor if own else -1)
    promised = max((world for world, floor in floors.items() if floor >= 0), default=-1)
    return [run_of_incarnation(run, world) for world in sorted(floors) if world not in (chosen, promised)]


def forget(find_endpoint: Callable[[], str], job: str, runs: Sequence[str]) -> None:
    """Free what this node holds of these runs; where the daemon cannot, they expire by themselves."""
    try:
        with connect(find_endpoint(), _TIMEOUT_S) as client:
            for run in runs:
                _forget_one(client, job, run)
    except (RequestTimeout, WireError, DaemonUnavailable, OSError) as error:
        logger.warning("memory of earlier worlds is not freed: %s; it expires by itself", error)


def _forget_one(client: ControlClient, job: str, run: str) -> None:
    try:
        client.ask(Forget(job, run), Done)
        logger.info("what this node held of %s is freed", run)
    except RefusedError as error:  # the others may be freed all the same
        logger.warning("the memory of %s is not freed: %s; it expires by itself", run, error)


class GarbageCollection:
    """Frees what this node holds of earlier worlds; of the ranks on a node one does so.

    Args:
        world: the one that goes on.
        start: where it began: a state of it that every rank has beyond there makes the worlds
            before needless.
    """

    def __init__(
        self,
        find_endpoint: Callable[[], str],
        folder: Path,
        job: str,
        run: str,
        world: int,
        start: int,
        rank: int,
    ) -> None:
        self._find_endpoint, self._folder = find_endpoint, folder
        self._job, self._run, self._world, self._start, self._rank = job, run, world, start, rank
        self._looked = 0
        self._thread: threading.Thread | None = None
        self.over = not self.earlier()

    def earlier(self) -> list[str]:
        """The runs of earlier worlds of which there are files here."""
        worlds = {world for world, _ in world_files(self._folder, self._job, self._run)}
        return [run_of_incarnation(self._run, world) for world in sorted(worlds) if world < self._world]

    def step_over(self) -> None:
        """Look, now and then, whether they are needless; what is to be done then is done beside training."""
        self._looked += 1
        if self._looked % _LOOK_STEPS == 0:
            self._look()

    def close(self) -> None:
        """Look once more, and wait for what is under way."""
        self._look()
        if self._thread is not None:
            self._thread.join(_TIMEOUT_S)

    def _look(self) -> None:
        if self.over:
            return
        run = run_of_incarnation(self._run, self._world)
        if floor_of(self._folder, self._job, run, self._rank) > self._start:
            self.over = True
            self._thread = threading.Thread(target=self._forget, name="ckptd-retire", daemon=True)
            self._thread.start()

    def _forget(self) -> None:
        forget(self._find_endpoint, self._job, self.earlier())
