"""What `make demo-elastic` concludes from the logs of its hosts; the demo itself takes minutes and
is run as one.
"""

from __future__ import annotations

from typing import Any

from examples.moe_elastic.demo import CLOSE, Change, differences, losses, report_of, sole_holders

LOST = Change(100.0, "host2 lost", 3, 2, last_step=20)


def _event(event: str, time_s: float, host: str = "host0", **told: Any) -> dict[str, Any]:
    return {"event": event, "time_s": time_s, "host": host, **told}


def _life(number: int, start: int, at_s: float, hosts: int) -> list[dict[str, Any]]:
    """All ranks of a world, one second after each other, up to its first step."""
    found = []
    for host in range(hosts):
        name = f"host{host}"
        found.append(_event("met", at_s + host, name))
        told = {"number": number, "start": start, "reason": "goes on"}
        found.append(_event("world", at_s + 10 + host, name, **told))
        found.append(_event("loaded", at_s + 20 + host, name, seconds={"plan_s": float(host)}))
        found.append(_event("step", at_s + 30 + host, name, step=start, loss=1.0))
    return sorted(found, key=lambda event: event["time_s"])


def test_a_change_is_over_with_the_first_step_of_the_world_after_it() -> None:
    found = report_of(LOST, _life(7, 0, 10.0, 3) + _life(8, 21, 110.0, 2))
    assert found is not None
    assert (found.start, found.redone) == (21, 0)
    assert (found.met_s, found.planned_s, found.loaded_s, found.back_s) == (11.0, 21.0, 31.0, 40.0)
    assert found.seconds == {"plan_s": 1.0}


def test_steps_that_had_been_done_are_counted() -> None:
    found = report_of(LOST, _life(8, 18, 110.0, 2))
    assert found is not None
    assert found.redone == 3


def test_a_world_without_all_hosts_or_without_a_step_is_not_yet_the_one() -> None:
    """torchrun may begin a round without a host that is late; that one ends again."""
    assert report_of(LOST, _life(7, 0, 10.0, 3)) is None
    assert report_of(LOST, _life(8, 21, 110.0, 1)) is None
    whole = _life(8, 21, 110.0, 2)
    assert report_of(LOST, [e for e in whole if e["event"] != "step"]) is None
    late = report_of(LOST, _life(8, 21, 110.0, 1) + _life(9, 22, 200.0, 2))
    assert late is not None
    assert late.start == 22


def test_who_alone_holds_an_expert() -> None:
    def world(host: str, *held: int) -> dict[str, Any]:
        return {"host": host, "held": {"layer": list(held)}}

    assert sole_holders([world("a", 0, 1, 2), world("b", 1, 2, 3)]) == {
        "a": "layer.experts.0",
        "b": "layer.experts.3",
    }
    assert sole_holders([world("a", 0, 1), world("b", 1, 0)]) == {}


def test_losses_are_those_of_the_last_time_a_step_was_done_and_differences_are_told() -> None:
    events = [_event("step", t, step=s, loss=x) for t, s, x in [(1, 0, 5.0), (2, 1, 4.0), (3, 1, 4.5)]]
    found = losses(events)
    assert found == {0: 5.0, 1: 4.5}
    assert differences({0: 5.0, 1: 4.5}, found) == []
    assert differences({0: 5.0 * (1 + CLOSE / 2), 1: 4.5}, found) == []
    told = differences({0: 5.1, 1: 4.5, 2: 3.0}, found)
    assert len(told) == 2
    assert told[0] == "step 2 was not done"
    assert "step 0" in told[1]
