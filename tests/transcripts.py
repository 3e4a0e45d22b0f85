"""Golden transcripts: what a state machine is told, and what it does, as text that a reviewer reads.

A transcript is a file in ``tests/testdata/<machine>/``. A line that begins with ``>`` is an event, with
the words that the machine's driver understands; the lines below it, up to the next blank line, are what followed. Lines
that begin with ``#`` are comments. The events are input: who adds a scenario writes them, runs the
test with ``--update-golden``, and reads what was written below them.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from ckptd.core.slots.slots import SlotRecord, SnapshotKey
from ckptd.core.switching import Change

__all__ = ["Driver", "compare", "scenarios", "shown"]

FOLDER = Path(__file__).with_name("testdata")


class Driver(Protocol):
    """Plays one scenario."""

    def play(self, words: list[str]) -> list[str]:
        """What follows from an event, line by line."""


def scenarios(machine: str) -> list[str]:
    """The transcripts of a machine, by name.

    Raises:
        FileNotFoundError: there are none.
    """
    found = sorted(f"{machine}/{path.stem}" for path in (FOLDER / machine).glob("*.txt"))
    if not found:
        raise FileNotFoundError(f"no transcripts in {FOLDER / machine}")
    return found


def compare(name: str, driver: Driver, *, update: bool) -> None:
    """Play a transcript; it must come out as it is written, or is written anew."""
    path = FOLDER / f"{name}.txt"
    written = path.read_text()
    played = "\n".join(_played(written, driver)) + "\n"
    if update:
        path.write_text(played)
        return
    difference = difflib.unified_diff(
        written.splitlines(), played.splitlines(), "written", "played", lineterm="", n=6
    )
    text = "\n".join(difference)
    assert written == played, f"{name} (if that is right: --update-golden)\n{text}"


def shown(action: Any) -> str:
    """What a machine wants done, in one line: its name and its values; a snapshot by its iteration."""
    values = [getattr(action, field.name) for field in dataclasses.fields(action) if field.compare]
    words = [_word(value) for value in values if not isinstance(value, SlotRecord)]
    return " ".join(["  ", type(action).__name__, *words])


def _word(value: Any) -> str:
    if isinstance(value, SnapshotKey):
        return str(value.iteration)
    if isinstance(value, Change):
        return f"[{value.why}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(_word, value))})"
    return str(value)


def _played(text: str, driver: Driver) -> Iterator[str]:
    before = "#"  # of the line before: a comment stands directly above its event
    for line in text.splitlines():
        if not line.startswith(("#", ">")):
            continue
        if not before.startswith("#"):
            yield ""
        yield line
        before = line
        if line.startswith(">"):
            yield from driver.play(line[1:].split())
