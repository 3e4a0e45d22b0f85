"""A trainer that tells its daemon of members that cannot be: refused with a reason and an event, and what stands stays.

Each of these made a tree of members in which no floor was ever announced, or two nodes that each took a rank for theirs.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckptd.transport import messages as m
from ckptd.transport.wire import RefusedError
from tests.ckptd.running import DaemonProcess, attach, reserve, running_daemon


def member(node: str, *ranks: int) -> m.Member:
    return m.Member(m.NodeCard(node), ranks)


def events(daemon: DaemonProcess) -> list[str]:
    return [event["kind"] for event in json.loads(daemon.ctl("events", "--json").stdout)["events"]]


def test_members_that_cannot_be_are_refused_and_change_nothing(tmp_path: Path) -> None:
    with running_daemon() as daemon, daemon.client() as client:
        attach(client)
        reserve(client)
        here = client.ask(m.GetStatus(), m.Status).node_id
        good = m.Join(1 << 12, -1, (member(here, 0),))
        client.ask(good, m.Done)
        (record,) = daemon.segment_dir.glob("*.run")
        stands = record.read_bytes()
        for members, why in (
            ((member(here, 0), member(here, 0)), here),
            ((member(here, 0), member("other", 0)), "rank 0"),
            ((member(here, 0, 7),), "7"),
        ):
            with pytest.raises(RefusedError, match=why) as refused:
                client.ask(m.Join(2 << 12, -1, members), m.Done)
            assert refused.value.code == m.RefusalCode.BAD_MESSAGE
        with pytest.raises(RefusedError, match="is over") as refused:
            client.ask(m.Join(1, -1, good.members), m.Done)
        assert refused.value.code == m.RefusalCode.STALE_EPOCH
        assert record.read_bytes() == stands
        assert events(daemon).count("refused.members") == 3
        client.ask(good, m.Done)
