"""Daemons that reach each other over IPv6."""

from __future__ import annotations

import pytest

from tests.ckptd.nodes import Net
from tests.ckptd.peers_harness import Job
from tests.ckptd.snapshots import IMAGE_BYTES
from tests.ports import free_ports

pytestmark = pytest.mark.timeout(90)


def require_ipv6() -> list[int]:
    """Two free ports; skips where there is no IPv6 loopback."""
    try:
        return free_ports(2, "::1")
    except OSError as error:
        pytest.skip(f"no IPv6 loopback on this machine: {error}")


@pytest.mark.parametrize(("data", "curve"), [("stream", True), ("zmq", False)])
def test_replicas_and_recovery_over_ipv6(data: str, curve: bool) -> None:
    ports = require_ipv6()
    of = {
        f"n{i}": {"peer_listen": f"tcp://[::1]:{port}", "peer_data_port": "0"} for i, port in enumerate(ports)
    }
    with Net(2, data=data, curve=curve, of=of).up() as net:
        job = Job(net, net.nodes, replicas=1)
        job.start()
        job.record(0, 1)
        job.await_replicas(1, 1)
        for node in net.nodes:
            assert node.saw("peers", "tcp://[::1]:")
            assert node.counters()["fabric.received_bytes"] >= IMAGE_BYTES  # 0 may have been passed over
        job.end()
        net[0].lose()
        net[0].launch()
        assert job.resume() == 1
        job.check_all()
        job.end()
