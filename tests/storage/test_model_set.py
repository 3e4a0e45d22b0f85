"""Sets of safetensors files: what is read, and what is refused."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import save_file

from ckptd.storage.image_format import TensorEntry
from ckptd.storage.model_set import (
    MANIFEST,
    MODEL,
    FolderFiles,
    ModelSet,
    SetError,
    SetFile,
    file_name,
    index_name,
    open_set,
    plain_names,
    plan_shards,
    render_import,
    render_index,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model in two files with an index."""
    weights = {}
    for index, name in enumerate(("a", "b")):
        file = file_name(MODEL, index, 2)
        save_file({name: torch.full((2, 3), float(index))}, tmp_path / file)
        weights[name] = file
    (tmp_path / index_name(MODEL)).write_bytes(render_index(weights, 48))
    return tmp_path


def opened(folder: Path, **options: Any) -> ModelSet:
    return open_set(FolderFiles(folder), **options)


def read(found: ModelSet, name: str) -> bytes:
    into = bytearray(found.model[name].nbytes)
    found.read(found.model[name], memoryview(into))
    return bytes(into)


def commit(folder: Path, **changed: Any) -> None:
    """Write ``import.json``, with the right digests if nothing is changed."""
    digests = [xxhash.xxh3_128_digest(read(opened(folder), name)) for name in "ab"]
    files = [
        SetFile(file_name(MODEL, i, 2), (folder / file_name(MODEL, i, 2)).stat().st_size, (d,))
        for i, d in enumerate(digests)
    ]
    told: dict[str, Any] = {"source": "hf", "groups": {}, "created_at_ns": 1, "tool": "test"}
    (folder / MANIFEST).write_bytes(render_import(files, **(told | changed)))


def test_an_index_leads_to_its_files(folder: Path) -> None:
    found = opened(folder)
    assert set(found.model) == {"a", "b"}
    assert found.optimizer == {}
    assert read(found, "b") == struct.pack("<6f", *[1.0] * 6)
    assert opened(folder, single=file_name(MODEL, 1, 2)).files == (file_name(MODEL, 1, 2),)


def test_a_manifest_makes_a_set_complete_and_checks_its_bytes(folder: Path) -> None:
    with pytest.raises(SetError, match=r"has no import\.json"):
        opened(folder, complete=True)
    commit(folder, groups={"a": {"lr": 0.1}})
    found = opened(folder, complete=True)
    assert found.groups == {"a": {"lr": 0.1}}
    assert read(found, "a") == bytes(24)
    data = bytearray((folder / file_name(MODEL, 0, 2)).read_bytes())
    data[-1] ^= 1
    (folder / file_name(MODEL, 0, 2)).write_bytes(data)
    with pytest.raises(SetError, match=r"a in .* is damaged"):
        read(opened(folder), "a")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda f: f.joinpath(MANIFEST).write_text("{}"), "does not end with a digest"),
        (lambda f: f.joinpath(file_name(MODEL, 1, 2)).unlink(), "is missing"),
        (lambda f: _cut(f.joinpath(file_name(MODEL, 1, 2)), 1), "bytes, .* were imported"),
    ],
)
def test_a_damaged_set_is_refused(folder: Path, damage: Callable[[Path], object], reason: str) -> None:
    commit(folder)
    damage(folder)
    with pytest.raises(SetError, match=reason):
        opened(folder)


def _cut(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


def header(fields: dict[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps(fields).encode()
    return struct.pack("<Q", len(text)) + text + data


def twice(name: str) -> bytes:
    """Which of the two is meant, every reader decides for itself."""
    told = json.dumps(entry())
    text = f'{{"{name}": {told}, "{name}": {told}}}'.encode()
    return struct.pack("<Q", len(text)) + text + bytes(4)


def entry(dtype: str = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        struct.pack("<Q", 1 << 62),
        struct.pack("<Q", 3) + b"{]}",
        struct.pack("<Q", 2) + b"[]",
        header({"w": entry()}),
        header({"w": entry()}, bytes(5)),
        header({"w": entry("F99")}, bytes(4)),
        header({"w": entry(shape=[2])}, bytes(4)),
        header({"w": entry(shape=[-1, -1])}, bytes(4)),
        header({"w": entry(shape="1")}, bytes(4)),
        header({"w": entry(offsets=[4, 8])}, bytes(8)),
        header({"w": entry(), "v": entry()}, bytes(4)),
        header({"w": {"dtype": "F32"}}, bytes(4)),
        header({"w": 7}, bytes(4)),
        header({"w": entry(), "__metadata__": {"format": 3}}, bytes(4)),
        twice("w"),
    ],
)
def test_what_is_no_whole_safetensors_file_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(SetError, match=r"model\.safetensors"):
        opened(tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": 3}',
        '{"weight_map": {"a": "../other.safetensors"}}',
        '{"weight_map": {"a": "weights.bin"}}',
        '{"weight_map": {"a": 3}}',
        f'{{"weight_map": {{"a": "{"x" * 300}.safetensors"}}}}',  # an OSError, fuzzing found
    ],
)
def test_an_index_that_is_none_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / index_name(MODEL)).write_text(index)
    with pytest.raises(SetError, match=r"index|File name too long"):
        opened(tmp_path)


def test_a_name_that_is_there_twice_is_refused(folder: Path) -> None:
    save_file({"a": torch.zeros(1)}, folder / file_name(MODEL, 1, 2))
    with pytest.raises(SetError, match="has a twice"):
        opened(folder)


def test_nothing_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(SetError, match=r"holds no model\.safetensors and no .*ckptctl import"):
        opened(tmp_path)


def test_names_lose_what_wraps_all_of_a_model_only() -> None:
    names = ["module.module.a.w", "module._orig_mod.module.b"]
    assert list(plain_names(names).values()) == ["a.w", "b"]
    assert plain_names(["module.a", "b"]) == {"module.a": "module.a", "b": "b"}
    wrapped = "layers.0._checkpoint_wrapped_module.w"
    assert plain_names([wrapped]) == {wrapped: "layers.0.w"}
    assert plain_names([]) == {}


def test_files_are_filled_in_order_and_never_split_a_tensor() -> None:
    sizes = [30, 40, 40, 200, 10, 0]
    entries = [TensorEntry(f"t{i}", "U8", (n,)) for i, n in enumerate(sizes)]
    shards = [[e.name for e in shard] for shard in plan_shards(entries, 100)]
    assert shards == [["t0", "t1"], ["t2"], ["t3"], ["t4", "t5"]]
    assert plan_shards([], 100) == [[]]
