"""When a manifest may be written, and what it may rely on: the store's view and the writer's own."""

from __future__ import annotations

from ckptd.storage.checkpoints.commit import Views, see
from ckptd.storage.checkpoints.names import CheckpointId, ManifestName
from ckptd.storage.stores.objects import ObjectInfo

JOB, RUN = "moe", "r1"


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
