"""What a listing alone tells of a run."""

from __future__ import annotations

import random
import time

import pytest

from ckptd.storage.checkpoints.catalog import Catalog, CheckpointState, Epoch, Views, build_catalog, see
from ckptd.storage.checkpoints.names import CheckpointId, ManifestName, ObjectName, PinName, RunName
from ckptd.storage.stores.objects import ObjectInfo

JOB, RUN = "moe", "r1"
TAG = "0f" * 8


def agreed(end: int, epoch: int = 7) -> str:
    return f"{end * 1000 + epoch:032x}"


def checkpoint(end: int, epoch: int = 7, start: int = -1) -> CheckpointId:
    return CheckpointId(end, epoch, start, agreed(end, epoch))


def manifests(
    end: int,
    *,
    epoch: int = 7,
    start: int = -1,
    world: int = 2,
    ranks: tuple[int, ...] | None = None,
    at: int = 100,
) -> list[ObjectInfo]:
    names = [
        ManifestName(JOB, RUN, checkpoint(end, epoch, start), rank, world)
        for rank in (range(world) if ranks is None else ranks)
    ]
    return [ObjectInfo(name.key, 10, at + name.rank, "") for name in names]


def stored(iteration: int, *, rank: int = 0, epoch: int = 7, sequence: int = 1) -> ObjectInfo:
    name = ObjectName(JOB, RUN, iteration, rank, epoch, sequence, TAG)
    return ObjectInfo(name.key, 1000, 50, "")


def states(catalog: Catalog) -> list[tuple[int, int, str]]:
    return [(c.id.end, c.id.epoch, c.state) for c in catalog.checkpoints]


def test_nothing_is_there() -> None:
    catalog = build_catalog([], JOB, RUN)
    assert catalog.checkpoints == catalog.committed == ()
    assert catalog.newest is None
    assert catalog.last_of(0) is None


def test_a_checkpoint_is_committed_when_every_rank_is_there() -> None:
    listing = [*manifests(20), *manifests(30, world=3, ranks=(0, 2)), *manifests(10)]
    catalog = build_catalog(listing, JOB, RUN)
    assert states(catalog) == [(30, 7, "incomplete"), (20, 7, "committed"), (10, 7, "committed")]
    newest, second, _ = catalog.checkpoints
    assert (newest.missing, newest.world_size, newest.complete) == ((1,), 3, False)
    assert newest.reason == "1 of 3 ranks are missing: 1"
    assert second.reason == "the manifests of all 2 ranks exist"
    assert catalog.newest is second
    assert second.manifests[1].key.endswith("rank-00001-of-00002.json")
    assert second.modified_ns == 101
    assert catalog.last_of(0) is newest
    assert catalog.last_of(1) is second


def test_the_order_of_the_listing_is_of_no_account() -> None:
    listing = [*manifests(20), *manifests(30, ranks=(0,)), stored(20), stored(19), *manifests(10)]
    expected = build_catalog(listing, JOB, RUN)
    for seed in range(5):
        mixed = random.Random(seed).sample(listing, len(listing))
        assert build_catalog(mixed, JOB, RUN).checkpoints == expected.checkpoints


def test_what_a_later_history_left_behind_is_stale() -> None:
    """Epoch 9 began at 20: of epoch 7 what ends at 20 stays valid, what ends later does not."""
    listing = [
        *manifests(20),
        *manifests(25, ranks=(1,)),
        *manifests(30),
        *manifests(28, epoch=9, start=20, ranks=(0,), at=500),
    ]
    catalog = build_catalog(listing, JOB, RUN)
    assert states(catalog) == [
        (30, 7, "stale"),
        (28, 9, "incomplete"),
        (25, 7, "stale"),
        (20, 7, "committed"),
    ]
    stale = catalog.checkpoints[0]
    assert stale.complete
    assert stale.stale_since_ns == 500
    assert stale.reason == "a later history began at iteration 20, before 30"
    assert catalog.newest is catalog.checkpoints[3]
    assert catalog.last_of(1) is catalog.checkpoints[3]
    assert catalog.epochs == {7: Epoch(-1, 100), 9: Epoch(20, 500)}


def test_of_several_later_histories_each_counts() -> None:
    """Epoch 8 left at 10, epoch 9 only at 40: what epoch 7 did after 10 is stale all the same."""
    listing = [
        *manifests(15),
        *manifests(12, epoch=8, start=10),
        *manifests(50, epoch=9, start=40),
    ]
    assert states(build_catalog(listing, JOB, RUN)) == [
        (50, 9, "committed"),
        (15, 7, "stale"),
        (12, 8, "committed"),
    ]


def test_a_run_that_began_anew_leaves_everything_behind() -> None:
    listing = [*manifests(15), *manifests(3, epoch=8, start=-1)]
    assert states(build_catalog(listing, JOB, RUN)) == [(15, 7, "stale"), (3, 8, "committed")]


