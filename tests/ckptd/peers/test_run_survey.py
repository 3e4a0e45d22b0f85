"""Asking other nodes what they hold: who does not answer is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ckptd.peers.run_survey import RunSurvey
from ckptd.transport.messages import (
    GetHoldings,
    Holdings,
    Member,
    NodeCard,
    RunRecord,
    RunSeen,
)

QUESTION = GetHoldings("job", "run")


class Link:
    """A connection that keeps the question until the test answers it."""

    def __init__(self) -> None:
        self.done: Callable[[Holdings], None]
        self.failed: Callable[[str, str], None]

    def ask(
        self,
        message: GetHoldings,
        done: Callable[[Holdings], None],
        failed: Callable[[str, str], None],
    ) -> None:
        assert message == QUESTION
        self.done, self.failed = done, failed


def survey(*configured: str, **links: Link) -> list[RunSeen]:
    """Asked are the members that ``here`` knows of, and the configured ones; only the links can be reached."""
    answers: list[RunSeen] = []

    def reach(cards: Sequence[NodeCard]) -> list[Any]:
        return [(card, links[card.node].ask) for card in cards if card.node in links]

    RunSurvey(QUESTION, HERE, map(NodeCard, configured), reach, answers.append, known=["attached"])
    return answers


def record(epoch: int, *members: Member, former: tuple[str, ...] = ()) -> RunRecord:
    return RunRecord("job", "run", epoch, 3, members, tuple(map(NodeCard, former)))


def member(name: str, *ranks: int) -> Member:
    return Member(NodeCard(name), ranks)


MEMBERS = (member("here", 0), member("b", 1), member("c"), member("attached", 2))
HERE = Holdings("here", (), 5, record=record(5, *MEMBERS, former=("d",)))


def test_alone_a_node_answers_at_once() -> None:
    answers: list[RunSeen] = []
    alone = Holdings("here", ())
    RunSurvey(QUESTION, alone, (), lambda cards: [], answers.append)
    assert answers == [RunSeen((alone,), ())]


def test_it_answers_once_when_everybody_has_answered_or_failed() -> None:
    """Who takes part, who did before, and who is configured; those that cannot be reached are silent at once."""
    b, d = Link(), Link()
    answers = survey("lent", b=b, d=d)
    d.failed("timeout", "no answer: timeout")
    told = Holdings("b", (), 7)
    assert answers == []
    b.done(told)
    (answer,) = answers
    assert (answer.holdings, answer.cards) == ((HERE, told), (NodeCard("b"),))
    assert answer.silent == ("c", "d", "lent")
    assert answer.members == (*MEMBERS, member("d"))


def test_another_node_at_the_address_of_one_is_not_it() -> None:
    links = {"b": Link(), "c": Link(), "d": Link()}
    answers = survey(**links)
    for name, link in links.items():
        link.done(Holdings("somebody-else" if name == "c" else name, ()))
    assert answers[0].silent == ("c",)


def test_whom_only_another_node_knows_is_asked_too() -> None:
    """Here the daemon knows of epoch 5; c took part in epoch 6 with a node that came only then, and
    that one may hold what is missing.
    """
    b, c, e = Link(), Link(), Link()
    answers = survey(b=b, c=c, e=e)
    b.done(Holdings("b", ()))
    c.done(Holdings("c", (), record=record(6, member("c", 0), member("e", 1), member("f"))))
    assert answers == []
    e.done(Holdings("e", ()))
    assert answers[0].silent == ("d", "f")
    assert {m.card.node: m.ranks for m in answers[0].members if m.ranks} == {"c": (0,), "e": (1,)}
