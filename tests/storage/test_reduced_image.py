"""Reduced images: what newer snapshots have is left out, everything else is the same bytes."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.storage.checkpoints.reader import restore_snapshot
from ckptd.storage.checkpoints.upload_plan import PartLimits, plan_upload
from ckptd.storage.image import ImageView, verify
from ckptd.storage.image_format import TensorEntry
from ckptd.storage.reduced_image import NewerSnapshots, StorableImage, bare, cut, reduced
from ckptd.storage.strong_digest import matches, strong_digest_of
from tests.storage.memory_store import MemoryStore
from tests.storage.samples import JOB, RUN, Sample, Writer, make_sample

SCALARS = TensorEntry("ckptd.scalars", "U8", (40,))
EXPERT, GATE, DENSE = (TensorEntry(name, "F32", (64, 8)) for name in ("expert.0", "gate", "dense"))


def sample(iteration: int, *names: str, anchors: int = 0b11, dtype: str = "F32") -> Sample:
    """Each tensor has as many rows as its name says; eight if it says nothing."""
    entries = []
    for name in names:
        begin, _, end = name.partition("[")[2].rstrip("]").partition(":")
        rows = int(end) - int(begin) if end else 8
        entries.append(TensorEntry(name, dtype, (rows, 4)))
    return make_sample(iteration, entries=[*entries, SCALARS], anchors=anchors, spare=64)


def without(image: Sample, *newer: Sample) -> StorableImage | None:
    found = NewerSnapshots()
    for each in newer:
        found.add(each.view)
    return reduced(image.image, image.view, found)


def names_of(image: StorableImage | None) -> set[str]:
    assert image is not None
    return set(ImageView(memoryview(b"".join(image.pieces))).names())


def test_what_a_newer_snapshot_has_is_left_out_and_the_rest_is_a_sealed_image() -> None:
    older = sample(3, "dense", "optim/exp_avg/dense", "expert.0", "optim/exp_avg/expert.0", "gate")
    newer = sample(4, "dense", "optim/exp_avg/dense", "gate", "expert.1", anchors=0b10)
    made = without(older, newer)
    assert made is not None
    whole = memoryview(b"".join(made.pieces))
    verify(whole, made.header_digest)
    view = ImageView(whole)
    assert view.names() == ("expert.0", "optim/exp_avg/expert.0", "ckptd.scalars")
    for name in view.names():
        assert view.data(name) == older.view.data(name)
    was = older.view
    assert (view.iteration, view.previous, view.scalars_len) == (was.iteration, was.previous, was.scalars_len)
    assert (view.identity, view.num_operators) == (was.identity, was.num_operators)
    assert view.anchors == made.anchors == 0b01
    assert (made.layout_id, made.image_len, made.data_offset) == (
        view.layout_id,
        len(whole),
        view.data_offset,
    )
    assert made.header == whole[: view.data_offset]
    assert matches(whole, strong_digest_of(made.pieces))


def test_an_image_of_which_newer_ones_have_nothing_stays_whole() -> None:
    image = sample(3, "expert.0")
    assert without(image) is None
    assert without(image, sample(4, "expert.1")) is None
    whole = StorableImage.whole(image.image, image.view, image.header_digest)
    assert b"".join(whole.pieces) == image.image[: image.view.image_len]
    assert (whole.header, whole.anchors) == (image.header, 0b11)


def test_step_scalars_stay_in_any_case() -> None:
    image = sample(3, "dense")
    assert names_of(without(image, sample(4, "dense"))) == {"ckptd.scalars"}


@pytest.mark.parametrize(
    ("newer", "left_out"),
    [
        (("up[0:2]", "up[2:8]"), True),  # both together have the rows
        (("up[2:8]", "up[0:3]"), True),
        (("up[0:2]", "up[4:8]"), False),
        (("up[2:8]",), False),
        (("up",), True),
        (("optim/exp_avg/up",), False),
    ],
)
def test_rows_are_left_out_if_newer_snapshots_have_all_of_them(
    newer: tuple[str, ...], left_out: bool
) -> None:
    image = sample(3, "up[1:4]", "gone")
    assert ("up[1:4]" in names_of(without(image, sample(4, "gone", *newer)))) is not left_out
    apart = [sample(4 + n, "gone", name) for n, name in enumerate(newer)]
    assert ("up[1:4]" in names_of(without(image, *apart))) is not left_out


def test_a_whole_tensor_is_not_left_out_for_some_rows() -> None:
    assert "up" in names_of(without(sample(3, "up", "gone"), sample(4, "gone", "up[0:8]")))


def test_of_a_reduced_image_too_only_new_tensors_are_uploaded() -> None:
    """An expert that is as it was is in an older object; the image is read back from both."""
    store, seeds = MemoryStore(), {"expert.0": 1}
    first = make_sample(1, entries=[EXPERT, GATE, SCALARS], seeds=seeds)
    writer = Writer(store)
    base = writer.upload(first)
    older = make_sample(3, entries=[EXPERT, GATE, DENSE, SCALARS], seeds=seeds)
    made = without(older, make_sample(4, entries=[DENSE, SCALARS]))
    assert made is not None
    plan = plan_upload(
        made.pieces, writer.index, job=JOB, run=RUN, rank=0, epoch=7, sequence=3, limits=PartLimits(64)
    )
    assert [stored.key for stored in plan.reused] == [info.key for info in store.list("")]
    put = b"".join(plan.parts(made.pieces))
    assert len(put) == plan.size
    assert store.put(plan.key, [memoryview(put)]).size == plan.size
    into = memoryview(bytearray(made.image_len))
    stored = replace(
        base,
        iteration=3,
        objects=plan.objects(""),
        extents=plan.extents,
        header_digest=made.header_digest,
        image_len=made.image_len,
        layout_id=made.layout_id,
        anchors=made.anchors,
        image_digest=strong_digest_of(made.pieces),
    )
    restore_snapshot(store, stored, into)
    assert into == b"".join(made.pieces)
    assert ImageView(into).data("expert.0") == first.view.data("expert.0")


def stripped(image: Sample, another: Sample, *parameters: str) -> StorableImage | None:
    found = NewerSnapshots()
    found.add(another.view)
    return bare(image.image, image.view, 0b01, parameters, found)


def test_a_bare_image_has_everything_but_the_experts_that_it_anchored() -> None:
    shared = ("dense", "optim/exp_avg/dense", "buffer/expert.0")
    newest = sample(4, *shared, "expert.0", "master/expert.0", "optim/exp_avg:codes/expert.0", anchors=0b11)
    another = sample(3, "dense", "optim/exp_avg/dense", "expert.1", anchors=0b10)
    made = stripped(newest, another, "expert.0", "expert.1")
    assert made is not None
    whole = memoryview(b"".join(made.pieces))
    verify(whole, made.header_digest)
    view = ImageView(whole)
    assert view.names() == (*shared, "ckptd.scalars")
    assert view.anchors == made.anchors == 0b10
    # The other snapshot lacks what is no expert's, too: that is no reason to leave it out.
    assert names_of(stripped(newest, sample(3, "gate"), "expert.0")) == {*shared, "ckptd.scalars"}
    assert names_of(stripped(newest, another, "expert.7")) == set(newest.view.names())
    assert stripped(another, newest, "expert.1") is None  # expert 1 is no expert here


def test_a_bare_image_anchors_no_experts_that_other_ranks_capture() -> None:
    """Ranks load the same anchors from the same image, whichever of them has the tensors."""
    newest = sample(4, "dense", anchors=0b11)
    made = stripped(newest, sample(3, "dense", anchors=0b10), "expert.0")
    assert made is not None
    assert names_of(made) == {"dense", "ckptd.scalars"}
    assert made.anchors == ImageView(memoryview(b"".join(made.pieces))).anchors == 0b10


def test_a_bare_image_keeps_what_every_snapshot_has_of_experts() -> None:
    """Weights of all of them, or optimizer state, of fused ones in other rows than the other snapshot."""
    newest = sample(4, "w[0:2]", "w[2:8]", "optim/exp_avg/w[0:2]", "master/w[0:2]")
    another = sample(3, "w[0:4]", "w[4:8]", "optim/exp_avg/w[4:8]", "master/w[4:8]")
    assert names_of(stripped(newest, another, "w")) == {"w[0:2]", "w[2:8]", "ckptd.scalars"}


@given(st.lists(st.binary(max_size=5), max_size=6), st.data())
def test_a_cut_is_the_range_of_the_joined_pieces(pieces: list[bytes], data: st.DataObject) -> None:
    joined = b"".join(pieces)
    ends = [0, *accumulate(map(len, pieces))]
    at = data.draw(st.one_of(st.integers(0, len(joined)), st.sampled_from(ends)))
    length = data.draw(st.integers(0, len(joined) - at))
    found = cut([memoryview(piece) for piece in pieces], at, length)
    assert b"".join(found) == joined[at : at + length]
