"""The commands as a user types them: exit codes, texts, JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.cli import EXIT_MEANINGS
from ckptd.memory.pages import filesystem_kind, is_in_memory
from ckptd.transport import messages as m
from tests.ckptd.running import ROOT, DaemonProcess, attach, busy_daemon, reserve, running_daemon


@pytest.fixture(scope="module")
def busy() -> Iterator[DaemonProcess]:
    """A daemon with one detached run: two slots sealed."""
    with busy_daemon() as (daemon, client):
        client.request(m.Detach())
        yield daemon


def run(*arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_a_second_daemon_on_the_same_folder_says_who_has_it(busy: DaemonProcess) -> None:
    assert busy.process is not None
    done = run("ckptd", "run", env=busy.env)
    assert done.returncode == 3
    assert f"another ckptd (process {busy.process.pid}) already uses the runtime" in done.stderr


def test_a_second_daemon_on_the_same_segments_is_refused_too(busy: DaemonProcess, tmp_path: Path) -> None:
    done = run("ckptd", "run", "--runtime-dir", str(tmp_path / "r"), env=busy.env)
    assert done.returncode == 3
    assert "already uses the segment folder" in done.stderr


def test_a_bad_setting_ends_the_start(busy: DaemonProcess) -> None:
    done = run("ckptd", "run", "--memory", "lots", env=busy.env)
    assert done.returncode == 2
    assert "memory = 'lots' (from flag --memory)" in done.stderr


def test_a_daemon_without_descriptors_says_why_it_does_not_start() -> None:
    """In a line, and not in a traceback."""
    code = (
        "from unittest.mock import Mock; from ckptd import cli; "
        "cli.Daemon = Mock(side_effect=OSError(24, 'Too many open files')); "
        "raise SystemExit(cli.main(['run', '--nice', '0']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 5
    assert done.stderr.endswith("ckptd: the daemon cannot start: [Errno 24] Too many open files\n")
    assert "Traceback" not in done.stderr


def test_a_configuration_file_that_others_may_write_to_ends_the_start(
    busy: DaemonProcess, tmp_path: Path
) -> None:
    file = tmp_path / "ckptd.toml"
    file.write_text("nice = 3\n", encoding="utf-8")
    file.chmod(0o666)
    for command in (("ckptd", "run", "--config", str(file)), ("ckptd.ctl", "doctor")):
        done = run(*command, env=busy.env | {"CKPTD_CONFIG": str(file)})
        assert done.returncode == 2
        assert f"chmod go-w {file}" in done.stderr


def test_credentials_that_others_may_read_are_one_warning_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "ckptd.toml"
    file.write_text('store_options = \'{"token": "hunter2"}\'\n', encoding="utf-8")
    file.chmod(0o644)
    with running_daemon(config=str(file)) as daemon:
        said = daemon.log_text()
        findings = json.loads(daemon.ctl("doctor", "--json").stdout)
    assert said.count(f"chmod go-r {file}") == 1
    assert "hunter2" not in said
    (finding,) = (each for each in findings if each["name"] == "settings")
    assert (finding["grade"], finding["fix"]) == ("WARN", f"run `chmod go-r {file}`")


def test_segments_on_a_disk_are_refused_unless_allowed(busy: DaemonProcess, tmp_path: Path) -> None:
    if is_in_memory(filesystem_kind(tmp_path)):
        pytest.skip(f"{tmp_path} is in memory: no disk to try it on")
    flags = ["--runtime-dir", str(tmp_path / "r"), "--segment-dir", str(tmp_path / "s")]
    done = run("ckptd", "run", *flags, env=busy.env)
    assert done.returncode == 4
    assert "not in memory" in done.stderr
    assert "CKPTD_ALLOW_DISK_SEGMENTS=true" in done.stderr


def test_print_config_shows_values_and_sources(busy: DaemonProcess) -> None:
    done = run("ckptd", "run", "--print-config", "--nice", "5", env=busy.env)
    assert done.returncode == 0
    assert "nice = 5  # flag --nice\n" in done.stdout
    assert 'memory = "64MiB"  # environment variable CKPTD_MEMORY\n' in done.stdout


@pytest.mark.parametrize("module", ["ckptd.cli", "ckptd.ctl.main", "ckptd.launch"])
def test_torch_is_never_imported(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_a_running_daemon_has_no_torch_mapped(busy: DaemonProcess) -> None:
    assert busy.process is not None
    maps = Path(f"/proc/{busy.process.pid}/maps").read_text(encoding="utf-8", errors="replace")
    assert "libzmq" in maps or "zmq" in maps
    assert "torch" not in maps


def test_status_is_a_table_or_json(busy: DaemonProcess) -> None:
    text = busy.ctl("status").stdout
    assert "no trainer is attached" in text
    assert "2 free, 2 sealed" in text
    answer = json.loads(busy.ctl("status", "--json").stdout)
    assert answer["segments"][0]["states"] == {"sealed": 2, "free": 2}
    assert answer["segments"][0]["newest_iteration"] == 6


def test_snapshots_say_what_is_recoverable_and_at_what_cost(busy: DaemonProcess) -> None:
    text = busy.ctl("snapshots", "--operators").stdout
    assert "recoverable: iteration 6, from snapshots 5 to 6, by replaying 1 iteration" in text
    assert "and 2 free slots" in text
    assert "iteration 6 anchors 1:\n    operator 1" in text
    (rank,) = json.loads(busy.ctl("snapshots", "--json").stdout)["ranks"]
    assert rank["suffix"] == [5, 6]
    assert busy.ctl("snapshots", "--rank", "7").stdout == "no snapshots of rank 7 in memory\n"
    unknown = busy.ctl("snapshots", "--job", "other", check=False)
    assert (unknown.returncode, "knows no job other; known runs: job/run" in unknown.stderr) == (4, True)


def test_events_are_listed_newest_last_and_limited(busy: DaemonProcess) -> None:
    everything = json.loads(busy.ctl("events", "--json").stdout)["events"]
    assert [event["seq"] for event in everything] == list(range(1, len(everything) + 1))
    (last,) = json.loads(busy.ctl("events", "--limit", "1", "--json").stdout)["events"]
    assert last["seq"] >= everything[-1]["seq"]
    assert "reserved" in busy.ctl("events").stdout


def test_events_can_be_followed(busy: DaemonProcess) -> None:
    command = [sys.executable, "-m", "ckptd.ctl", "events", "--follow", "--json"]
    follower = subprocess.Popen(command, env=busy.env, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert follower.stdout is not None
        assert json.loads(follower.stdout.readline())["kind"] == "started"
        with busy.client() as client:
            attach(client, run="followed")
            client.send(m.Notice("info", "hello", "I am being followed"))
            client.request(m.Detach(final=True))
        assert any("being followed" in follower.stdout.readline() for _ in range(200))
    finally:
        follower.kill()
        follower.wait(10)
        assert follower.stdout is not None
        follower.stdout.close()


def test_forget_asks_and_then_frees() -> None:
    with running_daemon() as daemon:
        with daemon.client() as client:
            attach(client)
            segment = reserve(client)
            done = daemon.ctl("forget", "job", "run", "--yes", check=False)
            assert done.returncode == 4
            assert "has live trainers" in done.stderr
            client.request(m.Detach())
        assert daemon.ctl("forget", "job", "run", check=False).returncode == 2
        assert segment.path.exists()
        assert "freed 6 MiB" in daemon.ctl("forget", "job", "run", "--yes").stdout
        assert not segment.path.exists()
        done = daemon.ctl("forget", "job", "run", "--yes", check=False)
        assert done.returncode == 4
        assert "this node knows no job job; known runs: none" in done.stderr


def test_without_a_daemon_the_exit_code_says_so(busy: DaemonProcess, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/s"
    for command in ("status", "snapshots", "events", "wait"):
        done = busy.ctl(command, "--endpoint", endpoint, "--timeout", "0.2", check=False)
        assert done.returncode == 3
        assert endpoint in done.stderr


def test_wrong_usage_is_code_2(busy: DaemonProcess) -> None:
    assert busy.ctl("export", check=False).returncode == 2
    assert run("ckptd", "walk", env=busy.env).returncode == 2


def test_the_help_of_the_daemon_has_its_exit_codes_and_the_defaults(busy: DaemonProcess) -> None:
    """Descriptors that are short were said to be code 4, and 1 and 5 were missing."""
    table = (ROOT / "docs/operations.md").read_text("utf-8").partition("| exit code of `ckptd` |")[2]
    codes = re.findall(r"^\| (\d) \|", table.partition("\n\n")[0], re.MULTILINE)
    assert list(map(str, EXIT_MEANINGS)) == codes
    for words in ((), ("run",)):
        shown = " ".join(run("ckptd", *words, "--help", env=busy.env).stdout.split())
        assert all(f"{code}: {meaning}" in shown for code, meaning in EXIT_MEANINGS.items())
    assert "Allowed: 0 to 16. Default: 2." in shown


def test_a_reader_that_leaves_is_no_error(busy: DaemonProcess) -> None:
    command = f"{sys.executable} -m ckptd.ctl status | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], env=busy.env, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
