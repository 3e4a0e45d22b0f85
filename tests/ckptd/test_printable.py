"""Secrets appear in no output, and what trainers and peers say steers no terminal and forges no
line of a log.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import tempfile
from pathlib import Path

import msgspec
import pytest

from ckptd.config.daemon_config import load_config, render_toml
from ckptd.event_log import EventLog
from ckptd.launch import ensure_daemon
from ckptd.printable import for_json, for_terminal, hide_options, hide_secrets, one_line, set_up_logging
from ckptd.transport.messages import Notice, Ping, Report
from tests.ckptd.running import attach, eventually, running_daemon

SECRET = "hunter2-very-secret"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"s3://me:{SECRET}@bucket/p is away", "s3://***@bucket/p is away"),
        (f"https://{SECRET}@host/x", "https://***@host/x"),
        (
            f"GET https://h/x?a=1&X-Amz-Signature={SECRET}&b=2",
            "GET https://h/x?a=1&X-Amz-Signature=***&b=2",
        ),
        (f"https://h/x?token={SECRET}", "https://h/x?token=***"),
        (f"secret_access_key={SECRET}, region=eu", "secret_access_key=***, region=eu"),
        (f"{{'aws_secret_access_key': '{SECRET}'}}", "{'aws_secret_access_key': \"***\"}"),
        ("lost_tokens_limit=0.05, token=" + SECRET, "lost_tokens_limit=0.05, token=***"),
        ("tcp://10.0.0.1:5 and s3://bucket/a@b stay", "tcp://10.0.0.1:5 and s3://bucket/a@b stay"),
    ],
)
def test_secrets_are_hidden(text: str, shown: str) -> None:
    assert hide_secrets(text) == shown


def test_options_keep_what_is_not_secret() -> None:
    told = {
        "region": "eu",
        "lost_tokens_share": 0.05,
        "secret_access_key": SECRET,
        "client": {"headers": {"Authorization": SECRET}},
    }
    shown = hide_options(json.dumps(told))
    assert SECRET not in shown
    assert json.loads(shown)["region"] == "eu"
    assert json.loads(shown)["lost_tokens_share"] == 0.05


def test_controls_are_escaped() -> None:
    assert one_line("a\nb\x1b[2J\u202ec\x9b\x7f") == "a\\nb\\x1b[2J\\u202ec\\x9b\\x7f"
    assert for_terminal("a\n\x1b[97;48;5;52m7\x1b[0m\x1b[2J") == "a\n\x1b[97;48;5;52m7\x1b[0m\\x1b[2J"


def test_colours_of_others_hide_no_text() -> None:
    """Any colour passed to the terminal, whoever had said it: with `\\x1b[8m` a peer's refusal
    could hide what came after it.
    """
    assert for_terminal("a\x1b[8mb\x1b[30;40mc") == "a\\x1b[8mb\\x1b[30;40mc"


STEERING = "a\x1b[2J\x7f\x9b\x85\u061c\u200f\u202e\u2066\u2028é"


def test_a_json_document_steers_no_terminal_and_means_the_same() -> None:
    """Encoders escape what is below U+0020: U+009B alone begins a command for a terminal, and
    U+202E turns the direction of what follows.
    """
    encoded = for_json(msgspec.json.encode({STEERING: [STEERING]}).decode())
    assert json.loads(encoded) == {STEERING: [STEERING]}
    assert "é" in encoded
    assert not any(c in encoded for c in STEERING[1:-1] if not c.isascii() or not c.isprintable())


def test_what_ckptctl_prints_as_json_steers_no_terminal() -> None:
    """A trainer names its counters: the names were printed as they were in `ckptctl status --json`."""
    with running_daemon() as daemon, daemon.client() as client:
        attach(client)
        client.send(Report(1, {STEERING: 1.0}))
        client.request(Ping())
        listed, shown = daemon.ctl("status", "--json").stdout, daemon.ctl("status").stdout
    assert STEERING in json.loads(listed)["sessions"][0]["metrics"]
    assert "\\u202e" in listed
    assert "\\u202e" in shown
    for character in "\x1b\x7f\x9b\x85\u061c\u200f\u202e\u2066\u2028":
        assert character not in listed + shown, ascii(character)


def test_the_printed_configuration_steers_no_terminal_either(tmp_path: Path) -> None:
    printed = render_toml(load_config({"node_id": "n1", "segment_dir": "/dev/shm/a\x7f\u202e"}, environ={}))
    assert "\x7f" not in printed
    assert "\u202e" not in printed
    again = tmp_path / "printed.toml"
    again.write_text(printed, encoding="utf-8")
    assert load_config(file=str(again), environ={}).config.segment_dir == "/dev/shm/a\x7f\u202e"


def test_print_config_hides_credentials() -> None:
    """It printed them as they were."""
    environ = {
        "CKPTD_STORE": f"s3://me:{SECRET}@bucket/p?token={SECRET}",
        "CKPTD_STORE_OPTIONS": json.dumps({"secret": SECRET, "region": "eu"}),
    }
    shown = render_toml(load_config(environ=environ))
    assert SECRET not in shown
    assert "bucket/p" in shown
    assert "region" in shown


@pytest.mark.parametrize("style", ["text", "json"])
def test_a_log_line_is_one_line_without_secrets(style: str, capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        set_up_logging("info", style)
        logging.getLogger("x").info("first s3://u:%s@b\n2026 ERROR forged \x1b[2J", SECRET)
        try:
            raise ValueError(f"https://h/?token={SECRET}")
        except ValueError:
            logging.getLogger("x").exception("second")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    told = capsys.readouterr().err
    assert SECRET not in told
    assert "\x1b" not in told
    assert [line for line in told.splitlines() if line.startswith("2026 ERROR")] == []


def test_an_event_is_stored_without_secrets_and_controls() -> None:
    events = EventLog(10)
    events.add("info", "kind\x1b", f"s3://u:{SECRET}@b\nforged")
    (event,) = events.page(0, 10).events
    assert (event.kind, event.message) == ("kind\\x1b", "s3://***@b\\nforged")


def test_what_a_trainer_says_reaches_neither_log_nor_terminal_as_it_is() -> None:
    """A notice cleared the screen of whoever looked at the events, and forged lines in the daemon's log."""
    with running_daemon() as daemon, daemon.client() as client:
        attach(client)
        client.send(Notice("error", "k\x1b[2J", f"\x1b]0;title\x07\nforged ERROR s3://a:{SECRET}@b"))
        eventually(lambda: "forged" in daemon.ctl("events").stdout, "it is told")
        for told in (daemon.ctl("events").stdout, daemon.log_text()):
            assert "\x1b" not in told
            assert "\x07" not in told
            assert SECRET not in told
            assert "\nforged" not in told


