"""The image format: what is written is what stock safetensors reads, and damage is always noticed."""

from __future__ import annotations

import json
import os
import pickle
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.storage import image
from ckptd.storage.image import DigestMismatch, ImageLayout, ImageView, seal, sealed_digests, verify
from ckptd.storage.image_format import DTYPE_SIZE, ImageError, TensorEntry

IDENTITY = {"job": "demo", "run": "r1", "rank": "0", "world_size": "1"}

ENTRIES = [
    TensorEntry("gate.weight", "BF16", (3, 5)),
    TensorEntry("experts.up[2:3]", "F32", (1, 7)),
    TensorEntry("optim/exp_avg/experts.up[2:3]", "F32", (1, 7)),
    TensorEntry("empty", "F32", (0, 4)),
    TensorEntry("step", "I64", ()),
    TensorEntry("größe", "F16", (3,)),
    TensorEntry("mask", "BOOL", (5,)),
    TensorEntry("ckptd.scalars", "U8", (40,)),
]


def make(
    entries: list[TensorEntry] = ENTRIES, *, seed: int = 0, spare: int = 0, anchors: int = 0b101
) -> tuple[ImageLayout, memoryview]:
    """A layout, and an unsealed image of random bytes (with ``spare`` bytes behind it)."""
    layout = ImageLayout.build(entries, identity=IDENTITY, num_operators=11, anchors=anchors)
    buf = memoryview(bytearray(layout.image_len + spare))
    layout.write_header(buf, iteration=41, previous=40, scalars_len=12)
    data = random.Random(seed).randbytes(layout.image_len - layout.data_offset)
    buf[layout.data_offset : layout.image_len] = bytes(byte & 1 for byte in data)
    return layout, buf


def raw(header: object, data: bytes = b"", *, length: int | None = None) -> memoryview:
    """An image from any JSON value, padded as ours are."""
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    size = len(text) if length is None else length
    return memoryview(bytearray(size.to_bytes(8, "little") + text + data))


def header(**tensors: object) -> dict[str, object]:
    """A well-formed header around ``tensors``."""
    metadata = {
        "format": "ckptd/1",
        "iteration": f"{1:20}",
        "previous": f"{0:20}",
        "scalars_len": f"{0:12}",
        "digests": "0" * 32 * len(tensors),
        "num_operators": "3",
        "anchors": "BQ==",
    }
    return {"__metadata__": metadata, **tensors}


def with_metadata(**changes: str) -> memoryview:
    """An image without tensors, some of its metadata changed."""
    changed = header()
    metadata = changed["__metadata__"]
    assert isinstance(metadata, dict)
    return raw({"__metadata__": {**metadata, **changes}})


def test_layout_is_ordered_aligned_and_contiguous() -> None:
    layout, _ = make()
    sizes = [DTYPE_SIZE[entry.dtype] for entry in layout.entries]
    assert sizes == sorted(sizes, reverse=True)
    floats = [entry.name for entry in layout.entries if entry.dtype == "F32"]
    assert floats == [entry.name for entry in ENTRIES if entry.dtype == "F32"]  # stable
    at = layout.data_offset
    assert at % 64 == 0
    assert at == 8 + layout.header_len
    for entry in layout.entries:
        assert layout.offset_of(entry.name) == at
        assert at % DTYPE_SIZE[entry.dtype] == 0
        at += entry.nbytes
    assert at == layout.image_len


def test_data_that_is_in_place_already_keeps_its_place_and_order(tmp_path: Path) -> None:
    """Of a boundary log only the header is written last; small items may lie before large ones."""
    entries = [
        TensorEntry("bytes", "U8", (64,)),
        TensorEntry("wide", "F64", (8,)),
        TensorEntry("none", "F32", (0, 3)),
        TensorEntry("half", "BF16", (5,)),
    ]
    layout = ImageLayout.build(entries, identity=IDENTITY, num_operators=1, anchors=0, data_offset=4096)
    assert [layout.offset_of(e.name) for e in entries] == [4096, 4160, 4224, 4224]
    buf = memoryview(bytearray(range(256)) * 20)
    before = bytes(buf[4096:])
    layout.write_header(buf, iteration=3, previous=-1, scalars_len=0)
    seal(buf)
    assert bytes(buf[4096:]) == before
    view = ImageView(buf)
    assert view.names() == tuple(e.name for e in entries)
    assert bytes(view.data("half")) == before[128:138]
    path = tmp_path / "image.safetensors"
    path.write_bytes(buf[: view.image_len])
    assert set(safetensors.torch.load_file(path)) == {e.name for e in entries}


