"""Two stages of a pipeline, each with a daemon of its own that replicates to the other's."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.cluster.daemons import HostDaemon, exchange_keys
from tests.cluster.hosts import Cluster
from tests.e2e.bubble_stage import MICRO_BATCHES, STAGES
from tests.forked import Forked
from tests.forked_hosts import become

DEADLINE_S = 120


@pytest.mark.slow
def test_the_network_is_quiet_while_a_stage_computes_and_open_in_its_bubbles(tmp_path: Path) -> None:
    settings = {"memory": "64MiB", "replicas": "1", "peer_security": "plain"}
    with Cluster(STAGES, kind="loopback") as cluster:
        daemons = [HostDaemon(host, tmp_path, settings=settings) for host in cluster.hosts]
        exchange_keys(daemons)
        for daemon in daemons:
            daemon.start()
        words, env = ["-m", "tests.e2e.bubble_stage", "--meet", str(tmp_path / "meet")], {**os.environ}
        env["GLOO_SOCKET_IFNAME"] = "lo"
        stages = [
            Forked(become, [*words, "--rank", str(rank), "--endpoint", daemon.endpoint], env, env=env)
            for rank, daemon in enumerate(daemons)
        ]
        said = [stage.communicate(timeout=DEADLINE_S) for stage in stages]
        assert [stage.returncode for stage in stages] == [0] * STAGES, said
        found = [json.loads(out) for out, _ in said]
    for answers in found:
        iterations = len(answers["update"])
        assert iterations > 0, "no peer was behind in some iteration"
        assert answers["update"] == [False] * iterations
        assert answers["forward"] == [False] * iterations * MICRO_BATCHES
        # The last stage waits before forwards, the first one before backwards.
        assert sum(answers["wait"]) >= iterations
