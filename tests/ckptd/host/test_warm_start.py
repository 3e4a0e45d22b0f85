"""Modules are imported ahead of torchrun, and its hosts use them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import textwrap
from collections.abc import Iterator

import pytest

from ckptd.host.warm_start import workers_environment
from tests.ckptd.host.hosting import Hosting, children_of, gone, until
from tests.ckptd.host.zygotes.test_zygote_handover import LAUNCHED, TRAINS, trainer_of, zygotes

LIBRARY = "import os\nprint('imported by', os.getpid(), flush=True)\nclass Thing: pass\n"
SCRIPT = f"from library_of_test import Thing\n{TRAINS}"


@pytest.fixture
def warm(hosting: Hosting, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosting]:
    """A script whose library is found, and that need not import torch; what waits is ended at the end."""
    monkeypatch.setenv("CKPTD_TEST_OF", str(os.getpid()))
    hosting.write("elsewhere/library_of_test.py", LIBRARY)
    hosting.write("script/train.py", SCRIPT)
    known(hosting)
    monkeypatch.setenv("PYTHONPATH", str(hosting.folder / "elsewhere"))
    yield hosting
    for pid in zygotes():
        os.kill(pid, signal.SIGKILL)


def environment(hosting: Hosting, **more: str) -> dict[str, str]:
    paths = [hosting.environment()["PYTHONPATH"], str(hosting.folder / "elsewhere")]
    return {"PYTHONPATH": os.pathsep.join(paths), **more}


def known(hosting: Hosting) -> None:
    """As if a trainer had been here, so that no torch is imported."""
    hosting.known("script/train.py", modules=["json", "library_of_test"])


@contextlib.contextmanager
def launched(hosting: Hosting, env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A host as torchrun starts it."""
    with hosting.start("script/train.py", flags=["-u"], env=env) as host:
        try:
            yield host
        finally:
            host.kill()


def test_the_environment_is_that_of_torchruns_workers() -> None:
    assert workers_environment({"A": "1"}, 1) == {"A": "1"}
    assert workers_environment({"A": "1"}, 2) == {"A": "1", "OMP_NUM_THREADS": "1"}
    assert workers_environment({"OMP_NUM_THREADS": "4"}, 2) == {"OMP_NUM_THREADS": "4"}


def test_hosts_use_what_was_imported_ahead(warm: Hosting) -> None:
    """Both ranks, and the next epochs, too."""
    done = warm.run("--warm", "2", "script/train.py", env=environment(warm))
    assert done.returncode == 0, done.stderr
    assert "wait 600 s for torchrun" in done.stderr
    waiting = zygotes()
    assert len(waiting) == 2
    assert {int(line.split()[-1]) for line in done.stdout.splitlines()} == set(waiting)
    for rank in ("0", "1"):
        env = environment(warm, **LAUNCHED, OMP_NUM_THREADS="1", TORCHELASTIC_RESTART_COUNT="0")
        with launched(warm, env={**env, "LOCAL_RANK": rank}) as host:
            first, _ = trainer_of(host)
            os.kill(first, signal.SIGKILL)
            again, _ = trainer_of(host)
            assert again != first
            warm.write("stop", "")
            out, log = host.communicate(timeout=60)
        (warm.folder / "stop").unlink()
        assert host.returncode == 0, log
        assert "the zygote that was started ahead is used" in log
        assert "imported by" not in out
    until(lambda: zygotes() == [], "the end of the zygotes of a job that has succeeded")


LATE = """
import os, sys, time
print(os.getpid(), os.environ["RANK"], "late_of_test" in sys.modules, flush=True)
import late_of_test, colorsys  # a name is recorded when the next one is looked for
while not os.path.exists("stop"):
    time.sleep(0.01)
"""


def warm_for_late(hosting: Hosting) -> int:
    """The zygote that waits for a script which imports ``late_of_test`` only when it runs."""
    hosting.write("script/train.py", f"def main():\n{textwrap.indent(LATE, '    ')}\nmain()\n")
    known(hosting)
    assert hosting.run("--warm", "1", "script/train.py", env=environment(hosting)).returncode == 0
    (zygote,) = zygotes()
    return zygote


def test_what_a_trainer_imports_later_is_imported_for_the_next_one(warm: Hosting) -> None:
    """The trainer lives on meanwhile."""
    warm.write("elsewhere/late_of_test.py", "")
    zygote = warm_for_late(warm)
    with launched(warm, env=environment(warm, **LAUNCHED)) as host:
        assert host.stdout is not None
        assert host.stderr is not None
        first, _, was_there = host.stdout.readline().split()
        assert was_there == "False"
        seen: list[str] = []
        while not any("a zygote has" in line for line in seen):
            seen.append(host.stderr.readline())
            assert seen[-1], seen
        assert not gone(int(first))
        os.kill(int(first), signal.SIGKILL)
        assert host.stdout.readline().split()[2] == "True"
        assert zygotes() == [zygote]
        warm.write("stop", "")
        log = host.communicate(timeout=60)[1]
        assert host.returncode == 0, log


