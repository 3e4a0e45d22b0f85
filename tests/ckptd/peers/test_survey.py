"""Asking other nodes what they hold: who does not answer is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckptd.peers.survey import RunSurvey
from ckptd.transport.messages import GetHoldings, Holdings, Member, NodeCard, RunSeen

HERE = Holdings("here", (), 5)
QUESTION = GetHoldings("job", "run")


class Link:
    """A connection that keeps the question until the test answers it."""

    def __init__(self) -> None:
        self.patience_s = 0.0
        self.done: Callable[[Holdings], None]
        self.failed: Callable[[str, str], None]

    def ask(
        self,
        message: GetHoldings,
        expect: type[Holdings],
        done: Callable[[Holdings], None],
        failed: Callable[[str, str], None],
        *,
        timeout_s: float,
    ) -> None:
        assert message == QUESTION
        assert expect is Holdings
        self.done, self.failed, self.patience_s = done, failed, timeout_s


def survey(**links: Link) -> tuple[list[RunSeen], tuple[Member, ...]]:
    answers: list[RunSeen] = []
    members = (Member(NodeCard("here"), (0,)),)
    others: list[Any] = [(NodeCard(name), link, 2.5) for name, link in links.items()]
    RunSurvey(QUESTION, HERE, others, answers.append, members)
    return answers, members


def test_alone_a_node_answers_at_once() -> None:
    answers, members = survey()
    assert answers == [RunSeen((HERE,), (), members)]


def test_it_answers_once_when_everybody_has_answered_or_failed() -> None:
    b, c, d = Link(), Link(), Link()
    answers, members = survey(b=b, c=c, d=d)
    assert b.patience_s == 2.5
    d.failed("timeout", "no answer: timeout")
    told = Holdings("b", (), 7)
    b.done(told)
    assert answers == []
    c.done(Holdings("somebody-else", ()))
    assert answers == [RunSeen((HERE, told), (NodeCard("b"),), members, ("c", "d"))]
