"""Who may stay connected: the pure table, with the clock a number."""

from __future__ import annotations

import pytest

from ckptd.transport.access.admission import (
    Admission,
    AdmissionLimits,
    TurnedAway,
    TurnReason,
    source_of,
)

LIMITS = AdmissionLimits(
    connections=20,
    strangers=6,
    strangers_per_address=3,
    arrivals_per_s=10.0,
    arrivals_burst=50.0,
    per_peer=2,
    patience_s=5.0,
)


def admission(**limits: float) -> Admission:
    fields = {name: getattr(LIMITS, name) for name in AdmissionLimits.__slots__} | limits
    return Admission(AdmissionLimits(**fields))


def turned(found: list[TurnedAway]) -> list[tuple[object, TurnReason]]:
    return [(each.visitor, each.reason) for each in found]


def test_the_oldest_silent_one_of_an_address_makes_room_for_the_next() -> None:
    """Whoever says at once who it is comes in, however many others of its address say nothing."""
    table = admission()
    for visitor in (1, 2, 3):
        assert table.arrived(visitor, "a", now_s=0) == []
    assert turned(table.arrived(4, "a", now_s=0)) == [(1, TurnReason.ADDRESS)]
    assert table.identified(4, "node") == []
    assert table.arrived(5, "a", now_s=0) == []


def test_strangers_of_many_addresses_push_out_those_of_the_address_with_most() -> None:
    table = admission()
    for visitor, source in enumerate("aaabbc"):
        assert table.arrived(visitor, source, now_s=0) == []
    assert turned(table.arrived(9, "d", now_s=0)) == [(0, TurnReason.STRANGERS)]
    assert sum(map(table.is_stranger, range(10))) == 6


def test_who_is_expected_competes_with_nobody() -> None:
    """64 silent connections from the address of a peer once kept its streams out: those with a
    ticket have places of their own.
    """
    table = admission(connections=6, arrivals_burst=6.0)
    for visitor in range(6):
        table.arrived(visitor, "a", now_s=0)
    assert turned(table.arrived(7, "a", now_s=0)) == [(7, TurnReason.RATE)]
    assert table.arrived(8, "a", now_s=0, expected=1) == []
    assert turned(table.arrived(9, "a", now_s=0, expected=1)) == [(9, TurnReason.RATE)]
    table.identified(8, "node")
    assert table.arrived(10, "a", now_s=0, expected=1) == []


def test_an_address_that_connects_too_often_waits_for_its_next_token() -> None:
    table = admission(arrivals_burst=2.0, strangers_per_address=100, strangers=100)
    assert table.arrived(1, "a", now_s=0) == []
    assert table.arrived(2, "a", now_s=0) == []
    assert turned(table.arrived(3, "a", now_s=0)) == [(3, TurnReason.RATE)]
    assert table.arrived(4, "b", now_s=0) == []
    assert table.arrived(5, "a", now_s=0.11) == []
    assert turned(table.arrived(6, "a", now_s=0.11)) == [(6, TurnReason.RATE)]


def test_a_stranger_that_says_nothing_goes_in_time() -> None:
    table = admission()
    table.arrived(1, "a", now_s=0)
    table.arrived(2, "b", now_s=3)
    assert table.due_s(4) == 1
    assert turned(table.overdue(5.5)) == [(1, TurnReason.SILENT)]
    table.identified(2, "node")
    assert table.overdue(100) == []
    assert table.due_s(100) == float("inf")


def test_a_node_has_so_many_connections_and_its_newest_stay() -> None:
    """One of an earlier life is not missed; those of others are not touched."""
    table = admission()
    for visitor in (1, 2, 3):
        table.arrived(visitor, "a", now_s=0)
        found = table.identified(visitor, "x")
    assert turned(found) == [(1, TurnReason.PEER)]
    table.arrived(4, "a", now_s=0)
    assert table.identified(4, "y") == []
    table.gone(2)
    table.arrived(5, "a", now_s=0)
    assert table.identified(5, "x") == []


def test_whoever_was_turned_away_counts_until_it_is_gone() -> None:
    """It has a descriptor for so long."""
    table = admission(connections=3, strangers_per_address=2)
    for visitor in (1, 2, 3):
        table.arrived(visitor, "a", now_s=0)
    table.identified(2, "x")
    table.identified(3, "x")
    assert len(table) == 3
    assert turned(table.arrived(4, "b", now_s=0)) == [(4, TurnReason.FULL)]
    assert not table.gone(1)
    assert not table.gone(4)
    assert table.arrived(5, "b", now_s=0) == []


def test_where_there_is_no_room_strangers_make_room() -> None:
    """Those that were turned away and are not gone yet filled a port for a moment, and whoever came
    then was refused, with what it had said already.
    """
    table = admission(connections=3, strangers_per_address=2)
    for visitor in (1, 2, 3):
        table.arrived(visitor, "a", now_s=0)
    assert turned(table.arrived(4, "b", now_s=0)) == [(2, TurnReason.STRANGERS)]
    assert table.is_stranger(4)


def test_the_end_of_a_stranger_is_told_from_that_of_others() -> None:
    table = admission()
    table.arrived(1, "a", now_s=0)
    table.arrived(2, "a", now_s=0)
    table.identified(2, "node")
    assert [table.gone(1), table.gone(2), table.gone(3)] == [True, False, False]
    assert len(table) == 0


def test_millions_of_addresses_are_not_remembered() -> None:
    table = admission(connections=1 << 30, strangers=1 << 30)
    for number in range(20_000):
        table.arrived(number, f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", now_s=0)
        table.gone(number)
    assert len(table) == 0
    assert len(table._rates) <= 4096


@pytest.mark.parametrize(
    ("host", "source"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_an_address_is_one_host_or_one_ipv6_site(host: str, source: str) -> None:
    assert source_of(host) == source
