"""The segment folder is removed under a daemon that serves, as logind does when a user's last login
ends (RemoveIPC).
"""

from __future__ import annotations

import shutil
from pathlib import Path

from ckptd.ctl.doctor import Grade, check_remove_ipc
from ckptd.transport import messages as m
from tests.ckptd.running import MIB, attach, eventually, reserve, running_daemon
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
