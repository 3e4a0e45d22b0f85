"""When a zygote may be forked, and what its trainers find."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptd.host.trainer_host import HOST_LOST
from ckptd.host.zygotes.zygote import serve_stores
from tests.ckptd.host.hosting import ROOT, Hosting, children_of, gone, trainers_of, until
from tests.long import long
from tests.ports import free_port

CUDA = """
import types
sys.modules["torch"] = torch = types.ModuleType("torch")
torch.cuda, torch.is_initialized = torch, lambda: True
"""
UNFIT = """
import os, sys
from ckptd.host.zygotes.zygote import _open_descriptors, unfit_because
given = _open_descriptors()
{0}
print(unfit_because(given))
"""


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        ("", "^$"),
        ("import threading, time; threading.Thread(target=time.sleep, args=(9,), daemon=True).start()", "threads"),
        ("import socket; s = socket.socket()", "a socket"),
        ("r, w = os.pipe()", "pipe:"),
        ("import select; e = select.epoll()", "eventpoll"),
        ("f = open('/dev/zero'); g = open(__import__('json').__file__); h = os.open('/', os.O_RDONLY)", "^$"),
        ("import subprocess; p = subprocess.Popen(['sleep', '9'], stdout=2)", "processes"),
        (CUDA, "CUDA"),
    ],
)  # fmt: skip
def test_what_must_not_be_forked(work: str, reason: str) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", UNFIT.format(work)],
        env=environ, check=True, text=True, stdout=subprocess.PIPE, timeout=60,
    )  # fmt: skip
    assert re.search(reason, done.stdout.strip())


def test_a_module_with_threads_makes_a_plain_start_with_the_reason(hosting: Hosting) -> None:
    """First with everything, then with torch alone: that may be forked, and the script does the rest."""
    hosting.write("library/threaded.py", "import threading, time\nthreading.Thread(target=time.sleep, "
                  "args=(600,), daemon=True).start()")  # fmt: skip
    hosting.write("script/train.py", "import threaded, os; print(os.getpid())")
    hosting.known("script/train.py", modules=["json", "threaded"])
    path = {"PYTHONPATH": f"{ROOT}:{hosting.folder / 'library'}"}
    done = hosting.run("script/train.py", env=path)
    assert done.returncode == 0, done.stderr
    assert "what it imports starts threads (1)" in done.stderr
    assert "forked" in done.stderr
    again = hosting.run("script/train.py", env=path)
    assert "only torch is imported ahead: what it imports starts threads (1)" in again.stderr
    assert "a new zygote" not in again.stderr


def test_a_script_that_sets_variables_for_its_imports_is_started_plainly(hosting: Hosting) -> None:
    hosting.write("train.py", "import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport json")
    done = hosting.run("train.py")
    assert done.returncode == 0
    assert "started plainly" in done.stderr
    assert "sets OMP_NUM_THREADS and imports afterwards" in done.stderr


SETS = """
import os, sys
def main():
    os.environ["PLACE"] = sys.argv[1]
    import reads, decimal, fractions
    print(reads.place, flush=True)
main()
"""


def test_a_script_that_sets_a_variable_in_a_function_before_an_import(hosting: Hosting) -> None:
    """What it imports there was imported ahead in the next start, without the variable (`HF_HOME`, say)."""
    hosting.write("library/reads.py", "import os; place = os.environ.get('PLACE', 'nowhere')")
    hosting.write("script/train.py", SETS)
    hosting.known("script/train.py")
    path = {"PYTHONPATH": f"{ROOT}:{hosting.folder / 'library'}"}
    done = [hosting.run("script/train.py", place, env=path) for place in "ab"]
    assert [each.stdout for each in done] == ["a\n", "b\n"]
    assert "what it imports reads PLACE, which the script sets before" in done[1].stderr


DRAWS = """
import json, os, random, sys
import numpy, torch
from pathlib import Path
if len(sys.argv) > 1:
    random.seed(1), numpy.random.seed(2), torch.manual_seed(3)
