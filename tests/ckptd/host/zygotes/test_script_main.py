"""A script in a forked trainer is as it is without a host."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from typing import Any

import pytest

from ckptd.host.zygotes.script_main import Script, own_folder
from tests.ckptd.host.hosting import Hosting

PROBE = '''"""A docstring."""
from __future__ import annotations
import json, os, resource, signal, sys, threading, warnings
x: int = 1
def facts():
    status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
    fds = {fd: os.readlink(f"/proc/self/fd/{fd}").split(":")[0] for fd in os.listdir("/proc/self/fd")
           if os.path.exists(f"/proc/self/fd/{fd}")}
    return {
        "globals": sorted(globals()), "name": __name__, "file": __file__, "doc": __doc__,
        "package": __package__, "spec": __spec__ and __spec__.name, "cached": __cached__,
        "loader": type(__loader__).__name__, "annotations": __annotations__,
        "main": sys.modules["__main__"].__dict__ is globals(),
        "argv": sys.argv, "path": sys.path, "orig_argv": sys.orig_argv, "flags": str(sys.flags),
        "cwd": os.getcwd(), "leads": os.getsid(0) == os.getpid() == os.getpgrp(),
        "umask": os.umask(0o22), "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
        "environ": {k: v for k, v in os.environ.items() if k != "CKPTD_RUNTIME_DIR"},
        "signals": [status[key] for key in ("SigBlk", "SigIgn", "SigCgt", "ShdPnd")],
        "comm": open("/proc/self/comm").read(), "threads": threading.active_count(),
        "fds": {fd: link for fd, link in fds.items() if int(fd) < 3}, "more": len(fds) - 3,
        "filters": str(warnings.filters), "interactive": hasattr(sys, "ps1"),
        "handlers": str([signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)]),
    }
if __name__ == "__main__":
    print(json.dumps(facts()))
'''


def facts(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text)
    # The recorder keeps one file open, and the page and the line to the host are two.
    assert found["more"] in (0, 3)
    for name in ("CKPTD_HOST_PROGRESS", "CKPTD_HOST_LINE"):
        found["environ"].pop(name, None)
    return found


@pytest.mark.parametrize(
    "words", [("probe.py", "--lr", "1"), ("-m", "probe"), ("-m", "pkg.probe", "x"), ("-m", "pkg")]
)
def test_what_a_script_sees(hosting: Hosting, words: tuple[str, ...]) -> None:
    for name in ("probe.py", "pkg/probe.py", "pkg/__main__.py"):
        hosting.write(name, PROBE)
    hosting.write("pkg/__init__.py", "")
    plain, hosted = hosting.both(*words, flags=["-u", "-W", "ignore::ImportWarning"])
    before, after = facts(plain.stdout), facts(hosted.stdout)
    assert before.pop("more") == 0
    assert after.pop("more") == 3
    assert after == before


@pytest.mark.parametrize("kind", ["folder", "app.zip", "app.pex", "app"])
def test_a_folder_or_zip_file_with_a_main(hosting: Hosting, kind: str) -> None:
    text = "import inner, sys; print(inner.x, sys.argv, sys.path[0], __name__, __spec__.name)"
    if kind == "folder":
        hosting.write("app/__main__.py", text)
        hosting.write("app/inner.py", "x = 5")
    else:
        with zipfile.ZipFile(hosting.folder / kind, "w") as file:
            file.writestr("__main__.py", text)
            file.writestr("inner.py", "x = 5")
    plain, hosted = hosting.both("app" if kind == "folder" else kind, "arg")
    assert plain.stdout
    assert hosted.stdout == plain.stdout


ENDS = {
    "success": "pass",
    "code": "import sys; sys.exit(3)",
    "text": "import sys; sys.exit('a reason')",
    "error": "def f():\n    raise ValueError('no')\nf()",
    "cause": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError('no') from e",
    "syntax": "def f(:\n    pass",
    "exit": "import os; os._exit(4)",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "terminated": "import os; os.kill(os.getpid(), 15)",
    "aborted": "import os, resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.abort()",
    # Where the tests run in the background of a shell, Python leaves the signal ignored.
    "interrupted": "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "signal.raise_signal(signal.SIGINT)",
    "atexit": "import atexit, threading, time\natexit.register(print, 'bye')\n"
    "threading.Thread(target=lambda: (time.sleep(.2), print(X))).start()\nX = 'still here'",
    "hook": "import sys\nsys.excepthook = lambda *a: print('hook', a[0].__name__)\nraise ValueError",
}


@pytest.mark.parametrize("end", ENDS)
def test_the_end_of_a_script(hosting: Hosting, end: str) -> None:
    """Exit code or signal, output, and the traceback to the letter."""
    hosting.write("script.py", ENDS[end])
    plain, hosted = hosting.both("script.py")
    assert hosted.returncode == plain.returncode
    assert hosted.stdout == plain.stdout
    assert re.sub(r"ckptd\.host: .*\n", "", hosted.stderr) == plain.stderr
    assert plain.returncode != 0 or end in ("success", "atexit")


@pytest.mark.parametrize("words", [("missing.py",), ("-m", "missing"), ("-m", "pkg.missing"), ("missing",)])
def test_a_script_that_is_not_there(hosting: Hosting, words: tuple[str, ...]) -> None:
    hosting.write("pkg/__init__.py", "")
    (hosting.folder / "missing").mkdir()  # a folder without a `__main__`
    plain, hosted = hosting.run(*words, host=False), hosting.run("--max-restarts", "0", *words)
    assert hosted.returncode == plain.returncode != 0
    assert "missing" in hosted.stderr


@pytest.mark.parametrize("word", ["pkg.train", "pkg", "lacks.train", "pkg.sub.train", "train.py", "empty"])
def test_a_module_that_cannot_begin(hosting: Hosting, word: str) -> None:
    """An error that a package raises at its import is told with its own traceback. All that was told was "Error while
    finding module specification", for a package that there is.
    """
    hosting.write("pkg/__init__.py", "def f():\n    raise ValueError('no')\nf()")
    hosting.write("lacks/__init__.py", "import not_there")
    hosting.write("empty/__init__.py", "")
    hosting.write("train.py", "")
    plain, hosted = hosting.run("-m", word, host=False), hosting.run("--max-restarts", "0", "-m", word)
    assert hosted.returncode == plain.returncode == 1
    usual = re.sub(r"  File \"<frozen runpy>.*\n", "", plain.stderr)
    assert re.sub(r"ckptd\.host: .*\n", "", hosted.stderr) == usual


PROCESSES = """
import multiprocessing as mp, os, pickle, sys
class Thing:
    def __init__(self, x): self.x = x
    def __eq__(self, other): return self.x == other.x