@pytest.mark.parametrize("data_offset", [64, 4095])
def test_a_header_that_does_not_end_where_data_begins_is_refused(data_offset: int) -> None:
    with pytest.raises(ValueError, match=f"cannot be padded to {data_offset}"):
        ImageLayout.build(ENTRIES, identity=IDENTITY, num_operators=1, anchors=0, data_offset=data_offset)


def test_view_returns_what_was_written() -> None:
    layout, buf = make(spare=4096)
    view = ImageView(buf)
    assert (view.iteration, view.previous, view.scalars_len) == (41, 40, 12)
    assert (view.num_operators, view.anchors) == (11, 0b101)
    assert dict(view.identity) == IDENTITY
    assert view.layout_id == layout.layout_id
    assert (view.data_offset, view.image_len) == (layout.data_offset, layout.image_len)
    assert view.names() == tuple(entry.name for entry in layout.entries)
    assert [(t.name, t.dtype, t.shape) for t in view] == [(e.name, e.dtype, e.shape) for e in layout.entries]
    assert len(view) == len(ENTRIES)
    assert "step" in view
    assert "stop" not in view
    assert view.tensor("mask").nbytes == 5


def test_data_is_the_buffer_itself() -> None:
    layout, buf = make()
    ImageView(buf).data("step")[:] = (7).to_bytes(8, "little")
    assert buf[layout.offset_of("step")] == 7


def test_previous_may_be_none_as_minus_one() -> None:
    layout, buf = make()
    layout.write_header(buf, iteration=0, previous=-1, scalars_len=0)
    assert ImageView(buf).previous == -1


def test_layout_id_ignores_what_changes_and_nothing_else() -> None:
    layout, buf = make()
    other, _ = make(seed=1)
    assert layout.layout_id == other.layout_id
    seal(buf)
    layout_again = ImageView(buf).layout_id
    assert layout_again == layout.layout_id
    assert make(anchors=0b100)[0].layout_id != layout.layout_id
    assert make(ENTRIES[:-1])[0].layout_id != layout.layout_id


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_sealed_image_verifies_and_digests_are_the_specified_ones(threads: int) -> None:
    layout, buf = make(spare=100)
    tail = random.Random(5).randbytes(100)
    buf[layout.image_len :] = tail
    with ThreadPoolExecutor(max(threads, 1)) as pool:
        digest = seal(buf, map_fn=pool.map) if threads else seal(buf)
        verify(buf, digest, map_fn=pool.map if threads else map)
    assert digest == xxhash.xxh3_128_digest(buf[: layout.data_offset])
    assert bytes(buf[layout.image_len :]) == tail
    stored = json.loads(bytes(buf[8 : layout.data_offset]))["__metadata__"]["digests"]
    view = ImageView(buf)
    expected = [xxhash.xxh3_128_hexdigest(view.data(tensor.name)) for tensor in view]
    assert stored == "".join(expected)
    assert sealed_digests(buf) == (layout.layout_id, view.entries, bytes.fromhex(stored))
    assert seal(buf) == digest  # sealing again changes nothing