def test_what_was_left_for_a_history_without_anything_complete_is_the_last_resort() -> None:
    """Not what a complete history left, however new it is."""
    begun = manifests(14, epoch=9, start=12, ranks=(0,))
    catalog = build_catalog([*manifests(15), *manifests(13), *begun], JOB, RUN)
    assert catalog.committed == ()
    assert [c.id.end for c in catalog.last_resort] == [15, 13]
    left = build_catalog([*manifests(15), *manifests(13, epoch=8, start=11), *begun], JOB, RUN)
    assert [(c.id.end, c.id.epoch) for c in left.last_resort] == [(13, 8)]
    known = build_catalog(manifests(15), JOB, RUN, known_epochs={8: 10})
    assert [c.id.end for c in known.last_resort] == [15]


def test_histories_that_only_the_caller_knows_count_too() -> None:
    catalog = build_catalog(manifests(15), JOB, RUN, known_epochs={8: 10, 7: -1})
    assert states(catalog) == [(15, 7, "stale")]
    assert catalog.checkpoints[0].stale_since_ns is None
    assert catalog.epochs == {7: Epoch(-1, 100), 8: Epoch(10, None)}
    assert catalog.leaving(7, 10) is None
    assert catalog.leaving(7, 11) == Epoch(10, None)


def test_of_two_tellings_of_a_beginning_the_earlier_counts() -> None:
    listing = [*manifests(15), *manifests(30, epoch=8, start=20), *manifests(31, epoch=8, start=12)]
    assert build_catalog(listing, JOB, RUN).epochs[8] == Epoch(12, 100)
    known = build_catalog(manifests(30, epoch=8, start=20), JOB, RUN, known_epochs={8: 5})
    assert known.epochs[8] == Epoch(5, 100)


def test_of_two_that_end_alike_the_later_history_is_newer() -> None:
    catalog = build_catalog([*manifests(20), *manifests(20, epoch=9, start=20)], JOB, RUN)
    assert states(catalog) == [(20, 9, "committed"), (20, 7, "committed")]


def test_objects_are_found_by_rank_and_iteration() -> None:
    listing = [stored(19), stored(20, rank=1), stored(20, rank=1, sequence=2), *manifests(20)]
    catalog = build_catalog(listing, JOB, RUN)
    assert [o.name.sequence for o in catalog.objects[1, 20]] == [1, 2]
    assert catalog.objects[0, 19][0].info == listing[0]
    assert set(catalog.objects) == {(0, 19), (1, 20)}


def test_pins_identity_and_what_is_foreign() -> None:
    pin = PinName(JOB, RUN, 20, 7, agreed(20))
    listing = [
        ObjectInfo(pin.key, 0, 1, ""),
        ObjectInfo(RunName(JOB, RUN).key, 5, 1, ""),
        ObjectInfo(f"{JOB}/{RUN}/notes.txt", 5, 1, ""),
        ObjectInfo(f"{JOB}/run-2/run.json", 5, 1, ""),
        ObjectInfo("elsewhere", 5, 1, ""),
        *manifests(20),
        *manifests(10),
    ]
    catalog = build_catalog(listing, JOB, RUN)
    assert [c.pinned for c in catalog.checkpoints] == [True, False]
    assert catalog.pins == (pin,)
    assert catalog.identity == listing[1]
    assert catalog.foreign == (f"{JOB}/{RUN}/notes.txt",)


def test_a_manifest_copied_from_another_world_does_not_hide_a_committed_checkpoint() -> None:
    stray = ManifestName(JOB, RUN, checkpoint(20), 1, 8)
    catalog = build_catalog([*manifests(20), ObjectInfo(stray.key, 1, 1, "")], JOB, RUN)
    assert states(catalog) == [(20, 7, "committed")]
    assert catalog.checkpoints[0].world_size == 2


def test_many_missing_ranks_are_told_in_few_words() -> None:
    catalog = build_catalog(manifests(20, world=100, ranks=(0,)), JOB, RUN)
    reason = catalog.checkpoints[0].reason
    assert reason == "99 of 100 ranks are missing: 1, 2, 3, 4, 5, 6, 7, 8 and 91 more"


def test_names_are_checked() -> None:
    with pytest.raises(ValueError, match="job"):
        build_catalog([], "a/b", RUN)