def work(q, thing): q.put((thing, __name__, os.getppid()))
def square(x): return Thing(x * x)
if __name__ == "__main__":
    assert pickle.loads(pickle.dumps(Thing(3))) == Thing(3)
    print(Thing.__module__, mp.current_process().name, mp.parent_process())
    for method in ("fork", "spawn", "forkserver"):
        context = mp.get_context(method)
        queue = context.Queue()
        child = context.Process(target=work, args=(queue, Thing(method)))
        child.start()
        thing, name, parent = queue.get()
        child.join()
        assert thing == Thing(method)
        print(method, name, parent == os.getpid(), child.exitcode)
        with context.Pool(2) as pool:
            print([t.x for t in pool.map(square, range(4))])
"""


def test_classes_of_main_and_child_processes(hosting: Hosting) -> None:
    hosting.write("script.py", PROCESSES)
    plain, hosted = hosting.both("script.py")
    assert plain.returncode == hosted.returncode == 0, hosted.stderr
    assert hosted.stdout == plain.stdout


def test_a_script_that_executes_itself_anew(hosting: Hosting) -> None:
    hosting.write(
        "script.py",
        "import os, sys\n"
        "if 'AGAIN' not in os.environ:\n"
        "    os.execve(sys.executable, sys.orig_argv, {**os.environ, 'AGAIN': '1'})\n"
        "print(sys.argv)\nsys.exit(5)",
    )
    plain, hosted = hosting.both("script.py", "x", flags=["-u"])
    assert (
        (hosted.returncode, hosted.stdout) == (plain.returncode, plain.stdout) == (5, "['script.py', 'x']\n")
    )


def test_signals_that_were_ignored_stay_ignored(hosting: Hosting) -> None:
    hosting.write("script.py", "import signal; print(signal.getsignal(signal.SIGHUP))")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        plain, hosted = hosting.both("script.py")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert hosted.stdout == plain.stdout == f"{signal.SIG_IGN!s}\n"


def test_paths_that_are_no_utf8(hosting: Hosting) -> None:
    """Such a name ended the host before it had begun."""
    name = os.fsdecode(b"d\xff/s\xfe.py")
    hosting.write(name, "import os, sys; print(ascii(sys.argv), ascii(os.environ['NAME']))")
    done = [
        subprocess.run(
            [sys.executable, *host, os.path.basename(name), "\udcfd"],
            cwd=(hosting.folder / name).parent, env=hosting.environment(NAME="\udcfc"), capture_output=True,
            timeout=120, check=True,
        )
        for host in ([], ["-m", "ckptd.host", "--no-fork"], ["-m", "ckptd.host"])
    ]  # fmt: skip
    assert [each.stdout for each in done] == [b"['s\\udcfe.py', '\\udcfd'] '\\udcfc'\n"] * 3
    assert b"forked" in done[2].stderr


CLOSES = """
import os
os.closerange(3, 100)
files = [os.open(f"own{number}", os.O_RDWR | os.O_CREAT) for number in range(20)]
import decimal, calendar, fractions
print([os.fstat(file).st_size for file in files])
"""


def test_a_script_that_closes_what_is_not_its_own(hosting: Hosting) -> None:
    """As programs do that become daemons. The names of modules that it imported then came into a file of its own, which
    had the number of ours.
    """
    hosting.write("script.py", CLOSES)
    plain, hosted = hosting.both("script.py")
    assert hosted.stdout == plain.stdout == f"{[0] * 20}\n"


STANDARD = (
    "import os, sys; print('said'); os.write(1, b'said'); sys.exit(os.fstat(1).st_rdev == os.makedev(1, 3))"
)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_files(hosting: Hosting, closed: str) -> None:
    """A socket or a page of the host had the number of the closed file, zygotes failed, and what the script printed
    went to where the host showed its progress. Now they are open, on nothing.
    """
    hosting.write("script.py", STANDARD)
    hosting.known("script.py")
    command = f"{sys.executable} -m ckptd.host --max-restarts 0 script.py {closed}"
    done = subprocess.run(
        ["/bin/sh", "-c", command],
        cwd=hosting.folder, env=hosting.environment(), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    open_output = ">&-" not in closed.replace("2>&-", "")
    assert (done.returncode, done.stdout) == ((0, "said\nsaid") if open_output else (1, "")), done.stderr
    assert ("forked" in done.stderr, "new zygote" in done.stderr) == ("2>&-" not in closed, False)


BLOCKED = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.parametrize("how", [[], ["--no-fork"]])
def test_a_launcher_that_has_the_death_of_children_blocked(hosting: Hosting, how: list[str]) -> None:
    """The host never heard that its trainer had ended."""
    hosting.write("script.py", "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))")
    hosting.known("script.py")
    said = []
    for host in ([], ["-m", "ckptd.host", *how]):
        done = subprocess.run(
            [sys.executable, "-c", BLOCKED, sys.executable, *host, "script.py"],
            cwd=hosting.folder, env=hosting.environment(), capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        said.append(done.stdout)
    assert said[0] == said[1]
    assert "SIGCHLD" in said[0]


def test_the_folder_of_a_script(hosting: Hosting) -> None:
    path = hosting.write("project/train.py", "")
    assert own_folder(Script(str(path), False, ())) == str(path.parent)
    assert own_folder(Script("json.tool", True, ())).endswith("/json")
    assert own_folder(Script("timeit", True, ())) == ""
