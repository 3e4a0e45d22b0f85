"""State machines as tables: states with their meaning, legal transitions, and the check of invariants. Pure.

A module that owns a machine begins with its states, its events and one `Transitions`, and nothing else knows
which state follows. An event that is not legal in a state raises `LocalProtocolError`, which names the
machine, the state and the event. ``docs/state_machines.md`` is generated from these tables.

Each owner has a ``_validate()``, which asserts what the documentation promises. A method that is `validated`
calls it at its end, if `validate_always` was called: by the tests and the simulations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar

from ckptd.errors import LocalProtocolError

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)
M = TypeVar("M", bound="_Validates")
P = ParamSpec("P")
R = TypeVar("R")

_validating = False


class MachineState(StrEnum):
    """A state and its meaning, in one line: ``IDLE = "idle", "nothing is under way"``."""

    meaning: str

    def __new__(cls, value: str, meaning: str) -> Self:
        state = str.__new__(cls, value)
        state._value_, state.meaning = value, meaning
        return state


class Transitions(Generic[S, E]):
    """The legal transitions of one machine.

    Args:
        machine: its name in errors and in the documentation.
        table: the next state, by state and event.
    """

    def __init__(self, machine: str, table: Mapping[tuple[S, E], S]) -> None:
        self.machine, self._table = machine, dict(table)
        self._following: dict[S, frozenset[S]] = {}

    @property
    def table(self) -> Mapping[tuple[S, E], S]:
        """The next state, by state and event."""
        return MappingProxyType(self._table)

    def after(self, state: S, event: E, **ids: object) -> S:
        """The next state.

        Args:
            ids: identify the machine in the message.
        Raises:
            LocalProtocolError: the event is not legal in this state.
        """
        try:
            return self._table[state, event]
        except KeyError:
            raise self._illegal(state, event, ids) from None

    def following(self, state: S) -> frozenset[S]:
        """The states to which one event leads."""
        if state not in self._following:
            after = (after for (before, _), after in self._table.items() if before is state)
            self._following[state] = frozenset(after)
        return self._following[state]

    def _illegal(self, state: S, event: E, ids: Mapping[str, object]) -> LocalProtocolError:
        legal = sorted(_name(e) for s, e in self._table if s is state)
        return LocalProtocolError(
            f"event {_name(event)} is not legal in state {_name(state)}",
            operation=self.machine,
            ids=ids,
            hint=f"Legal are: {', '.join(legal) or 'none'}. This is a bug of ckptd; please report it",
        )


class _Validates(Protocol):
    def _validate(self) -> None: ...


def validate_always(on: bool = True) -> None:
    """Check the invariants of every machine of this process after each of its events."""
    global _validating
    _validating = on


def validating() -> bool:
    """Whether `validate_always` is on."""
    return _validating


def validated(method: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], R]:
    """A method that handles an event: the machine's invariants hold when it returns."""

    @functools.wraps(method)
    def checked(self: M, /, *args: P.args, **kwargs: P.kwargs) -> R:
        result = method(self, *args, **kwargs)
        if _validating:
            self._validate()
        return result

    return checked


def _name(member: Enum) -> str:
    return member.name.lower()
