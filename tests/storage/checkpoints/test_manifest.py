"""Manifests: what is written is read back, and nothing else is ever believed."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.storage.checkpoints.manifest import (
    MAX_MANIFEST_BYTES,
    Extent,
    RankManifest,
    StoredObject,
    StoredSnapshot,
    agreement,
)
from ckptd.storage.checkpoints.names import ObjectName, parse
from ckptd.storage.checkpoints.sealed_json import (
    MAX_RUN_BYTES,
    ManifestError,
    RunIdentity,
    in_range,
    seal_json,
)
from ckptd.storage.checkpoints.signing import ManifestSigner, Signers, create_signer
from tests.storage.samples import JOB, RUN, RUN_ID, manifest_of

KEY = ObjectName(JOB, RUN, 40, 0, 7, 3, "0a" * 8).key
OTHER = ObjectName(JOB, RUN, 30, 1, 7, 2, "0b" * 8).key


def snapshot(iteration: int = 40, previous: int = -1, **changes: Any) -> StoredSnapshot:
    told = StoredSnapshot(
        iteration=iteration,
        previous=previous,
        sequence=3,
        phase=1,
        epoch=7,
        epoch_start=-1,
        filled_at_ns=99,
        header_digest=bytes(range(16)),
        image_len=300,
        layout_id=2**64 - 1,
        num_operators=9,
        anchors=0x1FF,
        objects=(StoredObject(KEY, 200, 'W/"é"'), StoredObject(OTHER, 500, "")),
        extents=(Extent(0, 150, 0, 50), Extent(150, 100, 1, 400), Extent(250, 50, 0, 0)),
    )
    return replace(told, **changes)


MANIFEST = manifest_of([snapshot()])


@st.composite
def manifests(draw: st.DrawFn) -> RankManifest:
    """Any manifest that may be written."""
    num_operators = draw(st.integers(0, 20))
    start = draw(st.integers(0, 10**11))
    previous, epoch, snapshots = -1, draw(st.integers(0, 100)), []
    everything = (1 << num_operators) - 1
    for number in range(draw(st.integers(1, 4))):
        iteration = start if not number else previous + draw(st.integers(1, 5))
        epoch += draw(st.integers(0, 1))
        objects = tuple(
            StoredObject(
                ObjectName(JOB, RUN, iteration, n, epoch, number, f"{n:016x}").key,
                draw(st.integers(1000, 2**50)),
                draw(st.text(max_size=20)),
            )
            for n in range(draw(st.integers(1, 3)))
        )
        at, extents = 0, []
        for n in (*range(len(objects)), *draw(st.lists(st.integers(0, len(objects) - 1)))):
            length = draw(st.integers(1, 1000))
            extents.append(Extent(at, length, n, draw(st.integers(0, objects[n].size - length))))
            at += length
        anchors = draw(st.integers(0, everything)) if number else everything
        told = snapshot(
            iteration,
            previous,
            sequence=draw(st.integers(0, 2**63 - 1)),
            phase=draw(st.integers(0, 9)),
            epoch=epoch,
            epoch_start=draw(st.integers(-1, 10**11)),
            header_digest=draw(st.binary(min_size=16, max_size=16)),
            image_len=at,
            layout_id=draw(st.integers(0, 2**64 - 1)),
            num_operators=num_operators,
            anchors=anchors,
            objects=objects,
            extents=tuple(extents),
            image_digest=draw(st.sampled_from(["", f"blake3:{'0a' * 32}", f"sha256:{'0b' * 32}"])),
        )
        snapshots.append(told)
        previous = iteration
    return replace(
        manifest_of(snapshots, rank=draw(st.integers(0, 3)), world_size=4),
        descriptor=draw(st.binary(max_size=50)),
        tool=draw(st.text(max_size=50)),
    )


@settings(deadline=None)
@given(manifests())
def test_what_is_written_is_read(manifest: RankManifest) -> None:
    data = manifest.to_bytes()
    assert RankManifest.from_bytes(data) == manifest
    name = parse(manifest.key)
    assert name is not None
    assert name.key == manifest.key


def test_it_is_json_that_ends_with_the_digest_of_the_lines_before() -> None:
    """What docs/format.md promises to readers that are not ours."""
    data = MANIFEST.to_bytes()
    told = json.loads(data)
    lines = data.splitlines(keepends=True)
    digest = xxhash.xxh3_128_hexdigest(b"".join(lines[:-2]))
    assert lines[-2:] == [f' "digest": "{digest}"\n'.encode(), b"}\n"]
    assert told["format"] == "ckptd.manifest/2"
    assert (told["start"], told["end"], told["rank"], told["world_size"]) == (40, 40, 0, 1)
    assert told["snapshots"][0]["extents"][1] == [150, 100, 1, 400]
    assert told["snapshots"][0]["objects"][1] == [OTHER, 500, ""]
    assert base64.b64decode(told["snapshots"][0]["anchors"]) == b"\xff\x01"
    assert data.isascii()
    assert max(map(len, data.splitlines())) < 200


def test_what_an_earlier_version_wrote_is_read() -> None:
    """Version 1 has no digests of images; durable checkpoints of it must not be lost by an update."""
    old = replace(MANIFEST, version=1)
    data = old.to_bytes()
    assert json.loads(data)["format"] == "ckptd.manifest/1"
    assert not {"signer", "signature", "image_digest"} & {
        *json.loads(data),
        *json.loads(data)["snapshots"][0],
    }
    assert RankManifest.from_bytes(data) == old
    with pytest.raises(ManifestError, match="version 1"):
        replace(manifest_of([snapshot(image_digest=f"sha256:{'0b' * 32}")]), version=1)


def test_a_signature_covers_everything_before_it(tmp_path: Path) -> None:
    """xxh3 is no signature: whoever can write to the store could change digest and bytes together, unnoticed."""
    create_signer(tmp_path)
    signed = MANIFEST.signed_by(ManifestSigner.load(tmp_path))
    data = signed.to_bytes()
    assert RankManifest.from_bytes(data) == signed
    trusted = Signers.load(tmp_path)
    assert data.startswith(signed.signed_bytes + b' "signature": "')
    assert trusted.objection(signed.signer, signed.signature, signed.signed_bytes) == ""
    changed = replace(
        signed,
        snapshots=(snapshot(image_len=299, extents=(Extent(0, 150, 0, 50), Extent(150, 149, 1, 300))),),
    )
    assert "bytes were changed" in trusted.objection(changed.signer, changed.signature, changed.signed_bytes)


@pytest.mark.parametrize(
    "change",
    [
        {"signer": "0a" * 32},
        {"signature": bytes(64)},
        {"signer": "0a" * 32, "signature": b"1"},
        {"version": 3},
    ],
)
def test_half_a_signature_is_none(change: dict[str, Any]) -> None:
    with pytest.raises(ManifestError):
        replace(MANIFEST, **change)


def test_every_flipped_bit_is_found() -> None:
    data = MANIFEST.to_bytes()
    for at in range(len(data)):
        for bit in range(8):
            bad = bytearray(data)
            bad[at] ^= 1 << bit
            with pytest.raises(ManifestError):
                RankManifest.from_bytes(bytes(bad))


def test_every_truncation_and_extension_is_found() -> None:
    data = MANIFEST.to_bytes()
    for length in range(len(data)):
        with pytest.raises(ManifestError):
            RankManifest.from_bytes(data[:length])
    with pytest.raises(ManifestError, match="truncated"):
        RankManifest.from_bytes(data + b"\n")


def forged(change: Callable[[dict[str, Any]], None]) -> bytes:
    """A manifest with other contents and a digest that fits."""
    fields = json.loads(MANIFEST.to_bytes())
    del fields["digest"]
    change(fields)
    return seal_json(fields)


HUGE = 10**30


def _first(fields: dict[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = fields["snapshots"][0]
    return told


FORGERIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "another format": lambda f: f.update(format="ckptd.manifest/3"),
    "the format before": lambda f: f.update(format="ckptd.manifest/1"),
    "a field too many": lambda f: f.update(more=1),
    "a field too few": lambda f: f.pop("tool"),
    "no snapshots": lambda f: f.update(snapshots=[]),
    "a start that is not the first": lambda f: f.update(start=39),
    "an end that is not the last": lambda f: f.update(end=41),
    "a job that is a path": lambda f: f.update(job="../moe"),
    "a run that is a path": lambda f: f.update(run=".."),
    "a run_id that is none": lambda f: f.update(run_id="a b"),
    "a rank beyond the world": lambda f: f.update(rank=1),
    "a negative rank": lambda f: f.update(rank=-1),
    "no world": lambda f: f.update(world_size=0),
    "a huge world": lambda f: f.update(world_size=HUGE),
    "a rank that is a float": lambda f: f.update(rank=0.0),
    "a rank that is a boolean": lambda f: f.update(rank=False),
    "a long tool": lambda f: f.update(tool="x" * 300),
    "a window of 0": lambda f: f.update(window=0),
    "slots smaller than an image": lambda f: f.update(slot_bytes=299),
    "a descriptor that is not base64": lambda f: f.update(descriptor="*"),
    "a descriptor spelled otherwise": lambda f: f.update(descriptor="AG9wYXF1ZR=="),
    "snapshots that are a number": lambda f: f.update(snapshots=7),
    "a negative iteration": lambda f: _first(f).update(iteration=-1),
    "a huge iteration": lambda f: _first(f).update(iteration=10**12),
    "a previous that is no earlier": lambda f: _first(f).update(previous=40),
    "a huge sequence": lambda f: _first(f).update(sequence=2**63),
    "a huge epoch": lambda f: _first(f).update(epoch=2**32),
    "a short digest": lambda f: _first(f).update(header_digest="00"),
    "a digest in capitals": lambda f: _first(f).update(header_digest="AB" * 16),
    "an empty image": lambda f: _first(f).update(image_len=0, extents=[], objects=[]),
    "a huge image": lambda f: _first(f).update(image_len=2**51),
    "anchors that do not fit": lambda f: _first(f).update(anchors="AAAA"),
    "anchors beyond the operators": lambda f: _first(f).update(anchors="//8="),
    "anchors that miss an operator": lambda f: _first(f).update(anchors="/wA="),
    "huge anchors": lambda f: _first(f).update(num_operators=10**9),
    "an object outside the run": lambda f: _first(f)["objects"][1].__setitem__(
        0, OTHER.replace(RUN, "run-2")
    ),
    "an object that is a path": lambda f: _first(f)["objects"][1].__setitem__(0, "../../etc"),
    "a manifest as an object": lambda f: _first(f)["objects"][1].__setitem__(0, MANIFEST.key),
    "an object twice": lambda f: _first(f)["objects"][1].__setitem__(0, KEY),
    "an empty object": lambda f: _first(f)["objects"][1].__setitem__(1, 0),
    "an object too many": lambda f: _first(f)["objects"].append([OTHER[:-13] + "c.safetensors", 1, ""]),
    "a gap": lambda f: _first(f)["extents"][1].__setitem__(0, 151),
    "an overlap": lambda f: _first(f)["extents"][1].__setitem__(0, 149),
    "extents that end early": lambda f: _first(f)["extents"].pop(),
    "an extent of nothing": lambda f: _first(f)["extents"].append([300, 0, 0, 0]),
    "a negative length": lambda f: _first(f)["extents"][2].__setitem__(1, -50),
    "an extent beyond its object": lambda f: _first(f)["extents"][1].__setitem__(3, 401),
    "an extent in no object": lambda f: _first(f)["extents"][1].__setitem__(2, 2),
    "a negative offset": lambda f: _first(f)["extents"][1].__setitem__(3, -1),
}


@pytest.mark.parametrize("what", FORGERIES)
def test_a_forged_manifest_is_refused_although_its_digest_fits(what: str) -> None:
    def change(fields: dict[str, Any]) -> None:
        FORGERIES[what](fields)

    data = forged(change)
    assert data != MANIFEST.to_bytes()
    with pytest.raises(ManifestError):
        RankManifest.from_bytes(data)


def test_the_forger_forges_well() -> None:
    """Without a change the forged manifest is the real one: the refusals above are about the change."""
    assert forged(lambda fields: None) == MANIFEST.to_bytes()


def test_another_spelling_of_the_same_is_refused() -> None:
    body = MANIFEST.to_bytes().replace(b' "rank": 0,', b' "rank":  0,')
    head = body[: body.rindex(b' "digest"')]
    data = head + f' "digest": "{xxhash.xxh3_128_hexdigest(head)}"\n}}\n'.encode()
    with pytest.raises(ManifestError, match="form that this version writes"):
        RankManifest.from_bytes(data)


def test_a_key_twice_is_refused() -> None:
    body = MANIFEST.to_bytes().replace(b' "rank": 0,', b' "rank": 5,\n "rank": 0,')
    head = body[: body.rindex(b' "digest"')]
    data = head + f' "digest": "{xxhash.xxh3_128_hexdigest(head)}"\n}}\n'.encode()
    with pytest.raises(ManifestError, match="form that this version writes"):
        RankManifest.from_bytes(data)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400))
def test_no_bytes_do_more_than_raise(junk: bytes) -> None:
    with pytest.raises(ManifestError):
        RankManifest.from_bytes(junk)
    head = b'{\n "format": "ckptd.manifest/1",\n' + junk + b"\n"
    sealed = head + f' "digest": "{xxhash.xxh3_128_hexdigest(head)}"\n}}\n'.encode()
    with pytest.raises(ManifestError):
        RankManifest.from_bytes(sealed)


@pytest.mark.parametrize("where", ["snapshots", "unheard_of"])
def test_deep_nesting_is_refused(where: str) -> None:
    """Once in a field that is known, once where a decoder must skip what it does not know."""
    nested = f'{{\n "{where}": {"[" * 100_000}{"]" * 100_000},\n'.encode()
    digest = xxhash.xxh3_128_hexdigest(nested)
    with pytest.raises(ManifestError):
        RankManifest.from_bytes(nested + f' "digest": "{digest}"\n}}\n'.encode())


def test_a_manifest_may_not_be_endless() -> None:
    with pytest.raises(ManifestError, match="the limit is"):
        RankManifest.from_bytes(b" " * (MAX_MANIFEST_BYTES + 1))


def chain(*changes: dict[str, Any]) -> RankManifest:
    return manifest_of([snapshot(**change) for change in changes])


def test_snapshots_must_be_a_chain_that_anchors_everything() -> None:
    good = chain({"iteration": 40, "anchors": 0x0F}, {"iteration": 42, "previous": 40, "anchors": 0x1F0})
    assert (good.start, good.end) == (40, 42)
    with pytest.raises(ManifestError, match="does not follow 40"):
        chain({"iteration": 40}, {"iteration": 42, "previous": 41})
    with pytest.raises(ManifestError, match="earlier history"):
        chain({"iteration": 40, "epoch": 8}, {"iteration": 41, "previous": 40, "epoch": 7})
    with pytest.raises(ManifestError, match="number of operators"):
        chain(
            {"iteration": 40, "num_operators": 10, "anchors": 0x3FF},
            {"iteration": 41, "previous": 40},
        )
    with pytest.raises(ManifestError, match="anchors some"):
        chain({"iteration": 40, "anchors": 0x0F}, {"iteration": 41, "previous": 40, "anchors": 0xF0})


def test_a_checkpoint_is_of_the_epoch_of_its_newest_snapshot() -> None:
    manifest = chain(
        {"iteration": 40, "epoch": 7, "epoch_start": -1},
        {"iteration": 41, "previous": 40, "epoch": 9, "epoch_start": 40},
    )
    assert manifest.checkpoint[:3] == (41, 9, 40)


AGREED: dict[str, Any] = {
    "job": JOB,
    "run": RUN,
    "run_id": RUN_ID,
    "world_size": 4,
    "epoch": 7,
    "epoch_start": -1,
    "phases": [(40, 1), (41, 0)],
}


def test_ranks_agree_if_and_only_if_all_of_it_is_equal() -> None:
    other: dict[str, Any] = {
        "job": "moe2",
        "run": "run-2",
        "run_id": "x",
        "world_size": 5,
        "epoch": 8,
        "epoch_start": 0,
        "phases": [(40, 1), (41, 1)],
    }
    told = [agreement(**{**AGREED, what: value}) for what, value in other.items()]
    told += [agreement(**AGREED), agreement(**{**AGREED, "phases": [(39, 1), (41, 0)]})]
    assert len(set(told)) == len(told)
    assert agreement(**{**AGREED, "phases": ((40, 1), (41, 0))}) == agreement(**AGREED)


def test_the_agreement_is_as_specified() -> None:
    """The example in docs/format.md."""
    text = '["moe","run-1","0123abcd",4,40,41,7,-1,[[40,1],[41,0]]]'
    assert agreement(**AGREED) == xxhash.xxh3_128_hexdigest(text.encode())


def test_ranks_of_one_checkpoint_share_it_whatever_else_differs() -> None:
    one = replace(manifest_of([snapshot()], rank=0, world_size=2), written_at_ns=1, tool="a")
    two = manifest_of([snapshot(sequence=77, previous=-1)], rank=1, world_size=2)
    assert one.checkpoint == two.checkpoint
    assert one.key != two.key
    assert one.object_keys == {KEY, OTHER}


def test_a_run_is_identified() -> None:
    identity = RunIdentity(JOB, RUN, RUN_ID, 5, "ckptd 0.3.0")
    data = identity.to_bytes()
    assert RunIdentity.from_bytes(data) == identity
    assert json.loads(data)["format"] == "ckptd.run/1"
    for at in range(len(data)):
        bad = bytearray(data)
        bad[at] ^= 1 << at % 8
        with pytest.raises(ManifestError):
            RunIdentity.from_bytes(bytes(bad))
    with pytest.raises(ManifestError, match="the limit is"):
        RunIdentity.from_bytes(b" " * (MAX_RUN_BYTES + 1))
    with pytest.raises(ManifestError, match="created_at_ns"):
        RunIdentity(JOB, RUN, RUN_ID, -1, "")
    spaced = data.replace(b'"tool": ', b'"tool":  ')
    head = spaced[: spaced.rindex(b' "digest"')]
    with pytest.raises(ManifestError, match="form that this version writes"):
        RunIdentity.from_bytes(head + f' "digest": "{xxhash.xxh3_128_hexdigest(head)}"\n}}\n'.encode())


def test_an_error_does_not_quote_a_number_of_thousands_of_digits() -> None:
    with pytest.raises(ManifestError, match="rank must be from 0 to 9, but is a number of 13288 bits"):
        in_range("rank", 10**4000, 0, 9)
    with pytest.raises(ManifestError, match=r"but is 10$"):
        in_range("rank", 10, 0, 9)