with open("drawn", "a") as file:
    print(json.dumps([random.random(), float(numpy.random.rand()), float(torch.rand(1))]), file=file)
if len(Path("drawn").read_text().splitlines()) < 4:
    os.kill(os.getpid(), 9)
"""


def test_random_numbers_are_those_of_plain_starts(hosting: Hosting) -> None:
    """Three trainers of one zygote. Seeded numbers are equal to those of a plain start; unseeded ones differ."""
    hosting.write("train.py", DRAWS)
    for words in ([], ["seeded"]):
        hosting.run("train.py", *words, host=False)
        assert hosting.run("train.py", *words).returncode == 0
        lines = [json.loads(line) for line in (hosting.folder / "drawn").read_text().splitlines()]
        (hosting.folder / "drawn").unlink()
        assert len(lines) == 4
        different = [len({line[generator] for line in lines}) for generator in range(3)]
        assert different == ([1, 1, 1] if words else [4, 4, 4])


def test_a_module_that_draws_at_its_import_is_not_imported_ahead(hosting: Hosting) -> None:
    hosting.write("library/drawing.py", "import random; random.seed(5)")
    hosting.write("script/train.py", "import drawing, random; print(random.random())")
    hosting.known("script/train.py", modules=["drawing"])
    path = {"PYTHONPATH": f"{ROOT}:{hosting.folder / 'library'}"}
    done = hosting.run("script/train.py", env=path)
    plain = hosting.run("script/train.py", env=path, host=False)
    assert "draws from the generator of random" in done.stderr
    assert done.stdout == plain.stdout != ""


CHANGES = """
import os, sys, pathlib
import changing
print(changing.x, flush=True)
if changing.x == 1:
    pathlib.Path(changing.__file__).write_text("x = 22")
    os.kill(os.getpid(), 9)
"""


def test_a_module_that_changes_between_lives(hosting: Hosting) -> None:
    hosting.write("library/changing.py", "x = 1")
    hosting.write("script/train.py", CHANGES)
    hosting.known("script/train.py", modules=["changing"])
    done = hosting.run("script/train.py", env={"PYTHONPATH": f"{ROOT}:{hosting.folder / 'library'}"})
    assert (done.returncode, done.stdout) == (0, "1\n22\n"), done.stderr
    assert "changing.py has changed" in done.stderr


def test_the_next_start_imports_what_this_one_did(hosting: Hosting) -> None:
    hosting.write("train.py", "import sys, pathlib\nprint('decimal' in sys.modules)\nimport decimal")
    hosting.known("train.py")
    assert [hosting.run("train.py").stdout for _ in range(2)] == ["False\n", "True\n"]


SLEEPS = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


def test_a_killed_zygote_is_replaced_and_the_trainer_stays(hosting: Hosting) -> None:
    hosting.write("train.py", SLEEPS)
    hosting.known("train.py")
    with hosting.start("train.py") as host:
        assert host.stdout is not None
        trainer = int(host.stdout.readline())
        zygote = children_of(host.pid)["ckptd-zygote"]
        os.kill(zygote, signal.SIGKILL)
        until(lambda: children_of(host.pid).get("ckptd-zygote", zygote) != zygote, "a new zygote")
        os.kill(trainer, signal.SIGKILL)
        second = int(host.stdout.readline())
        assert second != trainer
        os.kill(second, signal.SIGTERM)
        assert int(host.stdout.readline()) not in (trainer, second)
        host.terminate()
        assert host.wait(timeout=60) == -signal.SIGTERM
    assert gone(second)


GROUP = """
import os, subprocess, time
child = subprocess.Popen(["sleep", "600"])
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("whole_group", [False, True])
def test_nothing_is_left_of_a_killed_host(hosting: Hosting, whole_group: bool) -> None:
    """Neither the trainer, nor its children, nor the zygote; also if the launcher kills the host's group."""
    hosting.write("train.py", GROUP)
    hosting.known("train.py")
    with hosting.start("train.py") as host:
        assert host.stdout is not None
        processes = [*map(int, host.stdout.readline().split()), children_of(host.pid)["ckptd-zygote"]]
        if whole_group:
            os.killpg(host.pid, signal.SIGKILL)
        else:
            host.kill()
        until(lambda: all(map(gone, processes)), "the end of all")


