"""Targets that are read from files, memory and stores."""

from __future__ import annotations

import struct
from functools import cache
from pathlib import Path
from random import Random

import msgspec
import xxhash

from ckptd.config.daemon_config import ConfigError, load_config, render_toml, user_quotas
from ckptd.core.advice.failure_simulation import recorded_failures
from ckptd.core.export_plan import ExportError
from ckptd.core.slots.segment_format import (
    PROLOGUE_BYTES,
    SegmentDescriptor,
    SlotHeader,
    decode_descriptor,
    encode_descriptor,
    pack_slot_header,
    plan_geometry,
    unpack_slot_header,
    write_prologue,
)
from ckptd.core.slots.slots import SlotState
from ckptd.ctl.command import CommandError
from ckptd.ctl.elastic_answers import read_file
from ckptd.errors import RemoteProtocolError, SegmentError
from ckptd.event_log import EventLog
from ckptd.export.source import facts_of
from ckptd.holdings import held_from_segments
from ckptd.memory.inventory import held_segment, rank_snapshots, segment_status
from ckptd.memory.replay_failures import Quarantine
from ckptd.memory.segment_file import KEPT_DIGEST_AT, open_segment, settle
from ckptd.node.trainers import OwnerTokens
from ckptd.peers.run_records import decode_record, encode_record
from ckptd.persistence.durable_plan import read_newest
from ckptd.storage.checkpoints.manifest import RankManifest
from ckptd.storage.checkpoints.names import parse
from ckptd.storage.checkpoints.sealed_json import ManifestError, RunIdentity
from ckptd.storage.checkpoints.signing import ManifestSigner, Signers, SigningError, create_signer
from ckptd.storage.gradient_block import (
    UpdatedGroup,
    UpdatedParameter,
    UpdateRecord,
    aligned,
    block_bytes_max,
    first_gradient,
    gradient_range,
    pack_pieces,
    read_block,
    unpack_pieces,
    write_block,
)
from ckptd.storage.image import ImageView, layout_id_of, mismatches
from ckptd.storage.image_format import HeaderError, ImageError, parse_header
from ckptd.storage.model_set import FolderFiles, SetError, SetFile, open_set, render_import, render_index
from ckptd.storage.reduced_image import NewerSnapshots, bare, reduced
from ckptd.storage.strong_digest import strong_digest
from ckptd.transport.access.keys import Keys, KeysError, trust, trusted_keys
from ckptd.transport.messages import ReplayFailure, RunRecord
from tests.ckptd.running import descriptor
from tests.fuzz.examples import examples_of
from tests.fuzz.mutations import (
    changed_bytes,
    crc,
    in_json,
    in_msgpack,
    in_safetensors,
    in_sealed_json,
    packed,
    xxh3,
)
from tests.fuzz.target import Target, in_scratch, scratch
from tests.storage.memory_store import MemoryStore
from tests.storage.samples import RUN, Writer, make_sample

__all__ = ["FILE_TARGETS"]


# -- memory: a segment with what lies in it ----------------------------------------------------------

_PROLOGUE = struct.Struct("<8sIIQQIII")
_SLOTS, _SLOT_BYTES = 2, 64 << 10


@cache
def _segment_bytes() -> tuple[bytes, SegmentDescriptor]:
    """The beginning of a segment: prologue and descriptor."""
    told = descriptor(world_size=2, topology="dp2", node_id="n0", client=_client_seeds()[0])
    geometry = plan_geometry(_SLOTS, _SLOT_BYTES, len(encode_descriptor(told)))
    content = bytearray(geometry.total_bytes)
    write_prologue(memoryview(content), geometry, told)
    return bytes(content), told


def _segment_seeds() -> list[bytes]:
    content, told = _segment_bytes()
    sample = make_sample(3, previous=2)
    slots = [
        SlotHeader(
            state=state,
            iteration=3,
            previous=2,
            image_len=len(sample.image),
            sequence=4,
            layout_id=sample.view.layout_id,
            filled_at_ns=5,
            sealed_at_ns=6,
            writer_pid=7,
            header_digest=sample.header_digest,
        )
        for state in (SlotState.SEALED, SlotState.FILLING)
    ]
    spelled = {
        "prologue": list(_PROLOGUE.unpack_from(content))[:-1],
        "descriptor": encode_descriptor(told),
        "slots": [[getattr(slot, name) for name in SlotHeader.__dataclass_fields__] for slot in slots],
        "image": bytes(sample.image),
        "kept": _kept(slots[0], strong_digest(sample.image)),
        "patches": [[16, 3]],
        "size": len(content),
    }
    return [msgspec.msgpack.encode(spelled), msgspec.msgpack.encode(spelled | {"patches": []})]


