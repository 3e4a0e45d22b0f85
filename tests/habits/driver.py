"""Plays a row of a table: a training that is killed twice, and compared with one that was never
killed and does not know ckptd.

A row is exact or refused. *Exact*: both later lives went on from snapshots, every step of every
life, replayed ones included, had the batch that it has without a kill, and the final state is
identical to the bit. *Refused*: the very first life was told, with the reason, and ended before
training, or at the first snapshot at the latest. Everything else is *different*, and a fault.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.transport.messages import Forget
from ckptd.transport.wire import ControlClient, RefusedError
from tests.e2e.lives import Life, Parent
from tests.habits.leaves import differences
from tests.long import long_since
from tests.ports import free_port

__all__ = ["SEED", "Outcome", "Parents", "Row", "Verdict", "check", "play", "some", "training"]

SEED = int(os.environ.get("CKPTD_SEED") or 20261123)
STEPS = 20

_KILLED = -signal.SIGKILL
# What every training imports sooner or later, most of it in its first step.
_BEFORE = "tests.preload"
_SHARE = 20  # one in that many is played by `make test`


class Verdict(StrEnum):
    EXACT = "exact"
    REFUSED = "refused"
    DIFFERENT = "different"


@dataclass(frozen=True, slots=True)
class Row:
    """One training of a table.

    Attributes:
        module: has ``main(argv)`` (see ``tests.habits.life``).
        name: of what it trains; the module knows it.
        window: W; None leaves it to ckptd.
        refused: a pattern that the reason matches, where the row is to be refused; None: it is to be exact.
        plain: whether the training that is compared with runs without ckptd; otherwise it is protected, and not killed.
        imports: modules, beside ``module``, that it would import in each of its lives.
    """

    module: str
    name: str
    window: int | None = 1
    ranks: int = 1
    refused: str | None = None
    plain: bool = True
    steps: int = STEPS
    imports: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        return f"{self.name}-W{self.window or 'own'}-{self.ranks}r"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a row came to; ``text``: the reason of a refusal, or what was wrong, with the logs."""

    verdict: Verdict
    text: str = ""


class Parents:
    """The parents of the lives of one row after the other: rows that import the same share one."""

    def __init__(self) -> None:
        self._for: tuple[str, ...] = ()
        self._last: Parent | None = None

    def of(self, row: Row) -> Parent:
        wanted = (row.module, _BEFORE, *row.imports)
        if self._last is None or not self._last.alive or self._for != wanted:
            self.close()
            self._last, self._for = Parent(*wanted, ends_with_one=True), wanted
        return self._last

    def close(self) -> None:
        if self._last is not None:
            self._last.close()
        self._last = None