@pytest.mark.slow
def test_a_large_run_is_seen_through_quickly() -> None:
    """16,384 ranks, 10 checkpoints, an object each; the specified bound is 2 s of one core."""
    world = 16_384
    listing = [info for end in range(10, 20) for info in manifests(end, world=world)]
    listing += [stored(end, rank=rank) for end in range(10, 20) for rank in range(world)]
    begin = time.process_time()
    catalog = build_catalog(listing, JOB, RUN)
    took = time.process_time() - begin
    assert [c.state for c in catalog.checkpoints] == [CheckpointState.COMMITTED] * 10
    assert len(catalog.objects) == 10 * world
    assert took < 6, f"{took:.1f} s"  # three times the bound: the machine may be slow


def named(end: int, epoch: int = 7, start: int = -1) -> CheckpointId:
    return CheckpointId(end, epoch, start, f"{end * 1000 + epoch:032x}")


def manifest(end: int, rank: int = 0, *, epoch: int = 7, start: int = -1) -> str:
    return ManifestName(JOB, RUN, named(end, epoch, start), rank, 2).key


def views(*keys: str, known: dict[int, int] | None = None) -> Views:
    listing = (ObjectInfo(key, 1, 1, "") for key in keys)  # read once, although there are two views
    return see(listing, JOB, RUN, known_epochs=known or {})


def both(end: int, *, epoch: int = 7, start: int = -1) -> tuple[str, str]:
    return manifest(end, 0, epoch=epoch, start=start), manifest(end, 1, epoch=epoch, start=start)


def test_the_first_checkpoint_may_be_written_and_relies_on_nothing() -> None:
    seen = views()
    assert seen.base_of(0) is None
    assert seen.refusal(named(10), ()) == ""


def test_the_last_manifest_of_a_rank_is_its_base_committed_or_not() -> None:
    seen = views(*both(10), manifest(20, 0))
    assert seen.base_of(0) is not None
    assert [seen.base_of(r).id.end for r in (0, 1)] == [20, 10]  # type: ignore[union-attr]
    assert seen.refusal(named(30), [manifest(20, 0)]) == ""
    assert seen.refusal(named(20), [manifest(20, 0), manifest(10, 1)]) == ""


def test_what_is_older_than_something_committed_is_no_base() -> None:
    """A rank that was gone while the others went on (in another world, say)."""
    seen = views(manifest(10, 1), *both(20))
    assert seen.refusal(named(30), [manifest(10, 1)]) == (
        f"objects that it refers to may be deleted: {manifest(10, 1)} was replaced"
    )
    assert seen.refusal(named(30), [manifest(15, 1)]).endswith(f"{manifest(15, 1)} was replaced")  # gone


def test_nobody_commits_what_was_overtaken() -> None:
    seen = views(*both(20))
    assert seen.refusal(named(20, 8, 20), ()).startswith("iteration 20 (epoch 7")
    assert seen.refusal(named(15), ()).endswith("is committed")
    assert seen.refusal(named(20), ()) == ""  # the same again: an answer that was lost


def test_nobody_commits_what_was_abandoned() -> None:
    seen = views(manifest(20, epoch=9, start=14))
    assert seen.refusal(named(15), ()) == "a later history began at iteration 14"
    assert seen.refusal(named(14), ()) == ""


def test_an_abandoned_future_does_not_hinder_the_new_history() -> None:
    """Recovery went back to 14 in epoch 9, of which the store shows nothing yet."""
    seen = views(*both(12), *both(20), known={9: 14})
    assert seen.refusal(named(18, 9, 14), ()) == ""
    assert views(*both(12), *both(20)).refusal(named(18), ()) != ""


def test_what_the_new_history_shares_with_one_that_others_see_replaced_is_no_base() -> None:
    """Found by the model: a collector that has not heard of epoch 9 deletes 12, because of 20."""
    seen = views(*both(12), *both(20), known={9: 14})
    assert seen.own.newest is not None
    assert seen.own.newest.id.end == 12
    assert seen.base_of(0) is None
    assert seen.refusal(named(18, 9, 14), [manifest(12, 0)]).startswith("objects that it refers to")


def test_what_was_replaced_by_what_is_abandoned_by_now_is_no_base() -> None:
    """Found by the model: a collector looked before the first manifest of epoch 9, and acts after it."""
    other = manifest(18, 1, epoch=9, start=14)
    seen = views(*both(12), *both(20), other, known={9: 14})
    assert seen.shown.newest is not None
    assert seen.shown.newest.id.end == 12
    assert seen.base_of(0) is None
    assert seen.refusal(named(18, 9, 14), [manifest(12, 0)]) != ""


def test_what_only_the_new_history_has_is_a_base() -> None:
    """Whoever sees it sees that 20 is abandoned, and so it was never replaced."""
    other = manifest(18, 1, epoch=9, start=14)
    seen = views(*both(12), *both(20), other, known={9: 14})
    base = seen.base_of(1)
    assert base is not None
    assert base.id.end == 18
    assert seen.refusal(named(18, 9, 14), [other]) == ""
    assert seen.refusal(named(19, 9, 14), [other]) == ""
