"""What logs tell of ranks that do not speak for themselves."""

from __future__ import annotations

import msgpack
import pytest

from ckptd.core.recovery.held import HeldRecords
from ckptd.core.recovery.log_facts import facts_from_logs
from ckptd.core.recovery.recovery_facts import RankFacts, facts_of_log, facts_to_wire
from ckptd.core.slots.ring import SlotRecord, SlotState
from ckptd.errors import RemoteProtocolError

OLD, NEW = RankFacts((1,), (0,), (0,)), RankFacts((1, 2), (0, 3), (0,))


def records(*iterations: int, epoch: int = 0, start: int = -1) -> tuple[SlotRecord, ...]:
    return tuple(
        SlotRecord(0, n, SlotState.SEALED, t, sequence=t, epoch=epoch, epoch_start=start)
        for n, t in enumerate(iterations)
    )


def log(name: str, told: RankFacts | None, filled: tuple[SlotRecord, ...]) -> HeldRecords:
    facts = b"" if told is None else facts_to_wire({0: told})
    return HeldRecords("n1", name, False, 0, 1, name, 4096, filled, facts)


PARKED_AT_9 = [HeldRecords("n0", "p", True, 1, 1, "", 4096, records(9))]


def test_the_log_that_was_filled_last_tells() -> None:
    logs = [log("newer", NEW, records(7, 8)), log("older", OLD, records(5, 6, 7))]
    assert facts_from_logs({0}, logs, PARKED_AT_9) == {0: NEW}
    assert facts_from_logs({0}, reversed(logs), PARKED_AT_9) == {0: NEW}


@pytest.mark.parametrize(("last", "counts"), [(8, True), (7, True), (6, False)])
def test_a_replica_that_was_left_behind_tells_nothing(last: int, counts: bool) -> None:
    """Its rank went on, perhaps with a log that tells more: taken at its word, ranks would be
    called apart which are not.
    """
    found = facts_from_logs({0}, [log("old", OLD, records(*range(last + 1)))], PARKED_AT_9)
    assert found == ({0: OLD} if counts else {})


def test_what_a_recovery_ran_again_tells_nothing() -> None:
    """An epoch that began at 8: what was sent in 8 before is not what its rank did last."""
    logs = [log("abandoned", OLD, records(8)), log("last", NEW, records(7))]
    parked = [*PARKED_AT_9, HeldRecords("n0", "q", True, 2, 1, "", 4096, records(9, epoch=1, start=8))]
    assert facts_from_logs({0}, logs, parked) == {0: NEW}


def test_who_speaks_for_itself_is_not_looked_at() -> None:
    bad = HeldRecords("n1", "x", False, 1, 1, "", 4096, records(8), b"garbage")
    assert facts_from_logs({0}, [bad, log("a", OLD, records(8))], PARKED_AT_9) == {0: OLD}
    assert facts_from_logs(set(), [bad], PARKED_AT_9) == {}


def test_where_nobody_is_parked_or_no_log_has_facts_nothing_is_told() -> None:
    logs = [log("a", OLD, records(8))]
    assert facts_from_logs({0}, logs, []) == {}
    assert facts_from_logs({0}, [log("a", None, records(8))], PARKED_AT_9) == {}


def test_facts_that_cannot_be_read_are_the_peers_error() -> None:
    bad = HeldRecords("n1", "x", False, 0, 1, "", 4096, records(8), b"garbage")
    with pytest.raises(RemoteProtocolError):
        facts_from_logs({0}, [bad], PARKED_AT_9)


def test_a_descriptor_tells_what_the_trainer_packed() -> None:
    told = {"neighbours": [1], "domain": [0], "alike": [], "reasons": ["because"]}
    payload = msgpack.packb({"data_offset": 64, "facts": told})
    assert facts_of_log(payload) == RankFacts((1,), (0,), ())
    assert facts_of_log(msgpack.packb({"data_offset": 64})) is None
    assert facts_of_log(b"") is None
    assert facts_of_log(msgpack.packb({"facts": {"neighbours": "?"}})) is None
