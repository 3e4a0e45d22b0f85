"""Users that a daemon keeps apart: real processes of several users, before and after the daemon was killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ckptd.memory.user_files import readers_of
from tests.ckptd.running import eventually
from tests.e2e.compare import differences
from tests.forked import FORKED
from tests.users import DAEMON, GROUP, STRANGER, TRAINER, needs_users, spawn_as

pytestmark = needs_users
ALICE, BOB, OUTSIDER = TRAINER, STRANGER, 54_104
ALICES, BOBS = f"u{ALICE}.job", f"u{BOB}.job"
MIB = 1 << 20
TOTAL, KILL_AT = 14, 9
DAEMON_IMPORTS = (
    "import ckptd.cli, ckptd.node.daemon, encodings.idna, encodings.ascii, gettext, grp, locale, shutil"
)
IMPORTS = """
import json, os, zmq
from ckptd.launch import connect
from ckptd.core.slots.segment_format import SlotHeader, encode_descriptor, pack_slot_header
from ckptd.memory.segment_file import open_segment
from ckptd.transport import messages as m
from ckptd.transport.wire import RefusedError, decode, encode
from tests.ckptd.running import attach, descriptor
"""
ASKING = """
endpoint, others = sys.argv[3], json.loads(sys.argv[4])
mine, path, other = f"u{os.getuid()}.job", others["path"], others["job"]
def say(**words): print(json.dumps(words), flush=True)
def code(client, message):
    try:
        return type(client.request(message)).__name__
    except RefusedError as error:
        return error.code + (" source" if "is no segment of" in error.message else "")
"""
HOLD = """
with connect(endpoint, 20) as client:
    attached = attach(client, job=mine, needed_bytes=8 << 20)
    if not attached.segments:
        client.request(m.Reserve(1 << 20, 4, encode_descriptor(descriptor(mine))))
        attached = attach(client, job=mine, needed_bytes=8 << 20)
    (info,) = attached.segments
    with open(info.path, "r+b"): pass
    say(path=info.path, job=mine)
    sys.stdin.readline()
"""
INTRUDE = """
from ckptd.transport.messages import FetchPiece, FetchSource
with connect(endpoint, 20) as client:
    client.request(m.Hello("test", os.getpid()))
    named = [m.SeeRun(other, "run"), m.Drill(other, "run", 0), m.GetDurableWorlds(other, "run", "me"),
        m.BringStored(other, "run", 1, (0,)), m.Park(other, "run", 0.0), m.Park("", "", 0.0),
        m.AdmitNodes(other, "run", ("n",)), m.Forget(other, "run"), m.Unquarantine(other, "run"), m.StepAside(),
        m.Attach(other, "run", 0, 1, "dp1", 1, 0), m.Attach("job", "run", 0, 1, "dp1", 1, 0)]
    say(refused=sorted({code(client, message) for message in named}))
    unattached = [m.Reserve(1, 1, b""), m.Drop(0), m.Detach(True), m.GetFetch(0), m.TellReplay()]
    say(refused=sorted({code(client, message) for message in unattached}))
    status, peers = client.ask(m.GetStatus(), m.Status), client.ask(m.GetPeers(), m.Peers)
    say(seen=[len(status.sessions), len(status.segments), len(peers.ranks), len(peers.replicas),
        len(client.ask(m.GetSnapshots(), m.Snapshots).ranks),
        sum(event.job != mine for event in client.ask(m.GetEvents(), m.Events).events)])
    attach(client, job=mine, needed_bytes=1)
    stolen = FetchPiece(pack_slot_header(SlotHeader()), (FetchSource(client.ask(m.Hello("", 1), m.Welcome).node_id,
        os.path.basename(path), 0),))
    say(refused=[code(client, m.Reserve(1 << 20, 4, encode_descriptor(descriptor(other)))),
        code(client, m.Fetch((stolen,))), code(client, m.Fetch((stolen,), (), "snapshots", 0))])
for mode in ("rb", "r+b"):
    try:
        open(path, mode).close()
        say(opened=mode)
    except PermissionError:
        say(opened="")
