"""What elastic jobs have told this daemon of their placement: the last of each run, for `ckptctl elastic`.

Nothing here is needed for a recovery, so it lives in the daemon's own memory and is gone with it;
trainers tell it anew with each measured load. Time is an argument.
"""

from __future__ import annotations

from collections import OrderedDict

from ckptd.core.sessions import RankKey
from ckptd.transport.messages import Elastic, ElasticTold, SeenElastic

__all__ = ["ElasticFacts"]

RUNS_MAX = 16  # a placement of 64 layers on 1,024 nodes is some megabytes


class ElasticFacts:
    """The last placement of every run; of too many runs, those told of most recently."""

    def __init__(self) -> None:
        self._told: OrderedDict[tuple[str, str], tuple[int, float, Elastic]] = OrderedDict()

    def tell(self, key: RankKey, elastic: Elastic, now_s: float) -> None:
        """A rank tells of its run: what was told before, by whichever rank, is replaced."""
        run = key.job, key.run
        self._told[run] = key.rank, now_s, elastic
        self._told.move_to_end(run)
        while len(self._told) > RUNS_MAX:
            self._told.popitem(last=False)

    def forget(self, job: str, run: str) -> None:
        """The run is over."""
        self._told.pop((job, run), None)

    def seen(self, job: str, run: str, now_s: float) -> SeenElastic:
        """What is known, by name; empty names mean all."""
        return SeenElastic(
            tuple(
                ElasticTold(name, its_run, rank, max(0.0, now_s - told_s), elastic)
                for (name, its_run), (rank, told_s, elastic) in sorted(
                    self._told.items(), key=lambda item: item[0]
                )
                if job in ("", name) and run in ("", its_run)
            )
        )
