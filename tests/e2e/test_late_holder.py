"""A job that restarts before a node that took part is back: it waits for it, by name, and then goes
on at the exact bits.
"""

from __future__ import annotations

import pytest

from tests.ckptd.nodes import Net
from tests.e2e.compare import differences
from tests.e2e.harness import Jobs
from tests.e2e.ranks import KILL_AT, Ranks

_ALONE = ("--set", "replicas=0")


@pytest.mark.slow
def test_a_job_waits_for_the_node_that_a_restarted_daemon_remembers(jobs: Jobs, run: str) -> None:
    """Rank 0 dies. The node of rank 1 goes down, and the daemon of the other one is restarted: who
    took part was in its memory alone. The job comes back with a spare in place of rank 1's node:
    nobody counted as missing, what rank 0 had was dropped, and the job began at iteration 0; what
    the late node held was of an abandoned history. Now it stops, and says whom it misses; when that
    node is back the job goes on as if nothing had happened.
    """
    references = Ranks(jobs, run, *_ALONE, daemon="none").end()
    with Net(3, peer_deadline_s="2").up() as net:
        first, late, spare = net.nodes

        def on(*nodes: str) -> dict[int, tuple[str, ...]]:
            return {rank: ("--daemon", node) for rank, node in enumerate(nodes)}

        Ranks(jobs, run, *_ALONE, killed=0, each=on(first.endpoint, late.endpoint)).end_by_the_death_of(0)
        late.kill()
        first.kill()
        first.launch()
        moved = on(first.endpoint, spare.endpoint)
        told = Ranks(jobs, run, *_ALONE, each=moved).end_by_a_failure()
        assert f"node {late.name} took part in the run before and did not answer" in told
        assert f"on node {first.name}" in told
        assert f"`ckptctl forget e2e {run}`" in told
        late.launch()
        outs = Ranks(jobs, run, "--seed", "7", *_ALONE, each=moved).end()
        for reference, out in zip(references, outs, strict=True):
            assert jobs.report(out)["resumed_from"] in (KILL_AT - 1, KILL_AT)
            assert differences(reference, out) == []
        assert not any(node.saw("starting_over") for node in net.nodes)
