"""What a rank is told before it runs without its neighbours, and who wants the network. The rest of `PipelinePart` is played
by whole jobs.
"""

from __future__ import annotations

from typing import Any, cast
from unittest.mock import Mock

import pytest

from ckptd.client.capture.stage_shapes import StageShapes
from ckptd.client.pipeline.upstream_feed import FedLogs, ValueLogs
from ckptd.client.pipeline_support import PipelinePart
from ckptd.client.recovery.localized_recovery import LocalizedStart
from ckptd.client.stats import Stats
from ckptd.core.recovery.localized_plan import Feed, LocalizedPlan, RankKind, RankPlan
from ckptd.errors import DaemonUnavailable

KNOWN: StageShapes = {"inputs": [], "outputs": []}


def start(*feeds: Feed) -> LocalizedStart:
    """Rank 1 replays from iteration 8 on, the others begin at 12."""
    mine = RankPlan(RankKind.REPLAYS, 8, 11, (), feeds)
    plan = LocalizedPlan(12, 0, {1: mine}, "", {})
    nothing = cast(Any, None)
    fed = FedLogs(nothing, {})
    return LocalizedStart(plan, mine, [], fed, ValueLogs(nothing, mine, fed), 12)


def test_a_stage_that_would_ask_its_neighbours_is_not_run_without_them() -> None:
    """It waited for ever: nobody answers while it rehearses alone."""
    part = PipelinePart(Stats())
    with pytest.raises(DaemonUnavailable, match="would ask its neighbours"):
        part.run_isolated(1, start(Feed(0, 8, 12, ())), {0: KNOWN, 1: None})


def test_a_stage_that_asks_nobody_may_not_know() -> None:
    assert PipelinePart(Stats()).run_isolated(1, start(), {0: KNOWN, 1: None}) == {0: KNOWN}


def test_the_network_is_quiet_as_long_as_anybody_wants_that() -> None:
    """A bubble in a user's block does not end what the user wants."""
    part, memory = PipelinePart(Stats()), Mock()
    wishes = [("user", True), ("bubbles", True), ("bubbles", False), ("bubbles", True), ("user", False)]
    for who, wanted in (*wishes, ("bubbles", False), ("bubbles", False)):
        part.want_quiet(memory, who, wanted)
    asked = [call.args[0] for call in memory.table.ask_quiet.call_args_list]
    assert asked == [True, True, True, True, True, False, False]