def _kept(header: SlotHeader, digest: str) -> bytes:
    """The digest of an image as it is kept behind a slot's header."""
    whole, _ = _segment_bytes()
    path = in_scratch("kept/job~run~r0~g0.seg", whole)
    segment = open_segment(path)
    segment.keep_digest(0, header, digest)
    at = segment.geometry.header_offset(0) + KEPT_DIGEST_AT
    kept = bytes(segment.buffer[at : at + 128]).rstrip(b"\0")
    segment.close()
    return kept


class _Unspelled(Exception):
    """A segment that has no spelling, or that is none of this name."""


class _Spelled(msgspec.Struct):
    """A segment as its values, so that a mutation of these has the right checksums."""

    prologue: tuple[bytes, int, int, int, int, int, int]
    descriptor: bytes
    slots: list[tuple[int, int, int, int, int, int, int, int, int, int, bytes, int, int, int]]
    image: bytes
    kept: bytes
    patches: list[tuple[int, int]]
    size: int


_spelled = msgspec.msgpack.Decoder(_Spelled)


def _spelled_out(data: bytes) -> bytes:
    """The bytes of the segment; what does not fit its fields is refused here."""
    whole, _ = _segment_bytes()
    try:
        told = _spelled.decode(data)
        content = bytearray(whole[: max(1, told.size)])
        front = _PROLOGUE.pack(*told.prologue, int.from_bytes(crc(told.descriptor), "little"))
        slots = [pack_slot_header(SlotHeader(SlotState(each[0]), *each[1:])) for each in told.slots[:_SLOTS]]
    except (ValueError, TypeError, struct.error) as error:
        raise _Unspelled from error
    pieces = [(0, front + crc(front)), (PROLOGUE_BYTES, told.descriptor)]
    geometry = plan_geometry(_SLOTS, _SLOT_BYTES, 1)
    for index, slot in enumerate(slots):
        at = geometry.header_offset(index)
        pieces += [(at, slot), (at + KEPT_DIGEST_AT, told.kept), (geometry.slot_offset(index), told.image)]
    pieces += [(at % len(content), bytes([value & 255])) for at, value in told.patches]
    for at, piece in pieces:
        content[at : at + len(piece)] = piece[: max(0, len(content) - at)]
    return bytes(content)


def _segment(data: bytes) -> None:
    """Adopt the segment as a daemon does, and answer every question about it."""
    path = scratch() / "job~run~r0~g0.seg"
    path.write_bytes(_spelled_out(data))
    try:
        segment = open_segment(path)
    except ValueError as error:  # it is another's
        raise _Unspelled from error
    try:
        for index, header in segment.headers():
            segment.kept_digest(index, header)
            image = segment.image(index, header)
            read_newest(image, header, segment.descriptor, segment.geometry.num_slots)
        assert segment.ring_hint is not None
        settle(segment)
        segment_status(segment, 0.0)
        if segment.holds_snapshots:
            rank_snapshots([segment], operators=True)
        held_from_segments("n0", (held_segment(segment, own=True),))
    finally:
        segment.close()


def _slot_header(data: bytes) -> None:
    if len(data) == 112 and (header := unpack_slot_header(data)) is not None:
        assert unpack_slot_header(pack_slot_header(header)) == header


_mutate_slot = packed(
    struct.Struct("<IIqqQQQQQII16sQqI"), seal=lambda data: data + crc(data[8:]), body=False
)  # of which the 4 bytes of the old crc lie behind the front


def _descriptor(data: bytes) -> None:
    descriptor = decode_descriptor(data)
    assert decode_descriptor(encode_descriptor(descriptor)) == descriptor


