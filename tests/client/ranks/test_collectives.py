"""Exchanging what ranks say, and deciding together; several real ranks are in tests/e2e."""

from __future__ import annotations

import pytest

from ckptd.client.ranks.collectives import Exchange, all_or_none, vote
from ckptd.errors import AttachRefused, DaemonUnavailable
from tests.client.meeting import outcomes


def alone(said: bytes) -> list[bytes]:
    return [said]


def test_one_that_wants_to_try_again_takes_all_along() -> None:
    assert outcomes([lambda e: vote(e, "a"), lambda e: vote(e, "b")]) == [False, False]
    assert outcomes([lambda e: vote(e, "a", again=True), lambda e: vote(e, "b")]) == [True, True]


def test_one_that_cannot_go_on_takes_all_along_and_is_named() -> None:
    """Its own error has a code and a hint for the user; the others say whose it is."""
    full = AttachRefused("quota", "it does not fit", "give it more")
    first, second, third = outcomes(
        [
            lambda e: vote(e, "a", again=True),
            lambda e: vote(e, "b", fatal=full),
            lambda e: vote(e, "c"),
        ]
    )
    assert second is full
    assert isinstance(first, DaemonUnavailable)
    assert str(first) == (
        "recover: rank 1 on node b: attach refused (quota): it does not fit. give it more"
    )
    assert str(third) == str(first)


def test_a_missing_daemon_is_the_same_error_everywhere() -> None:
    away = DaemonUnavailable("no answer", operation="fetch")
    found = outcomes([lambda e: vote(e, "a"), lambda e: vote(e, "b", fatal=away)])
    assert [str(error) for error in found] == ["recover: rank 1 on node b: fetch: no answer"] * 2
    assert isinstance(found[1], DaemonUnavailable)
    assert found[1].__cause__ is away


def test_many_failures_are_counted() -> None:
    found = outcomes(
        [lambda e, r=r: vote(e, f"n{r}", fatal=DaemonUnavailable("away")) for r in range(6)]  # type: ignore[misc]
    )
    assert str(found[0]).endswith("; rank 3 on node n3: away; and 2 more ranks")


def test_alone_an_error_stays_as_it_is() -> None:
    away = DaemonUnavailable("no answer")
    with pytest.raises(DaemonUnavailable) as caught, all_or_none(alone, "a"):
        raise away
    assert caught.value is away


def test_a_block_is_come_through_by_all_or_by_none() -> None:
    def fine(exchange: Exchange) -> str:
        with all_or_none(exchange, "a"):
            return "through"

    def broken(exchange: Exchange) -> str:
        with all_or_none(exchange, "b"):
            raise KeyError("operators")

    assert outcomes([fine, fine]) == ["through", "through"]
    first, second = outcomes([fine, broken])
    assert isinstance(first, DaemonUnavailable)
    assert "rank 1 on node b: 'operators'" in str(first)
    assert isinstance(second, KeyError)


def test_an_error_without_a_text_is_one_all_the_same() -> None:
    first, second = outcomes([lambda e: vote(e, "a"), lambda e: vote(e, "b", fatal=ValueError())])
    assert isinstance(first, DaemonUnavailable)
    assert "ValueError" in str(first)
    assert isinstance(second, ValueError)


def test_what_went_wrong_here_is_told_also_where_others_did_not_come() -> None:
    def nobody(said: bytes) -> list[bytes]:
        raise DaemonUnavailable("rank 1 of 2 did not come within 1 s")

    full = AttachRefused("quota", "it does not fit", "give it more")
    with pytest.raises(AttachRefused) as caught, all_or_none(nobody, "a"):
        raise full
    assert caught.value is full
    with pytest.raises(DaemonUnavailable, match="rank 1 of 2"), all_or_none(nobody, "a"):
        pass
