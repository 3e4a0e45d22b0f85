"""What is uploaded: with what is stored already it makes up the image, byte for byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.storage.checkpoints.manifest import StoredSnapshot
from ckptd.storage.checkpoints.names import ObjectName, parse
from ckptd.storage.checkpoints.upload_plan import (
    IMAGE_HEADER,
    PartLimits,
    StoredIndex,
    UploadPlan,
    plan_upload,
)
from ckptd.storage.image_format import (
    DTYPE_SIZE,
    HeaderError,
    ImageTensor,
    TensorEntry,
    parse_header,
    render_header,
    tag_of,
)
from tests.storage.memory_store import MemoryStore
from tests.storage.samples import JOB, RUN, TENSORS, Sample, Writer, make_sample

FROZEN = {"expert.0.w": 1, "mask": 1}
DTYPES = sorted(set(DTYPE_SIZE) - {"F8_E8M0", "C64"})


def plan_of(sample: Sample, index: StoredIndex, *, least: int = 64, saving: float = 0.05) -> UploadPlan:
    return plan_upload(
        [sample.image],
        index,
        job=JOB,
        run=RUN,
        rank=0,
        epoch=sample.epoch,
        sequence=sample.sequence,
        limits=PartLimits(least, saving),
    )


def rebuilt(store: MemoryStore, stored: StoredSnapshot) -> bytes:
    """The image as its extents say, put together in the plainest way."""
    pieces = [
        store.objects[stored.objects[e.object].key][e.object_offset : e.object_offset + e.length]
        for e in stored.extents
    ]
    return b"".join(pieces)


def test_a_first_snapshot_is_stored_as_it_is() -> None:
    sample = make_sample(40, spare=1000)
    plan = plan_of(sample, StoredIndex())
    image = sample.image[: sample.view.image_len]
    assert b"".join(plan.parts([sample.image])) == image
    assert (plan.header, plan.saved_bytes, plan.reused) == (b"", 0, ())
    assert plan.reason == "none of its tensors is stored already"
    assert plan.key == ObjectName(JOB, RUN, 40, 0, 7, 40, tag_of(sample.header)).key
    assert plan.size == len(image)


def test_unchanged_tensors_are_not_uploaded_again() -> None:
    store = MemoryStore()
    writer = Writer(store)
    writer.upload(make_sample(40, seeds=FROZEN))
    sample = make_sample(41, seeds=FROZEN)
    plan = plan_of(sample, writer.index)
    header = parse_header(plan.header)
    assert [tensor.name for tensor in header.tensors] == [
        IMAGE_HEADER,
        "expert.1.w",
        "nothing",
        "gate.w",
        "mask",  # unchanged, but too small to be worth a request
        "ckptd.scalars",
    ]
    assert plan.saved_bytes == sample.view.image_len - plan.size
    assert plan.reason == "1 of 6 tensors are stored already"
    assert [stored.key for stored in plan.reused] == [next(iter(store.objects))]
    stored = writer.upload(sample)
    assert rebuilt(store, stored) == sample.image
    assert len(stored.extents) == 3  # the header; the old expert; all that follows it


def test_a_third_snapshot_refers_to_where_the_bytes_are() -> None:
    """A part may hold what a later snapshot needs, and what a part refers to is found through it."""
    store = MemoryStore()
    writer = Writer(store)
    writer.upload(make_sample(40, seeds={"expert.0.w": 1}))
    writer.upload(make_sample(41, seeds={"expert.0.w": 1, "expert.1.w": 2}))
    sample = make_sample(42, seeds={"expert.0.w": 1, "expert.1.w": 2})
    stored = writer.upload(sample)
    assert rebuilt(store, stored) == sample.image
    iterations = [parse(o.key).iteration for o in stored.objects]  # type: ignore[union-attr]
    assert iterations == [42, 40, 41]


def test_the_index_is_the_same_when_it_is_made_of_manifests() -> None:
    store = MemoryStore()
    writer = Writer(store)
    samples = [make_sample(i, seeds=FROZEN) for i in (40, 41)]
    stored = [writer.upload(sample) for sample in samples]
    again = StoredIndex()
    for sample, snapshot in zip(samples, stored, strict=True):
        again.add(sample.header, snapshot)
    later = make_sample(42, seeds=FROZEN)
    assert plan_of(later, again) == plan_of(later, writer.index)
    assert len(again) == len(writer.index)


def test_another_ranks_tensors_are_found_too() -> None:
    store = MemoryStore()
    other = Writer(store, rank=1, world_size=2)
    other.upload(make_sample(40, rank=1, seeds={"expert.0.w": 1}))
    writer = Writer(store, rank=0, world_size=2, index=other.index)
    sample = make_sample(40, rank=0, seeds={"expert.0.w": 1})
    stored = writer.upload(sample)
    assert [parse(o.key).rank for o in stored.objects] == [0, 1]  # type: ignore[union-attr]
    assert rebuilt(store, stored) == sample.image


def test_a_header_of_another_snapshot_is_not_learned_from() -> None:
    store = MemoryStore()
    writer = Writer(store)
    stored = writer.upload(make_sample(40))
    with pytest.raises(HeaderError, match="not the header"):
        StoredIndex().add(make_sample(41).header, stored)


def test_a_part_that_saves_too_little_is_not_made() -> None:
    writer = Writer(MemoryStore())
    writer.upload(make_sample(40, seeds={"mask": 1}))
    plan = plan_of(make_sample(41, seeds={"mask": 1}), writer.index, least=1)
    assert plan.header == b""
    assert "would save" in plan.reason


def test_small_tensors_are_uploaded_always() -> None:
    writer = Writer(MemoryStore())
    seeds = {entry.name: 1 for entry in TENSORS}
    writer.upload(make_sample(40, seeds=seeds))
    plan = plan_of(make_sample(41, seeds=seeds), writer.index, least=PartLimits().min_tensor_bytes)
    assert plan.reason == "none of its tensors is stored already"


def test_an_image_that_uses_the_name_of_the_header_is_stored_as_it_is() -> None:
    entries = (*TENSORS, TensorEntry(IMAGE_HEADER, "U8", (3,)))
    writer = Writer(MemoryStore())
    seeds = {entry.name: 1 for entry in entries}
    writer.upload(make_sample(40, seeds=seeds, entries=entries))
    assert plan_of(make_sample(41, seeds=seeds, entries=entries), writer.index).header == b""


def test_an_image_is_not_spread_over_ever_more_objects() -> None:
    """Each of 60 tensors was last changed at another time: only the objects that save most count."""
    entries = [TensorEntry(f"t{n:02}", "F32", (20 + n,)) for n in range(60)]
    writer = Writer(MemoryStore())
    for iteration in range(60):
        seeds = {f"t{n:02}": 1 for n in range(iteration + 1)}
        writer.upload(make_sample(iteration, seeds=seeds, entries=entries))
    seeds = {f"t{n:02}": 1 for n in range(60)}
    sample = make_sample(60, seeds=seeds, entries=entries)
    plan = plan_of(sample, writer.index)
    assert len(plan.reused) == 32
    assert "t00" in [tensor.name for tensor in parse_header(plan.header).tensors]
    stored = writer.upload(sample)
    assert rebuilt(writer.store, stored) == sample.image  # type: ignore[arg-type]


def test_a_key_stands_for_one_content() -> None:
    """The same snapshot uploaded by two nodes that know of different things: nobody overwrites."""
    store = MemoryStore()
    writer = Writer(store)
    writer.upload(make_sample(40, seeds=FROZEN))
    sample = make_sample(41, seeds=FROZEN)
    part, whole = plan_of(sample, writer.index), plan_of(sample, StoredIndex())
    assert part.key != whole.key
    assert plan_of(sample, writer.index) == part


@pytest.mark.parametrize("image", [b"", b"\0" * 7, b"\xff" * 64, bytes(8) + b"{}"])
def test_what_is_no_image_is_refused(image: bytes) -> None:
    sample = Sample(memoryview(image), b"", 0, -1)
    with pytest.raises(HeaderError):
        plan_of(sample, StoredIndex())


def test_an_image_that_is_cut_off_or_a_part_is_refused() -> None:
    writer = Writer(MemoryStore())
    sample = make_sample(40, seeds=FROZEN)
    writer.upload(sample)
    short = Sample(sample.image[:-1], sample.header_digest, 40, -1)
    with pytest.raises(HeaderError, match="whole image"):
        plan_of(short, StoredIndex())
    later = make_sample(41, seeds=FROZEN)
    part = b"".join(plan_of(later, writer.index).parts([later.image]))
    with pytest.raises(HeaderError, match="whole image"):
        plan_of(Sample(memoryview(part), b"", 41, -1), StoredIndex())


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[TensorEntry], list[dict[str, int]]]:
    """Tensors, and for each of several snapshots which of their contents they have."""
    entries = [
        TensorEntry(f"t{n}" + draw(st.sampled_from(["", "é", "[0:2]"])), dtype, tuple(shape))
        for n, (dtype, shape) in enumerate(
            draw(
                st.lists(
                    st.tuples(
                        st.sampled_from(DTYPES),
                        st.lists(st.integers(0, 9), max_size=3),
                    ),
                    min_size=1,
                    max_size=8,
                )
            )
        )
    ]
    contents = st.fixed_dictionaries({entry.name: st.integers(0, 2) for entry in entries})
    return entries, draw(st.lists(contents, min_size=2, max_size=5))


@settings(deadline=None, max_examples=60)
@given(histories(), st.integers(0, 200))
def test_whatever_changes_the_image_is_what_it_was(
    history: tuple[list[TensorEntry], list[dict[str, int]]], least: int
) -> None:
    entries, contents = history
    store = MemoryStore()
    writer = Writer(store, min_tensor_bytes=least)
    for iteration, seeds in enumerate(contents):
        sample = make_sample(iteration, seeds=seeds, entries=entries)
        stored = writer.upload(sample)
        assert rebuilt(store, stored) == sample.image[: sample.view.image_len]
        for before, after in zip(stored.extents, stored.extents[1:], strict=False):
            follows = before.object_offset + before.length == after.object_offset
            assert not (before.object == after.object and follows)  # merged
    for key, data in store.objects.items():
        assert isinstance(parse(key), ObjectName)
        opened = safetensors.deserialize(data)
        header = parse_header(data[: 8 + int.from_bytes(data[:8], "little")])
        assert header.size == len(data)
        assert tag_of(data[: header.data_offset]) in key
        told = dict(opened)
        for tensor, digest in zip(header.tensors, header.digests, strict=True):
            assert xxhash.xxh3_128_digest(bytes(told[tensor.name]["data"])) == digest
            assert tuple(told[tensor.name]["shape"]) == tensor.shape


def test_stock_safetensors_opens_a_part(tmp_path: Path) -> None:
    store = MemoryStore()
    writer = Writer(store)
    writer.upload(make_sample(40, seeds=FROZEN))
    sample = make_sample(41, seeds=FROZEN)
    plan = plan_of(sample, writer.index)
    (tmp_path / "part.safetensors").write_bytes(b"".join(plan.parts([sample.image])))
    with safetensors.safe_open(tmp_path / "part.safetensors", framework="pt") as part:
        assert set(part.keys()) >= {IMAGE_HEADER, "expert.1.w", "gate.w"}
        metadata = part.metadata()
        assert metadata["format"] == "ckptd.part/1"
        assert (metadata["job"], metadata["run"], metadata["rank"]) == (JOB, RUN, "0")
        assert (metadata["iteration"], metadata["previous"]) == ("41", "-1")
        assert metadata["image_len"] == str(sample.view.image_len)
        assert metadata["image_digest"] == sample.header_digest.hex()
        inside = part.get_tensor(IMAGE_HEADER)
        assert bytes(inside.numpy()) == sample.header
        expert = part.get_tensor("expert.1.w")
        assert expert.dtype is torch.float32
        assert expert.numpy().tobytes() == bytes(sample.view.data("expert.1.w"))


GOOD = render_header({"digests": "0" * 32}, [ImageTensor("t", "F32", (2,), 0, 8)])


def raw(text: str) -> bytes:
    data = text.encode()
    data += b" " * (-(8 + len(data)) % 64)
    return len(data).to_bytes(8, "little") + data


def tensor(**changes: object) -> str:
    told = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}
    return raw_header({"t": told})


def raw_header(tensors: dict[str, object], digests: str = "0" * 32) -> str:
    return json.dumps({"__metadata__": {"digests": digests}, **tensors})


@pytest.mark.parametrize(
    "header",
    [
        b"",
        GOOD[:-1],
        GOOD + b" " * 64,
        raw("[]"),
        raw("nothing"),
        raw("[" * 10_000),
        raw("{}"),
        raw('{"__metadata__": {"digests": 1}}'),
        raw('{"__metadata__": {}, "__metadata__": {}}'),
        raw(tensor(dtype="F99")),
        raw(tensor(dtype=[])),
        raw(tensor(shape=[-2])),
        raw(tensor(shape=[2.0])),
        raw(tensor(shape=[3])),
        raw(tensor(shape=[1] * 65, data_offsets=[0, 4])),
        raw(tensor(data_offsets=[0])),
        raw(tensor(data_offsets=[4, 12])),
        raw(tensor(more=1)),
        raw(raw_header({"t": 7})),
        raw(raw_header({}, "0" * 32)),
        raw(raw_header({}, "x")),
        raw(
            raw_header(
                {
                    "t": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},
                    "u": {"dtype": "U8", "shape": [8], "data_offsets": [7, 15]},
                },
                "0" * 64,
            )
        ),
    ],
)
def test_what_is_no_header_is_refused(header: bytes) -> None:
    with pytest.raises(HeaderError):
        parse_header(header)


def test_a_good_header_is_read() -> None:
    assert parse_header(GOOD).tensors == (ImageTensor("t", "F32", (2,), len(GOOD), 8),)
    assert parse_header(raw(tensor())).size == len(raw(tensor())) + 8