def test_children_of_a_killed_trainer_are_ended(hosting: Hosting) -> None:
    hosting.write("train.py", GROUP)
    hosting.known("train.py")
    with hosting.start("train.py") as host:
        assert host.stdout is not None
        trainer, child = map(int, host.stdout.readline().split())
        os.kill(trainer, signal.SIGKILL)
        host.stdout.readline()
        until(lambda: gone(child), "the end of the trainer's child")
        host.kill()


COUNTS = """
import signal, sys, time
count, stop = [], []
signal.signal(signal.SIGTERM, lambda *a: count.append(1))
signal.signal(signal.SIGUSR1, lambda *a: stop.append(1))
print("up", flush=True)
while not stop:
    time.sleep(0.01)
sys.exit(10 + len(count))
"""


SHARES = """
import os, signal, sys, time
from multiprocessing import shared_memory
signal.signal(signal.SIGTERM, signal.SIG_IGN)
block = shared_memory.SharedMemory(create=True, size=4096, name=f"ckptd-test-{os.getpid()}")
print(block.name, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how", [(), ("--no-fork",)])
def test_shared_memory_of_a_killed_trainer_is_removed(hosting: Hosting, how: tuple[str, ...]) -> None:
    """By the process that Python has for that. It was killed with the trainer's workers, so each failure left what the
    script had shared.
    """
    hosting.write("train.py", SHARES)
    hosting.known("train.py")
    with hosting.start(*how, "train.py", env={"CKPTD_HOST_STOP_S": "1"}) as host:
        assert host.stdout is not None
        first = Path("/dev/shm", host.stdout.readline().strip())
        (trainer,) = trainers_of(host.pid)
        assert first.exists()
        os.kill(trainer, signal.SIGKILL)
        second = Path("/dev/shm", host.stdout.readline().strip())
        until(lambda: not first.exists(), "the removal of what the first one has shared")
        assert second.exists()
        host.terminate()  # which the trainer ignores
        os.kill(trainers_of(host.pid)[0], signal.SIGKILL)
        assert host.wait(timeout=60) == -signal.SIGKILL
        until(lambda: not second.exists(), "the removal of what the second one has shared")


@pytest.mark.parametrize("how", [(), ("--no-fork",)])
@pytest.mark.parametrize("everywhere", [False, True])
def test_a_signal_arrives_once(hosting: Hosting, how: tuple[str, ...], everywhere: bool) -> None:
    """To the host alone it is passed on; to every process of the job (Slurm) it is not repeated: a second
    SIGTERM would cut parking short. It was, where trainers were started plainly."""
    hosting.write("train.py", COUNTS)
    hosting.known("train.py")
    with hosting.start(*how, "train.py") as host:
        assert host.stdout is not None
        assert host.stdout.readline() == "up\n"
        children = children_of(host.pid)
        (trainer,) = trainers_of(host.pid)
        for pid in [*(children.values() if everywhere else ()), host.pid]:
            os.kill(pid, signal.SIGTERM)
        host.send_signal(signal.SIGUSR1)  # passed on after the SIGTERM, if that is
        assert host.wait(timeout=60) == 11
        until(lambda: all(map(gone, [trainer, *children.values()])), "the end of all")


def test_a_signal_arrives_once_while_a_zygote_imports(hosting: Hosting) -> None:
    """Which cannot answer then."""
    hosting.write("library/slow.py", "import os, time\nif os.path.exists('slow'): time.sleep(600)")
    hosting.write("train.py", COUNTS)
    hosting.known("train.py", modules=["slow"])
    with hosting.start("train.py", env={"PYTHONPATH": f"{ROOT}:{hosting.folder / 'library'}"}) as host:
        assert host.stdout is not None
        assert host.stdout.readline() == "up\n"
        first = children_of(host.pid)["ckptd-zygote"]
        hosting.write("slow", "")
        os.kill(first, signal.SIGKILL)
        until(lambda: children_of(host.pid).get("ckptd-zygote", first) != first, "a new zygote")
        for pid in [*children_of(host.pid).values(), host.pid]:
            os.kill(pid, signal.SIGTERM)
        host.send_signal(signal.SIGUSR1)
        assert host.wait(timeout=60) == 11


def test_a_signal_that_arrives_while_a_trainer_is_forked(hosting: Hosting) -> None:
    """On a machine so busy that the fork takes longer than the zygote's answer is waited for: the trainer got no signal
    and went on, and the host with it.
    """
    hosting.write("train.py", SLEEPS)
    hosting.known("train.py")
    with hosting.start("train.py") as host:
        assert host.stdout is not None
        trainer = int(host.stdout.readline())
        zygote = children_of(host.pid)["ckptd-zygote"]
        os.kill(zygote, signal.SIGSTOP)
        os.kill(trainer, signal.SIGKILL)
        assert host.stderr is not None
        assert any("epoch 1 begins" in line for line in host.stderr)
        host.terminate()
        time.sleep(1.5)
        os.kill(zygote, signal.SIGCONT)
        try:
            assert host.wait(timeout=60) == -signal.SIGTERM
        finally:
            host.kill()


def test_a_crash_loop_ends_with_the_scripts_own_error(hosting: Hosting) -> None:
    hosting.write("train.py", "print('try', flush=True)\nraise RuntimeError('the reason')")
    hosting.known("train.py")
    done = hosting.run("--max-restarts", "2", "train.py")
    assert (done.returncode, done.stdout) == (1, "try\n" * 3)
    assert done.stderr.count("RuntimeError: the reason") == 3
    assert "3 failures, and 2 restarts are allowed; last: rank 0: exit code 1" in done.stderr


def test_a_store_server_makes_stores_that_work() -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    ours, theirs = socket.socketpair()
    with ours, theirs:
        if (pid := os.fork()) == 0:
            ours.close()
            serve_stores(theirs)
            os._exit(0)
        theirs.close()
        ports = []
        with ours.makefile("r") as lines:
            for _ in range(2):
                ours.send(b"n")
                ports.append(int(lines.readline()))
        for number, port in enumerate(ports):
            TCPStore("localhost", port, is_master=False).set("key", str(number))
        read = [TCPStore("localhost", port, is_master=False).get("key") for port in ports]
        assert read == [b"0", b"1"]
        ours.shutdown(socket.SHUT_RDWR)
        assert os.waitpid(pid, 0)[1] == 0


def test_a_host_is_small(hosting: Hosting) -> None:
    hosting.write("train.py", SLEEPS)
    hosting.known("train.py")
    with hosting.start("train.py") as host:
        assert host.stdout is not None
        host.stdout.readline()
        status = Path(f"/proc/{host.pid}/status").read_text()
        host.kill()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    assert int(found[1]) < 20 << 10


def test_on_several_machines_the_script_runs_without_a_host(hosting: Hosting) -> None:
    hosting.write("train.py", "import sys; print(sys.argv); sys.exit(6)")
    done = hosting.run("train.py", "x", env={"RANK": "0", "WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"})
    assert (done.returncode, done.stdout) == (6, "['train.py', 'x']\n")
    assert "several machines" in done.stderr


def test_where_the_daemons_folder_is_not_ours_hosts_use_their_own(hosting: Hosting) -> None:
    """And without any folder, the script runs without a host."""
    hosting.write("train.py", "import sys; sys.exit(6)")
    hosting.runtime.mkdir()
    hosting.runtime.chmod(0o777)
    own = hosting.folder / "own" / "ckptd"
    own.mkdir(parents=True, mode=0o700)
    env = {"XDG_RUNTIME_DIR": str(own.parent)}
    done = hosting.run("--no-fork", "--max-restarts", "0", "train.py", env=env)
    assert (done.returncode, "trainer" in done.stderr) == (6, True)
    assert (own / "host").is_dir()
    own.chmod(0o777)
    done = hosting.run("--no-fork", "--max-restarts", "0", "train.py", env=env)
    assert (done.returncode, "runs without a host" in done.stderr) == (6, True)


SLOW = "import sys, time\nprint('importing', file=sys.stderr, flush=True)\ntime.sleep(600)"


def test_a_host_that_is_ended_before_its_trainer_begins(hosting: Hosting) -> None:
    hosting.write("library/slow.py", SLOW)
    hosting.write("script/train.py", "print('never')")
    hosting.known("script/train.py", modules=["slow"])
    with hosting.start("script/train.py", env={"PYTHONPATH": f"{ROOT}:{hosting.folder / 'library'}"}) as host:
        assert host.stderr is not None
        assert host.stderr.readline() == "importing\n"
        zygote = children_of(host.pid)["ckptd-zygote"]
        host.terminate()
        assert host.wait(timeout=60) == -signal.SIGTERM
    until(lambda: gone(zygote), "the end of the zygote")


def test_a_zygote_that_hangs_in_an_import_dies_with_its_host(hosting: Hosting) -> None:
    hosting.write("library/slow.py", SLOW)
    hosting.write("script/train.py", "print('never')")
    hosting.known("script/train.py", modules=["slow"])
    with hosting.start("script/train.py", env={"PYTHONPATH": f"{ROOT}:{hosting.folder / 'library'}"}) as host:
        assert host.stderr is not None
        host.stderr.readline()
        zygote = children_of(host.pid)["ckptd-zygote"]
        host.kill()
        until(lambda: gone(zygote), "the end of the zygote")


def test_a_killed_server_of_stores_is_replaced(hosting: Hosting) -> None:
    hosting.write(
        "train.py",
        "import os, time, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "print(os.getpid(), os.environ['MASTER_PORT'], flush=True)\ntime.sleep(600)",
    )
    port = free_port()
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with hosting.start("train.py", env=env) as host:
        assert host.stdout is not None
        trainer, first = map(int, host.stdout.readline().split())
        until(lambda: "ckptd-store" in children_of(host.pid), "a server of stores")
        store = children_of(host.pid)["ckptd-store"]
        os.kill(store, signal.SIGKILL)
        until(lambda: children_of(host.pid).get("ckptd-store", store) != store, "another one")
        os.kill(trainer, signal.SIGKILL)
        again, second = map(int, host.stdout.readline().split())
        assert (again != trainer, first, second != first) == (True, port, True)
        host.kill()


MEETS = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
life = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
os.write(1, f"{life} {int(total)} {os.environ['MASTER_PORT']}\\n".encode())  # at once, or not at all
while not os.path.exists("joined"):
    time.sleep(0.01)
if dist.get_rank() == 1 and life < int(sys.argv[1]):
    os.kill(os.getpid(), 9)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("place", ["one machine", "several machines", "several machines, plainly"])
def test_ranks_without_torchrun(hosting: Hosting, place: str) -> None:
    """As `srun` starts them: the first trainer of rank 0 makes the store, later ones find one on a new port. Those
    of several machines are on one here, and do not know it."""
    hosting.write("train.py", MEETS)
    port = str(free_port())
    local = "2" if place == "one machine" else "1"
    env = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": local, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    # Each plain start imports torch.
    plainly, restarts = (["--no-fork"], 1) if "plainly" in place else ([], 2)
    words = [*plainly, "train.py", str(restarts)]
    hosts = [hosting.start(*words, env={**env, "RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]
    try:
        assert hosts[0].stderr is not None
        assert any("all 2 hosts have joined" in line for line in hosts[0].stderr)
        hosting.write("joined", "")
        ends = [host.communicate(timeout=200) for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    assert [host.returncode for host in hosts] == [0, 0], ends
    lives = [[line.split() for line in out.splitlines()] for out, _ in ends]
    assert lives[0][-1] == lives[1][-1]
    assert [life for life, _, _ in lives[1]] == [*"012"[: restarts + 1]]
    assert {total for _, total, _ in lives[1]} == {"2"}
    ports = [port for _, _, port in lives[1]]
    assert ports[0] == port
    assert len(set(ports)) == restarts + 1


PARKS = """
import signal, sys, time
stop = []
signal.signal(signal.SIGTERM, lambda *a: stop.append(1))
print("up", flush=True)
while not stop:
    time.sleep(0.01)
