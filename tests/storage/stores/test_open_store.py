"""Which backend opens which URL, and what it is told."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ckptd.storage.stores import open_store as module
from ckptd.storage.stores.objects import NotInstalled, ObjectStore, Unavailable
from ckptd.storage.stores.open_store import open_store
from ckptd.storage.stores.store_base import StoreOptions, public_url


def _backend(store: ObjectStore) -> str:
    store.close()
    return type(store).__name__


@pytest.mark.parametrize(
    ("url", "backend", "expected"),
    [
        ("s3://bucket/path", "auto", "ObstoreStore"),
        ("s3://bucket/path", "obstore", "ObstoreStore"),
        ("s3://bucket/path", "fsspec", "FsspecS3Store"),
        ("memory://a", "auto", "FsspecStore"),
        ("memory://a", "obstore", "ObstoreStore"),
        ("gs://bucket/a", "auto", "ObstoreStore"),
    ],
)
def test_who_opens_what(url: str, backend: str, expected: str) -> None:
    options = {"key": "k", "secret": "s"} if url.startswith("s3") else {}
    assert _backend(open_store(url, options, backend)) == expected


@pytest.mark.parametrize("backend", ["auto", "fsspec", "obstore"])
def test_folders_are_always_files(tmp_path: Path, backend: str) -> None:
    assert _backend(open_store(str(tmp_path), backend=backend)) == "LocalStore"
    assert _backend(open_store(f"file://{tmp_path}", backend=backend)) == "LocalStore"


def test_memory_is_one_for_a_process() -> None:
    open_store("memory://shared/x").put("a", [memoryview(b"1")])
    assert open_store("memory://shared/x").read("a", limit=1) == b"1"


@pytest.mark.parametrize("backend", ["obstore", "fsspec"])
def test_what_is_not_installed_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    missing = "obstore" if backend == "obstore" else "s3fs"
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setitem(sys.modules, f"{missing}.store", None)
    monkeypatch.delitem(sys.modules, "ckptd.storage.stores.obstore_store", raising=False)
    with pytest.raises(NotInstalled, match=r"ckptd\[s3\]"):
        open_store("s3://bucket", {"key": "k", "secret": "s"}, backend)


def test_auto_takes_fsspec_where_obstore_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    options = {"key": "k", "secret": "s"}
    assert _backend(open_store("s3://bucket", options)) == "FsspecS3Store"


def test_a_scheme_that_nobody_speaks() -> None:
    with pytest.raises(ValueError, match="nosuch"):
        open_store("nosuch://a/b")
    with pytest.raises(ValueError, match="obstore does not speak"):
        open_store("ftp://a/b", backend="obstore")
    with pytest.raises(ValueError, match="backend"):
        open_store("memory://", backend="boto")


@pytest.mark.parametrize(
    ("url", "options", "reason"),
    [
        ("s3://", {}, "names no bucket or container: write s3://name/path"),
        ("gs:///x", {}, "names no bucket or container: write gs://name/path"),
        ("abfss://x", {}, "Account must be specified"),
        ("s3://a:99999/x", {}, "invalid port number"),
        ("s3://bucket/%ff", {}, "contained non-unicode characters"),
        ("s3://bucket/x", {"obstore": {"nonsense": "1"}}, "'nonsense' is not valid"),
        ("s3://bucket/x", {"obstore": {"client_options": {"timeout": "z"}}}, 'parse "z" as Dura'),
        ("github://a", {}, "missing 2 required positional arguments"),
    ],
)
def test_what_a_client_cannot_open_is_a_value_error_on_one_line(
    url: str, options: dict[str, object], reason: str
) -> None:
    """obstore raises exceptions of its own kind, with a page of its insides; fsspec's file systems
    raise what they like.
    """
    with pytest.raises(ValueError, match=reason) as error:
        open_store(url, options)
    text = str(error.value)
    assert ("\n" in text, "Debug source" in text) == (False, False)


def test_what_cannot_be_opened_shows_no_secret() -> None:
    """obstore quotes the URL, and the client's options may hold a token of their own."""
    options = {"obstore": {"client_options": {"timeout": "tok-1"}, "bearer_token": "tok-1"}}
    with pytest.raises(ValueError, match=r"parse \"\*\*\*\"") as error:
        open_store("gs://bucket/x", options)
    assert "tok-1" not in str(error.value)
    with pytest.raises(ValueError, match=r"contained non-unicode") as error:
        open_store("gs://me:hush@bucket/%ff", {})
    assert "hush" not in str(error.value)


def test_a_server_that_a_file_system_does_not_reach_is_unavailable() -> None:
    """It connects when it is opened."""
    with pytest.raises(Unavailable, match=r"^ftp://127\.0\.0\.1:1/x: "):
        open_store("ftp://me:hush@127.0.0.1:1/x")


@pytest.mark.parametrize(
    "wrong",
    [
        {"endpoint": "http://a"},
        {"part_bytes": 1},
        {"threshold_bytes": -1},
        {"concurrency": 0},
        {"attempts": 0},
        {"request_timeout_s": 0.0},
        {"key": "without a secret"},
        {"part_bytes": "16777216"},
        {"obstore": ["nonsense"]},
    ],
)
def test_options_that_cannot_work(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"unknown|must be|together|of another kind"):
        StoreOptions.of(wrong)


def test_secrets_show_nowhere() -> None:
    options = StoreOptions.of({"key": "id-1", "secret": "hush", "token": "psst"})
    assert not {"id-1", "hush", "psst"} & {*repr(options).replace("'", " ").split()}
    assert options.hide("hush, said psst of id-1") == "***, said *** of ***"
    assert public_url("ftp://user:pass@host/a?sig=1#x") == "ftp://host/a"
    assert public_url("s3://user:pass@[x/a") == "s3://…"


@pytest.mark.parametrize(
    ("endpoint", "sign", "expected"),
    [
        (None, None, False),
        ("https://store.example", None, False),
        ("http://127.0.0.1:9000", None, False),
        ("http://[::1]:9000", None, False),
        ("http://localhost:9000", None, False),
        ("http://10.0.0.7:9000", None, True),
        ("http://store.example", None, True),
        ("http://store.example", False, False),
        ("https://store.example", True, True),
    ],
)
def test_payloads_are_signed_where_nothing_else_protects_them(
    endpoint: str | None, sign: bool | None, expected: bool
) -> None:
    assert StoreOptions(endpoint_url=endpoint, sign_payload=sign).signs_payload is expected


def test_the_environment_names_server_and_region() -> None:
    environment = {"AWS_ENDPOINT_URL": "http://e", "AWS_REGION": "r"}
    found = StoreOptions().for_s3(environment)
    assert (found.endpoint_url, found.region) == ("http://e", "r")
    found = StoreOptions().for_s3({**environment, "AWS_ENDPOINT_URL_S3": "http://s3"})
    assert found.endpoint_url == "http://s3"
    found = StoreOptions(endpoint_url="http://mine", region="here").for_s3(environment)
    assert (found.endpoint_url, found.region) == ("http://mine", "here")