def test_many_small_tensors_go_to_the_pool_in_batches() -> None:
    entries = [TensorEntry(f"t{i}", "F32", (i % 5,)) for i in range(3000)]
    layout, buf = make(entries)
    calls = []

    def counting(function: object, batches: object) -> Iterator[list[bytes]]:
        for batch in batches:  # type: ignore[attr-defined]
            calls.append(batch)
            yield function(batch)  # type: ignore[operator]

    digest = seal(buf, map_fn=counting)
    assert len(calls) == 1
    verify(buf, digest)
    buf[layout.offset_of("t1")] ^= 1
    with pytest.raises(DigestMismatch) as caught:
        verify(buf, digest)
    assert caught.value.tensor == "t1"


def test_batches_are_bounded_and_keep_the_order() -> None:
    big = image._BATCH_BYTES
    entries = [TensorEntry(f"t{i}", "U8", (size,)) for i, size in enumerate([9, big, 5, 5, big * 2])]
    _, buf = make(entries)
    view = ImageView(buf)
    batches = image._batches(view.entries)
    assert [len(b.tensors) for b in sorted(batches, key=lambda b: b.order)] == [1, 1, 2, 1]
    assert [b.nbytes for b in batches] == sorted((b.nbytes for b in batches), reverse=True)
    with ThreadPoolExecutor(2) as pool:
        assert seal(buf, map_fn=pool.map) == seal(buf)


@pytest.mark.parametrize("entries", [ENTRIES, ENTRIES[:1], []])
def test_stock_safetensors_opens_it(entries: list[TensorEntry], tmp_path: Path) -> None:
    """The image is a safetensors file: another program reads the same bits."""
    layout, buf = make(entries, spare=64)
    seal(buf)
    path = tmp_path / "image.safetensors"
    path.write_bytes(buf[: layout.image_len])
    loaded = safetensors.torch.load_file(path)
    assert sorted(loaded) == sorted(entry.name for entry in entries)
    view = ImageView(buf)
    for tensor in view:
        flat = loaded[tensor.name].contiguous().reshape(-1)
        assert tuple(loaded[tensor.name].shape) == tensor.shape
        assert bytes(flat.view(torch.uint8).numpy()) == bytes(view.data(tensor.name))
    with safetensors.safe_open(path, "pt") as opened:
        assert opened.metadata()["iteration"].strip() == "41"
        assert opened.metadata()["format"] == "ckptd/1"


@pytest.mark.parametrize("dtype", sorted(DTYPE_SIZE))
def test_every_dtype_has_the_size_that_safetensors_gives_it(dtype: str, tmp_path: Path) -> None:
    layout, buf = make([TensorEntry("t", dtype, (3, 2))])
    path = tmp_path / "image.safetensors"
    path.write_bytes(buf[: layout.image_len])
    assert safetensors.torch.load_file(path)["t"].element_size() == DTYPE_SIZE[dtype]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(DTYPE_SIZE)), st.lists(st.integers(0, 6), max_size=3)),
        max_size=20,
    ),
    st.randoms(use_true_random=False),
)
def test_any_layout_round_trips_and_any_flipped_bit_is_found(
    shapes: list[tuple[str, list[int]]], rng: random.Random
) -> None:
    entries = [TensorEntry(f"t/{i}", d, tuple(shape)) for i, (d, shape) in enumerate(shapes)]
    layout, buf = make(entries, seed=rng.randrange(1000))
    read = safetensors.deserialize(bytes(buf))
    assert {name for name, _ in read} == {entry.name for entry in entries}
    digest = seal(buf)
    verify(buf, digest)
    at = rng.randrange(layout.image_len)
    buf[at] ^= 1 << rng.randrange(8)
    with pytest.raises(ImageError) as caught:
        verify(buf, digest)
    if at >= layout.data_offset:
        assert isinstance(caught.value, DigestMismatch)
        hit = next(t for t in ImageView(buf) if t.offset <= at < t.offset + t.nbytes)
        assert caught.value.tensor == hit.name
    elif at >= 8:
        assert isinstance(caught.value, DigestMismatch)
        assert caught.value.tensor == "header"


def test_the_first_of_several_damaged_tensors_is_named() -> None:
    layout, buf = make()
    digest = seal(buf)
    for name in ("mask", "experts.up[2:3]", "gate.weight"):
        buf[layout.offset_of(name)] ^= 128
    with pytest.raises(DigestMismatch, match=r"experts\.up\[2:3\]"):
        verify(buf, digest)


