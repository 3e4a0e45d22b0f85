"""Clients get each token once, whichever device dies; a line that is no request is refused."""

from __future__ import annotations

import gc
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.client.serving.generation import GenerationRequest, RequestState
from ckptd.client.serving.request_front import RequestFront, ServingClient, ServingRefused, socket_of
from tests.ckptd.running import eventually

REQUEST = GenerationRequest(id="a", prompt=(1, 2), most=4)


def check(request: GenerationRequest) -> None:
    request.check(10)


@pytest.fixture
def fronts(tmp_path: Path) -> Iterator[list[RequestFront]]:
    made = [RequestFront(socket_of(tmp_path, rank), check) for rank in range(2)]
    yield made
    for each in made:
        each.close()


class Asking:
    """A client in a thread."""

    def __init__(self, folder: Path) -> None:
        self.tokens: list[int] = []
        self._folder = folder
        self.thread = threading.Thread(target=self._ask)
        self.thread.start()

    def _ask(self) -> None:
        for tokens in ServingClient(self._folder).generate(REQUEST):
            self.tokens += tokens


def test_a_client_goes_on_at_another_device(fronts: list[RequestFront], tmp_path: Path) -> None:
    asking = Asking(tmp_path)
    eventually(lambda: fronts[0].inbox(()) == [REQUEST], "the request")
    assert fronts[0].inbox({"a"}) == []  # it is served already
    fronts[0].publish({"a": RequestState(request=REQUEST, tokens=[5, 6])}, {})
    eventually(lambda: asking.tokens == [5, 6], "two tokens")
    fronts[0].close()
    eventually(lambda: fronts[1].inbox(()) == [REQUEST], "the request at the other device")
    fronts[1].publish({"a": RequestState(request=REQUEST, tokens=[5])}, {})  # it is a step behind
    fronts[1].publish({"a": RequestState(request=REQUEST, tokens=[5, 6, 7])}, {})
    eventually(lambda: asking.tokens == [5, 6, 7], "the third token")
    fronts[1].publish({}, {"a": (5, 6, 7, 8)})
    asking.thread.join()
    assert asking.tokens == [5, 6, 7, 8]
    eventually(lambda: fronts[1].inbox(()) == [], "nobody waits for it any more")


def test_what_is_refused(fronts: list[RequestFront], tmp_path: Path) -> None:
    client = ServingClient(tmp_path)
    with pytest.raises(ServingRefused, match="the model has 10"):
        list(client.generate(GenerationRequest(id="b", prompt=(12,), most=1)))
    for line, error in (
        (b"{}", "has no request"),
        (b"nonsense", "malformed"),
        (b'{"request": 3}', "Expected"),
    ):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(f"{socket_of(tmp_path, 1)}")
            connection.sendall(line + b"\n")
            assert error in json.loads(connection.makefile().readline())["error"]
    assert fronts[0].inbox(()) == fronts[1].inbox(()) == []


def test_a_client_asks_the_server_to_end(fronts: list[RequestFront], tmp_path: Path) -> None:
    ServingClient(tmp_path).stop()
    assert [front.stopping for front in fronts] == [True, False]


def test_without_a_server_a_client_gives_up(tmp_path: Path) -> None:
    client = ServingClient(tmp_path, patience_s=0.0)
    with pytest.raises(TimeoutError, match="no token of request 'a'"):
        list(client.generate(REQUEST))
    with pytest.raises(TimeoutError, match="no device answers"):
        client.stop()


def test_its_threads_hold_up_no_collection_and_end_with_it(
    fronts: list[RequestFront], tmp_path: Path
) -> None:
    """They waited as threads that work beside training do not: nothing was collected while a server lived, and
    one that was closed left a thread in an accept for ever.
    """
    thresholds = gc.get_threshold()
    assert thresholds[0] < 1 << 20
    asking = Asking(tmp_path)
    eventually(lambda: fronts[0].inbox(()) == [REQUEST], "the request")
    assert gc.get_threshold() == thresholds
    fronts[0].publish({}, {"a": (5,)})
    asking.thread.join()
    for each in fronts:
        each.close()
    names = {"ckptd-front", "ckptd-client"}
    eventually(
        lambda: not names & {thread.name for thread in threading.enumerate()}, "the end of the threads"
    )
