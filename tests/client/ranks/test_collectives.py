"""Every rank gets all values, or every rank raises; over rounds between threads, and over real process groups."""

from __future__ import annotations

import os
import random
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from ckptd.client.identity import Identity
from ckptd.client.ranks import collectives
from ckptd.client.ranks.collectives import Collectives, TryAgain, _cut, exchange
from ckptd.errors import AttachRefused, DaemonUnavailable
from tests.client.rank_threads import outcomes
from tests.forked import FORKED


def gives(value: int | Exception) -> Callable[[Collectives], list[int]]:
    """A rank whose work returns that, or raises it."""

    def work() -> int:
        if isinstance(value, Exception):
            raise value
        return value

    return lambda ranks: ranks.agree(work, int)


def agreed(*each: int | Exception) -> list[list[int] | Exception]:
    return outcomes([gives(value) for value in each])


def test_every_rank_gets_all_values_in_the_order_of_ranks() -> None:
    assert agreed(5, 3, 4) == [[5, 3, 4]] * 3
    assert outcomes([lambda ranks: ranks.gather(ranks.rank, int)] * 2) == [[0, 1]] * 2


def test_one_that_wants_to_try_again_takes_all_along() -> None:
    assert [type(one) for one in agreed(5, TryAgain(), 4)] == [TryAgain] * 3


def test_one_that_cannot_go_on_takes_all_along_and_is_named() -> None:
    """Its own error has a code and a hint for the user; the others name its rank and node."""
    full = AttachRefused("quota", "it does not fit", "give it more")
    first, second, third = agreed(TryAgain(), full, 1)
    assert second is full
    assert isinstance(first, DaemonUnavailable)
    assert str(first) == ("recover: rank 1 on node n1: attach refused (quota): it does not fit. Give it more")
    assert str(third) == str(first)


def test_a_missing_daemon_is_the_same_error_everywhere() -> None:
    away = DaemonUnavailable("no answer", operation="fetch")
    found = agreed(1, away)
    assert [str(error) for error in found] == ["recover: rank 1 on node n1: fetch: no answer"] * 2
    assert isinstance(found[1], DaemonUnavailable)
    assert found[1].__cause__ is away


def test_many_failures_are_counted() -> None:
    found = agreed(*(DaemonUnavailable("away") for _ in range(6)))
    assert str(found[0]).endswith("; rank 3 on node n3: away; and 2 more ranks")


def test_alone_an_error_stays_as_it_is() -> None:
    away = DaemonUnavailable("no answer")
    with pytest.raises(DaemonUnavailable) as caught, Collectives.alone().all_or_none():
        raise away
    assert caught.value is away


def test_a_block_is_come_through_by_all_or_by_none() -> None:
    def fine(ranks: Collectives) -> str:
        with ranks.all_or_none():
            return "through"

    def broken(ranks: Collectives) -> str:
        with ranks.all_or_none():
            raise KeyError("operators")

    assert outcomes([fine, fine]) == ["through", "through"]
    first, second = outcomes([fine, broken])
    assert isinstance(first, DaemonUnavailable)
    assert "rank 1 on node n1: KeyError: 'operators'" in str(first)
    assert isinstance(second, KeyError)


def test_a_block_that_could_be_tried_again_fails_on_all() -> None:
    """An image that is overwritten while it is read, after the plan counted: nobody plans any more, and
    the other ranks raised an error without a word.
    """

    def broken(ranks: Collectives) -> None:
        with ranks.all_or_none():
            if ranks.rank == 1:
                raise TryAgain("slot 3 has just been overwritten")

    found = outcomes([broken, broken])
    assert [type(one) for one in found] == [DaemonUnavailable] * 2
    assert all("rank 1 on node n1: slot 3 has just been overwritten" in str(one) for one in found)


def test_an_error_without_a_text_is_one_all_the_same() -> None:
    first, second = agreed(1, ValueError())
    assert isinstance(first, DaemonUnavailable)
    assert "ValueError" in str(first)
    assert isinstance(second, ValueError)


def test_a_value_that_cannot_be_sent_fails_on_all() -> None:
    """A path with a byte that is no UTF-8, say: the rank raised it alone, and the others waited."""
    first, second = outcomes(
        [
            lambda ranks: ranks.agree(lambda: "fine", str),
            lambda ranks: ranks.agree(lambda: "\udcff", str),
        ]
    )
    assert isinstance(first, DaemonUnavailable)
    assert "rank 1 on node n1: " in str(first)
    assert isinstance(second, UnicodeEncodeError)


