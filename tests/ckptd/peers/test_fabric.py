"""What a node lets in at the ports on which peers reach it."""

from __future__ import annotations

import resource

import pytest

from ckptd.peers.fabric import port_limits
from ckptd.transport.tcp.stream_server import LIMITS

ENOUGH = 1 << 20


def test_no_limit_of_open_files_is_not_taken_for_a_small_one() -> None:
    """``RLIM_INFINITY`` is -1: a daemon that may open any number of files let in 8 connections on each
    port, and a run of ten nodes did not replicate.
    """
    unlimited = port_limits(resource.RLIM_INFINITY)
    assert unlimited == port_limits(ENOUGH)
    control, data = unlimited
    assert control.connections == 4096
    assert data == LIMITS


@pytest.mark.parametrize("descriptors", [1024, 4096, 65_536, ENOUGH])
def test_half_of_the_descriptors_at_most_are_for_the_connections_of_others(
    descriptors: int,
) -> None:
    limits = port_limits(descriptors)
    assert sum(each.connections + each.strangers for each in limits) <= descriptors * 0.55
    assert all(each.strangers_per_address <= each.strangers for each in limits)
