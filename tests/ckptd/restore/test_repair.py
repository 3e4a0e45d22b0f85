"""A fetch of which every copy is damaged, each in another place: what is right in any of them is
put together.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ckptd.core.recovery.held import STORE_NODE
from ckptd.core.slots.slots import SlotState
from ckptd.storage.image import ImageView
from ckptd.transport.messages import FetchSource
from tests.ckptd.restore.setting import AWAY, Holder, Setting, check_sealed
from tests.ckptd.running import eventually
from tests.ckptd.snapshots import snapshot_of

NAMES = ("a", "b", "c", "d")
SNAPSHOT = snapshot_of(4, size=10_000, tensors=NAMES)
OTHER = FetchSource("away", "b.rep", 0)


def middle(name: str) -> int:
    """A byte of this tensor, as it lies in the image."""
    tensor = ImageView(memoryview(SNAPSHOT.image)).tensor(name)
    return tensor.offset + tensor.nbytes // 2


def span(name: str) -> tuple[int, int]:
    tensor = ImageView(memoryview(SNAPSHOT.image)).tensor(name)
    return tensor.offset, tensor.offset + tensor.nbytes


def test_two_copies_that_are_damaged_in_different_tensors_make_a_whole_one(
    setting: Setting,
) -> None:
    """The first that was wrong in anything used to be given up with all of it, and then the second one, too."""
    holder = setting.holder = Holder(
        snapshot=SNAPSHOT, damaged={"a.seg": [middle("a"), middle("b")], "b.rep": [middle("d")]}
    )
    job = setting.job(AWAY, OTHER, header=SNAPSHOT.header)
    assert setting.finish(job) == ""
    check_sealed(job.segment, SNAPSHOT)
    image = (0, len(SNAPSHOT.image))
    assert holder.got == [("a.seg", *image), ("b.rep", *span("a")), ("b.rep", *span("b"))]
    (found,) = setting.told("fetch_damaged")
    assert "2 tensors (a, b) of away's copy do not match" in found
    (mended,) = setting.told("fetch_repaired")
    assert mended == ("iteration 4: 2 tensors of away's copy do not match; taken from another copy on away")
    assert job.state.bytes_done == len(SNAPSHOT.image)


def test_who_was_wrong_is_told_when_the_snapshot_is_whole_and_not_before(setting: Setting) -> None:
    """What is in quarantine cannot be opened any more, and the rest of it may be needed: a region
    may have to be opened anew.
    """
    holder = setting.holder = Holder(snapshot=SNAPSHOT, damaged={"a.seg": [middle("a")]})
    job = setting.job(AWAY, OTHER, header=SNAPSHOT.header)

    def found() -> bool:
        setting.deliver()
        setting.workers.collect()
        return bool(setting.told("fetch_damaged"))

    while not found():
        assert holder.doubted == []
    assert holder.doubted == []
    assert setting.finish(job) == ""
    assert holder.doubted == ["a.seg"]


def test_a_holder_that_is_away_when_it_is_told_is_told_again(setting: Setting) -> None:
    """Whoever brought something wrong was told once. If its daemon was restarted at that moment, the
    next plan asked for the same copy.
    """
    holder = setting.holder = Holder(snapshot=SNAPSHOT, damaged={"a.seg": [middle("a")]}, away=True)
    assert setting.finish(setting.job(AWAY, OTHER, header=SNAPSHOT.header)) == ""
    assert holder.doubted == []
    setting.doubts.tick()
    setting.deliver()
    assert holder.doubted == []
    holder.away = False
    for _ in range(3):
        setting.doubts.tick()
        setting.deliver()
    assert holder.doubted == ["a.seg"], "once it has answered it is not told again"


def test_what_is_found_wrong_when_nobody_waits_any_more_is_told_all_the_same(
    setting: Setting,
) -> None:
    """The trainer ended while its snapshot was being verified, and what was found was dropped: the
    next plan asked for the same copy.
    """
    holder = setting.holder = Holder(snapshot=SNAPSHOT, damaged={"a.seg": [middle("a")]})
    gate = threading.Event()
    setting.workers.submit(gate.wait, lambda _: None, lambda _: None)
    job = setting.job(AWAY, header=SNAPSHOT.header)
    while setting.workers.pending == 1:  # until it waits to be verified
        setting.deliver()
    job.close("its trainer ended")
    assert holder.doubted == []
    gate.set()

    def told() -> bool:
        setting.workers.collect()
        setting.deliver()
        return holder.doubted == ["a.seg"]

    eventually(told, "the holder is told")


def test_a_damaged_header_hides_what_else_is_damaged(setting: Setting) -> None:
    setting.holder = Holder(
        snapshot=SNAPSHOT, damaged={"a.seg": [3, 70, middle("b")], "b.rep": [middle("c")]}
    )
    job = setting.job(AWAY, OTHER, header=SNAPSHOT.header)
    assert setting.finish(job) == ""
    check_sealed(job.segment, SNAPSHOT)
    assert "the header of away's copy does not match" in setting.told("fetch_damaged")[0]


def test_what_is_damaged_in_every_copy_is_named(setting: Setting) -> None:
    both = [middle("b")]
    setting.holder = Holder(snapshot=SNAPSHOT, damaged={"a.seg": both, "b.rep": [*both, 70]})
    job = setting.job(AWAY, OTHER, header=SNAPSHOT.header)
    reason = setting.finish(job)
    assert reason == "iteration 4: no holder is left of away; in no copy that was reached is b right"
    assert setting.told("fetch_repaired") == []
    assert sorted(setting.holder.doubted) == ["a.seg", "b.rep"]
    header = job.segment.header(0)
    assert header is not None
    assert header.state is SlotState.FREE


def test_a_holder_that_has_lost_some_of_it_delivers_the_rest_and_is_asked_once(
    setting: Setting,
) -> None:
    """A peer is damaged in one tensor, and the object is gone in which storage has the others."""
    holder = setting.holder = Holder(
        snapshot=SNAPSHOT, gone={"a.seg": [middle("d")]}, damaged={"b.rep": [middle("a")]}
    )
    job = setting.job(AWAY, OTHER, header=SNAPSHOT.header)
    assert setting.finish(job) == ""
    check_sealed(job.segment, SNAPSHOT)
    image = (0, len(SNAPSHOT.image))
    assert holder.got == [("a.seg", *image), ("b.rep", *image), ("a.seg", *span("a"))]
    assert len(holder.opened) == 2
    assert "away cannot deliver all of it" in setting.told("fetch_damaged")[0]


# -- copies on this node -------------------------------------------------------------------------


@pytest.mark.parametrize("state", [SlotState.SEALED, SlotState.QUARANTINED])
def test_of_a_damaged_copy_on_this_node_only_what_is_wrong_is_fetched(
    setting: Setting, state: SlotState
) -> None:
    here = setting.holding(snapshot=SNAPSHOT, at=[middle("b")], state=state)
    holder = setting.holder = Holder(snapshot=SNAPSHOT, damaged={"a.seg": [middle("c")]})
    job = setting.job(AWAY, here, header=SNAPSHOT.header)
    assert setting.finish(job) == ""
    check_sealed(job.segment, SNAPSHOT)
    assert holder.got == [("a.seg", *span("b"))]
    assert setting.told("fetch_repaired") == [
        "iteration 4: 1 tensor of this node's copy does not match; taken from away"
    ]
    assert setting.doubted == [(here.segment, 1, SNAPSHOT.header.sequence)]


def test_two_damaged_copies_on_this_node_need_no_other(setting: Setting) -> None:
    """The header of the second one is needed before it is known that a tensor of the first is wrong, too."""
    first = setting.holding(snapshot=SNAPSHOT, at=[70, middle("b")])
    second = setting.holding(snapshot=SNAPSHOT, at=[middle("c")])
    job = setting.job(first, second, header=SNAPSHOT.header)
    assert setting.finish(job) == ""
    check_sealed(job.segment, SNAPSHOT)


def test_a_copy_on_this_node_of_something_else_is_not_used(setting: Setting) -> None:
    here = setting.holding(snapshot=snapshot_of(5, size=10_000, tensors=NAMES))
    setting.holder = Holder(snapshot=SNAPSHOT)
    job = setting.job(here, AWAY, header=SNAPSHOT.header)
    assert setting.finish(job) == ""
    check_sealed(job.segment, SNAPSHOT)
    assert "is gone" in setting.lost()[0]


# -- storage -------------------------------------------------------------------------------------


def test_storage_is_asked_for_what_no_copy_has_that_the_plan_knows(setting: Setting) -> None:
    """Where memory is enough no plan looks into storage. Its object of another tensor is damaged:
    neither copy is whole.
    """
    holder = setting.holder = Holder(snapshot=SNAPSHOT, damaged={"a.seg": [middle("b")]})
    storage = setting.storage = Holder(snapshot=SNAPSHOT, damaged={"stored0.json": [middle("c")]})
    job = setting.job(AWAY, header=SNAPSHOT.header)
    assert setting.finish(job) == ""
    check_sealed(job.segment, SNAPSHOT)
    assert storage.got == [("stored0.json", *span("b"))]
    assert holder.closed == storage.closed == [1]
    assert setting.told("fetch_repaired") == [
        "iteration 4: 1 tensor of away's copy does not match; taken from storage"
    ]


def test_storage_that_has_another_snapshot_is_no_help_and_is_asked_once(setting: Setting) -> None:
    setting.holder = Holder(snapshot=SNAPSHOT, damaged={"a.seg": [middle("b")]})
    setting.storage = Holder(snapshot=snapshot_of(5))
    reason = setting.finish(setting.job(AWAY, header=SNAPSHOT.header))
    assert "no holder is left of away" in reason
    assert setting.lost() == ["iteration 4: not to be had from storage"]
    assert not setting.storage.opened


def test_storage_that_a_plan_names_is_not_looked_for_again(setting: Setting) -> None:
    setting.storage = Holder(snapshot=SNAPSHOT, damaged={"s.json": [middle("b")]})
    source = FetchSource(STORE_NODE, "s.json", 0)
    reason = setting.finish(setting.job(source, header=SNAPSHOT.header))
    assert "in no copy that was reached is b right" in reason
    assert len(setting.storage.opened) == 1


def test_the_answer_of_storage_may_come_when_all_is_over(setting: Setting, tmp_path: Path) -> None:
    setting.holder = Holder(snapshot=SNAPSHOT, refuses=("a.seg",))
    setting.storage = Holder(snapshot=SNAPSHOT)
    job = setting.job(AWAY, header=SNAPSHOT.header)
    setting.holder.later.pop(0)()
    job.close("its trainer ended")
    setting.deliver()
    assert setting.over == ["its trainer ended"]
    assert not setting.storage.opened
