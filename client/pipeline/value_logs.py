"""The logs from which an isolated rank reads shared values: a neighbour's log that feeds it, or another
rank's log.

Few jobs compute such values, so other ranks' logs are fetched only when a value is needed.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ckptd.client.pipeline.upstream_feed import BringsLogs, FedLogs
from ckptd.core.recovery.localized_plan import Feed, RankPlan
from ckptd.core.slots.boundary import RecordKey
from ckptd.transport.messages import NodeCard

__all__ = ["ValueLogs"]


class ValueLogs:
    """Logs with shared values; for one thread. ``close`` releases the fetched logs.

    Args:
        mine: this rank's part of the plan.
        feeds: the logs that feed the rank.
        cards: the addresses of the nodes that hold the logs.
    """

    def __init__(
        self,
        session: BringsLogs,
        mine: RankPlan,
        feeds: FedLogs,
        cards: tuple[NodeCard, ...] = (),
    ) -> None:
        self._session, self._mine, self._feeds, self._cards = session, mine, feeds, cards
        self._asked: tuple[int, FedLogs] | None = None  # of the iteration that runs

    def __call__(self, iteration: int) -> Mapping[RecordKey, Tensor]:
        """A log of this iteration; empty if there is none.

        Raises:
            DaemonUnavailable: no copy is reachable any more.
            AttachRefused: no memory is available, or none of its holders answers.
        """
        for feed in self._mine.feeds:
            if feed.first <= iteration < feed.end:
                return self._feeds(feed.neighbour, iteration)
        for feed in self._mine.values:
            if feed.first <= iteration < feed.end:
                return self._other(feed, iteration)(feed.neighbour, iteration)
        return {}

    def _other(self, feed: Feed, iteration: int) -> FedLogs:
        """The log of a rank that does not feed this one."""
        if self._asked is None or self._asked[0] != iteration:
            self.close()
            logged = {feed.neighbour: {iteration: feed.pieces[iteration - feed.first]}}
            self._asked = iteration, FedLogs(self._session, logged, self._cards)
        return self._asked[1]

    def close(self) -> None:
        """Release the fetched log."""
        asked, self._asked = self._asked, None
        if asked is not None:
            asked[1].close()