def test_options_of_a_started_daemon_are_in_no_command_line(tmp_path: Path) -> None:
    """They were flags, which everybody on the host can read."""
    segments = Path(tempfile.mkdtemp(prefix="ckptd-test-argv-", dir="/dev/shm"))
    flags = {
        "runtime_dir": str(tmp_path / "run"),
        "segment_dir": str(segments),
        "memory": "64MiB",
        "store": f"s3://me:{SECRET}@bucket/prefix",
        "store_options": json.dumps({"secret_access_key": SECRET, "region": "eu"}),
        "store_backend": "obstore",
    }
    ensure_daemon(**flags, timeout_s=30)
    started: list[int] = []
    try:
        pids = map(int, running_pids())
        started += [pid for pid in pids if str(segments) in environ_of(pid)]
        assert started
        assert all(SECRET not in command_of(pid) for pid in started)
        assert SECRET not in (tmp_path / "run" / "ckptd.log").read_text()
    finally:
        for pid in started:
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(segments)


def running_pids() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdecimal()]


def environ_of(pid: int) -> str:
    return read_proc(pid, "environ")


def command_of(pid: int) -> str:
    return read_proc(pid, "cmdline")


def read_proc(pid: int, what: str) -> str:
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes().decode(errors="replace")
    except OSError:
        return ""  # it has ended, or is another user's
