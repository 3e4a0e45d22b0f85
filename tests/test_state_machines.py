"""The tables of the state machines: complete, and what docs/state_machines.md shows.

The tables on the page are written by ``pytest tests/test_state_machines.py --update-golden``.
"""

from __future__ import annotations

import importlib
import re
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from ckptd.core.state_machine import Transitions

PAGE = Path(__file__).resolve().parents[1] / "docs" / "state_machines.md"
TABLES = {
    "replay": ("ckptd.client.recovery.replay", "TRANSITIONS"),
    "schedule change": ("ckptd.core.switching", "TRANSITIONS"),
    "host": ("ckptd.host.epochs", "TRANSITIONS"),
    "slot": ("ckptd.core.slots.slots", "TRANSITIONS"),
    "parking copy": ("ckptd.client.parking.parker", "COPY_TRANSITIONS"),
    "parking moment": ("ckptd.client.parking.parker", "MOMENT_TRANSITIONS"),
    "persistence": ("ckptd.core.persister", "TRANSITIONS"),
    "preparation": ("ckptd.client.schedule.schedule_change", "TRANSITIONS"),
    "recorder": ("ckptd.client.capture.recorder", "TRANSITIONS"),
    "replication": ("ckptd.core.replication.target", "TRANSITIONS"),
}


def _table(machine: str) -> Transitions[Any, Any]:
    module, name = TABLES[machine]
    table = getattr(importlib.import_module(module), name)
    assert isinstance(table, Transitions)
    return table


def _states(table: Transitions[Any, Any]) -> list[Any]:
    (kind,) = {type(state) for pair in table.table.items() for state in (pair[0][0], pair[1])}
    return list(kind.__members__.values())


def _rendered(machine: str) -> str:
    table = _table(machine)
    rows = []
    for state in _states(table):
        leads = [f"{_of(e)} → {_of(s)}" for (at, e), s in table.table.items() if at is state]
        rows.append(f"| {_of(state)} | {state.meaning} | {', '.join(leads) or 'nothing'} |")
    return "\n".join(["| state | meaning | event → next state |", "|---|---|---|", *rows])


def _of(member: Enum) -> str:
    return f"`{member.name.lower()}`"


@pytest.mark.parametrize("machine", TABLES)
def test_every_state_is_explained_and_can_be_reached(machine: str) -> None:
    table = _table(machine)
    states = _states(table)
    assert all(state.meaning for state in states)
    reached: set[Any] = {states[0]}
    before: set[Any] = set()
    while reached != before:
        before = set(reached)
        reached |= {after for state in before for after in table.following(state)}
    assert reached == {*states}, "no event leads there from the first state"
    assert table.machine == machine


def test_the_page_shows_the_tables(request: pytest.FixtureRequest) -> None:
    page = PAGE.read_text()
    for machine in TABLES:
        block = f"<!-- table: {machine} -->\n{_rendered(machine)}\n<!-- end -->"
        pattern = rf"<!-- table: {re.escape(machine)} -->\n.*?<!-- end -->"
        assert re.search(pattern, page, re.DOTALL), f"no place for the table of {machine}"
        page = re.sub(pattern, block.replace("\\", r"\\"), page, flags=re.DOTALL)
    if request.config.getoption("--update-golden"):
        PAGE.write_text(page)
    assert page == PAGE.read_text(), "the page is older than a table: --update-golden"
    assert set(re.findall("<!-- table: (.*?) -->", page)) == {*TABLES}
