"""Everybody who was asked to park is told of once, whatever becomes of them, and in time."""

from __future__ import annotations

from ckptd.core.park_requests import ParkRequests
from ckptd.core.sessions import RankKey
from ckptd.ctl import daemon_commands
from ckptd.transport.control.messages import Parks

A, B = RankKey("job", "run", 0), RankKey("job", "run", 1)


def told(answers: list[Parks]) -> list[list[tuple[int, int]]]:
    return [[(r.rank, r.iteration) for r in answer.ranks] for answer in answers]


def test_the_answer_comes_when_all_have_spoken() -> None:
    requests, answers = ParkRequests(), list[Parks]()
    requests.ask([B, A], 10.0, answers.append)
    number = requests.number_for(A)
    assert number > 0
    requests.outcome(A, number, 7, "")
    assert (answers, requests.number_for(A)) == ([], 0)  # it is not asked again
    assert requests.number_for(B) == number
    requests.outcome(B, number, -1, "no memory")
    assert told(answers) == [[(0, 7), (1, -1)]]
    text = daemon_commands.parks_text(answers[0])
    assert text.splitlines() == [
        "job/run rank 0: parked at iteration 7",
        "job/run rank 1: not parked: no memory",
    ]


def test_who_is_gone_or_silent_is_not_waited_for_for_ever() -> None:
    requests, answers = ParkRequests(), list[Parks]()
    requests.ask([A, B], 10.0, answers.append)
    requests.gone(A)
    requests.tick(9.9)
    assert answers == []
    requests.tick(10.0)
    assert told(answers) == [[(0, -1), (1, -1)]]
    assert ["ended" in r.reason or "no answer" in r.reason for r in answers[0].ranks] == [True] * 2
    requests.outcome(B, 1, 5, "")  # too late: nobody waits any more
    assert len(answers) == 1


def test_one_word_of_a_rank_answers_everybody_who_asked_before() -> None:
    requests, first, second = ParkRequests(), list[Parks](), list[Parks]()
    requests.ask([A], 10.0, first.append)
    old = requests.number_for(A)
    requests.ask([A], 10.0, second.append)
    requests.outcome(A, old, 3, "")
    assert (told(first), second) == ([[(0, 3)]], [])
    requests.outcome(A, requests.number_for(A), 4, "")
    assert told(second) == [[(0, 4)]]


def test_nobody_to_ask_is_an_answer() -> None:
    answers: list[Parks] = []
    ParkRequests().ask([], 10.0, answers.append)
    assert told(answers) == [[]]
    assert "no attached trainer" in daemon_commands.parks_text(answers[0])