"""


class Node:
    """A daemon of its own user that keeps users apart."""

    def __init__(self, **settings: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ckptd-u-", dir="/tmp"))
        self.folder.chmod(0o755)
        os.chown(self.folder, DAEMON, DAEMON)
        self.segments = Path(f"/dev/shm/{self.folder.name}")
        self.endpoint = f"ipc://{self.folder}/run/ckptd.sock"
        self._env = {key: value for key, value in os.environ.items() if not key.startswith("CKPTD_")}
        self._env |= {
            "CKPTD_RUNTIME_DIR": f"{self.folder}/run",
            "CKPTD_SEGMENT_DIR": str(self.segments),
            "CKPTD_MEMORY": "64MiB",
            "CKPTD_TRAINER_GROUP": str(GROUP),
            "CKPTD_ISOLATE_USERS": "true",
            **{f"CKPTD_{key.upper()}": value for key, value in settings.items()},
        }
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        socket = self.folder / "run/ckptd.sock"
        socket.unlink(missing_ok=True)
        script = "sys.exit(ckptd.cli.main(['run']))"
        daemon = spawn_as(DAEMON, script, imports=DAEMON_IMPORTS, groups=(GROUP,), env=self._env)
        self._process = daemon
        eventually(lambda: socket.exists() or daemon.poll() is not None, "it listens")
        assert daemon.poll() is None
        eventually(lambda: stat.S_IMODE(socket.stat().st_mode) == 0o660, "its mode is set")

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.communicate()

    @property
    def trust(self) -> dict[str, str]:
        """What is in the environment of a trainer."""
        return {"CKPTD_DAEMON_USER": str(DAEMON), "CKPTD_RUNTIME_DIR": f"{self.folder}/run"}

    def spawn(self, user: int, script: str, *arguments: str) -> subprocess.Popen[str]:
        env = dict(os.environ, **self.trust)
        return spawn_as(user, script, *arguments, imports=IMPORTS, groups=(GROUP,), env=env)

    @contextmanager
    def holding(self, user: int) -> Iterator[dict[str, str]]:
        """A trainer of this user with a segment, while the block runs; its path and job."""
        nobody = json.dumps({"path": "", "job": ""})
        process = self.spawn(user, ASKING + HOLD, self.endpoint, nobody)
        assert process.stdout is not None
        try:
            told: dict[str, str] = json.loads(process.stdout.readline())
            yield told
        finally:
            process.communicate("\n", timeout=60)

    def asks(self, user: int, script: str, others: dict[str, str]) -> list[dict[str, Any]]:
        """What a process of this user prints."""
        process = self.spawn(user, ASKING + script, self.endpoint, json.dumps(others))
        said, _ = process.communicate(timeout=90)
        assert process.returncode == 0
        return [json.loads(line) for line in said.splitlines()]

    def clean_up(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()
        shutil.rmtree(self.folder)
        shutil.rmtree(self.segments, ignore_errors=True)


@contextmanager
def node(**settings: str) -> Iterator[Node]:
    made = Node(**settings)
    try:
        made.start()
        yield made
    finally:
        made.clean_up()


INTRUSION = [
    {"refused": ["foreign"]},
    {"refused": ["no_session"]},
    {"seen": [0, 0, 0, 0, 0, 0]},
    {"refused": ["bad_descriptor", "bad_message source", "bad_message source"]},
    {"opened": ""},
    {"opened": ""},
]


def test_no_user_reaches_the_memory_of_another_even_after_a_restart_of_the_daemon() -> None:
    with node() as here:
        with here.holding(ALICE) as alices:
            assert here.asks(BOB, INTRUDE, alices) == INTRUSION
            file = Path(alices["path"])
            assert (file.stat().st_uid, stat.S_IMODE(file.stat().st_mode)) == (DAEMON, 0o660)
            with file.open("rb") as opened:
                assert readers_of(opened.fileno()) == {ALICE: 6}
            here.kill()
            here.start()
            assert here.asks(BOB, INTRUDE, alices) == INTRUSION
        assert here.asks(BOB, INTRUDE, alices) == INTRUSION, "without a live trainer, too"
        with here.holding(BOB) as bobs, here.holding(ALICE) as again:
            assert again == alices, "she has her segment again"
            assert Path(bobs["path"]) != Path(alices["path"])
        (told,) = here.asks(
            DAEMON,
            "with connect(endpoint, 20) as client:\n say(done=code(client, m.Forget(other, 'run')))",
            alices,
        )
        assert told == {"done": "Done"}, "the operator may do everything"
        assert not file.exists()


COUNTED = """
with connect(endpoint, 20) as client:
    counted = client.ask(m.GetStatus(), m.Status).counters
"""
QUOTAS = """
with connect(endpoint, 20) as client:
    attach(client, job=mine, needed_bytes=16 << 20)
    say(first=code(client, m.Reserve(4 << 20, 3, encode_descriptor(descriptor(mine)))))
    for ask in (lambda: client.request(m.Reserve(4 << 20, 3, encode_descriptor(descriptor(mine)))),
            lambda: attach(client, job=mine, run="second", needed_bytes=30 << 20)):
        try:
            ask()
        except RefusedError as error:
            say(code=error.code, message=error.message)
    (user,) = client.ask(m.GetStatus(), m.Status).users
    say(user=user.user, quota=user.quota_bytes, fits=0 < user.used_bytes <= user.quota_bytes)
