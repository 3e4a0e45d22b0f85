"""What S3 by obstore and by s3fs do beyond the contract: credentials, memory, cleaning up."""

from __future__ import annotations

import gc
import os
import random
import time
from pathlib import Path

import pytest

from ckptd.storage.stores.objects import ObjectStore, Range, StoreRefused
from ckptd.storage.stores.obstore_store import ObstoreStore
from ckptd.storage.stores.open_store import open_store
from ckptd.storage.stores.store_base import StoreOptions
from tests.storage.s3_server import S3Server

MIB = 1 << 20
BACKENDS = ("obstore", "fsspec")


def _round_trip(store: ObjectStore) -> None:
    assert store.put("a", [memoryview(b"abc")], if_absent=True).size == 3
    assert store.read("a", limit=3) == b"abc"
    store.close()


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """An environment in which nobody left credentials."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    return monkeypatch


@pytest.mark.parametrize("backend", BACKENDS)
def test_credentials_of_the_environment(
    s3_server: S3Server, s3_url: str, bare: pytest.MonkeyPatch, backend: str
) -> None:
    options = s3_server.options
    bare.setenv("AWS_ACCESS_KEY_ID", str(options["key"]))
    bare.setenv("AWS_SECRET_ACCESS_KEY", str(options["secret"]))
    bare.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    bare.setenv("AWS_REGION", "us-east-1")
    _round_trip(open_store(s3_url, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_credentials_of_a_profile(
    s3_server: S3Server, s3_url: str, bare: pytest.MonkeyPatch, tmp_path: Path, backend: str
) -> None:
    options = s3_server.options
    (tmp_path / "credentials").write_text(
        f"[train]\naws_access_key_id = {options['key']}\naws_secret_access_key = {options['secret']}\n"
    )
    bare.setenv("AWS_PROFILE", "train")
    where = {"endpoint_url": s3_server.endpoint, "region": "us-east-1"}
    _round_trip(open_store(s3_url, where, backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_credentials_at_all(
    s3_server: S3Server, s3_url: str, bare: pytest.MonkeyPatch, backend: str
) -> None:
    where = {"endpoint_url": s3_server.endpoint, "region": "us-east-1"}
    store = open_store(s3_url, where, backend)
    with pytest.raises(StoreRefused, match=r"(?i)credentials"):
        store.read("a", limit=1)
    store.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_anonymous(s3_server: S3Server, s3_url: str, backend: str) -> None:
    where = {"endpoint_url": s3_server.endpoint, "region": "us-east-1", "anon": True}
    store = open_store(s3_url, where, backend)
    with pytest.raises(StoreRefused):  # it is not a public bucket
        store.read("a", limit=1)
    store.close()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sign_payload", [False, True])
def test_signed_payloads(s3_server: S3Server, s3_url: str, backend: str, sign_payload: bool) -> None:
    options = {**s3_server.options, "sign_payload": sign_payload, "part_bytes": 5 * MIB}
    store = open_store(s3_url, {**options, "threshold_bytes": 5 * MIB}, backend)
    data = random.Random(1).randbytes(11 * MIB)
    store.put("big", [memoryview(data)])
    into = bytearray(len(data))
    store.read_ranges("big", [Range(0, memoryview(into))])
    assert into == data
    _round_trip(store)


def _peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no VmHWM")


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_upload_needs_no_second_copy(s3_server: S3Server, s3_url: str, backend: str) -> None:
    """The object lies in shared memory; beyond it no more than the parts in flight is needed."""
    options = {**s3_server.options, "part_bytes": 5 * MIB, "threshold_bytes": 5 * MIB}
    store = open_store(s3_url, {**options, "concurrency": 2}, backend)
    memory = bytearray(b"\x01") * (160 * MIB)
    store.put("warm", [memoryview(memory)[: 20 * MIB]])
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    except PermissionError:
        pytest.skip("cannot reset the peak")
    before = _peak_bytes()
    store.put("big", [memoryview(memory)[:7], memoryview(memory)[7:]])
    assert _peak_bytes() - before < 60 * MIB
    store.close()


def test_without_a_housekeeper_nobody_knows(s3_server: S3Server, s3_url: str) -> None:
    store = ObstoreStore(s3_url, StoreOptions.of(s3_server.options))
    assert store.abort_uploads("", 0.0) == -1
    store.close()


def test_the_housekeeper_is_opened_once(s3_server: S3Server, s3_url: str) -> None:
    """It was opened for each run that a node joins: most of a second of CPU time, taken from training."""
    opened: list[ObjectStore] = []

    def open_one() -> ObjectStore:
        opened.append(open_store(s3_url, s3_server.options, "fsspec"))
        return opened[-1]

    store = ObstoreStore(s3_url, StoreOptions.of(s3_server.options), open_one)
    assert [store.abort_uploads("", 0.0) for _ in range(2)] == [0, 0]
    store.close()
    assert len(opened) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_time_is_the_servers(s3_server: S3Server, s3_url: str, backend: str) -> None:
    store = open_store(s3_url, s3_server.options, backend)
    stored = store.put("a", [memoryview(b"x")])
    assert abs(stored.modified_ns / 1e9 - time.time()) < 60
    assert stored.etag
    store.close()