def some(rows: Sequence[Row], *, seed: int = SEED) -> list[Any]:
    """Parameters for all rows; a twentieth of them, drawn with ``seed``, is played always, the others
    with ``CKPTD_LONG=1``.
    """
    draw = random.Random(seed)
    always = set(draw.sample(range(len(rows)), -(-len(rows) // _SHARE)))
    later = long_since("left to make campaign-habits")
    return [
        pytest.param(row, id=row.id, marks=() if at in always else (later,)) for at, row in enumerate(rows)
    ]


def play(row: Row, folder: Path, endpoint: str, parents: Parents, *, seed: int = SEED) -> Outcome:
    """Play it with a running daemon; the moments of the kills follow from ``seed`` and the row."""
    folder.mkdir(exist_ok=True)
    draw = random.Random(f"{seed} {row.id}")
    first = draw.randrange(row.steps // 4, row.steps // 2)
    kills = [first, draw.randrange(first + 2, row.steps - 2)]
    run = uuid.uuid4().hex[:8]
    protected = ("--daemon", endpoint)
    reference = training(
        row, folder / "reference", () if row.plain else (*protected, "--run", f"{run}.whole")
    )
    lives = []
    for number, kill in enumerate([*kills, None]):
        moment = f"{kill}:{draw.choice((0.0, draw.uniform(0.1, 20))):.2f}"
        victim = draw.randrange(row.ranks) if kill is not None else -1
        told = training(
            row,
            folder / f"life{number}",
            (*protected, "--run", run),
            seed=1 if number == 0 else 1000 + number,
            kill=(victim, moment),
        )
        lives.append(told)
    codes = parents.of(row).live([reference, *lives], timeout_s=280)
    for name in (run, f"{run}.whole"):
        # Memory for the rows to come. A run that was refused has none.
        with ControlClient(endpoint, timeout_s=20) as client, contextlib.suppress(RefusedError):
            client.request(Forget("habits", name))
    return _judge(reference, lives, codes[0], codes[1:])


def training(
    row: Row, out: Path, options: Sequence[str], *, seed: int = 1, kill: tuple[int, str] = (-1, "")
) -> list[Life]:
    """The processes of one life of a row; ``kill``: the rank that dies, and when."""
    port, found = str(free_port()), []
    for rank in range(row.ranks):
        told = ["--row", row.name, "--steps", str(row.steps), "--seed", str(seed + 10 * rank)]
        told += ["--ranks", str(row.ranks), "--rank", str(rank), "--port", port, *options]
        told += [] if row.window is None else ["--window", str(row.window)]
        told += ["--kill", kill[1]] if rank == kill[0] else []
        found.append(Life(out.with_name(f"{out.name}.{rank}.pt"), *told))
    return found


def _judge(
    reference: list[Life], lives: list[list[Life]], whole: list[int], codes: list[list[int]]
) -> Outcome:
    """What the lives of a row came to.

    Args:
        whole: exit codes of the ranks of the training that was not killed.
        codes: of each life's.
    """
    told = "\n".join(
        f"--- {life.out.stem} ended with {code}\n{life.log}"
        for row, row_codes in zip([reference, *lives], [whole, *codes], strict=True)
        for life, code in zip(row, row_codes, strict=True)
    )
    if any(whole):
        return Outcome(Verdict.DIFFERENT, f"the training that nobody kills failed\n{told}")
    if _KILLED not in codes[0]:
        return Outcome(Verdict.REFUSED, "\n".join(life.log for life in lives[0]))
    wrong = [
        f"life {number} of rank {rank} trained step {step} on another batch"
        for number, row in enumerate(lives)
        for rank, life in enumerate(row)
        for step in _other_batches(reference[rank], life)
    ]
    if _KILLED not in codes[1] or any(codes[2]):
        return Outcome(Verdict.DIFFERENT, "\n".join(["a later life failed", *wrong, told]))
    wrong += [
        f"life {number} of rank {rank} began at the beginning"
        for number, row in enumerate(lives[1:], 1)
        for rank, life in enumerate(row)
        if not any(note.get("resumed") for note in _notes(life))
    ]
    for rank, (one, other) in enumerate(zip(reference, lives[-1], strict=True)):
        states = [torch.load(life.out, weights_only=False) for life in (one, other)]
        wrong += [f"rank {rank}: {text}" for text in differences(*states)]
    return Outcome(Verdict.DIFFERENT, "\n".join([*wrong, told])) if wrong else Outcome(Verdict.EXACT)


def _other_batches(reference: Life, life: Life) -> list[int]:
    """The steps of a life that had other batches than they have without a kill; several of a step
    (accumulation) in their order.
    """
    expected = _batches(reference)
    return [step for step, found in _batches(life).items() if not _continues(expected.get(step, []), found)]


def _continues(expected: list[str], found: list[str]) -> bool:
    """Whether these are the batches of a step; the last step of a life may be cut off."""
    return found == expected[: len(found)]


def _batches(life: Life) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for note in _notes(life):
        if "batch" in note:
            found.setdefault(note["step"], []).append(note["batch"])
    return found


def _notes(life: Life) -> list[dict[str, Any]]:
    path = life.out.with_suffix(".notes")
    if not path.exists():
        return []
    # A kill may cut the last line off.
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def check(row: Row, outcome: Outcome) -> None:
    """Fail the test whose row did not come to what it is to come to."""
    if row.refused is None:
        assert outcome.verdict is Verdict.EXACT, f"{row.id} is {outcome.verdict}:\n{outcome.text}"
    else:
        assert outcome.verdict is Verdict.REFUSED, f"{row.id} is {outcome.verdict}:\n{outcome.text}"
        assert re.search(row.refused, outcome.text), (
            f"{row.id}, refused without naming what to do:\n{outcome.text}"
        )