def _client_seeds() -> list[bytes]:
    """The trainer's part of a descriptor."""
    operators = [["gate", 0, 1, 10, None, [["gate.w", None, None]]]]
    operators += [["expert", 1, 2, 10, ["moe", 0], [["expert.w", 0, 4], ["expert.b", None, None]]]]
    told = {
        "operators": operators,
        "owners": [-1, 1],
        "policy": "partial",
        "transient_buffers": ["b"],
        "aliases": {"a": "b"},
        "groups": {"expert": [0, 2]},
        "facts": {"neighbours": [1], "domain": [0, 1], "alike": [0]},
        "data_offset": 0,
    }
    return [msgspec.msgpack.encode(told)]


def _client(data: bytes) -> None:
    facts_of(data, 0)


# -- images and gradients -----------------------------------------------------------------------------


@cache
def _image_seeds() -> list[bytes]:
    return [bytes(make_sample(40).image), bytes(make_sample(40, anchors=0).image)]


def _image(data: bytes) -> None:
    buf = memoryview(bytearray(data))
    view = ImageView(buf)
    layout_id_of(bytes(buf[: view.data_offset]))
    mismatches(buf, xxhash.xxh3_128_digest(buf[: view.data_offset]))
    newer = NewerSnapshots()
    newer.add(view)
    reduced(buf, view, newer)
    bare(buf, view, 1, {"expert.0.w"}, newer)


def _object_header_seeds() -> list[bytes]:
    return [make_sample(40).header]


_BLOCK_OF = {"iteration": 40, "sequence": 40}


def _block_seeds() -> list[bytes]:
    """A slot with an image and gradients behind it: as it is filled, and as a peer gets it."""
    image = bytes(make_sample(40).image)
    names = ("expert.0.w", "expert.1.w")
    sizes = [(name, ImageView(memoryview(image)).tensor(name).nbytes) for name in names]
    slot = memoryview(bytearray(len(image) + block_bytes_max(sizes, 1)))
    slot[: len(image)] = image
    at, parameters = first_gradient(), []
    for name, size in sizes:
        parameters.append(UpdatedParameter(name, {"exp_avg": name}, {"step": ("ckptd.scalars", 0)}, at))
        at += aligned(size)
    record = UpdateRecord(
        39, 1, "2.8", [UpdatedGroup("AdamW", {"lr": 0.1, "betas": [0.9, 0.99]}, parameters)]
    )
    assert write_block(slot, len(image), record, at, **_BLOCK_OF)
    block = read_block(slot, len(image), **_BLOCK_OF)
    assert block is not None
    sent = bytearray(len(slot))
    for begin, piece in pack_pieces(slot, ImageView(slot[: len(image)]), block):
        sent[begin : begin + len(piece)] = piece
    return [len(image).to_bytes(4, "little") + bytes(each[: block.stop]) for each in (slot, sent)]


_BLOCK_FRONT = struct.Struct("<8sqQQII16s8x")


def _mutate_block(random: Random, data: bytes) -> bytes:
    """Mutates numbers of the block's front, or its description, and makes its digest anew."""
    start = data.find(b"CKPTDGRD")
    if start < 0 or not random.randrange(3):
        return changed_bytes(random, data)
    front = list(_BLOCK_FRONT.unpack_from(data, start))
    body = data[start + front[3] : start + front[3] + front[4]] if front[3] < len(data) else b""
    if random.randrange(2):
        body = in_msgpack(random, body)
    else:
        at = random.choice((1, 2, 3, 5))
        front[at] = abs(front[at] + random.choice((-1, 1, 64, 1 << 20))) % (1 << 31)
    front[4], front[6] = len(body), xxhash.xxh3_128_digest(body)
    end = start + min(front[3], len(data))
    return data[:start] + _BLOCK_FRONT.pack(*front) + data[start + 64 : end] + body


def _block(data: bytes) -> None:
    slot, length = memoryview(bytearray(data[4:])), int.from_bytes(data[:4], "little")
    block = read_block(slot, length, **_BLOCK_OF)
    if block is None:
        block = unpack_pieces(slot, length, **_BLOCK_OF)
    view = ImageView(slot[:length])
    for parameter in block.record.parameters:
        gradient_range(block, view, parameter)


# -- stores -------------------------------------------------------------------------------------------


@cache
def _manifests() -> tuple[bytes, ...]:
    writer = Writer(MemoryStore())
    first, second = make_sample(30, anchors=1), make_sample(40, previous=30, anchors=2)
    for sample in (first, second):
        writer.upload(sample)
    manifest = writer.commit([first, second])
    create_signer(scratch() / "signer")
    signer = ManifestSigner.load(scratch() / "signer")
    return manifest.to_bytes(), manifest.signed_by(signer).to_bytes()


