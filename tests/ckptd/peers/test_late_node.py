"""A node that is late when its job starts again: nothing is forgotten meanwhile, and all of it is there afterwards."""

from __future__ import annotations

import pytest

from ckptd.errors import DaemonUnavailable
from tests.ckptd.nodes import Net
from tests.ckptd.peers_harness import Job
from tests.ckptd.running import eventually

pytestmark = pytest.mark.timeout(90)


def test_the_only_holder_is_late() -> None:
    """Rank 1 lived on node 1, without replicas; its job starts again on node 2 while node 1 still boots."""
    with Net(3, peer_deadline_s="2").up() as net:
        first, late, spare = net.nodes
        job = Job(net, [first, late], replicas=0)
        job.start()
        job.record(0)
        job.record(1)
        job.end()
        late.kill()
        eventually(lambda: first.saw("peer_lost", late.name), "it is missed")
        again = Job(net, [first, spare], replicas=0)
        again.written = job.written
        again.attach()
        with pytest.raises(
            DaemonUnavailable, match=f"node {late.name} took part in the run before"
        ):
            again.recover()
        again.end()
        assert again.check_all() == 0, "no replicas; what is there is as it was"
        late.launch()
        eventually(lambda: first.saw("peer_back", late.name), "it is back")
        assert again.resume() == 1
        assert f"from {late.name}" in spare.events("fetched")[0].message
        again.end()
        assert not any(node.saw("starting_over") for node in net.nodes)
