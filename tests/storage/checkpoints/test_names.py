"""Keys: every fact has one spelling, and what is spelled in another way is nobody's."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.storage.checkpoints.names import (
    MAX_EPOCH,
    MAX_INCARNATION,
    MAX_ITERATION,
    MAX_RANKS,
    MAX_SEQUENCE,
    CheckpointId,
    IncarnationName,
    ManifestName,
    ObjectName,
    PinName,
    RunName,
    StoredName,
    check_name,
    incarnation_of_run,
    parse,
    run_of_incarnation,
    run_prefix,
)
from ckptd.storage.stores.objects import check_key

LABELS = st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True).filter(
    lambda name: name not in (".", "..") and not name.startswith(".ckptd-")
)
HASHES = st.from_regex(r"[0-9a-f]{32}", fullmatch=True)
TAGS = st.from_regex(r"[0-9a-f]{16}", fullmatch=True)
ITERATIONS = st.integers(0, MAX_ITERATION)
EPOCHS = st.integers(0, MAX_EPOCH)
CHECKPOINTS = st.builds(CheckpointId, ITERATIONS, EPOCHS, st.integers(-1, MAX_ITERATION), HASHES)


@st.composite
def manifest_names(draw: st.DrawFn) -> ManifestName:
    world_size = draw(st.integers(1, MAX_RANKS))
    rank = draw(st.integers(0, world_size - 1))
    return ManifestName(draw(LABELS), draw(LABELS), draw(CHECKPOINTS), rank, world_size)


NAMES: st.SearchStrategy[StoredName] = st.one_of(
    st.builds(RunName, LABELS, LABELS),
    st.builds(
        ObjectName,
        LABELS,
        LABELS,
        ITERATIONS,
        st.integers(0, MAX_RANKS - 1),
        EPOCHS,
        st.integers(0, MAX_SEQUENCE),
        TAGS,
    ),
    st.builds(PinName, LABELS, LABELS, ITERATIONS, EPOCHS, HASHES),
    st.builds(IncarnationName, LABELS, LABELS, st.integers(0, MAX_INCARNATION)),
    manifest_names(),
)

HASH, TAG = "0f" * 16, "0f" * 8
EXAMPLES: dict[str, StoredName] = {
    "moe/r1/run.json": RunName("moe", "r1"),
    f"moe/r1/000000000041/rank-00003/1700000000-97-{TAG}.safetensors": ObjectName(
        "moe", "r1", 41, 3, 1_700_000_000, 97, TAG
    ),
    f"moe/r1/000000000041/commit-1700000000.-1.{HASH}/rank-00003-of-00008.json": ManifestName(
        "moe", "r1", CheckpointId(41, 1_700_000_000, -1, HASH), 3, 8
    ),
    f"moe/r1/pins/000000000041.1700000000.{HASH}": PinName("moe", "r1", 41, 1_700_000_000, HASH),
    "moe/r1/worlds/001700000000": IncarnationName("moe", "r1", 1_700_000_000),
    f"moe/worlds/pins/000000000041.7.{HASH}": PinName("moe", "worlds", 41, 7, HASH),
}


@pytest.mark.parametrize("key", EXAMPLES)
def test_keys_are_as_specified(key: str) -> None:
    assert EXAMPLES[key].key == key
    assert parse(key) == EXAMPLES[key]


@settings(deadline=None)
@given(NAMES)
def test_a_name_survives_its_key(name: StoredName) -> None:
    assert parse(name.key) == name
    assert check_key(name.key).startswith(run_prefix(name.job, name.run))


@settings(deadline=None)
@given(NAMES, st.data())
def test_a_changed_key_is_foreign_or_the_only_spelling_of_something_else(
    name: StoredName, data: st.DataObject
) -> None:
    key = name.key
    at = data.draw(st.integers(0, len(key)))
    put = data.draw(st.sampled_from(["", "0", "-", "/", ".", "é", "٣", "\n", "1"]))
    changed = key[:at] + put + key[at + data.draw(st.integers(0, 2)) :]
    found = parse(changed)
    assert found is None or found.key == changed


@settings(deadline=None)
@given(st.text())
def test_any_text_is_foreign_or_spelled_as_we_would(text: str) -> None:
    found = parse(text)
    assert found is None or found.key == text


@pytest.mark.parametrize(
    "key",
    [
        "",
        "moe/r1/notes.txt",
        "moe/../run.json",
        "./r1/run.json",
        ".ckptd-tmp/r1/run.json",
        "x/moe/r1/run.json",
        f"moe/r1/41/rank-00003/1700000000-97-{TAG}.safetensors",
        f"moe/r1/000000000041/rank-00003/1700000000-097-{TAG}.safetensors",
        f"moe/r1/000000000041/rank-00003/9999999999-97-{TAG}.safetensors",
        f"moe/r1/000000000041/rank-99999/1700000000-97-{TAG}.safetensors",
        f"moe/r1/000000000041/rank-00003/1700000000-{2**63}-{TAG}.safetensors",
        "moe/r1/000000000041/rank-00003/1700000000-97.safetensors",
        f"moe/r1/000000000041/commit-07.-1.{HASH}/rank-00003-of-00008.json",
        f"moe/r1/000000000041/commit-7.-2.{HASH}/rank-00003-of-00008.json",
        f"moe/r1/000000000041/commit-{2**32}.-1.{HASH}/rank-00003-of-00008.json",
        f"moe/r1/000000000041/commit-7.{10**12}.{HASH}/rank-00003-of-00008.json",
        f"moe/r1/000000000041/commit-7.-1.{HASH}/rank-00008-of-00008.json",
        f"moe/r1/pins/000000000041.{2**32}.{HASH}",
        f"moe/r1/pins/000000000041.7.{HASH.upper()}",
    ],
)
def test_what_is_not_ours_is_foreign(key: str) -> None:
    assert parse(key) is None


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "x" * 65, "é", "a\n", ".ckptd-x"])
def test_what_cannot_be_a_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="must be 1 to 64"):
        check_name(name, "job")


@pytest.mark.parametrize(
    "name",
    [
        ObjectName("moe", "r1", -1, 0, 7, 0, TAG),
        ObjectName("moe", "r1", MAX_ITERATION + 1, 0, 7, 0, TAG),
        ObjectName("moe", "r1", 1, MAX_RANKS, 7, 0, TAG),
        ObjectName("moe", "r1", 1, 0, MAX_EPOCH + 1, 0, TAG),
        ObjectName("moe", "r1", 1, 0, 7, -1, TAG),
        ObjectName("moe", "r1", 1, 0, 7, 0, "xyz"),
        ManifestName("moe", "r1", CheckpointId(1, 7, -2, HASH), 0, 1),
        ManifestName("moe", "r1", CheckpointId(1, 7, -1, "x"), 0, 1),
        ManifestName("moe", "r1", CheckpointId(1, 7, -1, HASH), 1, 1),
        ManifestName("moe", "r1", CheckpointId(1, 7, -1, HASH), 0, MAX_RANKS + 1),
        PinName("moe", "r1", 1, -1, HASH),
        RunName("moe", ".."),
    ],
)
def test_facts_out_of_range_have_no_key(name: StoredName) -> None:
    with pytest.raises(ValueError, match=r"must be|hexadecimal"):
        _ = name.key


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("r1.w1700000000", ("r1", 1_700_000_000)),
        ("r1.w3.w0", ("r1.w3", 0)),
        ("r1.w007", None),
        ("r1.w", None),
        (".w5", None),
        ("r1", None),
        ("r1.w1234567890123", None),
    ],
)
def test_a_run_that_may_be_a_world_has_one_spelling(name: str, found: tuple[str, int] | None) -> None:
    assert incarnation_of_run(name) == found
    if found is not None:
        assert run_of_incarnation(*found) == name
