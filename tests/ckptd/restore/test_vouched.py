"""A snapshot counts only if it is what its holders vouch for over the control session: xxh3 digests
that fit are not enough.
"""

from __future__ import annotations

import pytest

from ckptd.core.recovery.held import STORE_NODE
from ckptd.core.recovery.striping import PART_BYTES
from ckptd.memory.segment_file import Segment
from ckptd.restore.fetched_image import Vouchers, Vouching
from ckptd.storage.strong_digest import strong_digest
from ckptd.transport.messages import FetchSource
from tests.ckptd.forging import forged
from tests.ckptd.restore.setting import AWAY, SNAPSHOT, Holder, Setting, check_sealed
from tests.ckptd.snapshots import snapshot_of

FORGED = forged(SNAPSHOT.image, SNAPSHOT.header.header_digest)
OTHER = FetchSource("other", "b.seg", 0)
THIRD = FetchSource("third", "c.seg", 0)
STORED = FetchSource(STORE_NODE, "stored0.json", 0)


def kept(segment: Segment) -> str:
    header = segment.header(0)
    assert header is not None
    return segment.kept_digest(0, header)


def target(setting: Setting) -> Segment:
    return next(s for s in setting.segments.values() if s.descriptor.rank == 0)


def test_what_a_holder_forged_is_brought_from_another_one(setting: Setting) -> None:
    """Its memory was changed together with the xxh3 digests; what it vouches for is of before. It
    is told to verify its copy.
    """
    setting.holder = Holder(images={"a.seg": FORGED})
    assert setting.finish(setting.job(AWAY, OTHER)) == ""
    check_sealed(target(setting))
    assert kept(target(setting)) == SNAPSHOT.digest
    assert setting.holder.doubted == ["a.seg"]
    (told,) = setting.told("fetch_forged")
    assert "the image of away's copy does not match what is vouched for" in told


def test_what_only_a_forger_holds_is_not_had(setting: Setting) -> None:
    """No part of it becomes a snapshot here, and the reason says what is wrong."""
    setting.holder = Holder(images={"a.seg": FORGED})
    why = setting.finish(setting.job(AWAY))
    assert "no holder is left of away; in no copy that was reached is the image right" in why
    assert setting.holder.doubted == ["a.seg"]


def test_parts_of_two_holders_are_compared_as_a_whole(setting: Setting) -> None:
    """Each brings some of it, one of them forged: the parts of the other one alone are right."""
    snapshot = snapshot_of(7, size=3 * PART_BYTES)
    image = forged(snapshot.image, snapshot.header.header_digest)
    setting.holder = Holder(snapshot=snapshot, images={"a.seg": image})
    job = setting.job(AWAY, OTHER, header=snapshot.header, slot_bytes=4 * PART_BYTES)
    assert setting.finish(job) == ""
    assert {name for name, _, _ in setting.holder.got} == {"a.seg", "b.seg"}
    check_sealed(target(setting), snapshot)
    assert setting.told("fetch_forged")


def test_a_digest_that_was_not_made_yet_is_waited_for(setting: Setting) -> None:
    """A replica that was sealed by a version of before: its holder makes the digest while the parts
    are on their way.
    """
    setting.holder = Holder(unmade=("a.seg",))
    assert setting.finish(setting.job(AWAY)) == ""
    check_sealed(target(setting))
    assert kept(target(setting)) == SNAPSHOT.digest


def test_a_holder_that_vouches_for_nothing_is_given_up(setting: Setting) -> None:
    """Its copy does not match its own digests, it says: another one is asked."""
    setting.holder = Holder(silent=("a.seg",))
    assert setting.finish(setting.job(AWAY, OTHER)) == ""
    check_sealed(target(setting))
    assert any("does not vouch" in text for text in setting.lost())


def test_what_nobody_vouches_for_is_not_had(setting: Setting) -> None:
    setting.holder = Holder(silent=("a.seg",))
    assert "no holder is left of away" in setting.finish(setting.job(AWAY))