def test_digest_mismatch_survives_a_pickle() -> None:
    copy = pickle.loads(pickle.dumps(DigestMismatch("w")))
    assert copy.tensor == "w"
    assert str(copy) == str(DigestMismatch("w"))


@pytest.mark.parametrize("end", [0, 5, 8, 63, 200, -1, -50])
def test_a_truncated_image_is_refused(end: int) -> None:
    layout, buf = make()
    digest = seal(buf)
    cut = buf[: end if end >= 0 else layout.image_len + end]
    with pytest.raises(ImageError):
        ImageView(cut)
    with pytest.raises(ImageError):
        verify(cut, digest)
    with pytest.raises(ImageError):
        seal(cut)


def good(begin: int = 0, end: int = 4, **changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [1], "data_offsets": [begin, end], **changes}


GARBAGE: dict[str, memoryview] = {
    "zeros": memoryview(bytes(4096)),
    "ones": memoryview(b"\xff" * 4096),
    "huge header": raw(header(), length=1 << 62),
    "header beyond the buffer": raw(header(), length=4096 - 8),
    "header above the limit": raw(header(), length=100_000_000 + 56),
    "unaligned header": raw(header(), length=250),
    "not JSON": raw(b'{"__metadata__":' + b"[" * 400),
    "not an object": raw([]),
    "foreign safetensors": raw({"w": good()}, bytes(4)),
    "another format": with_metadata(format="ckptd/9"),
    "deeply nested": raw(json.dumps(header()).encode()[:-1].replace(b" ", b"") + b"[" * 90_000),
    "gap": raw(header(a=good(), b=good(8, 12)), bytes(12)),
    "overlap": raw(header(a=good(), b=good(2, 6)), bytes(6)),
    "same bytes twice": raw(header(a=good(), b=good()), bytes(4)),
    "beyond the buffer": raw(header(a=good(shape=[1 << 40], data_offsets=[0, 4 << 40])), bytes(4)),
    "shape does not match": raw(header(a=good(shape=[2])), bytes(4)),
    "endless shape": raw(header(a=good(shape=[1 << 62] * 64)), bytes(4)),
    "too many dimensions": raw(header(a=good(shape=[1] * 65)), bytes(4)),
    "negative size": raw(header(a=good(shape=[-1])), bytes(4)),
    "negative offset": raw(header(a=good(-4, 0)), bytes(4)),
    "backward offsets": raw(header(a=good(4, 0)), bytes(4)),
    "shape of floats": raw(header(a=good(shape=[1.0])), bytes(4)),
    "shape of booleans": raw(header(a=good(shape=[True])), bytes(4)),
    "unknown dtype": raw(header(a=good(dtype="F31")), bytes(4)),
    "dtype is a list": raw(header(a=good(dtype=["F32"])), bytes(4)),
    "three offsets": raw(header(a=good(data_offsets=[0, 2, 4])), bytes(4)),
    "tensor is a number": raw(header(a=3), bytes(4)),
    "surplus key": raw(header(a=good(more=1)), bytes(4)),
    "too few digests": with_metadata(digests="0" * 32),
    "digests are not hex": with_metadata(digests="x" * 32),
    "digests cut": with_metadata(digests="0" * 31),
    "anchors beyond": with_metadata(anchors="CQ=="),
    "anchors of another length": with_metadata(anchors="BQAA"),
    "anchors are not base64": with_metadata(anchors="?"),
    "operators are not a number": with_metadata(num_operators="-1"),
    "endless operators": with_metadata(num_operators="9" * 5000),
    "iteration is not a number": with_metadata(iteration=f"{'ten':>20}"),
    "iteration is blank": with_metadata(iteration=" " * 20),
    "iteration is negative": with_metadata(iteration=f"{-3:20}"),
    "metadata are not strings": raw(
        json.dumps(header()).replace('"num_operators": "3"', '"num_operators": 3').encode()
    ),
    "a key twice": raw(
        json.dumps(header(a=good()), separators=(",", ":")).encode()[:-1]
        + b","
        + json.dumps({"a": good()}, separators=(",", ":")).encode()[1:],
        bytes(4),
    ),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_an_image_error(name: str) -> None:
    with pytest.raises(ImageError):
        ImageView(GARBAGE[name])


def test_the_garbage_differs_from_a_good_header_only_in_what_is_wrong() -> None:
    """Guards the table above: the helper's own header must be readable."""
    view = ImageView(raw(header(a=good(), b=good(4, 8)), bytes(8)))
    assert (view.names(), view.anchors, view.num_operators) == (("a", "b"), 0b101, 3)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 40))
