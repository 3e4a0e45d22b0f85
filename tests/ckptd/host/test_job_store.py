"""A host's child sets and reads a key in the job's store: a real one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from ckptd.host.host_loop import HostLoop
from ckptd.host.host_options import HostOptions, options_from
from ckptd.host.job_store import StoreErrand, store_request


@pytest.fixture
def store() -> Iterator[Any]:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    made = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    yield made
    del made


def options(port: int, **more: str) -> HostOptions:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), **more}
    return options_from(["train.py"], environ)


def answer_of(errand: StoreErrand) -> dict[str, Any]:
    answers: list[dict[str, Any]] = []
    loop = HostLoop()
    loop.watch(errand, lambda: answers.extend(filter(None, [errand.receive()])))
    while not answers:
        loop.turn()
    loop.close()
    errand.close()
    return answers[0]


@pytest.mark.slow
def test_what_one_host_sets_another_reads(store: Any) -> None:
    given, until_s = options(store.port), time.monotonic() + 200
    reads = StoreErrand(None, store_request(given, until_s))  # before it is there
    assert answer_of(StoreErrand(None, store_request(given, until_s, "place"))) == {"value": "place"}
    assert answer_of(reads) == {"value": "place"}


@pytest.mark.slow
def test_a_store_that_is_not_there_in_time_is_an_answer() -> None:
    answer = answer_of(StoreErrand(None, store_request(options(1), time.monotonic())))
    assert answer["error"]


def test_jobs_that_share_a_store_have_keys_of_their_own() -> None:
    keys = {
        store_request(options(29400, **more), 0.0)["key"]
        for more in ({}, {"TORCHELASTIC_RUN_ID": "a"}, {"TORCHELASTIC_RUN_ID": "b"})
    }
    assert len(keys) == 3


def test_a_restart_has_the_key_of_the_start_before() -> None:
    """Agents count restarts each for themselves: two nodes of one start may disagree."""
    one, other = (
        store_request(options(29400, TORCHELASTIC_RESTART_COUNT=count), 0.0)["key"] for count in "03"
    )
    assert one == other


class ForksNothing:
    """Stands for a zygote that has died: the descriptor it was sent is closed."""

    ready = True

    def fork_errand(self, channel: int) -> None:
        """It is closed by the caller."""


def test_a_child_that_has_gone_is_an_answer() -> None:
    zygote: Any = ForksNothing()
    answer = answer_of(StoreErrand(zygote, store_request(options(29400), 0.0)))
    assert "error" in answer
