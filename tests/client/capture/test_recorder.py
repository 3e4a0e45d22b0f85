"""Which snapshot the next one follows: golden transcripts of the chain, without any tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ckptd.client.capture.recorder import (
    TRANSITIONS,
    ChainEvent,
    ChainState,
    SnapshotChain,
    Taken,
)
from ckptd.errors import LocalProtocolError
from tests.transcripts import Driver, scenarios


class Chain:
    """A rank whose boundaries are told one by one."""

    def __init__(self) -> None:
        self.chain = SnapshotChain()

    def play(self, words: list[str]) -> list[str]:
        chain, lines = self.chain, []
        match words:
            case ["plan"]:
                chain.use(other_plan=True)
            case ["grow"]:
                chain.use(other_plan=False)
            case ["resume", last]:
                chain.resume(int(last))
            case ["take", step]:
                previous = chain.previous
                chain.take(Taken(int(step), previous))
                lines = [f"   snapshot {step} follows {previous if previous >= 0 else 'none'}"]
            case ["repeat"]:
                chain.repeat()
            case ["break"]:
                chain.cut()
            case ["refuse"]:
                chain.refuse()
            case _:
                raise ValueError(words)
        chain.validate(captures=chain.state is not ChainState.MEASURING)
        return [*lines, str(chain.state)]


@pytest.mark.parametrize("name", scenarios("recorder"))
def test_transcripts(name: str, transcript: Callable[[str, Driver], None]) -> None:
    transcript(name, Chain())


def test_an_event_that_is_not_legal_names_machine_state_and_event() -> None:
    """There is no ring yet: the copy would go nowhere."""
    with pytest.raises(LocalProtocolError, match=r"recorder .*: event take .* in state measuring"):
        TRANSITIONS.after(ChainState.MEASURING, ChainEvent.TAKE, newest=-1)


def test_a_link_over_a_break_is_noticed() -> None:
    """A replay over it would go on from weights that no step led to."""
    chain = SnapshotChain()
    chain.use(other_plan=True)
    chain.take(Taken(3))
    chain.cut()
    chain.previous = 3
    with pytest.raises(AssertionError, match="unchained, 3"):
        chain.validate(captures=True)
