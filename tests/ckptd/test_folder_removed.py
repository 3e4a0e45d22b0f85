"""The segment folder or the runtime folder is removed under a daemon that serves, as logind does when a user's
last login ends.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest

from ckptd.ctl.doctor import Grade, check_remove_ipc
from ckptd.transport import messages as m
from tests.ckptd.running import MIB, DaemonProcess, attach, eventually, reserve, running_daemon
from tests.e2e.habits import SCRIPT, start
from tests.e2e.harness import own_daemon


def test_a_removed_segment_folder_is_made_again_with_what_was_in_it(tmp_path: Path) -> None:
    """Every attach was refused with an internal error, until the daemon was restarted; what it
    still had mapped was lost.
    """
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with own_daemon() as daemon:
        assert start(script, daemon, variables={"KILL_AT": "8"}).code == -9
        # The daemon may be writing a file there at this moment: away at once, then piece by piece.
        gone = daemon.segment_dir.rename(daemon.segment_dir.with_name("gone"))
        shutil.rmtree(gone, ignore_errors=True)
        again = start(script, daemon)
        assert again.code == 0, again.printed
        (why,) = daemon.events("segment_folder_removed")
        assert "RemoveIPC=no" in why
        assert again.about("resuming at iteration"), again.printed
        assert daemon.events("segment_rescued")


def test_who_takes_part_and_who_owns_a_rank_is_written_again_too() -> None:
    """They lay in the folder. The next daemon adopted the rescued segments, and knew no member of their
    runs: it refused their nodes, and a run that asked it was told of nobody.
    """
    with running_daemon() as daemon:
        with daemon.client() as client:
            attach(client, token=b"mine")
            reserve(client)
            here = m.Member(m.NodeCard(client.ask(m.GetStatus(), m.Status).node_id), (0,), (MIB,))
            client.ask(m.Join(0, -1, (here,), 0), m.Done)
            files = [daemon.segment_dir / name for name in ("job~run.run", ".owners")]
            before = [path.read_bytes() for path in files]
            shutil.rmtree(daemon.segment_dir)
            eventually(lambda: all(path.exists() for path in files), "they are written again")
        assert [path.read_bytes() for path in files] == before


def test_a_node_that_lost_its_memory_can_be_told_who_takes_part() -> None:
    """It still knows former members, refuses all others, and names `ckptctl admit` to them. The command
    refused a run of which there is no segment.
    """
    with running_daemon() as daemon:
        with daemon.client() as client:
            attach(client)
            segment = reserve(client)
            here = m.Member(m.NodeCard(client.ask(m.GetStatus(), m.Status).node_id), (0,), (MIB,))
            client.ask(m.Join(0, -1, (here,), 0), m.Done)
        daemon.kill()
        segment.path.unlink()
        daemon.start()
        assert "n9 may act on job/run" in daemon.ctl("admit", "job", "run", "n9").stdout
        unknown = daemon.ctl("admit", "jobs", "run", "n9", check=False)
        assert (unknown.returncode, "this node knows no job jobs" in unknown.stderr) == (4, True)


def test_doctor_looks_for_a_logind_that_removes_segments(tmp_path: Path) -> None:
    segments = Path("/dev/shm/ckptd-1000")
    assert check_remove_ipc(segments, root=tmp_path, uid=1000).grade is Grade.OK
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    found = check_remove_ipc(segments, root=tmp_path, uid=1000)
    assert found.grade is Grade.WARN
    assert "RemoveIPC is yes (the default)" in found.detail
    assert "enable-linger" in found.fix
    assert check_remove_ipc(segments, root=tmp_path, uid=0).grade is Grade.OK
    assert check_remove_ipc(Path("/mnt/ckptd"), root=tmp_path, uid=1000).grade is Grade.OK
    part = tmp_path / "etc/systemd/logind.conf.d/keep.conf"
    part.parent.mkdir(parents=True)
    part.write_text("[Login]\nRemoveIPC=no\n")
    assert check_remove_ipc(segments, root=tmp_path, uid=1000).grade is Grade.OK


@pytest.mark.parametrize("only_socket", [False, True])
def test_a_removed_runtime_folder_is_made_again(only_socket: bool) -> None:
    """logind removes that of XDG_RUNTIME_DIR when a user's last login ends, and others clean /tmp. The daemon lived
    on, nobody could connect to it, and no other one could take its segments.
    """
    with running_daemon() as daemon, daemon.client() as before:
        attach(before)
        (name,) = {before.ask(m.GetStatus(), m.Status).node_id}
        if only_socket:
            (daemon.runtime_dir / "ckptd.sock").unlink()
        else:
            shutil.rmtree(daemon.runtime_dir)
        eventually(lambda: (daemon.runtime_dir / "ckptd.sock").exists(), "it listens again")
        assert before.ask(m.Ping(), m.Pong).attached, "who was connected stays"
        with daemon.client() as other:
            attach(other, run="another", token=b"another")
            told = other.ask(m.GetEvents(), m.Events).events
        assert [e.level for e in told if e.kind == "runtime_folder_removed"] == ["error"]
        second = DaemonProcess()
        second.settings = daemon.settings
        process = second.spawn()
        assert process.wait(60) == 3, "the folder is claimed again"
        shutil.rmtree(second.folder)
        daemon.kill()
        daemon.start()
        with daemon.client() as again:
            assert again.ask(m.GetStatus(), m.Status).node_id == name


def test_a_runtime_folder_that_cannot_be_made_again_is_tried_until_it_can(tmp_path: Path) -> None:
    """As nobody may make folders in /run/user: here a file has its name."""
    with running_daemon() as daemon, daemon.client() as before:
        in_the_way = tmp_path / "file"
        in_the_way.touch()
        while in_the_way.exists():  # the daemon may make the folder again in between
            shutil.rmtree(daemon.runtime_dir, ignore_errors=True)
            with contextlib.suppress(OSError):
                shutil.copyfile(in_the_way, daemon.runtime_dir)
                in_the_way.unlink()

        def told(text: str) -> list[str]:
            events = before.ask(m.GetEvents(), m.Events).events
            return [e.message for e in events if e.kind == "runtime_folder_removed" and text in e.message]

        failed, done = "it cannot be made again now", "it is made again"
        eventually(lambda: bool(told(failed)), "it says so")
        made = len(told(done))
        daemon.runtime_dir.unlink()
        eventually((daemon.runtime_dir / "ckptd.sock").exists, "it listens again")
        with daemon.client() as other:
            other.ask(m.GetStatus(), m.Status)
        assert len(told(done)) == made + 1
        assert len(set(told(failed))) == len(told(failed)), "once for each reason"
