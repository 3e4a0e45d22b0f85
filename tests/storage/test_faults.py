"""S3 through a proxy that throttles, resets, stalls, truncates, repeats and forgets to answer.

After each fault: the right error or success, no part of an object visible, and no half-finished upload left.
"""

from __future__ import annotations

import gc
import random
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from ckptd.storage.stores.fsspec_store import FsspecStore
from ckptd.storage.stores.objects import (
    ContainerMissing,
    ObjectExists,
    ObjectStore,
    Range,
    StoreError,
    StoreRefused,
    Throttled,
    Unavailable,
)
from ckptd.storage.stores.open_store import open_store
from ckptd.storage.stores.resilience import Resilient, RetryPolicy
from ckptd.storage.stores.store_base import StoreOptions
from tests.storage.fault_proxy import (
    Answer,
    Duplicate,
    FaultProxy,
    LoseAnswer,
    Match,
    Reset,
    Stall,
    Truncate,
    completes,
    is_put,
    method,
    uploads_part,
)
from tests.storage.s3_server import BUCKET, S3Server

MIB = 1 << 20
PART = 5 * MIB
# Nobody is to wait for it: a busy machine is no fault.
TIMEOUT_S = 60.0
HASTY_S = 1.5
OPTIONS = {
    "part_bytes": PART,
    "threshold_bytes": PART,
    "concurrency": 2,
    "attempts": 3,
    "connect_timeout_s": TIMEOUT_S,
    "request_timeout_s": TIMEOUT_S,
}
SMALL = b"a small object"
BIG = random.Random(1).randbytes(
    2 * PART + 11
)  # three parts: a whole first one, one in the middle, and the rest


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3_server.port) as running:
        yield running


@pytest.fixture
def options(s3_server: S3Server, aws_session: Any) -> dict[str, Any]:
    return {**s3_server.options, **OPTIONS, "fsspec": {"session": aws_session}}


