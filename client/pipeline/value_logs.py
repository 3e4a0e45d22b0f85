"""Where a rank that runs apart looks up what all ranks computed together: in a neighbour's log that
it is fed from, or in another rank's.

Few jobs compute such values, so the other ranks' logs are asked for when one is wanted, and not before.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ckptd.client.pipeline.upstream_feed import BringsLogs, FedLogs
from ckptd.core.recovery.localized_plan import Feed, RankPlan
from ckptd.core.slots.boundary import RecordKey
from ckptd.transport.control.messages import NodeCard

__all__ = ["ValueLogs"]


class ValueLogs:
    """For one thread; ``close`` gives back what was asked for.

    Args:
        mine: this rank's part of the plan.
        feeds: what it is fed from.
        cards: how the nodes that hold the logs are reached.
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
            DaemonUnavailable: no copy of it can be had any more.
            AttachRefused: there is no memory for it, or none of its holders answers.
        """
        for feed in self._mine.feeds:
            if feed.first <= iteration < feed.end:
                return self._feeds(feed.neighbour, iteration)
        for feed in self._mine.values:
            if feed.first <= iteration < feed.end:
                return self._other(feed, iteration)(feed.neighbour, iteration)
        return {}

    def _other(self, feed: Feed, iteration: int) -> FedLogs:
        """The log of a rank that is no neighbour, or that this one is not fed from."""
        if self._asked is None or self._asked[0] != iteration:
            self.close()
            pieces = {feed.neighbour: {iteration: feed.pieces[iteration - feed.first]}}
            self._asked = iteration, FedLogs(self._session, pieces, self._cards)
        return self._asked[1]

    def close(self) -> None:
        """Give back what was brought here."""
        asked, self._asked = self._asked, None
        if asked is not None:
            asked[1].close()
