"""Real daemons: killed, restarted, fed garbage, refused, drained."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from ckptd.core.slots.slots import SlotState
from ckptd.memory.locks import is_locked, try_lock
from ckptd.memory.segment_file import open_segment
from ckptd.node.daemon import Daemon, Notifier
from ckptd.node.node_limits import check_quota, default_digest_threads
from ckptd.transport import messages as m
from ckptd.transport.wire import ControlClient, RefusedError, RequestTimeout, encode
from tests.ckptd.running import (
    MIB,
    ROOT,
    DaemonProcess,
    attach,
    eventually,
    fill,
    own,
    reserve,
    running_daemon,
    running_in_own_pid_namespace,
    small_tmpfs,
    state_of,
)


@pytest.fixture(scope="module")
def shared() -> Iterator[DaemonProcess]:
    """One daemon for the tests that leave nothing behind that matters to the next."""
    with running_daemon() as daemon:
        yield daemon


def kinds(client: ControlClient) -> list[str]:
    return [event.kind for event in client.ask(m.GetEvents(), m.Events).events]


def messages_of(client: ControlClient, kind: str) -> list[str]:
    events = client.ask(m.GetEvents(), m.Events).events
    return [event.message for event in events if event.kind == kind]


@pytest.mark.parametrize(("cpus", "threads"), [(1, 1), (2, 1), (4, 2), (8, 4), (16, 4), (64, 8), (208, 16)])
def test_digest_threads_grow_with_the_machine(cpus: int, threads: int) -> None:
    assert default_digest_threads(cpus) == threads


def test_a_quota_beyond_the_filesystem_is_told_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check_quota(1, tmp_path)
    assert not caplog.records
    check_quota(1 << 60, tmp_path)
    assert "the quota of 1.049e+06 TiB is larger than the filesystem of" in caplog.text


def test_a_slot_is_sealed_after_it_was_announced() -> None:
    with running_daemon() as daemon, daemon.client() as client:
        attached = attach(client)
        assert attached.segments == ()
        assert attached.quota_bytes == 64 * MIB
        segment = reserve(client)
        fill(segment, 0, 3)
        assert client.send(m.Filled(segment.generation, 0, 3))
        eventually(lambda: state_of(segment, 0) is SlotState.SEALED, "sealed")
        (rank,) = client.ask(m.GetSnapshots(), m.Snapshots).ranks
        assert rank.suffix == (3, 3)  # one snapshot anchors both operators


def test_a_filled_slot_is_sealed_although_its_message_was_lost() -> None:
    with running_daemon() as daemon, daemon.client() as client:
        attach(client)
        segment = reserve(client)
        fill(segment, 2, 9)
        eventually(lambda: state_of(segment, 2) is SlotState.SEALED, "found by the sweep")


def test_a_killed_daemon_is_replaced_by_one_that_adopts_and_seals() -> None:
    """SIGKILL with one slot sealed, one filled, one being filled; the trainer dies meanwhile."""
    with running_daemon() as daemon:
        with daemon.client() as client:
            attach(client)
            segment = reserve(client)
            fill(segment, 0, 3)
            client.send(m.Filled(0, 0, 3))
            eventually(lambda: state_of(segment, 0) is SlotState.SEALED, "sealed")
            first = client.ask(m.Hello("test", os.getpid()), m.Welcome)
        daemon.kill()
        fill(segment, 1, 4)
        fill(segment, 2, 5, state=SlotState.FILLING)
        daemon.start()
        eventually(lambda: state_of(segment, 1) is SlotState.SEALED, "sealed by the new daemon")
        assert state_of(segment, 2) is SlotState.FREE
        with daemon.client() as client:
            second = client.ask(m.Hello("test", os.getpid()), m.Welcome)
            assert second.node_id == first.node_id
            assert second.boot_id != first.boot_id
            attached = attach(client)
            assert [info.path for info in attached.segments] == [str(segment.path)]
            assert "adopted" in kinds(client)
            assert "slot_freed" in kinds(client)
            (rank,) = client.ask(m.GetSnapshots(), m.Snapshots).ranks
            sealed = [slot.iteration for slot in rank.slots if slot.state == "sealed"]
            assert sealed == [3, 4]


def test_a_trainer_that_outlived_the_daemon_attaches_again_with_what_it_holds() -> None:
    with running_daemon() as daemon:
        with daemon.client() as client:
            attach(client)
            segment = reserve(client)
            fd = own(segment)
            daemon.kill()
            daemon.start()
            eventually(lambda: _answers(client), "the connection renews itself")
            assert client.ask(m.Ping(), m.Pong).attached is False
            with pytest.raises(RefusedError) as caught:
                attach(client)
            assert caught.value.code == "rank_taken"
            attached = attach(client, held=(segment.generation,))
            assert len(attached.segments) == 1
            assert client.ask(m.Ping(), m.Pong).attached is True
        os.close(fd)


def _answers(client: ControlClient) -> bool:
    try:
        client.request(m.Ping(), timeout_s=0.5)
    except RequestTimeout:
        return False
    return True


def test_a_killed_trainer_is_noticed_and_its_slots_come_to_rest() -> None:
    with running_daemon() as daemon:
        trainer = subprocess.Popen(
            [sys.executable, "-m", "tests.ckptd.running", daemon.endpoint, "run"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert trainer.stdout is not None
            segment = open_segment(Path(trainer.stdout.readline().strip()))
            with daemon.client() as client:
                with pytest.raises(RefusedError, match=f"process {trainer.pid}") as caught:
                    attach(client)
                assert caught.value.code == "rank_taken"
                assert state_of(segment, 1) is SlotState.FILLING
                trainer.kill()
                trainer.wait(10)
                eventually(lambda: state_of(segment, 1) is SlotState.FREE, "freed")
                eventually(lambda: state_of(segment, 0) is SlotState.SEALED, "sealed")
                assert "trainer_gone" in kinds(client)
                assert attach(client).segments[0].path == str(segment.path)
        finally:
            trainer.kill()
            trainer.wait(10)
            assert trainer.stdout is not None
            trainer.stdout.close()


def test_a_trainer_of_another_pid_namespace_is_watched_by_its_lock() -> None:
    """The daemon runs in a container of its own: the kernel knows no number there for a process
    outside, nor does it help to claim one.
    """
    with running_in_own_pid_namespace() as daemon, daemon.client() as client:
        client.request(m.Hello("test", os.getpid(), "trainer", os.readlink("/proc/self/ns/pid")))
        client.ask(m.Attach("job", "run", 0, 1, "dp1", 1, MIB), m.Attached)
        fd = own(reserve(client))
        (session,) = client.ask(m.GetStatus(), m.Status).sessions
        assert session.watched_by == "owner-lock"
        time.sleep(1.2)  # it must be seen to hold the lock before the lock can be seen to be free
        assert client.ask(m.GetStatus(), m.Status).sessions
        os.close(fd)
        eventually(lambda: not client.ask(m.GetStatus(), m.Status).sessions, "noticed")


def test_garbage_is_counted_and_harms_nobody(shared: DaemonProcess) -> None:
    source = random.Random(7)
    context = zmq.Context()
    dealer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 1000)
    dealer.connect(shared.endpoint)
    for _ in range(300):
        frames = [source.randbytes(source.randrange(64)) for _ in range(source.randrange(1, 5))]
        dealer.send_multipart(frames)
    dealer.send_multipart([encode(1, m.Ping())[0], b"\x91" * 50_000])
    dealer.send_multipart(encode(2, m.Pong("b", True)))  # a reply, sent to a daemon
    raw = socket.socket(socket.AF_UNIX)
    raw.connect(shared.endpoint.removeprefix("ipc://"))
    raw.sendall(source.randbytes(5000))
    raw.close()
    with shared.client() as client:

        def counted() -> int:
            counters = client.ask(m.GetStatus(), m.Status).counters
            return sum(n for name, n in counters.items() if name.startswith("garbage."))

        eventually(lambda: counted() >= 301, "all of it was counted")
        assert len(messages_of(client, "garbage")) <= 2  # logged now and then, not each time
    dealer.close(linger=0)
    context.term()


def test_a_bad_message_is_answered(shared: DaemonProcess) -> None:
    with shared.client() as client:
        with pytest.raises(RefusedError, match=r"regex") as caught:
            client.request(m.Forget("../etc", "r"))
        assert caught.value.code == "bad_message"
        assert client.ask(m.Ping(), m.Pong)


def test_another_protocol_version_is_refused_by_name(shared: DaemonProcess) -> None:
    with (
        ControlClient(shared.endpoint, 20, protocol=99) as client,
        pytest.raises(RefusedError, match=r"version 99.*version 3.*same ckptd version") as caught,
    ):
        client.request(m.Ping())
    assert caught.value.code == "protocol"


def test_what_needs_a_session_says_so(shared: DaemonProcess) -> None:
    with shared.client() as client:
        for message in (m.Reserve(1, 1, b""), m.Drop(0), m.Detach()):
            with pytest.raises(RefusedError, match="attach first") as caught:
                client.request(message)
            assert caught.value.code == "no_session"
        client.send(m.Filled(0, 0, 0))
        client.request(m.Ping())
        assert [refusal.code for refusal in client.refusals()] == ["no_session"]
        with pytest.raises(RefusedError, match="Hello"):
            client.request(m.Attach("job", "run", 0, 1, "t", 1, 0))


def test_topology_layout_and_stale_runs_are_told_by_name() -> None:
    with running_daemon() as daemon, daemon.client() as client:
        attach(client)
        reserve(client)
        client.request(m.Detach())
        with pytest.raises(RefusedError, match=r"world size 1.*world size 4") as caught:
            attach(client, world_size=4)
        assert caught.value.code == "topology"
        with pytest.raises(RefusedError, match=r"'dp1'.*'tp8'"):
            attach(client, topology="tp8")
        with pytest.raises(RefusedError) as caught:
            attach(client, layout_version=2)
        assert caught.value.code == "layout_version"
        assert attach(client, run="other").segments == ()
        (note,) = messages_of(client, "stale_run")
        assert "job/other rank 0 does not get the snapshots of run 'run'" in note
        assert "pass run=RunOptions(name='run', job='job')" in note
        assert "`ckptctl forget job run`" in note
        reserve(client, run="other")
        client.request(m.Detach())
        attach(client, run="third")
        _, note = messages_of(client, "stale_run")  # one for all of them
        assert "'other'" in note
        assert "'run'" in note


def test_a_quota_that_is_too_small_is_refused_with_numbers() -> None:
    with running_daemon(memory="16MiB") as daemon, daemon.client() as client:
        attach(client, run="old", needed_bytes=6 * MIB)
        reserve(client, run="old", slots=4)
        client.request(m.Detach())
        with pytest.raises(RefusedError) as caught:
            attach(client, needed_bytes=12 * MIB)
        assert caught.value.code == "quota"
        assert caught.value.message == (
            "job/run rank 0 needs 12 MiB (for a test); the quota is 16 MiB, of which 6 MiB is in "
            "use by job/old (6 MiB)"
        )
        assert "ckptctl forget job old" in caught.value.hint
        attach(client, needed_bytes=8 * MIB)
        with pytest.raises(RefusedError, match="20 slots of 1 MiB"):
            reserve(client, slots=20)
        assert client.ask(m.Forget("job", "old"), m.Done).message == "freed 6 MiB in 1 segment"
        assert client.ask(m.GetStatus(), m.Status).used_bytes == 0
        attach(client, needed_bytes=12 * MIB)


def test_a_small_segment_filesystem_is_refused_at_attach_and_at_reserve() -> None:
    with (
        small_tmpfs("16m") as folder,
        running_daemon(memory="1GiB", segment_dir=str(folder / "s")) as daemon,
        daemon.client() as client,
    ):
        with pytest.raises(RefusedError, match="has 16 MiB, of which 16 MiB is free") as caught:
            attach(client, needed_bytes=32 * MIB)
        assert caught.value.code == "segment_fs"
        assert "--shm-size" in caught.value.hint
        attach(client, needed_bytes=8 * MIB)
        (folder / "ballast").write_bytes(bytes(12 * MIB))
        with pytest.raises(RefusedError) as caught:
            reserve(client, slots=6)
        assert caught.value.code == "segment_fs"
        assert list((folder / "s").glob("*.seg")) == []
        assert client.ask(m.GetStatus(), m.Status).used_bytes == 0


@pytest.mark.parametrize("final", [False, True])
def test_memory_is_given_back_although_the_segment_filesystem_is_full(final: bool) -> None:
    """`ckptctl forget`, and the orderly end of a run, ended in an error where they were needed most, and freed
    nothing: a line about the run could not be written.
    """
    with (
        small_tmpfs("16m") as folder,
        running_daemon(memory="12MiB", segment_dir=str(folder / "s")) as daemon,
        daemon.client() as client,
    ):
        attach(client)
        reserve(client)
        here = m.Member(m.NodeCard(client.ask(m.GetStatus(), m.Status).node_id), (0,), (MIB,))
        client.ask(m.Join(0, -1, (here,), 0), m.Done)
        with (folder / "ballast").open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
            while True:
                ballast.write(bytes(4096))
        client.ask(m.Detach(final), m.Done)
        if not final:
            freed = client.ask(m.Forget("job", "run"), m.Done).message
            assert freed == "freed 6 MiB in 1 segment, and forgot the members of the run"
        assert list((folder / "s").glob("*.seg")) == []
        assert "internal" not in kinds(client)


def test_peers_and_storage_hear_once_of_many_slots_that_are_sealed_together() -> None:
    """Each look reads the whole ring: with a thousand slots that waited for their digests nothing else was
    answered for minutes.
    """
    posted: list[Callable[[], None]] = []
    heard: list[object] = []
    runs, tier = SimpleNamespace(sealed=heard.append), SimpleNamespace(changed=heard.append)
    daemon: Any = SimpleNamespace(
        _fresh={},
        _post=posted.append,
        _guarded=lambda work: work(),
        _peering=SimpleNamespace(runs=runs),
        _tier=tier,
    )
    daemon._tell_sealed = partial(Daemon._tell_sealed, daemon)
    first: Any = SimpleNamespace(key="rank 0")
    second: Any = SimpleNamespace(key="rank 1")
    for segment in [first] * 1000 + [second] * 1000:
        Daemon.snapshot_sealed(daemon, segment)
    for _ in range(2):
        (work,) = posted
        posted.clear()
        work()
        assert heard == [first, "rank 0", second, "rank 1"]
        heard.clear()
        for segment in (first, second):
            Daemon.snapshot_sealed(daemon, segment)


def test_a_descriptor_that_contradicts_the_session_is_refused(shared: DaemonProcess) -> None:
    with shared.client() as client:
        attach(client, run="mine")
        with pytest.raises(RefusedError, match=r"says run 'other'.*'mine'") as caught:
            reserve(client, run="other")
        assert caught.value.code == "bad_descriptor"
        with pytest.raises(RefusedError, match="descriptor"):
            client.request(m.Reserve(1, 1, b"\xc1"))
        client.request(m.Detach(final=True))


def test_a_truncated_segment_is_put_aside_and_the_rest_is_served() -> None:
    with running_daemon() as daemon:
        with daemon.client() as client:
            attach(client)
            good, bad = reserve(client), reserve(client)
        daemon.kill()
        os.truncate(bad.path, MIB)
        daemon.start()
        with daemon.client() as client:
            assert [info.path for info in attach(client).segments] == [str(good.path)]
            (why,) = messages_of(client, "bad_segment")
            assert bad.path.name in why
            assert "truncated" in why
        assert bad.path.with_name(bad.path.name + ".bad").exists()


def test_a_segment_that_somebody_deletes_is_told_and_the_daemon_goes_on() -> None:
    with running_daemon() as daemon, daemon.client() as client:
        attach(client)
        gone, kept = reserve(client), reserve(client)
        fill(gone, 0, 3)
        client.send(m.Filled(gone.generation, 0, 3))
        gone.path.unlink()
        eventually(lambda: "segment_vanished" in kinds(client), "told")
        status = client.ask(m.GetStatus(), m.Status)
        assert [segment.path for segment in status.segments] == [str(kept.path)]
        assert status.used_bytes == kept.file_bytes


def test_a_flipped_bit_is_found_by_the_scrub() -> None:
    with running_daemon(scrub_interval_s="0.2") as daemon, daemon.client() as client:
        attach(client)
        segment = reserve(client)
        fill(segment, 0, 3, tensors=(("expert.0.w1", "F32", (8,), bytes(32)),))
        client.send(m.Filled(0, 0, 3))
        eventually(lambda: state_of(segment, 0) is SlotState.SEALED, "sealed")
        header = segment.header(0)
        assert header is not None
        segment.buffer[segment.geometry.slot_offset(0) + header.image_len - 1] ^= 1
        eventually(lambda: state_of(segment, 0) is SlotState.QUARANTINED, "quarantined")
        eventually(lambda: "slot_quarantined" in kinds(client), "told")
        assert "'expert.0.w1'" in messages_of(client, "slot_quarantined")[0]


def test_sigterm_seals_what_is_filled_and_exits_cleanly() -> None:
    with running_daemon() as daemon:
        with daemon.client() as client:
            attach(client)
            segment = reserve(client)
            for index in range(4):
                fill(segment, index, index)
            assert daemon.terminate() == 0
        assert [state_of(segment, index) for index in range(4)] == [SlotState.SEALED] * 4
        assert not Path(daemon.endpoint.removeprefix("ipc://")).exists()
        assert "stopped: SIGTERM" in daemon.log_text()


def test_reports_and_notices_are_shown(shared: DaemonProcess) -> None:
    with shared.client() as client:
        attach(client, run="talks")
        client.send(m.Report(41, {"stall_ms": 0.25}))
        client.send(m.Notice("warning", "replay_mismatch", "operator x"))
        client.request(m.Ping())
        sessions = client.ask(m.GetStatus(), m.Status).sessions
        (session,) = [session for session in sessions if session.run == "talks"]
        assert (session.step, session.metrics) == (41, {"stall_ms": 0.25})
        assert "operator x" in messages_of(client, "replay_mismatch")
        client.request(m.Detach(final=True))


def test_dropping_a_generation_frees_its_memory() -> None:
    with running_daemon() as daemon, daemon.client() as client:
        attach(client)
        first, second = reserve(client), reserve(client)
        assert (first.generation, second.generation) == (0, 1)
        client.ask(m.Drop(0), m.Done)
        assert not first.path.exists()
        assert second.path.exists()
        with pytest.raises(RefusedError, match="no generation 0"):
            client.request(m.Drop(0))


def test_a_final_detach_frees_the_rank_and_a_plain_one_keeps_it() -> None:
    with running_daemon() as daemon, daemon.client() as client:
        attach(client)
        segment = reserve(client)
        client.request(m.Detach())
        assert segment.path.exists()
        attach(client)
        client.request(m.Detach(final=True))
        assert not segment.path.exists()


def test_a_run_without_a_trainer_expires_and_an_owned_one_does_not() -> None:
    with running_daemon(retain_detached_s="1") as daemon, daemon.client() as client:
        attach(client, run="left")
        left = reserve(client, run="left")
        client.request(m.Detach())
        attach(client, run="owned")
        owned = reserve(client, run="owned")
        fd = own(owned)
        client.request(m.Detach())
        eventually(lambda: not left.path.exists(), "expired")
        assert owned.path.exists()
        os.close(fd)


def test_an_idle_daemon_ends_and_leaves_its_segments() -> None:
    with running_daemon(idle_exit_s="1.5") as daemon:
        with daemon.client() as client:
            attach(client)
            segment = reserve(client)
            client.request(m.Detach())
        assert daemon.process is not None
        assert daemon.process.wait(20) == 0
        assert segment.path.exists()


def test_systemd_is_notified_of_readiness_life_and_end() -> None:
    folder = tempfile.mkdtemp(prefix="ckptd-n-")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener.settimeout(20)
    listener.bind(f"{folder}/n")
    daemon = DaemonProcess()
    daemon.settings |= {"NOTIFY_SOCKET": f"{folder}/n", "WATCHDOG_USEC": "400000"}
    try:
        daemon.start()
        assert daemon.process is not None
        seen = [listener.recv(4096).decode() for _ in range(4)]
        assert seen[0].startswith("READY=1\n")
        assert seen[1:] == ["WATCHDOG=1"] * 3
        daemon.process.send_signal(signal.SIGTERM)
        while (text := listener.recv(4096).decode()) == "WATCHDOG=1":
            continue
        assert text == "STOPPING=1"
        assert daemon.process.wait(20) == 0
    finally:
        daemon.clean_up()
        listener.close()
        Path(folder, "n").unlink()
        Path(folder).rmdir()


def test_a_kept_file_has_no_locks_of_this_process(tmp_path: Path) -> None:
    """They would outlive it in the service manager."""
    path = tmp_path / "job~run~r0~g0.seg"
    path.write_bytes(b"segment")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener, path.open("r+b") as file:
        listener.settimeout(20)
        listener.bind(str(tmp_path / "n"))
        notifier = Notifier(str(tmp_path / "n"))
        notifier.keep(path.name, file.fileno())
        assert listener.recv(4096) == b"FDSTOREREMOVE=1\nFDNAME=" + path.name.encode()
        text, (kept,), _, _ = socket.recv_fds(listener, 4096, 4)
        assert text == b"FDSTORE=1\nFDNAME=" + path.name.encode()
        try:
            assert os.pread(kept, 7, 0) == b"segment"
            assert try_lock(file.fileno(), 0, exclusive=True)
            assert is_locked(kept, 0, exclusive=False)
        finally:
            os.close(kept)
        notifier.keep(path.name, None)
        assert listener.recv(4096).startswith(b"FDSTOREREMOVE=1\n")


HANDED = """
import os, signal, sys
kept, name, dies_in = sys.argv[1:4]
if kept:
    os.dup2(os.open(kept, os.O_RDONLY), 3)
    os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": name}
