"""What of earlier worlds may be deleted: nothing before the newest one has a verified checkpoint of its own."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from ckptd.storage.checkpoints.catalog import build_catalog
from ckptd.storage.checkpoints.incarnation_retention import (
    IncarnationRemoval,
    StoredIncarnation,
    plan_incarnations,
)
from ckptd.storage.checkpoints.names import (
    CheckpointId,
    ManifestName,
    ObjectName,
    PinName,
    RunName,
    run_of_incarnation,
)
from ckptd.storage.checkpoints.retention import References, RetentionPolicy
from ckptd.storage.stores.objects import ObjectInfo

JOB, RUN, RANKS = "moe", "r1", 2
HOUR = 3600 * 10**9
NOW = 1000 * HOUR
OLD = NOW - 100 * HOUR
POLICY = RetentionPolicy(keep_last=2, grace_ns=24 * HOUR)


def world(
    number: int,
    *ends: int,
    at: int = OLD,
    damaged: Collection[int] = (),
    incomplete: Collection[int] = (),
    pinned: Collection[int] = (),
    unread: bool = False,
) -> StoredIncarnation:
    """With dense checkpoints of two ranks that end there."""
    run = run_of_incarnation(RUN, number)
    listing = [ObjectInfo(RunName(JOB, run).key, 5, at, "")]
    references: dict[str, References] = {}
    verified = set()
    for end in ends:
        name = CheckpointId(end, 7, -1, f"{end:032x}")
        if end in pinned:
            listing.append(ObjectInfo(PinName(JOB, run, end, 7, name.agreement).key, 0, at, ""))
        if end not in damaged:
            verified.add(name)
        for rank in range(1 if end in incomplete else RANKS):
            stored = ObjectName(JOB, run, end, rank, 7, end, "0" * 16).key
            key = ManifestName(JOB, run, name, rank, RANKS).key
            listing += [ObjectInfo(stored, 1000, at, ""), ObjectInfo(key, 10, at, "")]
            references[key] = References(end, frozenset([stored]), f"run of {number}")
    return StoredIncarnation(build_catalog(listing, JOB, run), verified, {} if unread else references)


def plans(
    newest: StoredIncarnation, *earlier: StoredIncarnation, policy: RetentionPolicy = POLICY
) -> dict[str, IncarnationRemoval]:
    found = plan_incarnations(newest, {w.name.number: w for w in earlier}, policy, now_ns=NOW)
    return {run_of_incarnation(RUN, plan.number): plan for plan in found}


def gone(plan: IncarnationRemoval) -> set[int]:
    return {int(deletion.key.split("/")[2]) for deletion in plan.manifests}


@pytest.mark.parametrize(
    "newest",
    [
        world(9),
        world(9, 40, incomplete=[40]),
        world(9, 40, damaged=[40]),
        world(9, 40, at=NOW - 60 * 10**9),
    ],
    ids=["none", "incomplete", "damaged", "not yet settled"],
)
def test_nothing_goes_before_the_newest_world_has_a_checkpoint_that_counts(
    newest: StoredIncarnation,
) -> None:
    assert plans(newest, world(5, 30, 50)) == {}


def test_what_was_replaced_goes_to_the_last_object_and_its_names_too() -> None:
    """Whatever iterations it had come to: the newest world is the history of the job."""
    found = plans(world(9, 40, 44), world(5, 30, 50))["r1.w5"]
    assert gone(found) == {30, 50}
    assert {int(d.key.split("/")[2]) for d in found.objects} == {30, 50}
    assert [d.key for d in found.names] == ["moe/r1.w5/run.json", "moe/r1/worlds/000000000005"]
    assert found.manifests[0].reason == "incarnation 9 replaced it"


def test_so_many_are_kept_over_all_worlds_and_those_are_whole() -> None:
    """While the newest world has one, there is one before it to fall back to."""
    found = plans(world(9, 40), world(5, 30, 38, damaged=[38]), world(3, 20))
    assert gone(found["r1.w5"]) == {38}
    assert found["r1.w5"].names == ()
    assert {int(d.key.split("/")[2]) for d in found["r1.w5"].objects} == {38}
    assert gone(found["r1.w3"]) == {20}
    assert found["r1.w3"].names


def test_what_is_pinned_and_what_the_policy_names_stays() -> None:
    policy = RetentionPolicy(keep_last=1, keep_every=20, grace_ns=24 * HOUR)
    found = plans(world(9, 40), world(5, 4, 20, 28, 30, pinned=[30]), policy=policy)["r1.w5"]
    assert gone(found) == {28}, "of every 20 iterations the first stays"
    assert found.names == ()


def test_what_a_node_may_be_writing_into_a_world_that_is_over_stays_for_the_grace_time() -> None:
    young = world(5, 30, at=NOW - HOUR, incomplete=[30])
    found = plans(world(9, 40, 44), young)["r1.w5"]
    assert (found.manifests, found.objects, found.names) == ((), (), ())


def test_no_object_goes_where_a_manifest_that_stays_could_not_be_read() -> None:
    found = plans(world(9, 40, 44), world(5, 28, 30, pinned=[30], unread=True))["r1.w5"]
    assert gone(found) == {28}
    assert found.objects == ()
