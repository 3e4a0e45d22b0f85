"""What may be deleted, and above all what may not."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.storage.checkpoints.catalog import Catalog, build_catalog
from ckptd.storage.checkpoints.names import (
    CheckpointId,
    ManifestName,
    ObjectName,
    PinName,
    RunName,
    run_of_incarnation,
)
from ckptd.storage.checkpoints.retention import (
    IncarnationRemoval,
    References,
    RetentionPlan,
    RetentionPolicy,
    StoredIncarnation,
    choose_checkpoints,
    plan_incarnations,
    plan_retention,
)
from ckptd.storage.stores.objects import ObjectInfo

JOB, RUN = "moe", "r1"
HOUR = 3600 * 10**9
NOW = 1000 * HOUR
OLD = NOW - 100 * HOUR
POLICY = RetentionPolicy(keep_last=2, grace_ns=24 * HOUR)


class World:
    """A run in a store, as keys only: what was committed of what, and when."""

    def __init__(self, world_size: int = 2) -> None:
        self.world_size = world_size
        self.listing: dict[str, ObjectInfo] = {}
        self.references: dict[str, References] = {}

    def object(
        self, iteration: int, rank: int = 0, *, epoch: int = 7, at: int = OLD, tag: str = "0" * 16
    ) -> str:
        key = ObjectName(JOB, RUN, iteration, rank, epoch, iteration, tag).key
        self.listing.setdefault(key, ObjectInfo(key, 1000, at, ""))
        return key

    def checkpoint(
        self,
        end: int,
        *,
        start: int | None = None,
        epoch: int = 7,
        epoch_start: int = -1,
        at: int = OLD,
        ranks: Iterable[int] | None = None,
        also: Collection[str] = (),
        run_id: str = "a",
    ) -> CheckpointId:
        """Manifests of these ranks (all), each with an object of its own, ``also`` with these."""
        begin = end - 1 if start is None else start
        agreement = f"{run_id}{end * 100 + epoch:031x}"
        name = CheckpointId(end, epoch, epoch_start, agreement)
        for rank in range(self.world_size) if ranks is None else ranks:
            own = {self.object(i, rank, epoch=epoch, at=at) for i in range(begin, end + 1)}
            key = ManifestName(JOB, RUN, name, rank, self.world_size).key
            self.listing[key] = ObjectInfo(key, 10, at, "")
            self.references[key] = References(begin, frozenset(own | set(also)), run_id)
        return name

    def pin(self, name: CheckpointId) -> None:
        key = PinName(JOB, RUN, name.end, name.epoch, name.agreement).key
        self.listing[key] = ObjectInfo(key, 0, OLD, "")

    @property
    def catalog(self) -> Catalog:
        return build_catalog(self.listing.values(), JOB, RUN)

    def plan(
        self,
        verified: Collection[CheckpointId],
        policy: RetentionPolicy = POLICY,
        *,
        now: int = NOW,
        unread: Collection[str] = (),
    ) -> RetentionPlan:
        references = {k: v for k, v in self.references.items() if k not in unread}
        return plan_retention(self.catalog, policy, verified=verified, references=references, now_ns=now)

    def carry_out(self, plan: RetentionPlan, steps: int | None = None) -> None:
        """As far as ``steps`` deletions (all)."""
        for deletion in (*plan.manifests, *plan.objects)[:steps]:
            del self.listing[deletion.key]


def gone(plan: RetentionPlan | IncarnationRemoval) -> set[int]:
    """The ends of the checkpoints that go."""
    return {int(deletion.key.split("/")[2]) for deletion in plan.manifests}


def test_the_last_ones_stay() -> None:
    world = World()
    ids = [world.checkpoint(end) for end in (10, 20, 30, 40)]
    plan = world.plan(ids)
    assert gone(plan) == {10, 20}
    assert plan.kept == {ids[3]: "one of the last 2", ids[2]: "one of the last 2"}
    assert {int(d.key.split("/")[2]) for d in plan.objects} == {9, 10, 19, 20}
    assert plan.freed_bytes == 4 * 10 + 8 * 1000
    assert plan.manifests[0].reason.startswith("replaced by iteration 40 (epoch 7")
    assert plan.objects[0].reason == ("no manifest refers to it, and the newest checkpoint begins at 39")
    assert plan.notes == ()


def test_nothing_goes_unless_something_newer_is_verified() -> None:
    world = World()
    ids = [world.checkpoint(end) for end in (10, 20, 30, 40)]
    assert world.plan([]).manifests == ()
    assert world.plan([]).objects == ()
    only = world.plan(ids[:1])
    assert only.manifests == ()
    assert only.kept[ids[0]] == "the newest verified one"
    assert only.kept[ids[1]] == "no newer one is verified (long enough ago)"
    assert gone(world.plan(ids[1:2])) == {10}


def test_what_was_replaced_just_now_stays_for_a_while() -> None:
    """The newest one is too young to replace anything; the one before it replaces what is older."""
    world = World()
    ids = [world.checkpoint(end) for end in (10, 20)]
    world.checkpoint(15, ranks=[0])
    ids += [world.checkpoint(30, at=NOW - 10**9)]
    policy = RetentionPolicy(keep_last=1)
    assert gone(world.plan(ids, policy)) == {10, 15}
    later = world.plan(ids, policy, now=NOW + policy.settle_ns)
    assert gone(later) == {10, 15, 20}
    young = World()
    young.checkpoint(15, ranks=[0])
    young.checkpoint(30, at=NOW - 10**9)
    assert gone(young.plan([], policy)) == set()
    assert gone(young.plan([], policy, now=NOW + policy.settle_ns)) == {15}


def test_the_newest_verified_one_stays_although_others_are_newer() -> None:
    world = World()
    ids = [world.checkpoint(end) for end in (10, 20, 30, 40, 50)]
    plan = world.plan(ids[:2], RetentionPolicy(keep_last=1))
    assert gone(plan) == {10}
    assert set(plan.kept) == set(ids[1:])


def test_other_reasons_to_stay() -> None:
    world = World()
    ids = [world.checkpoint(end) for end in (95, 105, 150, 199, 201, 300, 310, 320)]
    young = world.checkpoint(330, at=NOW - HOUR)
    last = world.checkpoint(340)
    world.pin(ids[2])
    policy = RetentionPolicy(keep_last=1, keep_every=100, keep_younger_than_ns=2 * HOUR)
    plan = world.plan([last], policy)
    assert plan.kept == {
        last: "one of the last 1",
        young: "young",
        ids[0]: "the first of 100 iterations",
        ids[1]: "the first of 100 iterations",
        ids[4]: "the first of 100 iterations",
        ids[5]: "the first of 100 iterations",
        ids[2]: "pinned",
    }
    world.carry_out(plan)
    assert world.plan([last], policy).freed_bytes == 0  # which is first does not change by deleting


def test_an_unfinished_checkpoint_goes_when_a_newer_one_is_committed_and_time_has_passed() -> None:
    world = World()
    kept = world.checkpoint(50)
    world.checkpoint(40, ranks=[1])
    world.checkpoint(45, ranks=[0], at=NOW - HOUR)
    world.checkpoint(60, ranks=[0])
    plan = world.plan([kept])
    assert gone(plan) == {40}
    assert plan.manifests[0].reason.startswith("incomplete (1 of 2 ranks are missing: 0), and iter")
    assert sorted(plan.kept.values())[0:2] == [
        "incomplete, and no newer one is committed (long enough ago)",
        "incomplete, within the grace time",
    ]


def test_an_unfinished_checkpoint_of_a_later_history_stays() -> None:
    world = World()
    world.checkpoint(50, epoch=7)
    late = world.checkpoint(45, epoch=9, epoch_start=50, ranks=[0])
    assert world.plan([], now=NOW).kept[late] == "incomplete, and no newer one is committed (long enough ago)"


def test_a_stale_checkpoint_goes_when_its_successor_history_is_verified() -> None:
    world = World()
    stale = world.checkpoint(30)
    new = world.checkpoint(25, epoch=9, epoch_start=20)
    assert "no checkpoint of a later history is verified" in world.plan([]).kept[stale]
    assert "no checkpoint of a later history is verified" in world.plan([stale]).kept[stale]
    plan = world.plan([new])
    assert gone(plan) == {30}
    assert plan.manifests[0].reason.startswith("stale: a later history began at iteration 20")
    assert {int(d.key.split("/")[2]) for d in plan.objects} == {29, 30}


def test_a_checkpoint_that_has_just_become_stale_stays_for_the_grace_time() -> None:
    """A writer that has not heard of the other history yet may refer to its objects."""
    world = World()
    stale = world.checkpoint(30)
    new = world.checkpoint(25, epoch=9, epoch_start=20, at=NOW - HOUR)
    assert world.plan([new]).kept[stale].endswith("within the grace time")
    assert world.plan([new]).freed_bytes == 0


def test_a_pinned_stale_checkpoint_stays() -> None:
    world = World()
    stale = world.checkpoint(30)
    new = world.checkpoint(25, epoch=9, epoch_start=20)
    world.pin(stale)
    assert world.plan([new]).kept[stale] == "pinned"
    assert world.plan([new]).freed_bytes == 0


def test_an_object_stays_as_long_as_any_manifest_that_stays_refers_to_it() -> None:
    """Unchanged tensors: the newest checkpoint refers to an object of one that goes."""
    world = World()
    old = world.object(5)
    ids = [world.checkpoint(end, also={old}) for end in (10, 20, 30)]
    plan = world.plan(ids, RetentionPolicy(keep_last=1))
    assert gone(plan) == {10, 20}
    assert old not in {deletion.key for deletion in plan.objects}


def test_an_object_of_an_unfinished_checkpoint_stays() -> None:
    world = World()
    old = world.object(5)
    done = world.checkpoint(30)
    world.checkpoint(40, ranks=[1], also={old})
    assert world.plan([done]).objects == ()


@pytest.mark.parametrize(
    ("iteration", "age", "goes"),
    [
        (5, 100 * HOUR, True),
        (5, HOUR, False),  # somebody may be about to refer to it
        (28, 100 * HOUR, True),
        (29, 100 * HOUR, False),  # part of the newest checkpoint, or of a later one
        (99, 100 * HOUR, False),
    ],
)
def test_an_orphan_goes_when_it_is_old(iteration: int, age: int, goes: bool) -> None:
    world = World()
    done = world.checkpoint(30)
    orphan = world.object(iteration, at=NOW - age, tag="f" * 16)
    assert ({d.key for d in world.plan([done]).objects} == {orphan}) == goes
    assert ({d.key for d in world.plan([]).objects} == {orphan}) == goes  # nothing refers to it


def test_an_object_of_a_history_that_has_committed_nothing_yet_stays() -> None:
    """Found by the model: epoch 9 began before 20, which only its writers know. One of them died when it
    had put an object; later it puts that again, while a collector that saw it as an orphan deletes it."""
    world = World()
    done = world.checkpoint(30)
    world.object(15, epoch=9)
    assert world.plan([done]).objects == ()
    later = world.checkpoint(40, epoch=9, epoch_start=30)
    assert [d.key.split("/")[2] for d in world.plan([later]).objects] == ["000000000015"]


def test_nothing_is_an_orphan_before_anything_is_committed() -> None:
    world = World()
    world.object(5)
    world.checkpoint(30, ranks=[0])
    assert world.plan([]).objects == ()


def test_an_orphan_of_an_abandoned_history_goes_although_it_is_new() -> None:
    world = World()
    new = world.checkpoint(25, epoch=9, epoch_start=20)
    stale, fine = world.object(99, epoch=7), world.object(99, epoch=9)
    plan = world.plan([new])
    assert [d.key for d in plan.objects] == [stale]
    assert plan.objects[0].reason == "no manifest refers to it, and a later history began at 20"
    assert fine in world.listing
    recent = World()
    recent.checkpoint(25, epoch=9, epoch_start=20, at=NOW - HOUR)
    recent.object(99, epoch=7)
    assert recent.plan([]).objects == ()


def test_if_a_manifest_that_stays_cannot_be_read_no_object_goes() -> None:
    world = World()
    ids = [world.checkpoint(end) for end in (10, 20, 30, 40)]
    damaged = next(key for key in world.references if "/000000000030/" in key)
    plan = world.plan(ids, unread=[damaged])
    assert gone(plan) == {10, 20}
    assert plan.objects == ()
    assert plan.notes == (f"no object is deleted: 1 manifests could not be read ({damaged})",)
    of_doomed = [key for key in world.references if "/000000000010/" in key]
    assert world.plan(ids, unread=of_doomed).notes == ()


def test_only_manifests_that_stay_must_be_read() -> None:
    world = World()
    ids = [world.checkpoint(end) for end in (10, 20, 30)]
    choice = choose_checkpoints(world.catalog, POLICY, verified=ids, now_ns=NOW)
    assert set(choice.kept) == set(ids[1:])
    assert set(choice.doomed) == {ids[0]}


# -- several runs under one name -------------------------------------------------------------------


def test_a_checkpoint_of_one_run_never_replaces_one_of_another() -> None:
    """Somebody removed ``run.json``, and the job began anew under the same names: by the listing
    alone, the two that were left of the run before (which had come further) replaced all that the
    new one committed, and later the other way round.
    """
    world = World()
    before = [world.checkpoint(end, run_id="a") for end in (100, 110, 120)]
    now = [world.checkpoint(end, run_id="b", epoch=8, epoch_start=10) for end in (20, 30, 130)]
    plan = world.plan([*before, *now])
    assert gone(plan) == {100, 20}
    assert plan.kept == dict.fromkeys([before[1], before[2], now[1], now[2]], "one of the last 2")
    assert {int(d.key.split("/")[2]) for d in plan.objects} == {99, 100, 19, 20}
    assert gone(world.plan(now)) == {20}
    assert gone(world.plan(before)) == {100}


def test_a_history_of_one_run_makes_nothing_of_another_stale() -> None:
    world = World()
    before = world.checkpoint(100, run_id="a")
    new = world.checkpoint(30, run_id="b", epoch=9, epoch_start=20)
    assert world.plan([new]).kept == dict.fromkeys([before, new], "one of the last 2")
    stale = World()
    stale.checkpoint(100)
    assert gone(stale.plan([stale.checkpoint(30, epoch=9, epoch_start=20)])) == {100}


def test_an_unfinished_checkpoint_of_one_run_is_not_given_up_for_another() -> None:
    world = World()
    world.checkpoint(50, run_id="a")
    world.checkpoint(60, run_id="a")
    begun = world.checkpoint(40, run_id="b", ranks=[0])
    reason = "incomplete, and no newer one is committed (long enough ago)"
    assert world.plan([]).kept[begun] == reason


def test_what_a_manifest_of_another_run_refers_to_stays() -> None:
    """The new run found a tensor unchanged in what the run before it had stored, and the other way round."""
    world = World()
    of_before = world.object(5)
    world.checkpoint(10, run_id="a", also={of_before})
    shared = world.object(4)
    ids = [world.checkpoint(end, run_id="b", also={shared}) for end in (20, 30, 40)]
    plan = world.plan(ids)
    assert gone(plan) == {20}
    assert not {of_before, shared} & {deletion.key for deletion in plan.objects}


def test_where_several_runs_are_what_cannot_be_read_stays_and_with_it_all_objects() -> None:
    world = World()
    ids = [world.checkpoint(end, run_id="a") for end in (10, 20, 30)]
    other = world.checkpoint(5, run_id="b")
    world.checkpoint(40, run_id="b")
    unread = [key for key in world.references if "/000000000005/" in key]
    plan = world.plan(ids, unread=unread)
    assert plan.kept[other] == "its run is not known"
    assert (gone(plan), plan.objects) == ({10}, ())
    known = world.plan(ids, unread=unread[:1])  # one of its two manifests tells
    assert known.kept[other] == "one of the last 2"


def test_objects_that_nobody_names_go_by_the_run_that_is_under_way() -> None:
    """The run before had come further: its newest checkpoint says nothing of what this run may be storing."""
    world = World()
    world.checkpoint(100, run_id="a")
    world.checkpoint(30, run_id="b", at=OLD + HOUR)
    orphan, needed = (world.object(i, tag="f" * 16) for i in (20, 50))
    keys = {deletion.key for deletion in world.plan([]).objects}
    assert (orphan in keys, needed in keys) == (True, False)


@pytest.mark.parametrize(
    "wrong",
    [
        {"keep_last": 0},
        {"keep_every": -1},
        {"keep_younger_than_ns": -1},
        {"grace_ns": -1},
        {"settle_ns": -1},
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must"):
        RetentionPolicy(**wrong)


def restorable(world: World, name: CheckpointId) -> bool:
    """Whether every manifest, and whatever it refers to, is there."""
    keys = [ManifestName(JOB, RUN, name, r, world.world_size).key for r in range(world.world_size)]
    return all(key in world.listing and world.references[key].objects <= world.listing.keys() for key in keys)


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 2**32), st.data())
def test_whenever_a_deletion_is_cut_short_the_newest_verified_one_is_whole(
    seed: int, data: st.DataObject
) -> None:
    """Random histories, policies and deaths; at last everything that nobody needs is gone."""
    rng = random.Random(seed)
    world = World(rng.choice([1, 2, 3]))
    policy = RetentionPolicy(keep_last=rng.randint(1, 3), keep_every=rng.choice([0, 40]), grace_ns=24 * HOUR)
    verified: set[CheckpointId] = set()
    now, end, epoch, begun = 0, 0, 1, -1
    for _ in range(rng.randint(3, 12)):
        now += rng.randint(1, 30) * HOUR
        end += rng.randint(2, 15)
        if rng.random() < 0.2:  # a recovery, mostly back to something earlier
            epoch, end = epoch + 1, max(2, end - rng.randint(0, 25))
            begun, end = end, end + 3
        olds = [o.info.key for found in world.catalog.objects.values() for o in found]
        newest = world.catalog.newest
        shared = (
            [k for i in newest.manifests.values() for k in world.references[i.key].objects] if newest else []
        )
        whole = rng.random() < 0.7
        name = world.checkpoint(
            end,
            epoch=epoch,
            epoch_start=begun,
            at=now,
            ranks=None if whole else range(rng.randint(0, world.world_size - 1)),
            also=set(rng.sample(shared, min(len(shared), 1))),
        )
        if whole and rng.random() < 0.7:
            verified.add(name)
        if rng.random() < 0.3:
            world.object(end, rank=0, epoch=epoch, at=now, tag=f"{rng.getrandbits(64):016x}")
        assert set(olds) <= world.listing.keys()
        committed = world.catalog.committed
        best = next((c.id for c in committed if c.id in verified), None)
        plan = world.plan(verified, policy, now=now)
        total = len(plan.manifests) + len(plan.objects)
        world.carry_out(plan, data.draw(st.integers(0, total)))
        for c in world.catalog.committed:
            assert restorable(world, c.id), c.id
        if best is not None:
            assert best in {c.id for c in world.catalog.committed}
    end, now = end + 100, now + 100 * HOUR
    last = world.checkpoint(end, epoch=epoch, epoch_start=begun, at=now)
    verified.add(last)
    for _ in range(2):
        world.carry_out(world.plan(verified, policy, now=now + 30 * HOUR))
    left = world.catalog
    used = {
        key
        for c in left.checkpoints
        for info in c.manifests.values()
        for key in world.references[info.key].objects
    }
    assert {o.info.key for found in left.objects.values() for o in found} == used
    assert all(restorable(world, c.id) for c in left.committed)
    assert left.newest is not None
    assert left.newest.id == last
    assert all(c.complete for c in left.checkpoints)


RANKS = 2


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
