"""The line that tells how far long work is."""

from __future__ import annotations

import argparse
import io
import socket
from pathlib import Path

import pytest

from ckptd.config import runtime_dir
from ckptd.ctl.command import ProgressBar, connected, progress_line
from ckptd.ctl.main import main
from ckptd.transport import wire
from tests.ckptd.running import running_daemon

MIB = 1 << 20


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_socket_of_a_unit_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shell without CKPTD_RUNTIME_DIR was told that no daemon runs, beside the daemon of the unit."""
    unit = tmp_path / "ckptd-alice"
    unit.mkdir()
    monkeypatch.setattr(runtime_dir, "_RUN", tmp_path)
    monkeypatch.setenv("CKPTD_RUNTIME_DIR", str(tmp_path))
    assert main(["status"]) == 3
    assert "there is no socket (is it running?" in capsys.readouterr().err
    (unit / "ckptd.sock").touch()
    assert main(["status"]) == 3
    told = capsys.readouterr().err
    assert f"but one at {unit}/ckptd.sock: export CKPTD_RUNTIME_DIR={unit} (is it running?" in told


def test_a_daemon_of_another_release_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of the nodes are upgraded: "the peer speaks protocol version 4" said neither who, nor what to do."""
    with running_daemon() as daemon:
        monkeypatch.setattr(wire, "PROTOCOL_VERSION", 99)
        assert main(["status", "--endpoint", daemon.endpoint]) == 3
    assert (
        "the daemon is another release: run the ckptctl that was installed with it" in capsys.readouterr().err
    )


def test_with_a_total_there_is_a_bar_a_rate_and_what_is_left() -> None:
    line = progress_line("verifying", 30 * MIB, 120 * MIB, 10.0)
    bar = "######.................."
    assert line == f"verifying [{bar}] 25 %, 30 MiB of 120 MiB, 3 MiB/s, 30 s left"


def test_without_a_total_it_tells_what_is_done() -> None:
    assert progress_line("verifying", 30 * MIB, 0, 10.0) == "verifying: 30 MiB, 3 MiB/s"


def test_more_than_all_is_all_and_nothing_is_fast_at_first() -> None:
    assert progress_line("x", 9, 4, 0.0).endswith("] 100 %, 4 B of 4 B")
    assert progress_line("x", 0, 4, 9.0).endswith("] 0 %, 0 B of 4 B")


def test_it_is_drawn_now_and_then_and_cleared_at_the_end() -> None:
    now = [0.0]
    terminal = Terminal()
    with ProgressBar("x", 100, stream=terminal, clock=lambda: now[0]) as bar:
        for done in range(100):
            bar.update(done)
            now[0] += 0.01
    drawn = terminal.getvalue().split("\r\x1b[K")
    assert 8 <= len(drawn) - 2 <= 11
    assert drawn[-1] == ""


def test_it_is_silent_where_nobody_looks() -> None:
    for stream, quiet in ((io.StringIO(), False), (Terminal(), True)):
        with ProgressBar("x", 100, quiet=quiet, stream=stream) as bar:
            bar.update(50)
        assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("command", "expected"), [("status", 10), ("wait", 60), ("drill", 600), ("verify", 600)]
)
def test_the_default_timeout_of_one_command_is_not_that_of_all(
    command: str, expected: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """argparse shares the options of parent parsers, so `import`'s 600 s were the default of all commands."""
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert f"seconds to wait (default {expected})" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("status --timeout -3", "--timeout: '-3' is not a number of seconds above 0"),
        ("status --timeout soon", "--timeout: 'soon' is not a number of seconds above 0"),
        ("status --watch soon", "--watch: 'soon' is not a number of seconds"),
        ("snapshots --rank -1", "--rank: '-1' is not a whole number from 0 on"),
        ("snapshots --verify-iterations -1", "--verify-iterations: '-1' is not a whole number from 0 on"),
        ("events --since -4", "--since: '-4' is not a whole number from 0 on"),
        ("events --limit 0", "--limit: '0' is not a whole number from 1 on"),
        ("logs --lines x", "--lines: 'x' is not a whole number from 0 on"),
    ],
)
def test_a_number_that_cannot_be_is_named_with_its_option(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--limit 0` went to the daemon, whose decoder answered; `--rank -1` was taken for all ranks."""
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    assert f"argument {message}" in capsys.readouterr().err


def test_a_drill_needs_its_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drill", "--job", "moe"]) == 2
    assert "ckptctl: pass --rank: the rank whose recovery is rehearsed" in capsys.readouterr().err


# -- the daemon -----------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", ["tcp://10.0.0.1:7077", "ckptd.sock"])
def test_an_endpoint_that_is_no_socket(endpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--endpoint", endpoint]) == 2
    assert f"--endpoint {endpoint}: pass ipc:// and the path of the socket" in capsys.readouterr().err


def test_a_socket_of_a_killed_daemon_is_no_daemon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ckptd.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    command = ["status", "--endpoint", f"ipc://{path}"]
    assert main([*command, "--timeout", "0.2"]) == 3
    assert (
        f"no daemon serves ipc://{path}: no process accepts connections at the socket"
        in capsys.readouterr().err
    )
    monkeypatch.setenv("CKPTD_LISTEN", f"ipc://{path}")
    assert main(["checkpoints", "list"]) == 2
    assert "no store is configured here, and no daemon with a store answers" in capsys.readouterr().err


def test_a_daemon_that_replaces_its_image_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ckptd.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        monkeypatch.setattr("time.sleep", lambda _: listener.listen())
        with connected(argparse.Namespace(endpoint=f"ipc://{path}", timeout=60.0)) as client:
            assert client.endpoint == f"ipc://{path}"
