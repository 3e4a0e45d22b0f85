"""`ckptctl support`: what a report needs is in the archive, and no planted secret is."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from ckptd.transport import messages as m
from ckptd.transport.access.keys import Keys
from tests.ckptd.running import ROOT, DaemonProcess, running_daemon

# One for each place in which it is planted; none is a part of another.
SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG",
    "HF_TOKEN": "hf_AbCdEfGhIjKl",
    "CKPTD_PRIVATE": "planted-unknown-variable",
    "user": "planted-user",
    "password": 'planted"pass\\word é',
    "query": "planted-query-value",
    "option": "planted-option-value",
    "odd_option": "planted-value-of-an-odd-name",
    "file_option": "planted-in-the-file",
    "file_password": "planted-in-the-url-of-the-file",
}
URL = f"s3://{SECRETS['user']}:{quote(SECRETS['password'])}@bucket/prefix?token={SECRETS['query']}"
OPTIONS = {"key": SECRETS["user"], "nested": {"secret": SECRETS["option"], "odd": SECRETS["odd_option"]}}


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    """With a trainer, an event and log lines that repeat every secret."""
    with running_daemon() as started, started.client() as client:
        client.ask(m.Hello("1", 1), m.Welcome)
        client.ask(m.Attach("moe", "run-1", 0, 1, "t", 1, 0), m.Attached)
        for name, secret in SECRETS.items():
            client.send(m.Notice("warning", "planted", f"the place of {name} says {secret}, or {URL}"))
        client.ask(m.Ping(), m.Pong)
        with started.log.open("a") as log:
            for name, secret in SECRETS.items():
                print(f"the place of {name} says {secret}, or {json.dumps(secret)}, or {URL}", file=log)
        yield started


def report(daemon: DaemonProcess, out: Path, **environment: str) -> dict[str, str]:
    """The texts in the archive, by name."""
    command = [sys.executable, "-m", "ckptd.ctl", "support", "--json", "--out", str(out)]
    env = daemon.env | environment
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    with tarfile.open(out) as archive:
        files = {each.name.partition("/")[2]: archive.extractfile(each) for each in archive}
        found = {name: file.read().decode() for name, file in files.items() if file is not None}
    assert json.loads(done.stdout)["members"] == list(found)
    return found


def planted(tmp_path: Path, *, in_environment: bool) -> dict[str, str]:
    """An environment and a configuration file with secrets."""
    file = tmp_path / "ckptd.toml"
    options = json.dumps({"password": SECRETS["file_option"]})
    url = f"s3://me:{SECRETS['file_password']}@other/prefix"
    file.write_text(f"store = {json.dumps(url)}\nstore_options = {json.dumps(options)}\n")
    file.chmod(0o600)
    environ = {name: SECRETS[name] for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "CKPTD_PRIVATE")}
    store = {"CKPTD_STORE": URL, "CKPTD_STORE_OPTIONS": json.dumps(OPTIONS)} if in_environment else {}
    return {"CKPTD_CONFIG": str(file), "CKPTD_LOG_LEVEL": "debug", **environ, **store}


def forms(secret: str) -> set[str]:
    return {secret, quote(secret), json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]}


ENVIRONMENT = {"AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "user", "password", "query", "option", "odd_option"}


@pytest.mark.parametrize(
    ("in_environment", "visible"),
    [
        (True, ENVIRONMENT),
        (False, {"AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "file_option", "file_password"}),
    ],
)
def test_no_secret_that_ckptctl_can_see_is_in_the_archive(
    daemon: DaemonProcess, tmp_path: Path, in_environment: bool, visible: set[str]
) -> None:
    """Log and events repeat them all in sentences that no pattern knows."""
    found = report(daemon, tmp_path / "r.tar.gz", **planted(tmp_path, in_environment=in_environment))
    for name, text in found.items():
        for secret in visible:
            assert not [form for form in forms(SECRETS[secret]) if form in text], (name, secret)
    for name in ("configuration.toml", "environment.json", "versions.json", "system.json", "doctor.json"):
        assert not [secret for secret in SECRETS.values() if secret in found[name]], name
    assert "the place of HF_TOKEN says ***" in found["log.txt"]
    assert "the place of HF_TOKEN says ***" in found["events.json"]


def test_keys_and_other_variables_are_not_taken(daemon: DaemonProcess, tmp_path: Path) -> None:
    keys = Keys.create(daemon.runtime_dir / "keys")
    found = report(daemon, tmp_path / "r.tar.gz", OTHER_SETTING="of-somebody-else")
    for text in found.values():
        assert keys.secret not in text
        assert "of-somebody-else" not in text


def test_what_a_report_needs_is_there(daemon: DaemonProcess, tmp_path: Path) -> None:
    out = tmp_path / "r.tar.gz"
    found = report(daemon, out, **planted(tmp_path, in_environment=True))
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    documents = {name: json.loads(text) for name, text in found.items() if name.endswith(".json")}
    assert documents["status.json"]["sessions"][0]["job"] == "moe"
    assert {"started", "planted"} <= {event["kind"] for event in documents["events.json"]["events"]}
    assert documents["versions.json"]["packages"]["torch"]
    assert documents["environment.json"]["CKPTD_LOG_LEVEL"] == "debug"
    assert (
        documents["environment.json"]["CKPTD_PRIVATE"]
        == documents["environment.json"]["CKPTD_STORE"]
        == "***"
    )
    assert documents["system.json"]["memory"]["MemTotal"].endswith("kB")
    assert {"peers.json", "snapshots.json", "doctor.json"} <= documents.keys()
    assert 'store = "s3://bucket/prefix"  # environment variable CKPTD_STORE' in found["configuration.toml"]
    assert found["log.txt"].startswith(f"the last lines of the {daemon.log}\n")


def test_without_a_daemon_and_with_a_bad_setting_the_rest_is_packed(tmp_path: Path) -> None:
    gone = DaemonProcess(replicas="many", store_options=SECRETS["option"])
    try:
        found = report(gone, tmp_path / "r.tar.gz")
    finally:
        gone.clean_up()
    assert found["status.json"].startswith("not available: no daemon serves")
    assert "not available: " in found["configuration.toml"]
    assert json.loads(found["system.json"])["kernel"].startswith("Linux")
    assert not [name for name, text in found.items() if SECRETS["option"] in text]


def test_a_file_that_is_there_is_not_replaced(daemon: DaemonProcess, tmp_path: Path) -> None:
    out = tmp_path / "r.tar.gz"
    out.write_text("mine")
    done = daemon.ctl("support", "--out", str(out), check=False)
    assert (done.returncode, "File exists" in done.stderr, out.read_text()) == (2, True, "mine")