def test_two_nodes_that_vouch_for_different_contents_are_named(setting: Setting) -> None:
    """One of them is lying, and nobody can tell which."""
    setting.holder = Holder(images={"a.seg": FORGED}, vouches={"a.seg": strong_digest(FORGED)})
    why = setting.finish(setting.job(AWAY, OTHER))
    assert "away and other vouch for different contents of it" in why
    assert "ckptctl keys untrust" in why


def test_storage_decides_between_two_nodes(setting: Setting) -> None:
    """Its manifest has the digest of every image."""
    setting.holder = Holder(images={"a.seg": FORGED}, vouches={"a.seg": strong_digest(FORGED)})
    setting.storage = Holder()
    assert setting.finish(setting.job(AWAY, OTHER)) == ""
    check_sealed(target(setting))


def test_the_digest_that_was_kept_here_decides(setting: Setting) -> None:
    """This node's own copy was damaged since; what its sender told of it when it came was kept apart."""
    near = setting.holding(damaged=True)
    segment = setting.segments[near.segment]
    header = segment.header(1)
    assert header is not None
    segment.keep_digest(1, header, SNAPSHOT.digest)
    setting.holder = Holder(images={"a.seg": FORGED}, vouches={"a.seg": strong_digest(FORGED)})
    assert "in no copy that was reached is" in setting.finish(setting.job(near, AWAY))


def test_a_copy_on_this_node_of_which_nothing_was_kept_counts(setting: Setting) -> None:
    """It was sealed by a version of before, and crosses no network."""
    near = setting.holding()
    assert setting.finish(setting.job(near)) == ""
    check_sealed(target(setting))
    assert kept(target(setting)) == ""


def test_a_forged_copy_on_this_node_is_not_used(setting: Setting) -> None:
    """Of this one a digest was kept."""
    near = setting.holding()
    segment = setting.segments[near.segment]
    header = segment.header(1)
    assert header is not None
    segment.keep_digest(1, header, SNAPSHOT.digest)
    segment.image(1, header)[:] = FORGED
    setting.holder = Holder()
    assert setting.finish(setting.job(near, AWAY)) == ""
    check_sealed(target(setting))
    assert [name for name, _, _ in setting.doubted] == [near.segment]


def test_a_checkpoint_of_before_that_has_no_digests_counts(setting: Setting) -> None:
    """Manifests of version 1. Who believes signed manifests alone does not come here: they must have digests."""
    setting.storage = Holder(vouches={"stored0.json": ""})
    assert setting.finish(setting.job(STORED)) == ""
    check_sealed(target(setting))


def test_a_stored_snapshot_with_another_digest_is_not_had(setting: Setting) -> None:
    setting.storage = Holder(images={"stored0.json": FORGED})
    assert "the image right" in setting.finish(setting.job(STORED))
    assert setting.storage.doubted == ["stored0.json"]


@pytest.mark.parametrize(
    ("told", "matching", "verdict"),
    [
        ({AWAY: "x"}, {"x"}, Vouching.GOOD),
        ({AWAY: "x"}, set(), Vouching.WRONG),
        ({}, set(), Vouching.GOOD),
        ({AWAY: ""}, set(), Vouching.GOOD),
        ({AWAY: "x", OTHER: "y"}, {"x"}, Vouching.DISPUTED),
        ({AWAY: "x", OTHER: "y"}, {"x", "y"}, Vouching.GOOD),
        ({AWAY: "x", OTHER: "x", THIRD: "y"}, {"x"}, Vouching.GOOD),
        ({AWAY: "x", OTHER: "x", THIRD: "y"}, {"y"}, Vouching.WRONG),
        ({FetchSource("here", "c", 0): "y", AWAY: "x", OTHER: "x"}, {"y"}, Vouching.GOOD),
        ({FetchSource("here", "c", 0): "y", AWAY: "x", OTHER: "x"}, {"x"}, Vouching.WRONG),
        ({AWAY: "x", FetchSource("away", "a2", 0): "x", OTHER: "y"}, {"x"}, Vouching.DISPUTED),
    ],
)
def test_verdicts(told: dict[FetchSource, str], matching: set[str], verdict: Vouching) -> None:
    """Two digests of one image may differ because they are of different algorithms: then both match."""
    vouchers = Vouchers("here")
    for source, digest in told.items():
        vouchers.tell(source, digest)
    assert vouchers.verdict(matching) is verdict
