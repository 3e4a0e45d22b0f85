"""The event log: numbered, bounded, paged."""

from __future__ import annotations

from ckptd.core.sessions import RankKey
from ckptd.event_log import EventLog
from ckptd.units import first_of, format_age, format_bytes, format_table


def test_events_are_numbered_and_bounded() -> None:
    log = EventLog(limit=3)
    for number in range(5):
        log.add("info", "kind", f"message {number}", RankKey("j", "r", number))
    page = log.page(since=0, limit=10)
    assert [event.seq for event in page.events] == [3, 4, 5]
    assert (page.first_seq, page.last_seq) == (3, 5)
    assert page.events[0].rank == 2
    assert log.counters["event.kind"] == 5


def test_pages_follow_each_other() -> None:
    log = EventLog(limit=100)
    for number in range(10):
        log.add("info", "kind", str(number))
    seen: list[str] = []
    since = 0
    while (page := log.page(since, limit=3)).events:
        seen += [event.message for event in page.events]
        since = page.events[-1].seq
    assert seen == [str(number) for number in range(10)]
    assert log.page(since=10, limit=3).events == ()
    assert log.page(since=99, limit=3).events == ()
    assert EventLog(limit=3).page(0, 3).events == ()


def test_a_page_of_some_jobs_is_full_although_others_have_more_events() -> None:
    log = EventLog(limit=100)
    for number in range(60):
        log.add("info", "kind", str(number), RankKey("mine" if number % 20 == 7 else "theirs", "r", 0))
    page = log.page(0, 2, lambda job: job == "mine")
    assert [event.message for event in page.events] == ["7", "27"]
    assert [e.message for e in log.page(page.events[-1].seq, 2, lambda job: job == "mine").events] == ["47"]


def test_kinds_that_trainers_invent_do_not_fill_the_counters() -> None:
    log = EventLog(limit=10)
    for number in range(1000):
        log.add("info", f"kind {number}", "x" * 10_000, by_trainer=True)
    assert len(log.counters) <= 257
    assert sum(log.counters.values()) == 1000
    log.add("info", "kind 3", "", by_trainer=True)
    assert log.counters["event.kind 3"] == 2
    log.add("warning", "trainer_gone", "")
    log.count("refused.quota")
    assert log.counters["event.trainer_gone"] == log.counters["refused.quota"] == 1, "alerts are on them"
    assert len(log.page(0, 1).events[0].message) == 4096


def test_codes_that_peers_invent_do_not_fill_the_counters() -> None:
    log = EventLog(limit=10)
    log.count_refusal("hello", "deadline")
    for number in range(1000):
        log.count_refusal("tell_run", f"code {number}")
    log.count_refusal("hello", "deadline")
    assert (len(log.counters), sum(log.counters.values())) == (257, 1002)
    assert log.counters["hello.deadline"] == 2
    assert log.counters["tell_run.other"] == 745


def test_numbers_for_people() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5 TiB",
    ]
    assert [format_age(s) for s in (1.5, 600, 5400, 864000)] == [
        "1.5 s",
        "10 min",
        "90 min",
        "10 d",
    ]
    assert format_table(("a", "n"), [("x", 5), ("yy", 10)]) == "a    n\nx    5\nyy  10"
    assert format_table(("a",), []) == "a"


def test_the_first_of_many_are_named_and_the_others_counted() -> None:
    assert first_of([], 2) == ""
    assert first_of(iter([1, 2]), 2) == "1, 2"
    assert first_of("abcde", 2) == "a, b and 3 more"
    assert first_of("abcde", 2, between="; ", what="more ranks") == "a; b; and 3 more ranks"
