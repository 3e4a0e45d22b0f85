"""Names of segments and replicas, and what is refused as one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.slots.segment_names import (
    Kind,
    check_name,
    parse_replica_file_name,
    parse_segment_file_name,
    replica_file_name,
    segment_file_name,
)


@given(
    st.text("aZ09._-", min_size=1, max_size=64),
    st.text("bY18._-", min_size=1, max_size=64),
    st.integers(0, 10**9),
    st.integers(0, 10**9),
)
def test_file_names_round_trip(job: str, run: str, rank: int, generation: int) -> None:
    if {job, run} & {".", ".."}:
        return
    name = segment_file_name(job, run, rank, generation)
    assert parse_segment_file_name(name) == (job, run, rank, generation)


@pytest.mark.parametrize(("kind", "end"), [("log", ".boundary"), ("parked", ".parked")])
def test_names_of_one_kind_are_of_that_kind_alone(kind: Kind, end: str) -> None:
    name = segment_file_name("demo", "r1", 3, 2, kind)
    assert name == f"demo~r1~r3~g2{end}"
    assert parse_segment_file_name(name, kind) == ("demo", "r1", 3, 2)
    for parse in (parse_segment_file_name, parse_replica_file_name):
        with pytest.raises(ValueError, match="is not <job>"):
            parse(name)
    with pytest.raises(ValueError, match="is not <job>"):
        parse_segment_file_name(segment_file_name("demo", "r1", 3, 2), kind)


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 2**64 - 1))
def test_replica_names_round_trip(rank: int, generation: int, origin: int) -> None:
    told = ("demo", "r1", rank, generation, f"{origin:016x}")
    name = replica_file_name(*told)
    assert name == f"demo~r1~r{rank}~g{generation}~{origin:016x}.rep"
    assert parse_replica_file_name(name) == told
    with pytest.raises(ValueError, match="is not <job>"):
        parse_segment_file_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "demo~r1~r3~g2.seg",
        "demo~r1~r3~g2.rep",
        "demo~r1~r3~g2~0123456789abcdef.seg",
        "demo~r1~r3~g2~0123456789ABCDEF.rep",
        "demo~r1~r3~g2~0123456789abcde.rep",
        "demo~r1~r3~g2~0123456789abcdef.rep.bad",
        "..~r1~r3~g2~0123456789abcdef.rep",
    ],
)
def test_what_is_not_a_replicas_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"is not <job>|must not be"):
        parse_replica_file_name(name)


def test_a_replica_needs_an_origin() -> None:
    for origin in ("", "0123", "0123456789ABCDEF", "0123456789abcdef\n"):
        with pytest.raises(ValueError, match="is not 16 hex digits"):
            replica_file_name("a", "b", 0, 0, origin)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "has 0 characters"),
        ("a" * 65, "has 65 characters"),
        ("a/b", "contains '/'"),
        ("run~1", "contains '~'"),
        ("größe", "contains 'ö'"),
        ("a\n", r"contains '\\n'"),
        ("..", r"must not be '\.\.'"),
    ],
)
def test_names_that_cannot_be_are_refused_by_character(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_name(name, "job")


@pytest.mark.parametrize(
    "name",
    [
        "demo~r1~r3~g2",
        "demo~r1~r3~g2.seg.tmp",
        "demo~r1~r-3~g2.seg",
        "demo~r1~r03~g2.seg",
        "demo~r1~r3.seg",
        "..~r1~r3~g2.seg",
        "a/demo~r1~r3~g2.seg",
        "demo~r1~r3~g2.seg\n",
    ],
)
def test_foreign_file_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"is not <job>|must not be"):
        parse_segment_file_name(name)


def test_negative_numbers_are_in_no_name() -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        segment_file_name("a", "b", -1, 0)
