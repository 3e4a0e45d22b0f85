"""Each check of the doctor, in sickness and in health."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from ckptd.config.daemon_config import load_config
from ckptd.ctl import doctor
from ckptd.ctl.doctor import Grade
from ckptd.transport.messages import GetStatus, Status
from ckptd.transport.tcp import sealing
from ckptd.units import format_bytes
from tests.ckptd.running import running_daemon, small_tmpfs
from tests.users import DAEMON, GROUP, STRANGER, TRAINER, needs_users, spawn_as


def test_a_daemon_that_answers_is_well_and_the_report_is_complete() -> None:
    with running_daemon() as daemon:
        done = daemon.ctl("doctor", "--json")
        findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
        text = daemon.ctl("doctor").stdout
        with daemon.client() as client:
            status = client.ask(GetStatus(), Status)
    its_own = f"of {format_bytes(status.quota_bytes)} in {status.segment_dir}"
    assert its_own in findings["daemon"]["detail"], "the quota that it runs with, not this command's"
    assert findings["daemon"]["grade"] == "OK"
    assert set(findings) == {
        "daemon",
        "settings",
        "runtime folder",
        "segment folder",
        "segment memory",
        "damaged segments",
        "logind",
        "memlock",
        "huge pages",
        "pidfd",
        "ptrace",
        "clock",
        "copy speed",
        "peer encryption",
        "torchrun",
        "versions",
    }
    assert all(name in text for name in findings)
    assert "torch" in findings["versions"]["detail"]


def test_no_daemon_is_a_warning_with_the_fix(tmp_path: Path) -> None:
    finding = doctor.check_daemon(f"ipc://{tmp_path}/s")
    assert finding.grade is Grade.WARN
    assert "ckptd run" in finding.fix


def test_what_goes_to_peers_in_plaintext_is_said() -> None:
    alone = load_config(environ={}).config
    assert doctor.check_peer_data(alone).grade is Grade.OK
    usual = replace(alone, peer_listen="tcp://127.0.0.1:0")
    assert doctor.check_peer_data(usual).detail in ("AES-256-GCM", "ChaCha20-Poly1305")
    assert doctor.check_peer_data(replace(usual, peer_data="zmq")).detail == "CURVE"
    unencrypted = replace(usual, peer_data="stream-plaintext")
    assert doctor.check_peer_data(unencrypted).grade is Grade.WARN
    assert doctor.check_peer_data(replace(usual, peer_security="plain")).grade is Grade.WARN


def test_without_the_library_that_encrypts_peers_cannot_be_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sealing, "_has_library", lambda: False)
    usual = replace(load_config(environ={}).config, peer_listen="tcp://127.0.0.1:0")
    finding = doctor.check_peer_data(usual)
    assert finding.grade is Grade.FAIL
    assert "cryptography" in finding.fix


def test_folders(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    assert doctor.check_folder(tmp_path).grade is Grade.OK
    assert "will be created" in doctor.check_folder(tmp_path / "new").detail
    tmp_path.chmod(0o777)
    assert "chmod go-w" in doctor.check_folder(tmp_path).fix
    tmp_path.chmod(0o755)
    assert "chmod o=" in doctor.check_folder(tmp_path).fix
    tmp_path.chmod(0o750)
    assert "chmod 700" in doctor.check_folder(tmp_path).fix
    tmp_path.chmod(0o700)
    file = tmp_path / "file"
    file.write_text("")
    assert doctor.check_folder(file).grade is Grade.FAIL
    assert doctor.check_folder(file / "below").grade is Grade.FAIL


def test_a_folder_of_another_user(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(tmp_path, 12345, -1)
    finding = doctor.check_folder(tmp_path)
    assert finding.grade is Grade.FAIL
    assert "belongs to user 12345" in finding.detail


def test_folders_of_a_trainer_group(tmp_path: Path) -> None:
    """The daemon itself gives its folders mode 0750 for a trainer_group; the doctor said `chmod
    700`, which shuts the trainers out.
    """
    group = tmp_path.stat().st_gid
    tmp_path.chmod(0o750)
    finding = doctor.check_folder(tmp_path, str(group))
    assert (finding.grade, finding.fix) == (Grade.OK, "")
    assert f"trainer_group {group}" in finding.detail
    tmp_path.chmod(0o700)
    assert "cannot attach" in doctor.check_folder(tmp_path, str(group)).detail
    tmp_path.chmod(0o750)
    assert "cannot attach" in doctor.check_folder(tmp_path, str(group + 1)).detail
    unknown = doctor.check_folder(tmp_path, "nobody-here")
    assert unknown.grade is Grade.FAIL
    assert "this group does not exist" in unknown.detail


@needs_users
def test_a_daemon_of_another_user_with_a_trainer_group_is_well() -> None:
    """Trainers that are other users than the daemon: the doctor failed for them, and said that they
    should run as the daemon's user.
    """
    with tempfile.TemporaryDirectory(prefix="ckptd-d-", dir="/tmp") as base:
        os.chmod(base, 0o755)
        folder = Path(base, "run")
        folder.mkdir()
        os.chown(folder, DAEMON, GROUP)
        folder.chmod(0o750)
        script = f"""
