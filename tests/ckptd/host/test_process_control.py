"""Processes are started, end with their parents, and are imitated."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ckptd.host.process_control import end_group, send, spawn, status_text
from tests.ckptd.host.hosting import ROOT, gone, until


def test_a_program_is_started_in_its_own_session() -> None:
    code = "import os; raise SystemExit(10 + (os.getsid(0) == os.getpid()))"
    for own_session in (True, False):
        process = spawn([sys.executable, "-c", code], os.environ, own_session=own_session)
        _, status = os.waitpid(process.pid, 0)
        assert status_text(status) == f"exit code {10 + own_session}"


def test_a_program_that_cannot_be_executed() -> None:
    process = spawn(["/not/there"], os.environ, own_session=False)
    _, status = os.waitpid(process.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 127


def test_a_signal_reaches_the_group_of_a_leader() -> None:
    process = spawn(["/bin/sh", "-c", "sleep 60 & wait"], os.environ, own_session=True)
    send(process, signal.SIGUSR1, group=True)
    _, status = os.waitpid(process.pid, 0)
    assert status_text(status) == "SIGUSR1"
    end_group(process.pid)
    send(process, signal.SIGUSR1)  # nobody is there any more


PARENT = """
import os, sys, time
from ckptd.host.process_control import spawn
print(spawn(["/bin/sleep", "100"], os.environ, own_session=True).pid, flush=True)
time.sleep(100)
"""


def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env=environ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    until(lambda: gone(child), "the end of the child")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGINT])
def test_a_process_ends_as_another_did(number: int) -> None:
    code = f"import sys; from ckptd.host.process_control import die_as; sys.exit(die_as({int(number)}))"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, check=False, timeout=60)
    assert done.returncode == -number


def test_texts_of_wait_statuses() -> None:
    assert status_text(0) == "exit code 0"
    assert status_text(3 << 8) == "exit code 3"
    assert status_text(int(signal.SIGKILL)) == "SIGKILL"
    assert status_text(40) == "signal 40"


DESCRIPTORS = """
import os, resource, sys
from ckptd.host.process_control import allow_descriptors, spawn
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 512))
print(allow_descriptors(100), allow_descriptors(300), allow_descriptors(9999), *resource.getrlimit(resource.RLIMIT_NOFILE))
sys.stdout.flush()
code = "import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
os.waitpid(spawn([sys.executable, "-c", code], os.environ, own_session=False).pid, 0)
"""


def test_a_host_may_open_more_files_and_its_trainers_have_the_limit_that_it_had() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DESCRIPTORS], capture_output=True, text=True, check=True, cwd=ROOT, timeout=60
    )
    assert done.stdout.splitlines() == ["128 300 512 512 512", "128 512"]
