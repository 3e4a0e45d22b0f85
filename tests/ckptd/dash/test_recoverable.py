"""Where ranks could resume from each tier, as far as a node knows."""

from __future__ import annotations

import msgspec
import pytest

from ckptd.dash.recoverable import TierEnds, recoverable
from ckptd.transport import messages as m
from tests.ckptd.dash import fabricated as made


def replication(*targets: m.TargetStatus, wanted: int = 1, kind: str = "snapshots") -> m.ReplicationStatus:
    return m.ReplicationStatus(*made.NAME, 0, 1, 100, targets, kind, wanted)


def tiers(
    *replications: m.ReplicationStatus, rank: int = 0, committed: int | None = None, ring: bool = True
) -> TierEnds:
    ranks = () if committed is None else (made.durable(0, committed),)
    status = made.status(durable=None if committed is None else m.DurableStatus("s3://b", 1, 0, 0, ranks))
    snapshots = m.Snapshots((made.ring(0, 2),) if ring else ())
    return recoverable(status, snapshots, made.peers(ranks=replications)).at(*made.NAME, rank)


def test_a_tier_that_is_not_used_is_none() -> None:
    assert tiers() == TierEnds(memory=made.NEWEST)
    assert tiers(ring=False) == TierEnds()
    assert tiers(replication(wanted=0)) == TierEnds(memory=made.NEWEST)


@pytest.mark.parametrize(
    ("targets", "end"),
    [
        ((), -1),
        ((made.target("n1", 90, alive=False),), -1),
        ((made.target("n1", 90), made.target("n2", 100)), 100),
        ((made.target("n1", 90), made.target("n2", 100, alive=False)), 90),
    ],
)
def test_of_replicas_the_best_one_that_answers_counts(targets: tuple[m.TargetStatus, ...], end: int) -> None:
    assert tiers(replication(*targets)).peers == end


def test_a_replica_of_a_log_is_none_of_snapshots() -> None:
    assert tiers(replication(made.target("n1", 100), kind="log")).peers is None


def test_a_committed_checkpoint_has_all_ranks() -> None:
    assert tiers(committed=80).storage == 80
    assert tiers(committed=80, rank=1) == TierEnds(storage=80)
    assert tiers(committed=-1).storage == -1


def test_a_rank_without_a_complete_suffix_is_recoverable_at_none() -> None:
    ring = msgspec.structs.replace(made.ring(0, 2), suffix=(-1, -1))
    found = recoverable(made.status(), m.Snapshots((ring,)), made.peers())
    assert found.at(*made.NAME, 0).memory == -1
