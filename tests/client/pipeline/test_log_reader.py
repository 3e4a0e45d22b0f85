"""Facts: kept and read again, with what was known before; who is joined by way of whom; what is
said about it.
"""

from __future__ import annotations

from ckptd.client import values
from ckptd.client.model.communication import Communication
from ckptd.client.pipeline.log_reader import (
    LogFacts,
    data_offset_of,
    facts_of,
    find_facts,
    log_payload,
    recorded_facts,
)

FACTS = LogFacts((0, 2), (1, 3), (3,), ("an all-reduce",))


def test_facts_are_read_as_they_were_told() -> None:
    payload = log_payload(8192, FACTS)
    assert (data_offset_of(payload), facts_of(payload)) == (8192, FACTS)


def test_a_log_of_before_tells_none() -> None:
    before = values.pack({"data_offset": 4096})
    assert (data_offset_of(before), facts_of(before)) == (4096, None)
    assert facts_of(log_payload(4096, None)) is None


def test_the_newest_generation_that_tells_counts() -> None:
    older, newer = log_payload(4096, LogFacts((2,), (1,))), log_payload(4096, FACTS)
    assert recorded_facts([older, newer]) == FACTS
    assert recorded_facts([newer, log_payload(4096, None)]) == FACTS
    assert recorded_facts([]) is None


def test_reasons_alone_make_no_difference() -> None:
    assert FACTS.same_as(LogFacts((0, 2), (1, 3), (3,), ("another",)))
    assert not FACTS.same_as(LogFacts((0, 2), (1, 2, 3), (3,), FACTS.reasons))


def test_before_a_step_was_seen_what_an_earlier_trainer_told_counts() -> None:
    assert find_facts(1, Communication(), (), FACTS) == FACTS
    assert find_facts(1, Communication(), (), None) is None
    assert find_facts(1, None, (), None) is None


def test_only_a_boundary_within_a_domain_is_worth_a_warning() -> None:
    assert FACTS.warnings() == []
    (line,) = LogFacts((0, 2), (0, 1, 2), (), ("collectives over process group 'pp'",)).warnings()
    assert line.startswith(
        "localized recovery: never apart from rank 0, 2, though a boundary is logged: collectives over process group 'pp'. "
    )
    assert "ckpt.shared_value(name, compute)" in line