def test_what_went_wrong_here_is_raised_also_where_others_did_not_come() -> None:
    def nobody(said: bytes) -> list[bytes]:
        raise DaemonUnavailable("rank 1 of 2 did not come within 1 s")

    full = AttachRefused("quota", "it does not fit", "give it more")
    with pytest.raises(AttachRefused) as caught, Collectives(nobody).all_or_none():
        raise full
    assert caught.value is full
    with pytest.raises(DaemonUnavailable, match="rank 1 of 2"), Collectives(nobody).all_or_none():
        pass


def checked(*each: int | Exception) -> list[str]:
    """What a check of all ranks raises, or returns, on each."""

    def work(value: int | Exception) -> int:
        if isinstance(value, Exception):
            raise value
        return value

    found = outcomes(
        [
            lambda ranks, value=value: ranks.check(  # type: ignore[misc]
                lambda: work(value), int, what="nothing was placed", unlike="another plan"
            )
            for value in each
        ]
    )
    assert {type(one) for one in found} in ({list}, {ValueError})
    return [str(one) for one in found]


def test_a_check_raises_the_same_error_on_all() -> None:
    assert checked(7, 7, 7) == ["[7, 7, 7]"] * 3
    assert (
        checked(7, ValueError("no room"), KeyError("layer"))
        == ["nothing was placed: rank 1: no room; rank 2: KeyError: 'layer'"] * 3
    )
    assert checked(7, 8, 7, 9) == ["nothing was placed: ranks 1, 3: another plan"] * 4


WORLD = 3


FIRST = collectives._FIRST_BYTES
LENGTHS = [0, 1, 70_000, FIRST, FIRST + 1, FIRST - 1]


def said_by(rank: int, turn: int) -> bytes:
    """Of very different lengths, and those at which another round begins; one has nothing to say. No two parts
    of a payload are equal.
    """
    return random.Random(f"{rank} {turn}").randbytes(LENGTHS[(rank + turn) % len(LENGTHS)])


def turns(rank: int) -> None:
    collectives._ROUND_BYTES = 3 * 10_000  # so that a payload takes several rounds
    for turn in range(len(LENGTHS)):
        heard = exchange(Identity("j", "r", rank, WORLD), said_by(rank, turn))
        assert heard == [said_by(r, turn) for r in range(WORLD)]
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    assert not store.check([f"ckptd/j/r/exchange/{len(LENGTHS) - 2}/verdict"])
    assert store.check([f"ckptd/j/r/exchange/{len(LENGTHS)}/verdict"])


def one_stays_away(rank: int) -> None:
    if rank == 1:
        return
    with pytest.raises(DaemonUnavailable, match=r"rank 1 of 3 did not come within 1 s"):
        exchange(Identity("j", "r", rank, WORLD), b"", deadline_s=1.0)


def _in_rank(work: Callable[[int], None], rank: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
        dist.barrier()  # whoever leaves at once would break the connections that others are making
        work(rank)
    except BaseException:
        Path(folder, f"failed{rank}").write_text(traceback.format_exc())
        raise


@pytest.mark.slow
@pytest.mark.parametrize("work", [turns, one_stays_away])
def test_in_a_process_group(work: Callable[[int], None], tmp_path: Path) -> None:
    ranks = [FORKED.Process(target=_in_rank, args=(work, rank, str(tmp_path))) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    told = [path.read_text() for path in tmp_path.glob("failed*")]
    assert [process.exitcode for process in ranks] == [0] * WORLD, told


def test_alone_one_hears_oneself() -> None:
    assert exchange(Identity("j", "r", 0, 1), b"said") == [b"said"]


def test_several_ranks_without_a_process_group_are_told_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"call init_process_group\(\) before Checkpointer"):
        exchange(Identity("j", "r", 0, 2), b"said")


@pytest.mark.parametrize("width", [1, 3, 7, 100])
@pytest.mark.parametrize("parts", [[], [b""], [b"abc"], [b"ab", b"", b"cdefgh", b"i"], [b"x" * 20, b"y"]])
def test_pieces_add_up_and_all_but_the_last_are_full(parts: list[bytes], width: int) -> None:
    pieces = list(_cut(parts, width))
    assert b"".join(pieces) == b"".join(parts)
    assert all(len(piece) == width for piece in pieces[:-1])
    assert all(pieces)