"""


def test_a_user_has_a_quota_and_another_one_a_larger_one() -> None:
    with node(user_quota="24MiB", user_quotas=f"{BOB}=40MiB, no-such-user=1GiB") as here:
        first, second, third, user = here.asks(ALICE, QUOTAS, {"path": "", "job": ""})
        assert first == {"first": "Reserved"}
        assert second["code"] == third["code"] == "user_quota"
        assert f"user {ALICE} may have 24 MiB on this node" in second["message"]
        assert "beside 14 MiB that it has" in second["message"]
        assert f"of which 16 MiB is in use by {ALICES}/run (16 MiB)" in third["message"]
        assert user == {"user": ALICE, "quota": 24 * MIB, "fits": True}
        first, third, user = here.asks(BOB, QUOTAS, {"path": "", "job": ""})
        assert first == {"first": "Reserved"}
        assert f"may have 40 MiB on this node, of which 28 MiB is in use by {BOBS}/run" in third["message"]
        assert user == {"user": BOB, "quota": 40 * MIB, "fits": True}
        assert here.asks(
            DAEMON, COUNTED + "say(n=counted['event.unknown_user'])", {"path": "", "job": ""}
        ) == [{"n": 1}]


OUTSIDE = """
context = zmq.Context()
socket = context.socket(zmq.DEALER)
socket.connect(endpoint)
socket.send_multipart(encode(1, m.GetStatus()))
_, answer = decode(socket.recv_multipart())
say(code=answer.code, message=answer.message)
"""


def test_who_is_not_in_the_group_is_refused_although_the_path_is_open() -> None:
    """As for a process that may go through closed folders, or where an operator opened them."""
    with node() as here:
        (here.folder / "run").chmod(0o755)
        (here.folder / "run/ckptd.sock").chmod(0o666)
        env = dict(os.environ)
        nobody = json.dumps({"path": "", "job": ""})
        process = spawn_as(OUTSIDER, ASKING + OUTSIDE, here.endpoint, nobody, imports=IMPORTS, env=env)
        said, _ = process.communicate(timeout=60)
        told = json.loads(said)
        assert told["code"] == "not_member"
        assert told["message"].endswith(f"of user {OUTSIDER} is not in group {GROUP} (trainer_group)")
        (here.folder / "run/ckptd.sock").chmod(0o660)
        assert here.asks(
            DAEMON, COUNTED + "say(n=counted['refused.not_member'])", {"path": "", "job": ""}
        ) == [{"n": 1}]


def _train(user: int, arguments: list[str], environment: dict[str, str]) -> None:
    os.setgroups([GROUP])
    os.setgid(user)
    os.setuid(user)
    os.environ.update(environment)
    from tests.e2e.job import main

    main(arguments)


def test_a_killed_job_of_a_user_resumes_at_the_exact_bits_beside_that_of_another() -> None:
    """Both run the same script in one folder, without a name for the job; the daemon is killed in between."""
    outs = Path(tempfile.mkdtemp(prefix="ckptd-o-", dir="/tmp"))
    outs.chmod(0o777)

    def train(user: int, name: str, here: Node | None, *options: str) -> BaseProcess:
        daemon = "none" if here is None else here.endpoint
        arguments = ["plain", "--out", f"{outs}/{name}.pt", "--total", str(TOTAL), "--run", "r"]
        arguments += ["--daemon", daemon, "--set", "job=null", *options]
        told = {} if here is None else here.trust
        life = FORKED.Process(target=_train, args=(user, arguments, told))
        life.start()
        return life

    def end(life: BaseProcess) -> int | None:
        life.join(120)
        return life.exitcode

    try:
        with node() as here:
            lives = {
                "reference": train(ALICE, "reference", None),
                "first": train(ALICE, "first", here, "--kill-at", str(KILL_AT), "--kill-sealed"),
                "bobs": train(BOB, "bobs", here, "--seed", "3"),
            }
            ends = {name: end(life) for name, life in lives.items()}
            assert ends == {"reference": 0, "first": -signal.SIGKILL, "bobs": 0}
            here.kill()
            here.start()
            assert end(train(ALICE, "again", here, "--seed", "7")) == 0
        assert json.loads((outs / "again.json").read_text())["resumed_from"] == KILL_AT
        assert differences(outs / "reference.pt", outs / "again.pt") == []
        assert differences(outs / "reference.pt", outs / "bobs.pt") != []
    finally:
        shutil.rmtree(outs)