def test_random_damage_of_the_header_never_escapes(seed: int, count: int) -> None:
    layout, buf = make()
    digest = seal(buf)
    rng = random.Random(seed)
    before = bytes(buf)
    for _ in range(count):
        buf[rng.randrange(layout.data_offset)] = rng.randrange(256)
    for call in (ImageView, seal):
        try:
            call(memoryview(bytearray(buf)))
        except ImageError:
            continue
    if bytes(buf) != before:
        with pytest.raises(ImageError):
            verify(buf, digest)


def test_parsed_layouts_are_reused_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = image._LayoutCache(max_layouts=2, max_tensors=30)
    monkeypatch.setattr(image, "_parsed_layouts", cache)
    _, first = make()
    entries = ImageView(first).entries
    _, again = make(seed=9)
    assert ImageView(again).entries is entries
    for anchors in range(5):
        ImageView(make(anchors=anchors)[1])
        assert len(cache) <= 2
    ImageView(make([TensorEntry(f"t{i}", "U8", (1,)) for i in range(20)])[1])
    assert cache._num_tensors <= 30
    ImageView(make([TensorEntry(f"t{i}", "U8", (1,)) for i in range(31)])[1])
    assert cache._num_tensors <= 30


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            [TensorEntry("a", "F32", ()), TensorEntry("a", "F32", ())],
            "two tensors have the name 'a'",
        ),
        ([TensorEntry("__metadata__", "F32", ())], "two tensors have the name"),
        ([TensorEntry("a", "F33", ())], "unknown dtype 'F33'"),
        ([TensorEntry("a", "F32", (-1,))], "bad shape"),
    ],
)
def test_layouts_that_cannot_be_are_refused(entries: list[TensorEntry], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageLayout.build(entries, identity={}, num_operators=1, anchors=0)


def test_numbers_that_do_not_fit_are_refused() -> None:
    layout, buf = make()
    with pytest.raises(ValueError, match="anchors name operators beyond"):
        make(anchors=1 << 11)
    with pytest.raises(ValueError, match="more than 12 digits"):
        layout.write_header(buf, iteration=1, previous=0, scalars_len=10**12)
    with pytest.raises(ValueError, match="the image needs"):
        layout.write_header(buf[:-1], iteration=1, previous=0, scalars_len=0)
    with pytest.raises(ValueError, match="must not contain anchors"):
        ImageLayout.build([], identity={"anchors": "x"}, num_operators=0, anchors=0)


def test_no_operators_and_no_tensors_is_still_an_image() -> None:
    layout = ImageLayout.build([], identity={}, num_operators=0, anchors=0)
    buf = memoryview(bytearray(layout.image_len))
    layout.write_header(buf, iteration=0, previous=-1, scalars_len=0)
    verify(buf, seal(buf))
    assert ImageView(buf).names() == ()


def test_bytes_that_look_like_nan_are_data() -> None:
    """NaN in weights is data, not an error: digests are of bytes."""
    layout, buf = make([TensorEntry("w", "F32", (4,))])
    buf[layout.data_offset :] = b"\xff" * 16
    verify(buf, seal(buf))


def test_an_unsealed_image_does_not_verify() -> None:
    _, buf = make()
    with pytest.raises(DigestMismatch):
        verify(buf, os.urandom(16))
