"""What is refused is counted, and told now and then."""

from __future__ import annotations

from ckptd.transport.access.refusals import MAX_SOURCES, RefusalLog
from ckptd.transport.verbs import FabricCounters


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def make() -> tuple[RefusalLog, list[str], Clock, FabricCounters]:
    lines: list[str] = []
    clock, counters = Clock(), FabricCounters()
    return RefusalLog(counters, lines.append, clock=clock), lines, clock, counters


def test_ten_thousand_false_keys_are_two_lines() -> None:
    """Each was a line of its own: whoever knocked filled the disk of the log."""
    log, lines, clock, counters = make()
    for number in range(10_000):
        clock.now_s += 0.0001
        log.stranger("key", f"10.0.0.{number % 4}", "the key XYZ is not trusted")
    assert lines == ["refused from 10.0.0.0 (key): the key XYZ is not trusted"]
    clock.now_s += 60
    log.flush(clock.now_s)
    assert len(lines) == 2
    assert "9999 key" in lines[1]
    assert "10.0.0.1 (2500)" in lines[1]
    assert counters.unauthenticated == 10_000
    assert log.shown()["turned_away.key"] == 10_000
    assert log.shown()["turned_away_from.10.0.0.1"] == 2500


def test_each_kind_is_told_of_at_once_the_first_time() -> None:
    log, lines, clock, _ = make()
    log.stranger("key", "a", "1")
    log.seen("2", "b")
    log.refused("flood", "c", "3")
    assert [line.partition(":")[0] for line in lines] == [
        "refused from a (key)",
        "refused from b (garbage)",
        "refused from c (flood)",
    ]
    clock.now_s += 1000
    log.flush(clock.now_s)
    assert len(lines) == 3, "nothing was left untold"


def test_what_is_left_when_it_becomes_quiet_is_told_later() -> None:
    log, lines, clock, _ = make()
    for _ in range(5):
        log.seen("x")
    assert len(lines) == 1
    for _ in range(120):
        clock.now_s += 1
        log.flush(clock.now_s)
    assert len(lines) == 2
    assert "4 garbage" in lines[1]


def test_the_table_of_addresses_is_bounded() -> None:
    log, _, _, _ = make()
    for number in range(3 * MAX_SOURCES):
        log.seen("x", str(number))
    assert len(log.sources) <= MAX_SOURCES + 1
    assert log.sources["others"] == 2 * MAX_SOURCES