time.sleep(0.5)
print("parked", len(stop), flush=True)
sys.exit(9)
"""


@pytest.mark.parametrize("lost", [0, 1])
def test_when_a_host_is_lost_the_others_park_and_end_as_failures(hosting: Hosting, lost: int) -> None:
    """Also if the launcher, which has seen the loss, says the same a moment later."""
    hosting.write("train.py", PARKS)
    hosting.known("train.py")
    env = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    hosts = [hosting.start("train.py", env={**env, "RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]
    try:
        for host in hosts:
            assert host.stdout is not None
            assert host.stdout.readline() == "up\n"
        assert hosts[0].stderr is not None
        assert any("all 2 hosts have joined" in line for line in hosts[0].stderr)
        other = hosts[1 - lost]
        hosts[lost].kill()
        assert other.stderr is not None
        assert any("for a new start" in line for line in other.stderr)
        other.terminate()
        out, _ = other.communicate(timeout=60)
        assert (out, other.returncode) == ("parked 1\n", HOST_LOST)
    finally:
        for host in hosts:
            host.kill()
            host.communicate(timeout=60)


SHRINKS = """
import os, time, torch, torch.distributed as dist
import remembers
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
assert (dist.get_rank(), dist.get_world_size()) == (remembers.rank, int(total))
print(os.environ["RANK"], os.environ["WORLD_SIZE"], os.getpid(), flush=True)
while not os.path.exists("stop") or dist.get_world_size() == 3:
    time.sleep(0.01)
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=long)])
def test_an_elastic_job_goes_on_without_a_lost_node(hosting: Hosting, end: signal.Signals) -> None:
    """Nobody meets anew. A zygote that has remembered the rank at an import is replaced."""
    hosting.write("library/remembers.py", "import os; rank = int(os.environ['RANK'])")
    hosting.write("script/train.py", SHRINKS)
    hosting.known("script/train.py", modules=["json", "remembers"])
    port = str(free_port())
    env = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    env |= {"PYTHONPATH": f"{ROOT}:{hosting.folder / 'library'}", "CKPTD_HOST_MIN_RANKS": "2"}
    hosts = [
        hosting.start("script/train.py", env={**env, "RANK": rank, "SLURM_NODEID": rank, "LOCAL_RANK": "0"})
        for rank in "012"
    ]
    try:
        assert hosts[0].stderr is not None
        assert any("all 3 hosts have joined" in line for line in hosts[0].stderr)
        for host in hosts:
            assert host.stdout is not None
            assert host.stdout.readline().split()[1] == "3"
        hosts[1].send_signal(end)
        left = [hosts[0], hosts[2]]
        seen = [host.stdout.readline().split()[:2] for host in left]  # type: ignore[union-attr]
        assert seen == [["0", "2"], ["1", "2"]]
        hosting.write("stop", "")
        errors = [host.communicate(timeout=200)[1] for host in left]
        assert [host.returncode for host in left] == [0, 0], errors
        assert "2 ranks are left, and this is rank 1 of them" in errors[1]
        assert "a new zygote is needed: RANK has changed" in errors[1]
        assert "a new zygote" not in errors[0]
    finally:
        for host in hosts:
            host.kill()
            host.communicate(timeout=60)