def test_a_late_import_that_must_not_be_forked_costs_no_trainer(warm: Hosting) -> None:
    """The zygote is its parent: it stays, and another one forks the next trainer."""
    warm.write(
        "elsewhere/late_of_test.py",
        "import os, threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        "open('late', 'a').write(f'{os.getpid()}\\n')\n",
    )
    zygote = warm_for_late(warm)
    with launched(warm, env=environment(warm, **LAUNCHED)) as host:
        assert host.stdout is not None
        first = int(host.stdout.readline().split()[0])
        late = warm.folder / "late"
        until(lambda: late.exists() and str(zygote) in late.read_text().split(), "the late import")
        assert not gone(first)
        os.kill(first, signal.SIGKILL)
        again = host.stdout.readline().split()
        assert again[2] == "False"
        warm.write("stop", "")
        log = host.communicate(timeout=60)[1]
    assert host.returncode == 0, log
    assert "a new zygote is needed: what it imports starts threads" in log
    assert log.count("has failed") == 1
    until(lambda: gone(zygote), "the end of a zygote whose trainer has ended")


def test_torchrun_starts_hosts_that_use_what_was_imported_ahead(warm: Hosting) -> None:
    """On a machine where no trainer was: from the script's text. What torchrun passes to its workers beside the
    environment of the command is nothing that keeps them apart.
    """
    warm.write("script/train.py", "from library_of_test import Thing\nprint('trains', flush=True)\n")
    done = warm.run("--warm", "2", "script/train.py", env=environment(warm))
    assert done.returncode == 0, done.stderr
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    job = warm.run(*torchrun, "-m", "ckptd.host", "script/train.py", host=False, env=environment(warm))
    assert job.returncode == 0, job.stderr
    assert job.stderr.count("the zygote that was started ahead is used") == 2, job.stderr
    assert job.stdout.split() == ["trains", "trains"]


def test_what_was_imported_ahead_waits_for_a_time_only(warm: Hosting) -> None:
    done = warm.run("--warm", "1", "--warm-for", "1", "script/train.py", env=environment(warm))
    assert done.returncode == 0, done.stderr
    until(lambda: zygotes() == [], "the end of a zygote for which no host has come")
    assert list((warm.runtime / "host").glob("zygote-*.sock")) == []


@pytest.mark.parametrize("what", ["environment", "umask", "limit"])
def test_it_is_not_used_where_trainers_would_be_started_under_other_conditions(
    warm: Hosting, what: str
) -> None:
    done = warm.run("--warm", "1", "script/train.py", env=environment(warm))
    assert done.returncode == 0, done.stderr
    env = environment(warm, **LAUNCHED)
    if what == "environment":
        env["OMP_NUM_THREADS"] = "3"
    before = os.umask(0o077) if what == "umask" else None
    try:
        if what == "limit":
            # Of the host alone: the limits of this process stay.
            launcher = warm.write(
                "limited.py",
                "import os, resource, sys\n"
                "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
                "os.execv(sys.executable, [sys.executable, '-u', '-m', 'ckptd.host', *sys.argv[1:]])\n",
            )
            host = warm.start(str(launcher), "script/train.py", host=False, env=env)
        else:
            host = warm.start("script/train.py", flags=["-u"], env=env)
    finally:
        if before is not None:
            os.umask(before)
    warm.write("stop", "")
    _, log = host.communicate(timeout=120)
    assert host.returncode == 0, log
    expected = {"environment": "OMP_NUM_THREADS", "umask": "the umask", "limit": "the limit RLIMIT_CORE"}
    assert f"is not used: {expected[what]} differs" in log
    assert "a zygote has" in log, "of its own"


def test_where_imports_start_threads_only_torch_is_imported_ahead(warm: Hosting) -> None:
    warm.write(
        "elsewhere/library_of_test.py",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        "class Thing: pass\n",
    )
    done = warm.run("--warm", "1", "script/train.py", env=environment(warm))
    assert done.returncode == 0, done.stderr
    assert "only torch is imported ahead: what it imports starts threads" in done.stderr
    (zygote,) = zygotes()
    assert not children_of(zygote)


@pytest.mark.parametrize(
    ("words", "env", "message"),
    [
        (["--warm", "2000", "script/train.py"], {}, "at most 1024 ranks"),
        (["--warm", "2"], {}, "there is no script"),
        (["--warm", "x", "script/train.py"], {}, "--warm: unknown, or without a number"),
        (["--warm", "2", "script/train.py"], {"LOCAL_RANK": "0"}, "LOCAL_RANK is set, as in a worker"),
    ],
)
def test_bad_input_is_refused(warm: Hosting, words: list[str], env: dict[str, str], message: str) -> None:
    done = warm.run(*words, env=environment(warm, **env))
    assert done.returncode == 2
    assert message in done.stderr
    assert zygotes() == []


def test_a_script_that_sets_the_environment_of_its_imports_is_not_imported_ahead(warm: Hosting) -> None:
    warm.write("script/train.py", f"import os\nos.environ['A'] = '1'\nimport json\n{TRAINS}")
    done = warm.run("--warm", "1", "script/train.py", env=environment(warm))
    assert done.returncode == 1
    assert "sets A and imports afterwards" in done.stderr
    assert zygotes() == []


def test_a_signal_ends_what_is_being_imported(warm: Hosting) -> None:
    warm.write("elsewhere/library_of_test.py", "import time\nprint(flush=True)\ntime.sleep(600)\n")
    with warm.start("--warm", "1", "script/train.py", env=environment(warm)) as command:
        assert command.stdout is not None
        command.stdout.readline()
        (zygote,) = zygotes()
        command.send_signal(signal.SIGTERM)
        command.communicate(timeout=60)
    until(lambda: gone(zygote), "the end of the zygote")