from ckptd.cli import main
from ckptd.memory.segment_store import SegmentStore
if dies_in:
    setattr(SegmentStore, dies_in, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
sys.exit(main(["run"]))
"""


@pytest.mark.parametrize("dies_in", ["put_back", "rescue"])
def test_a_death_while_removed_segments_are_written_again_costs_nothing(dies_in: str) -> None:
    """The folder was there again, so the next daemon took what systemd had kept for files that somebody had
    removed on purpose, and let go of it: the last copy. A copy that takes longer than systemd waits is such a
    death.
    """
    daemon = DaemonProcess()
    daemon.command = [sys.executable, "-c", HANDED, "", "", dies_in if dies_in == "rescue" else ""]
    try:
        daemon.start()
        with daemon.client() as client:
            attach(client)
            segment = reserve(client)
            fill(segment, 0, 5)
            client.send(m.Filled(0, 0, 5))
            eventually(lambda: state_of(segment, 0) is SlotState.SEALED, "it is sealed")
            client.request(m.Detach())
        before, name = bytes(segment.buffer), segment.path.name
        assert daemon.process is not None
        if dies_in == "put_back":
            daemon.kill()
        shutil.rmtree(daemon.segment_dir)
        daemon.command[-3:] = [f"/proc/{os.getpid()}/fd/{segment.fd}", name, dies_in]
        dies = daemon.spawn() if dies_in == "put_back" else daemon.process
        assert dies.wait(20) == -signal.SIGKILL
        assert daemon.segment_dir.is_dir()
        assert not segment.path.exists()
        daemon.command[-1] = ""
        daemon.start()
        again = open_segment(segment.path)
        assert bytes(again.buffer) == before
        again.close()
        segment.path.unlink()  # on purpose
        daemon.kill()
        daemon.start()
        assert not segment.path.exists()
    finally:
        daemon.clean_up()


NO_ROOM = HANDED.replace("lambda *_: os.kill(os.getpid(), signal.SIGKILL)", "full").replace(
    "if dies_in:",
    "def full(*_):\n    raise OSError(28, 'No space left on device')\nif dies_in:",
)


def test_a_removed_segment_for_which_there_is_no_room_waits_with_systemd(tmp_path: Path) -> None:
    """It may be written again only beside its old pages; before, the last copy was let go of."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        daemon = DaemonProcess()
        try:
            daemon.start()
            with daemon.client() as client:
                attach(client)
                segment = reserve(client)
                client.request(m.Detach())
            before, name = bytes(segment.buffer), segment.path.name
            daemon.kill()
            shutil.rmtree(daemon.segment_dir)
            kept = f"/proc/{os.getpid()}/fd/{segment.fd}"
            daemon.settings["NOTIFY_SOCKET"] = str(tmp_path / "notify")
            daemon.command = [sys.executable, "-c", NO_ROOM, kept, name, "put_back"]
            daemon.start()
            with daemon.client() as client:
                (text,) = messages_of(client, "segment_waits")
            assert f"make room in {daemon.segment_dir}, and restart the daemon" in text
            daemon.kill()
            assert not segment.path.exists()
            said = b""
            while select.select([manager], [], [], 0)[0]:
                said += manager.recv(4096)
            assert b"READY=1" in said
            assert name.encode() not in said, "systemd would let go of it"
            del daemon.settings["NOTIFY_SOCKET"]
            daemon.command[-1] = ""
            daemon.start()
            again = open_segment(segment.path)
            assert bytes(again.buffer) == before
            again.close()
        finally:
            daemon.clean_up()


def test_the_daemon_is_small_and_says_how_small(shared: DaemonProcess) -> None:
    status = json.loads(shared.ctl("status", "--json").stdout)
    assert 0 < status["rss_anon_bytes"] < 64 * MIB
    assert status["rss_file_bytes"] > 0
