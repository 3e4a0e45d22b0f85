"""A host's child sets and reads a key in the job's store: a real one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from ckptd.host.host_loop import HostLoop
from ckptd.host.host_options import HostOptions, options_from
from ckptd.host.job_store import StoreErrand, store_request
from tests.ports import free_port


@pytest.fixture
def store() -> Iterator[Any]:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    made = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    yield made
    del made


def options(port: int, **more: str) -> HostOptions:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), **more}
    return options_from(["train.py"], environ)


class Errand:
    """One that is under way."""

    def __init__(self, request: dict[str, Any], zygote: Any = None) -> None:
        self._answers: list[dict[str, Any]] = []
        self._loop = HostLoop()
        StoreErrand(self._loop, zygote, request, self._answers.append)

    def answer(self) -> dict[str, Any]:
        while not self._answers:
            self._loop.turn()
        self._loop.close()
        (answer,) = self._answers
        return answer


@pytest.mark.slow
def test_what_one_host_sets_another_reads(store: Any) -> None:
    given, until_s = options(store.port), time.monotonic() + 200
    reads = Errand(store_request(given, until_s))  # before it is there
    assert Errand(store_request(given, until_s, "place")).answer() == {"value": "place"}
    assert reads.answer() == {"value": "place"}


@pytest.mark.slow
def test_a_store_that_appears_later_is_waited_for() -> None:
    """Without torchrun, the trainer of rank 0 makes it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    port = free_port()
    errand = Errand(store_request(options(port), time.monotonic() + 200, "place"))
    store = TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    assert errand.answer() == {"value": "place"}
    assert store.get(store_request(options(port), 0.0)["key"]) == b"place"


@pytest.mark.slow
def test_a_store_that_is_not_there_in_time_is_an_answer() -> None:
    assert Errand(store_request(options(1), time.monotonic())).answer()["error"]


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
    assert "error" in Errand(store_request(options(29400), 0.0), ForksNothing()).answer()
