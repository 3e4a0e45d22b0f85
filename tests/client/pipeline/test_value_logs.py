"""Logs that are looked up for what all ranks computed together: asked for when they are wanted, and
given back.
"""

from __future__ import annotations

import torch

from ckptd.client.pipeline.upstream_feed import FedLogs
from ckptd.client.pipeline.value_logs import ValueLogs
from ckptd.core.recovery.localized_plan import Feed, RankKind, RankPlan
from tests.ckptd.nodes import Net
from tests.ckptd.running import eventually
from tests.client.pipeline.test_upstream_feed import SENT, Job, job, log, pair, sent_in

__all__ = ["job", "pair"]


def test_the_log_of_a_rank_that_is_no_neighbour_is_brought_when_it_is_wanted(job: Job, pair: Net) -> None:
    with job.rank(pair[0], 0) as sender:
        log(sender, 7, 8)
        card = sender.session.card
    pieces, _ = job.logged(pair[0])
    feeds = (Feed(0, 7, 8, (pieces[7],)),)
    values = (Feed(0, 8, 9, (pieces[8],)),)
    mine = RankPlan(RankKind.PARKED, 7, 7, (), feeds, values)
    with job.rank(pair[1], 1) as reader:
        fed = FedLogs(reader.session, mine.logs, (card,))
        logs = ValueLogs(reader.session, mine, fed, (card,))
        assert torch.equal(logs(7)[SENT], sent_in(0, 7)), "as it is fed"
        assert len(job.copies(pair[1])) == 1, "nothing more was asked for"
        for _ in range(2):
            assert torch.equal(logs(8)[SENT], sent_in(0, 8))
        assert len(job.copies(pair[1])) == 2
        assert logs(9) == {}
        logs.close()
        fed.close()
        eventually(lambda: not job.copies(pair[1]), "all copies are given back")