@pytest.fixture(params=["fsspec", "obstore"])
def backend(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def store(options: dict[str, Any], s3_url: str, proxy: FaultProxy, backend: str) -> Iterator[ObjectStore]:
    """A store behind the proxy, connected and probed."""
    opened = open_store(s3_url, {**options, "endpoint_url": proxy.endpoint}, backend)
    assert opened.facts.conditional_create
    yield opened
    opened.close()


@pytest.fixture
def hasty(
    options: dict[str, Any], s3_url: str, proxy: FaultProxy, backend: str, behind: ObjectStore
) -> Iterator[ObjectStore]:
    """The same for a server that stalls: it gives up after many times what its longest call takes
    on this machine, now.
    """
    begun_s = time.monotonic()
    assert behind.put("measured", [memoryview(BIG)]).size == len(BIG)
    behind.delete(["measured"])
    hasty_s = max(HASTY_S, 10 * (time.monotonic() - begun_s))
    how = {**options, "endpoint_url": proxy.endpoint, "request_timeout_s": hasty_s}
    opened = open_store(s3_url, how, backend)
    assert opened.facts.conditional_create
    yield opened
    opened.close()


@pytest.fixture
def suited(request: pytest.FixtureRequest, backend: str) -> ObjectStore:
    """The store for the test's ``fault``."""
    stalls = isinstance(request.node.callspec.params["fault"], Stall)
    found: ObjectStore = request.getfixturevalue("hasty" if stalls else "store")
    return found


@pytest.fixture
def behind(options: dict[str, Any], s3_url: str) -> Iterator[ObjectStore]:
    """The same objects, past the proxy."""
    opened = open_store(s3_url, options, "obstore")
    yield opened
    opened.close()


@pytest.fixture
def raw(s3_call: Callable[..., Any], s3_url: str) -> Raw:
    """The server, asked without our code."""
    return Raw(s3_call, s3_url.removeprefix(f"s3://{BUCKET}/") + "/")


@dataclass
class Raw:
    call: Callable[..., Any]
    path: str

    def uploads(self) -> list[str]:
        """Keys of half-finished uploads."""
        page = self.call("list_multipart_uploads", Bucket=BUCKET, Prefix=self.path)
        return [upload["Key"].removeprefix(self.path) for upload in page.get("Uploads", ())]

    def begin_upload(self, key: str) -> None:
        upload = self.call("create_multipart_upload", Bucket=BUCKET, Key=self.path + key)
        self.call(
            "upload_part",
            Bucket=BUCKET,
            Key=self.path + key,
            UploadId=upload["UploadId"],
            PartNumber=1,
            Body=b"half",
        )


def _put(store: ObjectStore, data: bytes, **how: bool) -> None:
    assert store.put("object", [memoryview(data)], **how).size == len(data)


def _get(store: ObjectStore, size: int) -> bytes:
    data = bytearray(size)
    store.read_ranges("object", [Range(0, memoryview(data))])
    return bytes(data)


def _nothing_left(behind: ObjectStore, raw: Raw) -> None:
    assert list(behind.list("")) == []
    deadline = time.monotonic() + TIMEOUT_S  # a client may still be aborting
    while raw.uploads() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert raw.uploads() == []


def _patient(store: ObjectStore) -> Resilient:
    return Resilient(store, RetryPolicy(attempts=4, base_s=0.01, cap_s=0.02), notify=lambda notice: None)


CALLS: dict[str, Callable[[ObjectStore], object]] = {
    "put": lambda store: _put(store, SMALL),
    "put_big": lambda store: _put(store, BIG),
    "read": lambda store: store.read("object", limit=100),
    "read_ranges": lambda store: _get(store, 5),
    "info": lambda store: store.info("object"),
    "list": lambda store: list(store.list("")),
    "delete": lambda store: store.delete(["object"]),
}


class TestEveryCall:
    @pytest.mark.parametrize("call", CALLS)
    def test_throttled(
        self, store: ObjectStore, proxy: FaultProxy, behind: ObjectStore, raw: Raw, call: str
    ) -> None:
        proxy.inject(Answer(503, "SlowDown"), times=50)
        with pytest.raises(Throttled) as caught:
            CALLS[call](store)
        assert caught.value.retriable
        _nothing_left(behind, raw)

    @pytest.mark.parametrize("call", CALLS)
    def test_a_broken_server(self, store: ObjectStore, proxy: FaultProxy, call: str) -> None:
        proxy.inject(Answer(500, "InternalError"), times=50)
        with pytest.raises(Unavailable):
            CALLS[call](store)

    @pytest.mark.parametrize("call", ["put", "put_big", "read_ranges", "info"])
    def test_a_server_that_stalls(self, hasty: ObjectStore, proxy: FaultProxy, call: str) -> None:
        """Nothing is asked again within a call once its time is over."""
        asked = proxy.count(lambda request: True)
        proxy.inject(Stall(), times=50)
        with pytest.raises(Unavailable):
            CALLS[call](hasty)
        assert proxy.count(lambda request: True) == asked + 1

    @pytest.mark.parametrize("backend", ["fsspec", "obstore"])
    @pytest.mark.parametrize("call", CALLS)
    def test_nobody_listens(self, options: dict[str, Any], s3_url: str, backend: str, call: str) -> None:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
            store = open_store(s3_url, {**options, "endpoint_url": endpoint}, backend)
            with pytest.raises(Unavailable):
                CALLS[call](store)
            store.close()

    @pytest.mark.parametrize("backend", ["fsspec", "obstore"])
    @pytest.mark.parametrize("call", CALLS)
    def test_a_wrong_secret(self, options: dict[str, Any], s3_url: str, backend: str, call: str) -> None:
        store = open_store(s3_url, {**options, "secret": "not-the-secret"}, backend)
        with pytest.raises(StoreRefused) as caught:
            CALLS[call](store)
        assert not caught.value.retriable
        for each in _chain(caught.value):
            assert "not-the-secret" not in f"{each}{each!r}"
        store.close()

    @pytest.mark.parametrize("backend", ["fsspec", "obstore"])
    @pytest.mark.parametrize("call", CALLS)
    def test_a_bucket_that_vanished(self, options: dict[str, Any], raw: Raw, backend: str, call: str) -> None:
        bucket = f"gone-{uuid.uuid4().hex}"
        raw.call("create_bucket", Bucket=bucket)
        store = open_store(f"s3://{bucket}", options, backend)
        _put(store, SMALL)
        store.delete(["object"])
        raw.call("delete_bucket", Bucket=bucket)
        with pytest.raises(ContainerMissing) as caught:
            CALLS[call](store)
        assert not caught.value.retriable
        store.close()


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


class TestUploads:
    @pytest.mark.parametrize(
        "fault", [Reset(MIB), Answer(503, "SlowDown"), Stall(), LoseAnswer(), Duplicate()]
    )
    def test_a_part_that_fails_is_repeated_alone(
        self, suited: ObjectStore, proxy: FaultProxy, raw: Raw, fault: Any
    ) -> None:
        proxy.inject(fault, uploads_part(2))
        stalls = isinstance(fault, Stall)
        try:
            _put(suited, BIG)
        except Unavailable:
            assert stalls  # a call does not go on longer than its time
            _put(suited, BIG)
        assert _get(suited, len(BIG)) == BIG
        if not stalls:
            again = 1 if isinstance(fault, Duplicate) else 2
            assert [proxy.count(uploads_part(n)) for n in (1, 2, 3)] == [1, again, 1]
        assert raw.uploads() == []

    @pytest.mark.parametrize("fault", [Reset(MIB), Answer(500, "InternalError"), Stall()])
    def test_a_part_that_never_succeeds_ends_the_upload(
        self, suited: ObjectStore, proxy: FaultProxy, behind: ObjectStore, raw: Raw, fault: Any
    ) -> None:
        proxy.inject(fault, uploads_part(2), times=50)
        with pytest.raises(Unavailable):
            _put(suited, BIG)
        _nothing_left(behind, raw)

    def test_an_object_that_was_there_survives_a_put_that_fails(
        self, store: ObjectStore, proxy: FaultProxy, raw: Raw
    ) -> None:
        _put(store, SMALL)
        proxy.inject(Reset(MIB), uploads_part(), times=50)
        with pytest.raises(Unavailable):
            _put(store, BIG)
        assert store.read("object", limit=100) == SMALL

    def test_a_small_object_is_reset_on_its_way(
        self, store: ObjectStore, proxy: FaultProxy, behind: ObjectStore, raw: Raw
    ) -> None:
        proxy.inject(Reset(MIB), is_put, times=50)
        with pytest.raises(Unavailable):
            _put(store, BIG[: 2 * MIB])
        _nothing_left(behind, raw)

    def test_completing_fails(
        self, store: ObjectStore, proxy: FaultProxy, behind: ObjectStore, raw: Raw
    ) -> None:
        proxy.inject(Answer(500, "InternalError"), completes, times=50)
        with pytest.raises(Unavailable):
            _put(store, BIG)
        _nothing_left(behind, raw)

    @pytest.mark.parametrize("if_absent", [False, True])
    @pytest.mark.parametrize("fault", [LoseAnswer(), Duplicate(0), Duplicate(1), Answer(503, "SlowDown")])
    def test_completing_is_answered_badly(
        self, store: ObjectStore, proxy: FaultProxy, raw: Raw, fault: Any, if_absent: bool
    ) -> None:
        """The object is there, or it is not: asked patiently, a put ends with it there."""
        proxy.inject(fault, completes)
        try:
            _put(_patient(store), BIG, if_absent=if_absent)
        except ObjectExists:
            # The server's second answer, and the only one that arrived: who created it cannot be known.
            assert if_absent
            assert fault == Duplicate(1)
        assert _get(store, len(BIG)) == BIG
        assert raw.uploads() == []

    def test_a_large_object_that_is_there_already_is_not_replaced(
        self, store: ObjectStore, behind: ObjectStore, raw: Raw
    ) -> None:
        _put(behind, SMALL)
        with pytest.raises(ObjectExists):
            _put(store, BIG, if_absent=True)
        assert store.read("object", limit=100) == SMALL
        assert raw.uploads() == []

    def test_a_file_of_any_file_system_that_cannot_be_finished_is_given_up(
        self, s3_server: S3Server, s3_url: str, proxy: FaultProxy, behind: ObjectStore, raw: Raw
    ) -> None:
        """Closing it, as the garbage collector would, commits what it has."""
        own = {name: value for name, value in s3_server.options.items() if name != "region"}
        own["endpoint_url"] = proxy.endpoint
        store = FsspecStore(s3_url, StoreOptions(part_bytes=PART, fsspec=own))
        proxy.inject(Answer(400, "InvalidRequest"), uploads_part(2), times=50)
        with pytest.raises(Unavailable):
            _put(store, BIG)
        store.close()
        gc.collect()
        _nothing_left(behind, raw)


class TestSmallPuts:
    @pytest.mark.parametrize("if_absent", [False, True])
    @pytest.mark.parametrize(
        "fault",
        [Reset(3), Answer(503, "SlowDown"), LoseAnswer(), Duplicate(0), Stall(), Answer(500, "")],
    )
    def test_patience_is_enough(
        self, suited: ObjectStore, proxy: FaultProxy, fault: Any, if_absent: bool
    ) -> None:
        """A lost answer included: the object that the second attempt meets is that of the first."""
        proxy.inject(fault, is_put)
        _put(_patient(suited), SMALL, if_absent=if_absent)
        assert suited.read("object", limit=100) == SMALL
        assert [info.key for info in suited.list("")] == ["object"]

    def test_somebody_elses_object_is_no_success(
        self, store: ObjectStore, proxy: FaultProxy, behind: ObjectStore
    ) -> None:
        _put(behind, SMALL[::-1])
        proxy.inject(Answer(503, "SlowDown"), is_put)
        with pytest.raises(ObjectExists):
            _put(_patient(store), SMALL, if_absent=True)
        assert store.read("object", limit=100) == SMALL[::-1]

    @pytest.mark.parametrize("sign_payload", [False, True])
    def test_a_client_that_repeats_a_create_meets_its_own_object(
        self, options: dict[str, Any], s3_url: str, proxy: FaultProxy, sign_payload: bool
    ) -> None:
        """aiohttp sends a PUT again when the connection breaks; what it then meets is no stranger's."""
        how = {**options, "endpoint_url": proxy.endpoint, "sign_payload": sign_payload}
        store = open_store(s3_url, how, "fsspec")
        assert store.facts.conditional_create
        proxy.inject(LoseAnswer(), is_put)
        _put(store, SMALL, if_absent=True)
        for strange in (SMALL[::-1], SMALL + b"!"):
            proxy.inject(LoseAnswer(), is_put)
            with pytest.raises(ObjectExists):
                _put(store, strange, if_absent=True)
        with pytest.raises(ObjectExists):  # nothing was repeated here: it was there before
            _put(store, SMALL, if_absent=True)
        assert store.read("object", limit=100) == SMALL
        store.close()

    def test_obstore_does_not_repeat_a_create(
        self, options: dict[str, Any], s3_url: str, proxy: FaultProxy
    ) -> None:
        store = open_store(s3_url, {**options, "endpoint_url": proxy.endpoint}, "obstore")
        assert store.facts.conditional_create
        before = proxy.count(is_put)
        proxy.inject(LoseAnswer(), is_put)
        with pytest.raises(Unavailable):
            _put(store, SMALL, if_absent=True)
        assert proxy.count(is_put) == before + 1
        store.close()


class TestReads:
    @pytest.fixture(autouse=True)
    def _stored(self, behind: ObjectStore) -> None:
        _put(behind, BIG)

    @pytest.mark.parametrize("after", [0, 1000, PART - 1])
    def test_a_truncated_answer_is_fetched_again(
        self, store: ObjectStore, proxy: FaultProxy, after: int
    ) -> None:
        proxy.inject(Truncate(after), method("GET"), times=2)
        assert _get(_patient(store), len(BIG)) == BIG

    def test_answers_that_are_always_truncated(self, store: ObjectStore, proxy: FaultProxy) -> None:
        proxy.inject(Truncate(1000), method("GET"), times=500)
        with pytest.raises(Unavailable):
            _get(store, len(BIG))
        with pytest.raises(Unavailable):
            store.read("object", limit=len(BIG))

    def test_nobody_writes_into_the_buffers_afterwards(self, store: ObjectStore, proxy: FaultProxy) -> None:
        """They are slots, which hold something else by then."""
        for after in range(0, PART, MIB):
            proxy.inject(Truncate(after), method("GET"), times=3)
        data = bytearray(len(BIG))
        with pytest.raises(StoreError):
            store.read_ranges("object", [Range(0, memoryview(data))])
        data[:] = bytes(len(BIG))
        time.sleep(0.3)
        assert data == bytes(len(BIG))

    @pytest.mark.parametrize("match", [method("GET"), method("HEAD")])
    def test_patience_is_enough(self, hasty: ObjectStore, proxy: FaultProxy, match: Match) -> None:
        patient = _patient(hasty)
        for fault in (Answer(503, "SlowDown"), Reset(0), LoseAnswer(), Stall(), Duplicate()):
            proxy.inject(fault, match)
        assert patient.info("object") is not None
        assert _get(patient, len(BIG)) == BIG
        assert patient.read("object", limit=len(BIG)) == BIG
        assert [info.key for info in patient.list("")] == ["object"]


class TestCleaning:
    def test_old_uploads_below_a_prefix_are_aborted(self, store: ObjectStore, raw: Raw) -> None:
        for key in ("mine/a", "mine/b/c", "other/d"):
            raw.begin_upload(key)
        assert store.abort_uploads("mine/", 3600.0) == 0
        assert len(raw.uploads()) == 3
        assert store.abort_uploads("mine/", 0.0) == 2
        assert raw.uploads() == ["other/d"]
        assert list(store.list("")) == []

    def test_old_probes_go_too(self, store: ObjectStore, raw: Raw) -> None:
        raw.call("put_object", Bucket=BUCKET, Key=f"{raw.path}.ckptd-probe-1", Body=b"1")
        assert list(store.list("")) == []
        assert store.abort_uploads("", 3600.0) == 0
        assert store.abort_uploads("", 0.0) == 1
        assert raw.call("list_objects_v2", Bucket=BUCKET, Prefix=raw.path)["KeyCount"] == 0