def _manifest(data: bytes) -> None:
    manifest = RankManifest.from_bytes(data)
    assert manifest.to_bytes() == data
    assert parse(manifest.key) is not None
    assert len(manifest.object_keys) >= 0
    signers = Signers.load(scratch() / "signer")
    if not signers.objection(manifest.signer, manifest.signature, manifest.signed_bytes):
        assert data == _manifests()[1], "what nobody signed is taken as signed"


def _run(data: bytes) -> None:
    assert RunIdentity.from_bytes(data).to_bytes() == data


def _run_seeds() -> list[bytes]:
    return [RunIdentity("moe", RUN, "0123abcd", 5, "ckptd 1").to_bytes()]


def _key_seeds() -> list[bytes]:
    store = MemoryStore()
    writer, sample = Writer(store), make_sample(40)
    writer.upload(sample)
    writer.commit([sample])
    others = ["moe/run/pins/000000000040.7." + "0a" * 16, "moe/run/worlds/000000000003"]
    return [key.encode() for key in (*store.objects, *others)]


def _key(data: bytes) -> None:
    key = data.decode("utf-8", "replace")
    name = parse(key)
    assert name is None or name.key == key


def _set_seeds() -> list[bytes]:
    image = bytes(make_sample(40).image)
    digests = [bytes(16)] * len(make_sample(40).view)
    told = render_import(
        [SetFile("model.safetensors", len(image), tuple(digests))],
        source="a",
        groups={"w": {"lr": 0.1}},
        created_at_ns=1,
        tool="t",
    )
    index = render_index({"w": "model-00001-of-00002.safetensors"}, 8)
    return [
        b"import.json\n" + told,
        b"model.safetensors.index.json\n" + index,
        b"model.safetensors\n" + image,
    ]


def _mutate_set(random: Random, data: bytes) -> bytes:
    name, _, content = data.partition(b"\n")
    mutate = {b"import.json": in_sealed_json, b"model.safetensors": in_safetensors}.get(name, in_json)
    return name + b"\n" + mutate(random, content)


def _set(data: bytes) -> None:
    folder = scratch() / "set"
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    image = _image_seeds()[0]
    name, _, content = data.partition(b"\n")
    files = {"model.safetensors": image, "model-00001-of-00002.safetensors": image}
    if name in (b"import.json", b"model.safetensors.index.json", b"model.safetensors"):
        files[name.decode()] = content
    for each, text in files.items():
        in_scratch(f"set/{each}", text)
    open_set(FolderFiles(folder))


# -- files of a daemon --------------------------------------------------------------------------------

_RECORD = struct.Struct("<8sII")


def _record_seeds() -> list[bytes]:
    return [encode_record(record) for record in examples_of(RunRecord)]


def _record(data: bytes) -> None:
    assert decode_record(encode_record(decode_record(data)))


def _mutate_record(random: Random, data: bytes) -> bytes:
    if not random.randrange(4) or len(data) < 24:
        return changed_bytes(random, data)
    payload = in_msgpack(random, data[_RECORD.size : -8])
    front = _RECORD.pack(data[:8], 1, len(payload)) + payload
    return front + xxh3(front)


def _replay_seeds() -> list[bytes]:
    failures = [msgspec.to_builtins(each) for each in examples_of(ReplayFailure)]
    return [msgspec.msgpack.encode({"format": 1, "failures": failures})]


def _replays(data: bytes) -> None:
    in_scratch("quarantine/job~run.replays", data)
    events = EventLog(8)
    quarantine = Quarantine(
        scratch() / "quarantine", events, segments=lambda job, run: (), damaged=lambda segment: None
    )
    quarantine.adopt()
    quarantine.marks("job", "run")


def _owner_seeds() -> list[bytes]:
    return [msgspec.msgpack.encode([["job", "run", 0, bytes(32)]])]


def _owners(data: bytes) -> None:
    in_scratch("owners/.owners", data)
    OwnerTokens(scratch() / "owners")


# -- configuration and keys ---------------------------------------------------------------------------