finding = check_folder(Path({str(folder)!r}), "", trusted_users())
print(finding.grade, finding.detail, finding.fix, sep="|")
"""

        def asked(user: int, groups: tuple[int, ...], trusts: str) -> list[str]:
            process = spawn_as(
                user,
                script,
                imports="from pathlib import Path\nfrom ckptd.ctl.doctor import check_folder\n"
                "from ckptd.config.daemon_config import trusted_users",
                groups=groups,
                env=dict(os.environ, CKPTD_DAEMON_USER=trusts),
            )
            return process.communicate(timeout=60)[0].strip().split("|")

        grade, _, fix = asked(TRAINER, (GROUP,), str(DAEMON))
        assert (grade, fix) == ("OK", "")
        grade, _, fix = asked(TRAINER, (GROUP,), "")
        assert grade == "FAIL"
        assert "CKPTD_DAEMON_USER" in fix
        grade, _, fix = asked(STRANGER, (), str(DAEMON))
        assert grade == "FAIL"
        assert "trainer_group" in fix


def test_a_small_shm_is_a_warning_and_one_below_the_quota_fails() -> None:
    with small_tmpfs("64m") as folder:
        flags = {"segment_dir": str(folder / "not-made-yet"), "memory": "32MiB"}
        small = doctor.check_segment_filesystem(load_config(flags, environ={}).config)
        assert small.grade is Grade.WARN
        assert "tmpfs of 64 MiB" in small.detail
        assert "--shm-size" in small.fix
        flags["memory"] = "1GiB"
        below = doctor.check_segment_filesystem(load_config(flags, environ={}).config)
        assert below.grade is Grade.FAIL


def test_a_disk_is_no_place_for_segments() -> None:
    flags = {"segment_dir": "/proc/self"}
    finding = doctor.check_segment_filesystem(load_config(flags, environ={}).config)
    assert finding.grade is Grade.FAIL


def test_files_put_aside_are_listed(tmp_path: Path) -> None:
    assert doctor.check_damaged_files(tmp_path / "none").grade is Grade.OK
    (tmp_path / "a~b~r0~g0.seg.bad").write_bytes(bytes(10))
    finding = doctor.check_damaged_files(tmp_path)
    assert finding.grade is Grade.WARN
    assert "a~b~r0~g0.seg.bad" in finding.detail


def test_huge_pages_are_optional(tmp_path: Path) -> None:
    setting = tmp_path / "shmem_enabled"
    setting.write_text("always within_size advise [never] deny force\n")
    assert "huge=advise" in doctor.check_hugepages(setting).fix
    setting.write_text("always within_size [advise] never deny force\n")
    assert doctor.check_hugepages(setting).fix == ""
    assert doctor.check_hugepages(tmp_path / "none").grade is Grade.OK


def test_the_copy_tunable_is_recognised() -> None:
    tunables = "glibc.cpu.x86_non_temporal_threshold=0x40000"
    assert doctor.check_copy_tunable({"GLIBC_TUNABLES": tunables}).fix == ""


def test_memlock_on_demands_more_than_auto() -> None:
    assert doctor.check_memlock("off").grade is Grade.OK
    assert doctor.check_memlock("on").grade in (Grade.OK, Grade.FAIL)


def test_what_cannot_fail_here_says_something() -> None:
    for check in (doctor.check_pidfd, doctor.check_clock, doctor.check_versions):
        assert check().detail
    assert doctor.check_ptrace(Path("/nonexistent")).grade is Grade.OK


def torchrun(proc: Path, pid: int, *words: str, launcher: str = "/opt/bin/torchrun") -> None:
    folder = proc / str(pid)
    folder.mkdir()
    (folder / "cmdline").write_bytes("\0".join(["/opt/bin/python", launcher, *words, ""]).encode())


QUICK = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=2"


@pytest.mark.parametrize(
    ("words", "grade", "detail", "fix"),
    [
        (
            ["--nnodes", "2:4", "train.py"],
            Grade.WARN,
            "process 7 waits up to 45 s for its nodes to meet again after one is lost",
            f"torchrun --rdzv-conf {QUICK}",
        ),
        (
            ["--nnodes=2:4", "--rdzv_conf=last_call_timeout=9,keep_alive_interval=1", "train.py"],
            Grade.WARN,
            "process 7 waits up to 12 s for its nodes to meet again after one is lost",
            "torchrun --rdzv-conf last_call_timeout=3,keep_alive_max_attempt=2",
        ),
        (
            ["--nnodes=2:4", "--rdzv_conf=last_call_timeout=600,keep_alive_interval=soon", "train.py"],
            Grade.WARN,
            "process 7 waits up to 615 s for its nodes to meet again after one is lost",
            f"torchrun --rdzv-conf {QUICK}",
        ),
        (
            ["--nnodes", "2:4", "--rdzv-conf", QUICK, "train.py"],
            Grade.OK,
            "process 7 restarts all trainers by itself when one dies, which takes some seconds",
            "optional: `torchrun … -m ckptd.host train.py` brings them back in about one",
        ),
        (
            ["--standalone", "-m", "ckptd.host", "t.py"],
            Grade.OK,
            "1 of this user, whose trainers have hosts",
            "",
        ),
    ],
)
def test_a_torchrun_that_meets_slowly_is_told_how_to_be_quick(
    tmp_path: Path, words: list[str], grade: Grade, detail: str, fix: str
) -> None:
    torchrun(tmp_path, 7, *words)
    (tmp_path / "8").mkdir()  # it has just ended
    found = doctor.check_torchrun(tmp_path)
    assert (found.grade, found.detail, found.fix) == (grade, detail, fix)


def test_without_torchrun_there_is_nothing_to_say(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    torchrun(tmp_path, 9, "train.py", launcher="other.py")
    assert doctor.check_torchrun(tmp_path).detail == "no torchrun of this user runs here"
    torchrun(tmp_path, 10, "-m", "torch.distributed.run", "train.py", launcher="-X")
    assert "process 10 restarts" in doctor.check_torchrun(tmp_path).detail
    assert doctor.check_torchrun().grade in Grade