def _config_seeds() -> list[bytes]:
    known = [
        line.split("  # ")[0] for line in render_toml(load_config(file="/dev/null", environ={})).splitlines()
    ]
    given = [line for line in known if " = null" not in line]
    return [
        "\n".join(given).encode(),
        b'memory = "50%"\npeers = "a=tcp://10.0.0.1:7000"\nmetrics = "127.0.0.1:9000"\n',
        b'isolate_users = true\ntrainer_group = "root"\nuser_quotas = "root=1GiB"\nlabels = "rack=a"\n',
        b'store = "s3://bucket/x"\nstore_options = "{\\"a\\": 1}"\nseal_threads = 2\npeer_deadline_s = 1.5\n',
    ]


def _config(data: bytes) -> None:
    path = in_scratch("ckptd.toml", data)
    loaded = load_config(file=str(path), environ={})
    render_toml(loaded)
    user_quotas(loaded.config)


@cache
def _keys_folder() -> Path:
    folder = scratch() / "keys"
    Keys.create(folder)
    trust(folder, "other", Keys.create(scratch() / "other").public, valid_for_s=1e6)
    create_signer(folder)
    return folder


def _key_file_seeds() -> list[bytes]:
    files = ("node.key_secret", "trusted/other.key", "sign.key", "sign.pub")
    return [name.encode() + b"\n" + (_keys_folder() / name).read_bytes() for name in files]


def _key_file(data: bytes) -> None:
    folder = _keys_folder()
    name, _, content = data.partition(b"\n")
    match name:
        case b"node.key_secret":
            in_scratch("keys/node.key_secret", content)
            Keys.load(folder)
        case b"trusted/other.key":
            in_scratch("keys/trusted/other.key", content)
            trusted_keys(folder)
        case b"sign.key":
            in_scratch("keys/sign.key", content)
            ManifestSigner.load(folder)
        case b"sign.pub":
            in_scratch("keys/sign.pub", content)
            signers = Signers.load(folder)
            for public in signers.names:
                signers.objection(public, bytes(64), b"x")


def _mutate_key_file(random: Random, data: bytes) -> bytes:
    name, _, content = data.partition(b"\n")
    return name + b"\n" + changed_bytes(random, content)


# -- what users write ----------------------------------------------------------------------------------


def _elastic_seeds() -> list[bytes]:
    return [
        b'{"loads": [[5, 3]], "nodes": 2, "slots": 2, "max_straggler": null, "expert_bytes": 9}',
        b'{"loads": [[5, 3]], "nodes": [{"name": "a", "slots": 2, "holds": [[1, 1]]}]}',
    ]


def _elastic(data: bytes) -> None:
    read_file(str(in_scratch("elastic.json", data)))


FILE_TARGETS = (
    Target("segment", _segment_seeds, _segment, (SegmentError, RemoteProtocolError, _Unspelled), in_msgpack),
    Target("slot_header", lambda: [pack_slot_header(SlotHeader())], _slot_header, (), _mutate_slot),
    Target(
        "descriptor",
        lambda: [encode_descriptor(_segment_bytes()[1])],
        _descriptor,
        (SegmentError,),
        in_msgpack,
    ),
    Target("client_facts", _client_seeds, _client, (ExportError,), in_msgpack),
    Target("image", _image_seeds, _image, (ImageError,), in_safetensors),
    Target("object_header", _object_header_seeds, parse_header, (HeaderError,), in_safetensors),
    Target("gradients", _block_seeds, _block, (ImageError,), _mutate_block),
    Target("manifest", lambda: list(_manifests()), _manifest, (ManifestError,), in_sealed_json),
    Target("run_identity", _run_seeds, _run, (ManifestError,), in_sealed_json),
    Target("store_key", _key_seeds, _key, ()),
    Target("model_set", _set_seeds, _set, (SetError,), _mutate_set),
    Target("run_record", _record_seeds, _record, (SegmentError,), _mutate_record),
    Target("failed_replays", _replay_seeds, _replays, (), in_msgpack),
    Target("owners", _owner_seeds, _owners, (), in_msgpack),
    Target("config", _config_seeds, _config, (ConfigError,)),
    Target("keys", _key_file_seeds, _key_file, (KeysError, SigningError), _mutate_key_file),
    Target("elastic_file", _elastic_seeds, _elastic, (CommandError,), in_json),
    Target(
        "failure_record",
        lambda: [b"# s\n1.5\n2\n", b"0,4\n3,3\n9,4\n"],
        lambda data: recorded_failures(data.decode("utf-8", "replace")),
        (ValueError,),
    ),
)
